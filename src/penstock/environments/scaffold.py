"""An environment of one's own, to begin with: `penstock env new NAME` writes it, its test and its recipe.

What is written runs as it is: its test passes without a model, and its recipe trains a tiny random one on it. Those of
several turns and with tools begin with a supervised warm start, without which such a model would find no answer.
"""

import importlib.util
import keyword
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from penstock.types import ConfigError
from penstock.types.importing import nearest

_ENVIRONMENT = '''"""$title: spell a word backwards. Put your own problems and score in its place."""

from penstock.environments import Example, SingleTurnEnvironment

WORDS = "ant bee cat cow dog eel elk emu fox gnu hen jay owl pig ram rat".split()


class $class_name(SingleTurnEnvironment):
    """Rewards the share of right letters.

    Args:
        held_out: How many words are kept for evaluation.
        name: Stands on every rollout.
    """

    def __init__(self, held_out: int = 4, name: str = "$name") -> None:
        super().__init__(name)
        self._held_out = held_out

    def train_examples(self):
        return [self._example(word) for word in WORDS[self._held_out :]]

    def eval_examples(self):
        return [self._example(word) for word in WORDS[: self._held_out]]

    def score(self, example, text, completion):
        if completion.finish_reason == "length":
            return 0.0  # cut off: not a finished answer
        right = sum(said == wanted for said, wanted in zip(text, example.answer))
        return right / max(len(text), len(example.answer))

    def _example(self, word):
        # an id that no other problem has, what the policy is asked, and what it should say
        return Example(word, f"{word} backwards:", answer=word[::-1])
'''

_TEST = '''"""The environment by itself: answers are given, so no model is needed."""

import pytest
from $name import $class_name

from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import Decoding


def rewards(answer):
    """Of one answer to each of two problems; `answer` makes it from the prompt."""
    context = ScriptedContext(Tokenizer.load("penstock"), lambda prompt, seed: answer(prompt))
    groups, _ = $class_name().sample(context, 2, 1, Decoding(max_output_tokens=8), 0, "train")
    return [reward for group in groups for reward in group.rewards.tolist()]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (lambda prompt: prompt.split()[0][::-1], 1.0),
        (lambda prompt: "", 0.0),
        (lambda prompt: "far too long an answer", 0.0),
    ],
    ids=["right", "nothing", "cut"],
)
def test_an_answer_earns(answer, reward):
    assert rewards(answer) == [reward, reward]


def test_no_problem_is_both_for_training_and_held_out():
    environment = $class_name()
    train, held_out = environment.train_examples(), environment.eval_examples()
    assert not {each.example_id for each in train} & {each.example_id for each in held_out}
'''

_MULTI_TURN_ENVIRONMENT = '''"""$title: guess a number. Put your own problems, replies and score in its place."""

from penstock.environments import Example, MultiTurnEnvironment


class $class_name(MultiTurnEnvironment):
    """Rewards finding the number, the sooner the better, and a little for a last guess that is near.

    Args:
        largest: The numbers are 1 to this.
        name: Stands on every rollout.
        limits: Of a conversation: max_turns, max_seconds, turn_tokens.
    """

    eval_fraction = 0.2  # of the examples, held out

    def __init__(self, largest: int = 200, name: str = "$name", **limits) -> None:
        super().__init__(name, **limits)
        self.largest = largest
        # an id that no other problem has, what the policy is asked, and what the score needs to know
        self.examples = [Example(str(n), f"1 to {largest}:", answer=str(n)) for n in range(1, largest + 1)]

    def respond(self, conversation):
        guess = conversation.text.strip()
        if not guess.isdecimal():
            return " a number! "
        return " higher " if int(guess) < int(conversation.example.answer) else " lower "

    def is_done(self, conversation):
        return conversation.text.strip() == conversation.example.answer

    def score(self, conversation):
        if conversation.ending == "done":
            return 1 - 0.05 * (conversation.turns - 1)
        guess = conversation.text.strip()  # the last before a limit: see conversation.ending
        off = abs(int(guess) - int(conversation.example.answer)) / self.largest if guess.isdecimal() else 1
        return max(0.0, 0.3 - off)

    def solution(self, example):
        """What the policy might say, turn by turn, for the warm start: it halves what is left."""
        low, high, wanted = 1, self.largest, int(example.answer)
        said = [(low + high) // 2]
        while said[-1] != wanted:
            low, high = (said[-1] + 1, high) if said[-1] < wanted else (low, said[-1] - 1)
            said.append((low + high) // 2)
        return [str(guess) for guess in said]
'''

_MULTI_TURN_TEST = '''"""The environment by itself: answers are given, so no model is needed."""

import pytest
from $name import $class_name

from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import Decoding


def play(*answers):
    """One conversation about the number 25, in which the policy says one answer after the other."""
    environment = $class_name(max_turns=4)
    number = [example.example_id for example in environment.train_examples()].index("25")
    left = list(answers)
    context = ScriptedContext(Tokenizer.load("penstock"), lambda prompt, seed: left.pop(0))
    groups, metrics = environment.sample_problems(context, [number], 1, Decoding(max_output_tokens=64), 0)
    return groups[0].rollouts[0], metrics


@pytest.mark.parametrize(
    ("answers", "reward"),
    [(["25"], 1.0), (["100", "24", "25"], 0.9), (["1", "2", "3", "5"], 0.2), (["1", "2", "3", "far"], 0.0)],
    ids=["at once", "after two hints", "never, but near", "never"],
)
def test_a_conversation_earns(answers, reward):
    assert play(*answers)[0].episode_reward == pytest.approx(reward)


def test_the_policy_is_told_where_to_look():
    rollout, metrics = play("100", "many", "24", "25")
    assert [turn.content for turn in rollout.turns if turn.role == "user"][1:] == [" lower ", " a number! ", " higher "]
    assert metrics["turns"] == 4


def test_its_solutions_are_right():
    environment = $class_name(max_turns=8)
    assert environment.solution(environment.examples[49]) == ["100", "50"]
    assert all(environment.solution(each)[-1] == each.answer for each in environment.examples)
'''

_TOOL_ENVIRONMENT = '''"""$title: add with a tool. Put your own problems, tools and score in its place."""

import json

from penstock.environments import Example, ToolEnvironment


def add(a: int, b: int) -> int:
    """The sum of two whole numbers."""
    return a + b


class $class_name(ToolEnvironment):
    """Rewards the answer, that a tool was asked for it, and a little any call that can be answered.

    Args:
        largest: No number is larger.
        shown: Whether the chat template shows the tools.
        name: Stands on every rollout.
        conversation: What MultiTurnEnvironment takes: template, system_prompt, max_turns, max_seconds, turn_tokens.
    """

    tools = [add]

    def __init__(self, largest: int = 29, shown: bool = True, name: str = "$name", **conversation) -> None:
        super().__init__(shown=shown, name=name, **conversation)
        pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
        # an id that no other problem has, what the policy is asked, and what it should say; a part is held out
        self.examples = [Example(f"{a}+{b}", f"{a}+{b}=", answer=str(a + b)) for a, b in pairs]

    def score(self, conversation):
        answer = conversation.example.answer
        told = [result for _, result in conversation.state["calls"]]
        answered = any(not result.startswith("error: ") for result in told)
        return 0.2 * answered + 0.3 * (answer in told) + 0.5 * (conversation.text.strip() == answer)

    def solution(self, example):
        """What the policy might say, turn by turn, for the warm start; the tool answers between."""
        a, b = map(int, example.example_id.split("+"))
        call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
        return [f"<tool_call>{call}</tool_call>", example.answer]
'''

_TOOL_TEST = '''"""The environment by itself: answers are given, so no model is needed."""

import pytest
from $name import $class_name

from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import Decoding

ENVIRONMENT = $class_name(shown=False)
EXAMPLE = ENVIRONMENT.train_examples()[0]
CALL, ANSWER = ENVIRONMENT.solution(EXAMPLE)


def play(*answers):
    """One conversation about the first problem, in which the policy says one answer after the other."""
    left = list(answers)
    context = ScriptedContext(Tokenizer.load("penstock"), lambda prompt, seed: left.pop(0))
    groups, metrics = ENVIRONMENT.sample_problems(context, [0], 1, Decoding(max_output_tokens=512), 0)
    return groups[0].rollouts[0].episode_reward, metrics


@pytest.mark.parametrize(
    ("answers", "reward", "calls"),
    [([CALL, ANSWER], 1.0, 1), ([ANSWER], 0.5, 0), ([CALL, "many"], 0.5, 1), (["many"], 0.0, 0)],
    ids=["asked and right", "right", "asked and wrong", "wrong"],
)
def test_a_conversation_earns(answers, reward, calls):
    earned, metrics = play(*answers)
    assert (earned, metrics["tool_calls"]) == (reward, calls)


def test_a_call_that_cannot_be_read_is_told_so_and_may_be_tried_again():
    earned, metrics = play("<tool_call>add(1, 2)</tool_call>", CALL, ANSWER)
    assert (earned, metrics["tool_calls"], metrics["tool_errors"]) == (1.0, 2, 0.5)
'''

_RECIPE = """# $title: a tiny random model $does. Every key: docs/config.md, or penstock config KEY.
seed: 0
steps: 100
model:                                      # or path: a Hugging Face directory
  init: {hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}
curriculum:
  lessons:
    $name:
      environment: {env_class: $name.py:$class_name, env_args: $arguments}
      sampling_params: {n_generations_per_prompt: 8, max_output_tokens: $tokens}
  eval_frequency: 50
  eval_n_examples: 16
  micro_eval_frequency: 0
inference: {max_slots: 64, max_seq_len: $longest}
replay: {groups_per_batch: 8, staleness_budget: 1}
learner:
  row_length: 128
  micro_batch_rows: 8
  optimizer: {learning_rate: $rate, warmup_steps: 5}
"""
_WARM_START = (
    "  warm_start: {steps: 150, batch_size: 32, learning_rate: 3.0e-3}    # on the solutions of the environment\n"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between kinds of environments: texts, and what the recipe says of each."""

    environment: str
    test: str
    does: str
    arguments: str
    tokens: int
    longest: int
    rate: str
    warm_start: str = _WARM_START


KINDS = {
    "single-turn": _Kind(
        _ENVIRONMENT, _TEST, "spells words backwards", "{held_out: 4}", tokens=8, longest=64, rate="1.0e-3",
        warm_start="",
    ),
    "multi-turn": _Kind(
        _MULTI_TURN_ENVIRONMENT, _MULTI_TURN_TEST, "guesses a number in turns", "{largest: 200, max_turns: 8}",
        tokens=96, longest=128, rate="3.0e-4",
    ),
    "tool": _Kind(
        _TOOL_ENVIRONMENT, _TOOL_TEST, "adds with a tool, which its chat template cannot show",
        "{largest: 29, shown: false}", tokens=112, longest=128, rate="3.0e-4",
    ),
}  # fmt: skip
"""By the name that `new_environment` takes."""


def new_environment(name: str, folder: Path, kind: str = "single-turn") -> list[Path]:
    """Writes an environment, its test and its recipe.

    Args:
        name: Of the module; the class is called after it.
        folder: Is made, and must not exist.
        kind: Of environment, one of `KINDS`.

    Returns:
        The path of the environment, of its test, and of its recipe.

    Raises:
        ConfigError: the name is none for a module, or taken; there is no such kind; the folder exists or cannot be
            made.
    """
    chosen = KINDS.get(kind)
    if chosen is None:
        raise ConfigError(f"kind {kind!r}: there is no such kind{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ConfigError(f"NAME {name!r} names no module: use small letters, digits and _, such as spell_backwards")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None and not folder.exists():
        raise ConfigError(f"NAME {name!r} is the name of an installed module: choose another, such as my_{name}")
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}: choose another NAME, or remove it") from error
    words = {
        "name": name,
        "title": name.replace("_", " ").capitalize(),
        "class_name": "".join(part.capitalize() for part in name.split("_")) + "Environment",
        **{key: str(getattr(chosen, key)) for key in ("does", "arguments", "tokens", "longest", "rate")},
    }
    made = [folder / f"{name}.py", folder / f"test_{name}.py", folder / f"{name}.yaml"]
    for path, text in zip(made, (chosen.environment, chosen.test, _RECIPE + chosen.warm_start), strict=True):
        path.write_text(Template(text).substitute(words), "utf-8")
    return made

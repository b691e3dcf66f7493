"""An environment of one's own, to begin with: `penstock env new NAME` writes it, its test and its recipe.

What is written runs as it is: its test passes without a model, and its recipe trains a tiny random one on it.
"""

import importlib.util
import keyword
import sys
from pathlib import Path
from string import Template

from penstock.types import ConfigError

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

_RECIPE = """# $title: a tiny random model spells words backwards. Every key: docs/config.md, or penstock config KEY.
seed: 0
steps: 100
model:                                      # or path: a Hugging Face directory
  init: {hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}
curriculum:
  lessons:
    $name:
      environment: {env_class: $name.py:$class_name, env_args: {held_out: 4}}
      sampling_params: {n_generations_per_prompt: 8, max_output_tokens: 8}
  eval_frequency: 50
  eval_n_examples: 16
  micro_eval_frequency: 0
inference: {max_slots: 64, max_seq_len: 64}
replay: {groups_per_batch: 8, staleness_budget: 1, store: {buffer_size: 64}}
learner:
  row_length: 128
  micro_batch_rows: 8
  optimizer: {learning_rate: 1.0e-3, warmup_steps: 5}
"""


def new_environment(name: str, folder: Path) -> list[Path]:
    """Writes an environment, its test and its recipe.

    Args:
        name: Of the module; the class is called after it.
        folder: Is made, and must not exist.

    Returns:
        The path of the environment, of its test, and of its recipe.

    Raises:
        ConfigError: the name is none for a module, or taken; the folder exists or cannot be made.
    """
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
    }
    made = [folder / f"{name}.py", folder / f"test_{name}.py", folder / f"{name}.yaml"]
    for path, text in zip(made, (_ENVIRONMENT, _TEST, _RECIPE), strict=True):
        path.write_text(Template(text).substitute(words), "utf-8")
    return made

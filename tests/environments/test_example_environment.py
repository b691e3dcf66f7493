"""What every environment with lists of problems has in common."""

import logging

import numpy as np
import pytest

from penstock.environments import Environment, Example, Reference, SingleTurnEnvironment
from penstock.inference import ScriptedContext
from penstock.types import ConfigError, EnvironmentFailure, NoProgressError, ProblemSet, as_seed, fold

from .conftest import EOS, CharacterTokenizer

VERIFIER_BROKE = EnvironmentFailure("verifier broke")


class Echo(SingleTurnEnvironment):
    """1 where the answer repeats the prompt; breaks on demand."""

    def __init__(self, train="abcdefghij", held_out="xyz", broken="", error=VERIFIER_BROKE):
        super().__init__("echo")
        self._texts = {"train": train, "eval": held_out}
        self._broken = broken
        self._error = error

    def train_examples(self):
        return [Example(letter, letter, letter) for letter in self._texts["train"]]

    def eval_examples(self):
        return [Example(letter, letter, letter) for letter in self._texts["eval"]]

    def score(self, example, text, completion):
        if example.example_id in self._broken:
            raise self._error
        return float(text == example.answer)


def echo(prompt, *_):
    return prompt + "<eos>"


def test_groups_of_rollouts_without_metadata(policy, decoding):
    groups, metrics = Echo().sample(policy(echo), 3, 4, decoding, 7, "train")
    assert metrics == {"failed_groups": 0.0}
    assert [len(group.rollouts) for group in groups] == [4, 4, 4]
    rollout = groups[0].rollouts[0]
    assert groups[0].key == f"echo:{rollout.env_example_id}" and groups[0].group_id == ""
    assert rollout.metadata is None and rollout.rollout_id == "" and rollout.lesson_id == ""
    assert rollout.response_tokens.tolist() == [ord(rollout.env_example_id), EOS]
    assert rollout.response_weight_steps.tolist() == [5, 5] and rollout.oldest_weight_step == 4
    assert rollout.response_logprobs.tolist() == [-0.5, -0.5]
    assert rollout.token_rewards.tolist() == [0.0, 1.0] and rollout.episode_reward == 1.0
    assert rollout.decoding == decoding and rollout.finish_reason == "stop"
    assert [(t.role, t.content, t.start, t.stop) for t in rollout.turns] == [
        ("user", rollout.env_example_id, 0, 1),
        ("assistant", rollout.env_example_id, 1, 3),
    ]


def test_the_key_alone_decides_examples_and_seeds(policy, decoding):
    def run(key):
        context = policy(echo)
        groups, _ = Echo().sample(context, 4, 2, decoding, key, "train")
        return [group.key for group in groups], context.calls[0][3]

    assert run(3) == run(3)
    assert len({tuple(run(key)[0]) for key in range(8)}) > 4
    assert run(3)[1] == [fold(3, "sample", i) for i in range(4)]
    jax_key = np.array([0, 3], np.uint32)
    assert run(jax_key)[1][0] == fold(as_seed(jax_key), "sample", 0)


def test_duplicate_prompts_stay_distinct_groups_with_their_own_noise(policy, decoding):
    context = policy(echo)
    groups, _ = Echo(train="a").sample(context, 3, 2, decoding, 0, "train")
    assert [group.key for group in groups] == ["echo:a"] * 3
    assert len(set(context.calls[0][3])) == 3


def test_train_and_eval_draw_from_disjoint_problems(policy, decoding):
    environment = Echo()
    drawn = {
        mode: {group.key[-1] for group in environment.sample(policy(echo), 30, 1, decoding, 1, mode)[0]}
        for mode in ("train", "eval", "report")
    }
    assert drawn["train"] == set("abcdefghij")
    # Held out are x, y and z: some to decide by, the others for reports alone.
    assert drawn["eval"] and drawn["report"] and not drawn["eval"] & drawn["report"]
    assert drawn["eval"] | drawn["report"] == set("xyz")


def test_which_half_is_for_reports_depends_on_the_problem_alone(policy, decoding):
    held_out = "klmnopqrstuvwxyz"
    halves = []
    for order in (held_out, held_out[::-1]):
        environment = Echo(held_out=order)
        groups, _ = environment.sample(policy(echo), 8, 1, decoding, 0, "report")
        halves.append({group.key for group in groups})
        assert len(halves[-1]) == 8
    assert halves[0] == halves[1]


def test_a_single_held_out_problem_serves_both(policy, decoding):
    environment = Echo(held_out="x")
    for mode in ("eval", "report"):
        groups, _ = environment.sample(policy(echo), 2, 1, decoding, 0, mode)
        assert {group.key for group in groups} == {"echo:x"}


def test_nothing_asked_for_is_an_empty_result(policy, decoding):
    context = policy(echo)
    assert Echo().sample(context, 0, 4, decoding, 1, "train") == ([], {"failed_groups": 0.0})
    assert context.calls == []


def test_a_failing_problem_fails_its_own_group_only(policy, decoding, caplog):
    with caplog.at_level(logging.WARNING):
        groups, metrics = Echo(broken="abc").sample(policy(echo), 10, 2, decoding, 1, "train")
    assert {g.key for g in groups} == {f"echo:{letter}" for letter in "defghij"}
    assert metrics["failed_groups"] == 3.0
    assert caplog.text.count("verifier broke") == 1 and "3 groups failed: verifier broke" in caplog.text


def test_no_group_at_all_is_a_failure(policy, decoding):
    with pytest.raises(EnvironmentFailure, match="verifier broke"):
        Echo(train="a", broken="a").sample(policy(echo), 1, 2, decoding, 1, "train")


def test_a_mistake_in_the_score_is_a_counted_failure_that_names_it(policy, decoding):
    environment = Echo(train="a", broken="a", error=KeyError("colour"))
    with pytest.raises(EnvironmentFailure, match="Echo raised KeyError while scoring 'a': 'colour'"):
        environment.sample(policy(echo), 1, 2, decoding, 1, "train")


def test_errors_of_the_run_pass_through(policy, decoding):
    environment = Echo(train="a", broken="a", error=NoProgressError("engine"))
    with pytest.raises(NoProgressError):
        environment.sample(policy(echo), 1, 2, decoding, 1, "train")


def test_a_prompt_that_does_not_fit_fails_alone(decoding):
    environment = Echo(train=("a", "b" * 50))
    environment.train_examples = lambda: [Example("short", "a", "a"), Example("long", "b" * 50, "b")]
    context = ScriptedContext(CharacterTokenizer(), lambda prompt, _: prompt, max_seq_len=20)
    groups, metrics = environment.sample(context, 2, 2, decoding, 1, "train")
    assert [group.key for group in groups] == ["echo:short"]
    assert metrics["failed_groups"] == 1.0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Echo(train="abx"), "1 examples are both for training and held out, such as 'x'"),
        (Echo(held_out=""), "no examples for mode 'eval'"),
    ],
)
def test_problem_lists_that_cannot_be_used(environment, message, policy, decoding):
    with pytest.raises(ConfigError, match=message):
        environment.sample(policy(echo), 1, 1, decoding, 0, "train")


class Letters(SingleTurnEnvironment):
    """All problems in one list."""

    examples = [Example(letter, "Say one:", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    eval_fraction = 0.2

    def score(self, example, text, completion):
        return float(text == example.answer)


def test_of_one_list_of_problems_a_part_is_held_out_and_the_class_gives_the_name(policy, decoding):
    environment = Letters()
    assert environment.name == "Letters" and Letters("mine").name == "mine"
    held_out = "".join(example.example_id for example in environment.eval_examples())
    assert held_out == "cdfjnpsux"
    assert "".join(example.example_id for example in environment.train_examples()) == "abeghiklmoqrtvwyz"
    groups, _ = environment.sample(policy(echo), 2, 1, decoding, 0, "train")
    assert all(group.key.startswith("Letters:") for group in groups)
    more = Letters()
    more.examples = [*Letters.examples, Example("1", "Say one:", "1"), Example("2", "Say one:", "2")]
    assert set(held_out) <= {example.example_id for example in more.eval_examples()}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: [Example(1, "Say one:")], "example_id of an Example is 1: it must be text"),
        (lambda: [Example("1", "Say one:", 1)], r"answer of Example '1' is 1: it must be text, str\(…\); what else"),
        (lambda: [Example("1", 1)], "prompt of Example '1' is 1: it must be text or chat messages"),
        (
            lambda: ["Say one:", "Say two:"],
            r"examples must be a list of Example\(…\), and is \['Say one:', 'Say two:'\]",
        ),
        (lambda: (each for each in Letters.examples), "examples must be a list of .*, and is <generator"),
        (
            lambda: [Example("x", "Say one:"), Example("x", "Say two:")],
            "examples has 2 examples with the example_id 'x':",
        ),
        (lambda: [Example("x", "Say one:")], "has one example: to hold some out takes two"),
    ],
)
def test_examples_that_are_none_are_refused(made, message):
    environment = Letters()
    with pytest.raises(ConfigError, match=message):
        environment.examples = made()
        environment.training_set()


def test_lists_of_problems_are_lists_of_examples():
    for field, wrong in {"train_examples": iter(Letters.examples), "eval_examples": [{"prompt": "Say one:"}]}.items():
        given = {
            name: lambda self, i=i: Letters.examples[i::2] for i, name in enumerate(("train_examples", "eval_examples"))
        }
        environment = type("Wrong", (Letters,), given | {field: lambda self, wrong=wrong: wrong})()
        with pytest.raises(ConfigError, match=rf"{field}\(\) must be a list of Example\(…\), and is "):
            environment.training_set()


def test_an_environment_without_problems_says_how_to_give_it_some():
    class Half(Letters):
        examples = ()

        def train_examples(self):
            return Letters.examples

    class Whole(Letters):
        eval_fraction = 1.0

    with pytest.raises(ConfigError, match=r"^environment 'Half' \(Half\) has no problems: give it examples = \[Exampl"):
        Half().training_set()
    with pytest.raises(ConfigError, match="'Whole': eval_fraction is 1.0: it is a number between 0 and 1"):
        Whole().training_set()


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ("abcdefghijklmnopqrstuvwxyz1234", "rests on 15 of 30 held-out problems"),
        ("x", "rests on 1 of 1 held-out problems"),
        ("abcdefghijklmnopqrstuvwxyz123456", None),
    ],
)
def test_few_problems_for_reports_are_warned_of(held_out, said, caplog):
    Echo(train="!?", held_out=held_out).training_set()
    assert (said in caplog.text and "hold out 32 or more" in caplog.text) if said else caplog.text == ""


def test_references_come_from_training_problems():
    references = Echo().reference_examples(6, 5)
    assert len(references) == 6 and references == Echo().reference_examples(6, 5)
    assert {r.prompt for r in references} <= set("abcdefghij") and references != Echo().reference_examples(6, 6)


def test_references_as_tokens():
    tokenizer = CharacterTokenizer()
    prompt, response = Reference("ab", "c").token_pair(tokenizer)
    assert (prompt.tolist(), response.tolist()) == ([97, 98], [99, EOS])
    prompt, response = Reference("a", "d", earlier=("b", "c"), ends=False).token_pair(tokenizer)
    assert (prompt.tolist(), response.tolist()) == ([97, 98, 99], [100])
    assert prompt.dtype == response.dtype == np.int32


def test_problems_by_number_are_asked_with_the_keys_noise_alone(policy, decoding):
    context = policy(echo)
    groups, metrics = Echo().sample_problems(context, [9, 0, 9], 2, decoding, 7)
    assert [group.key for group in groups] == ["echo:j", "echo:a", "echo:j"]
    assert [len(group.rollouts) for group in groups] == [2, 2, 2] and metrics == {"failed_groups": 0.0}
    assert context.calls[0][3] == [fold(7, "sample", i) for i in range(3)]


def test_a_problem_that_is_not_there_fails_its_group_and_says_why(policy, decoding):
    with pytest.raises(EnvironmentFailure, match="'echo' was asked for problem 10, but has 10: .* resume the run"):
        Echo().sample_problems(policy(echo), [10], 1, decoding, 0)


def test_the_training_set_counts_training_problems_and_notices_each_change_of_them():
    found = Echo().training_set()
    assert found == ProblemSet(10, "ff31b5fa13fda394e46a4fb40448d536")
    assert Echo(held_out="yz").training_set() == found == Echo().training_set()
    others = [Echo(train="abcdefghik"), Echo(train="bacdefghij"), Echo(train="abcdefghi")]
    assert len({found.digest, *(other.training_set().digest for other in others)}) == 4


def test_an_environment_that_replaces_sample_alone_draws_for_itself():
    class Drawing(Echo):
        def sample(self, *args):
            return [], {}

    assert Drawing().training_set() is None


def test_an_environment_without_problems_by_number_says_so(policy, decoding):
    class Endless(Environment):
        def sample(self, *args):
            return [], {}

    assert Endless("endless").training_set() is None
    with pytest.raises(
        EnvironmentFailure, match=r"'endless' \(Endless\) was asked for problem \[3\]: .*sample_problems"
    ):
        Endless("endless").sample_problems(policy(echo), [3], 1, decoding, 0)


class Long(SingleTurnEnvironment):
    """Prompts of 1 to 1,000 characters; one cannot be made."""

    broken = ""

    def train_examples(self):
        return [Example(f"p{length}", "x" * length) for length in range(1, 1001)]

    def eval_examples(self):
        return [Example(f"held-{number}", f"out {number}") for number in range(100)]

    def shaped(self, example):
        return {}[example.example_id] if example.example_id == self.broken else super().shaped(example)

    def score(self, example, text, completion):
        return 0.0


def test_prompts_without_room_for_an_answer_are_told_before_a_run(caplog):
    environment = Long("long")
    environment.broken = "p5"
    with caplog.at_level(logging.WARNING):
        environment.check_prompts(CharacterTokenizer(), 1001)
        assert caplog.text == ""
        environment.check_prompts(CharacterTokenizer(), 900)
    (record,) = caplog.records
    assert record.getMessage() == (
        "environment long: 25 of 249 prompts looked at have 900 tokens or more (the longest, of problem 'p997', 997) "
        "and leave no room for an answer, so that their groups fail: raise inference.max_seq_len, or drop them"
    )


def test_a_first_prompt_that_cannot_be_made_is_bad_input():
    environment = Long("long")
    environment.broken = "p1"
    with pytest.raises(ConfigError, match=r"'long': making the prompt of 'p1' raised KeyError: 'p1' \(test_example_"):
        environment.check_prompts(CharacterTokenizer(), 900)

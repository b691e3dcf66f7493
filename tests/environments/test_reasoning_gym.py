"""Generators of reasoning-gym as environments: levels, splits, scores in their own process, and mistakes."""

import sys
from typing import Any

import pytest

from penstock.environments import ReasoningGymEnvironment, load_environment
from penstock.environments.reasoning_gym import runs_nothing
from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, EnvironmentSpec

CLASS = "penstock.environments.ReasoningGymEnvironment"


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym cannot be imported .*: pip install 'penstock\[reasoning-gym"):
        load_environment(EnvironmentSpec(CLASS, {"name": "leg_counting"}))


@pytest.fixture(scope="module")
def factory():
    reason = "needs the extra reasoning-gym (docs/decisions/019-adapters-are-extras.md): make test-adapters"
    pytest.importorskip("reasoning_gym", reason=reason)
    from reasoning_gym import factory

    return factory


@pytest.fixture
def made(factory):
    environments: list[Any] = []

    def make(name: str, **arguments: Any) -> ReasoningGymEnvironment:
        environments.append(load_environment(EnvironmentSpec(CLASS, {"name": name, **arguments})))
        return environments[-1]

    yield make
    for environment in environments:
        environment.close()


def sample(environment, answers, n_examples=1, n=1, mode="train"):
    context = ScriptedContext(Tokenizer.load("penstock"), answers)
    return environment.sample(context, n_examples, n, Decoding(max_output_tokens=128), 5, mode)


def test_one_line_of_arguments_is_a_generator_with_its_own_scores(made):
    environment = made("leg_counting", config={"size": 40})
    assert environment.name == "leg_counting"
    train, held_out = environment.train_examples(), environment.eval_examples()
    assert len(train) + len(held_out) == 40 and 1 <= len(held_out) <= 10
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    right = {str(example.prompt): example.answer for example in [*train, *held_out]}

    def answers(prompt, seed):
        return [right[prompt], f"thinking … <answer> {right[prompt]} </answer>", "nothing"][seed % 3]

    groups, metrics = sample(environment, answers, n_examples=6, n=4)
    told = {
        (answers(group.rollouts[0].turns[0].content, 0), rollout.turns[1].content, rollout.episode_reward)
        for group in groups
        for rollout in group.rollouts
    }
    assert {reward for answer, text, reward in told if answer in text} == {1.0}
    assert {reward for answer, text, reward in told if answer not in text} == {0.0}
    assert metrics["rewards/score_answers/unscorable"] == 0.0 and metrics["failed_groups"] == 0.0


def test_levels_are_the_generators_own_curriculum(made):
    terms = {}
    for level in (0, 2):
        environment = made("chain_sum", level=level, config={"size": 50})
        assert environment.name == f"chain_sum-{level}"
        prompts = [str(example.prompt) for example in environment.train_examples()]
        terms[level] = {prompt.count(" + ") + prompt.count(" - ") + 1 for prompt in prompts}
    assert terms == {0: {2}, 2: {2, 3, 4}}
    wider = made("chain_sum", level=0, config={"size": 50, "max_terms": 5})
    assert {str(example.prompt).count(" + ") for example in wider.train_examples()} > {0, 1}, "config goes over level"


def test_equal_questions_are_one_problem_and_the_same_in_every_process(made):
    first, again = (made("coin_flip", config={"size": 60, "seed": 4}) for _ in range(2))
    ids = [example.example_id for example in first.train_examples()]
    assert len(set(ids)) == len(ids) and ids == [example.example_id for example in again.train_examples()]
    assert ids != [example.example_id for example in made("coin_flip", config={"size": 60}).train_examples()]


def test_an_answer_on_which_the_generator_raises_earns_nothing_and_is_counted(made):
    environment = made("prime_factorization", config={"size": 20})
    by_prompt = {str(example.prompt): example.answer for example in environment.train_examples()}
    groups, metrics = sample(environment, lambda prompt, seed: "x" if seed % 2 else by_prompt[prompt], 4, 4)
    rewards = [(r.turns[1].content == "x", r.episode_reward) for group in groups for r in group.rollouts]
    assert set(rewards) == {(True, 0.0), (False, 1.0)}
    share = sum(wrong for wrong, _ in rewards) / len(rewards)
    assert metrics["rewards/score_answers/unscorable"] == pytest.approx(share) and metrics["failed_groups"] == 0.0


def test_a_cut_answer_earns_nothing(made):
    environment = made("chain_sum", level=0, config={"size": 30})
    right = {str(example.prompt): example.answer for example in environment.train_examples()}
    context = ScriptedContext(Tokenizer.load("penstock"), lambda prompt, _: right[prompt] + " " * 80)
    groups, _ = environment.sample(context, 1, 1, Decoding(max_output_tokens=8), 5, "train")
    assert groups[0].rollouts[0].finish_reason == "length" and groups[0].rollouts[0].episode_reward == 0.0


def test_a_mix_of_generators(made):
    parts = [{"name": "chain_sum", "weight": 1.0}, {"name": "leg_counting", "weight": 1.0}]
    environment = made("composite", config={"size": 20, "datasets": parts})
    prompts = [str(example.prompt) for example in environment.train_examples()]
    assert {"legs" in prompt for prompt in prompts} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"name": "leg_count"}, r"env_args.name 'leg_count': reasoning-gym has no such generator \(did you mean 'l"),
        ({"name": "chain_sum", "level": 40}, r"env_args.level is 40: the levels of chain_sum are 0 to 10"),
        ({"name": "chain_sum", "config": {"max_term": 3}}, r"env_args.config.max_term: .*did you mean 'max_terms'"),
        ({"name": "chain_sum", "config": {"max_terms": 1}}, r"refused by chain_sum: max_terms must be >= min_terms"),
        ({"name": "acre", "level": 1}, r"env_args.level is 1: acre has no levels"),
        ({"name": "chain_sum", "eval_fraction": 1.0}, r"env_args.eval_fraction is 1.0: it takes a number between 0"),
    ],
)
def test_mistakes_are_one_line(factory, arguments, line):
    with pytest.raises(ConfigError, match=line):
        load_environment(EnvironmentSpec(CLASS, arguments))


@pytest.mark.parametrize(
    ("source", "answer", "shown"),
    [
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[1, -2, 3]", True),
        ("string_insertion", "ABCDEA", True),
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "oracle_answer", False),
        ("n_queens", "__import__('os').system('true')", False),
        ("binary_matrix", "[open('x')]", False),
        ("binary_matrix", "9**9**9", False),
        ("countdown", "(3 + 4) * 25 - 7", True),
        ("countdown", "exit()", False),
        ("puzzle24", "eval(chr(49))", False),
        ("puzzle24", "().__class__", False),
        ("simple_integration", "x**3/3 + sin(2*x) + 1.5*x + C", True),
        ("simple_integration", "(x).diff(x)", False),
        ("polynomial_multiplication", "x[0]", False),
        ("chain_sum", "exit()", True),
    ],
)
def test_what_evaluates_an_answer_is_shown_data_alone(source, answer, shown):
    assert runs_nothing(answer, source) is shown


def test_an_answer_that_is_code_is_not_run(made, tmp_path):
    environment = made("spiral_matrix", config={"size": 20})
    file = tmp_path / "it_ran"
    _, metrics = sample(environment, [f"[open({str(file)!r}, 'w')]"])
    assert metrics["rewards/score_answers/unscorable"] == 1.0 and not file.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the files that generators leave open, and of their parsers
def test_every_generator_makes_problems_and_scores_whatever_is_said(factory):
    from penstock.environments.reasoning_gym import dataset_of, score_answers

    refused = {"knight_swap"}  # by itself, at its own first level
    said = ["", "42", "[1, 2", "1/0", "{}", "<answer>x</answer>", "[[1,2],[3,4]]"]
    for name in sorted(set(factory.DATASETS) - {"composite"}):
        level = 0 if factory.has_curriculum(name) and name not in refused else None
        generator = {"name": name, "level": level, "config": {"size": 2, "seed": 0}}
        entry = dataset_of(**generator)[1]
        shown = {"index": 1, "question": str(entry["question"]), "literal": repr(entry)}
        shown["literal"] = None if name == "knights_knaves" else shown["literal"]  # it holds types
        n = len(said)
        rewards = score_answers(said, ["stop"] * n, [generator] * n, [shown] * n, lambda *_: None)
        assert len(rewards) == n and all(-1 <= reward <= 1 for reward in rewards), name

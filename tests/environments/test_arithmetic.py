"""Graded arithmetic."""

import re

import pytest

from penstock.environments import ArithmeticEnvironment
from penstock.environments.arithmetic import worked_steps
from penstock.environments.calculator import calculate, show_number


@pytest.mark.parametrize(
    ("expression", "steps"),
    [
        ("7+5", ["7+5", "12"]),
        ("(2+3)*4", ["(2+3)*4", "5*4", "20"]),
        ("2+3*4-5", ["2+3*4-5", "2+12-5", "14-5", "9"]),
        ("3*((4+2)*5)", ["3*((4+2)*5)", "3*(6*5)", "3*30", "90"]),
        ("2+3*4-20", ["2+3*4-20", "2+12-20", "14-20", "-6"]),
        ("2*(1+2+3)", ["2*(1+2+3)", "2*(3+3)", "2*6", "12"]),
    ],
)
def test_worked_steps(expression, steps):
    assert worked_steps(expression) == steps


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("12<eos>", 1.0),
        (" 12 <eos>", 1.0),
        ("5+7=12<eos>", 1.0),
        ("12", 0.0),  # cut: it might have become 123
        ("012<eos>", 0.0),
        ("12.<eos>", 0.0),
        ("13<eos>", 0.0),
        ("<eos>", 0.0),
        ("12=<eos>", 0.0),
    ],
)
def test_only_the_finished_exact_answer_counts(said, reward, policy, decoding):
    environment = ArithmeticEnvironment("easy")
    example = next(e for e in environment.train_examples() if e.columns["expression"] == "7+5")
    environment.train_examples = lambda: [example]
    groups, _ = environment.sample(policy(said), 1, 1, decoding, 0, "train")
    assert groups[0].rewards.tolist() == [reward]


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_answers_are_right_and_steps_lead_to_them(difficulty):
    environment = ArithmeticEnvironment(difficulty)
    assert environment.name == f"arithmetic-{difficulty}"
    for example in [*environment.train_examples()[:300], *environment.eval_examples()[:300]]:
        expression = example.columns["expression"]
        assert expression in example.prompt
        assert example.answer == show_number(calculate(expression)) == worked_steps(expression)[-1]
        for step in worked_steps(expression):
            assert calculate(step) == calculate(expression)


def expressions(examples):
    return {example.columns["expression"] for example in examples}


def test_held_out_easy_problems_are_new_combinations_of_sum_and_wording():
    easy = ArithmeticEnvironment("easy")
    assert (len(easy.train_examples()), len(easy.eval_examples())) == (240, 60)
    assert len(expressions([*easy.train_examples(), *easy.eval_examples()])) == 100
    trained = expressions(easy.train_examples())
    assert len(expressions(easy.eval_examples()) & trained) >= 45  # most sums are known in another wording


def test_held_out_expressions_are_never_trained():
    for difficulty in ("medium", "hard"):
        environment = ArithmeticEnvironment(difficulty)
        held_out = expressions(environment.eval_examples())
        assert not expressions(environment.train_examples()) & held_out
        assert len(held_out) > 500
    medium = expressions(ArithmeticEnvironment("medium").eval_examples())
    assert all(re.fullmatch(r"\d\d[+-]\d\d", expression) for expression in medium)

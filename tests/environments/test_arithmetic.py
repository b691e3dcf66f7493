"""Graded arithmetic."""

import re

import pytest

from penstock.environments import ArithmeticEnvironment
from penstock.environments.arithmetic import worked_steps
from penstock.environments.calculation import calculate, show_number


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
        ("12", 0.0),
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


def test_what_is_held_out():
    easy = ArithmeticEnvironment("easy")
    assert (len(easy.train_examples()), len(easy.eval_examples())) == (400, 100)
    assert {e.columns["expression"] for e in easy.train_examples()} == {
        f"{a}+{b}" for a in range(10) for b in range(10)
    }
    for difficulty in ("medium", "hard"):
        environment = ArithmeticEnvironment(difficulty)
        train = {e.columns["expression"] for e in environment.train_examples()}
        held_out = {e.columns["expression"] for e in environment.eval_examples()}
        assert not train & held_out and len(held_out) > 500
    assert all(
        re.fullmatch(r"\d\d[+-]\d\d", e)
        for e in {e.columns["expression"] for e in ArithmeticEnvironment("medium").eval_examples()}
    )

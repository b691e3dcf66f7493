"""Graded arithmetic."""

import re

import pytest

from penstock.environments import ArithmeticEnvironment, Example
from penstock.environments.arithmetic import worked_steps
from penstock.environments.expressions import calculate, show_number


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


def operands(examples):
    return {tuple(sorted(re.findall(r"\d+", example.columns["expression"]))) for example in examples}


@pytest.mark.parametrize(
    ("difficulty", "pairs", "least"), [("easy", 55, 11), ("medium", 4095, 819), ("hard", None, 200)]
)
def test_no_sum_that_is_held_out_is_trained_in_any_wording_or_order(difficulty, pairs, least):
    environment = ArithmeticEnvironment(difficulty)
    held_out, trained = environment.eval_examples(), environment.train_examples()
    assert not operands(held_out) & operands(trained)
    assert len(operands(held_out)) >= least
    if pairs is not None:  # each unordered pair is in one of the two
        assert len(operands(held_out) | operands(trained)) == pairs and len(operands(held_out)) == least
        sums = {e.columns["expression"] for e in held_out if "+" in e.columns["expression"]}
        assert {"+".join(reversed(one.split("+"))) for one in sums} == sums  # with its commuted form


def test_easy_asks_every_sum_in_every_wording():
    easy = ArithmeticEnvironment("easy")
    everything = [*easy.train_examples(), *easy.eval_examples()]
    assert len(everything) == len(expressions(everything)) * 3 == 300
    assert len(easy.eval_examples()) in range(33, 67)


def test_problems_have_the_form_of_their_difficulty():
    medium = expressions(ArithmeticEnvironment("medium").eval_examples())
    assert len(medium) > 1500 and all(re.fullmatch(r"\d\d[+-]\d\d", expression) for expression in medium)
    assert len(expressions(ArithmeticEnvironment("hard").eval_examples())) > 300


@pytest.mark.parametrize(
    ("difficulty", "expression", "said"),
    [
        ("easy", "7+5", "12"), ("medium", "27+38", "50+15=65"), ("medium", "82-16", "70-4=66"),
        ("medium", "40-40", "0+0=0"), ("medium", "35-35", "0+0=0"), ("medium", "50+10", "60+0=60"),
    ],
)  # fmt: skip
def test_worked_solutions_add_tens_and_ones_by_themselves(difficulty, expression, said):
    environment = ArithmeticEnvironment(difficulty)
    example = Example(expression, f"{expression}=", str(calculate(expression)), {"expression": expression})
    (reference,) = environment.references(example)
    assert reference.response == said
    assert all(calculate(step) == calculate(expression) for step in said.split("="))

"""Built-in graders."""

from decimal import Decimal

import pytest

from penstock.environments.rewards import (
    answer_closeness,
    answer_format,
    closeness,
    exact_match,
    final_answer,
    final_number,
    last_number,
    numbers_in,
    reference_number,
    shaped_answer,
    text_of,
)

GOLD = "Five days bring 5 * 96 = $480.\n#### 1,480"


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("#### 18", "18"),
        ("so ####18", "18"),
        ("#### 1,000", "1000"),
        ("#### $1,234.50.", "1234.5"),
        ("#### 18.", "18"),
        ("#### 18.00", "18"),
        ("#### -3", "-3"),
        ("#### -$3", "-3"),
        ("#### **7**", "7"),
        ("#### .5", "0.5"),
        ("#### 12 apples in 3 baskets", "12"),
        ("#### 12 apples and 3 pears", None),
        ("#### 5 18", None),
        ("#### 1\nno, #### 2", "2"),
        ("####\n 9", "9"),
        ("#### x = 9", "9"),
        (r"so \boxed{9}, that is #### 8", "9"),
        ("the answer is 9", None),
        ("####", None),
        ("", None),
    ],
)
def test_the_number_after_the_last_mark(said, number):
    assert final_number(said) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("12-5=7", ["12", "5", "7"]),
        ("-5 and $1,000", ["-5", "1000"]),
        ("3.5.", ["3.5"]),
        ("none", []),
        ("(2)-3", ["2", "3"]),
    ],
)
def test_numbers_of_a_text(text, numbers):
    assert numbers_in(text) == [Decimal(number) for number in numbers]


def test_reference_answers():
    assert reference_number(GOLD) == 1480
    assert reference_number("18") == reference_number(18) == 18
    assert reference_number("yes") is None


def test_final_answer_grades_by_value():
    said = ["x #### 1480", "#### $1,480.00", "1480", "#### 480", "#### 14800", ""]
    assert final_answer(said, [GOLD] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert final_answer(["#### 1"], ["no number"]) == [0.0]


def test_a_cut_answer_earns_nothing():
    reasons = ["stop", "length"]
    assert final_answer(["#### 1480"] * 2, [GOLD] * 2, finish_reason=reasons) == [1.0, 0.0]
    assert last_number(["1480"] * 2, [GOLD] * 2, finish_reason=reasons) == [1.0, 0.0]
    assert exact_match(["yes"] * 2, ["yes"] * 2, finish_reason=reasons) == [1.0, 0.0]


def test_last_number_and_exact_match():
    assert last_number(["I say 3, no 1,480", "1480 or 3", "none"], [GOLD] * 3) == [1.0, 0.0, 0.0]
    assert exact_match([" yes\n", "Yes"], ["yes", "yes"]) == [1.0, 0.0]


def test_both_forms_of_completion():
    assert text_of("a") == text_of([{"role": "assistant", "content": "a"}]) == "a"
    assert final_answer([[{"role": "assistant", "content": "#### 1480"}]], [GOLD], prompts=["p"], other=[1]) == [1.0]


def test_the_form_of_an_answer():
    said = ["#### 7", "so #### 7 apples", "7", "####", ""]
    assert answer_format(said, answer=[GOLD] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert answer_format(["#### 7"], finish_reason=["length"]) == [0.0]


@pytest.mark.parametrize(
    ("found", "right", "value"),
    [("99", "99", 1.0), ("9", "99", 0.5), ("99", "9", 0.5), ("0", "999", 0.25), ("-5", "5", 0.0), ("5", None, 0.0)],
)
def test_closeness_of_numbers(found, right, value):
    assert closeness(Decimal(found), None if right is None else Decimal(right)) == pytest.approx(value, abs=1e-12)


def test_closeness_is_that_of_the_marked_number_or_else_of_the_last():
    said = ["#### 9 of 99", "9 or 99", "#### of 9", "none", [{"role": "assistant", "content": "#### 99"}]]
    assert answer_closeness(said, ["#### 99"] * 5) == pytest.approx([0.5, 1.0, 0.5, 0.0, 1.0])
    assert answer_closeness(["5"], ["no number"]) == [0.0]


@pytest.mark.parametrize(
    ("said", "reason", "reward"),
    [
        ("It is #### 99", "stop", 1.0),
        ("It is #### 99", "length", 0.3),  # cut: it might have gone on
        ("It is 99", "stop", 0.1 + 0.3),
        ("#### 9", "stop", 0.1 + 0.2 + 0.3 / 2),
        ("no idea", "stop", 0.1),
        ("", "length", 0.0),
    ],
)
def test_the_shaped_reward_gives_each_step_its_share(said, reason, reward):
    assert shaped_answer([said], ["99"], finish_reason=[reason], question=["?"]) == pytest.approx([reward])
    assert shaped_answer([said, said], ["99", "99"], finish_reason=[reason] * 2) == pytest.approx([reward] * 2)

"""Built-in graders."""

from decimal import Decimal

import pytest

from penstock.environments.rewards import (
    exact_match,
    final_answer,
    final_number,
    last_number,
    numbers_in,
    reference_number,
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
        ("#### 12 apples and 3 pears", "12"),
        ("#### 5 18", "5"),
        ("#### 1\nno, #### 2", "2"),
        ("####\n 9", "9"),
        ("#### x = 9", None),
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

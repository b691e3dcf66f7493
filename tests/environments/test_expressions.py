"""The parser of expressions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.environments.expressions import CalculationError, calculate, show_number


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+30", "42"),
        (" 2 + 3 * 4 ", "14"),
        ("(2+3)*4", "20"),
        ("10-2-3", "5"),
        ("100/4/5", "5"),
        ("-(3-5)*2", "4"),
        ("2*-3", "-6"),
        ("1/4", "0.25"),
        ("1/3", "0.333333"),
        ("0.1+0.2", "0.3"),
        ("7.50*4", "30"),
    ],
)
def test_values(expression, value):
    assert show_number(calculate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("(1+2", "ends too early"),
        ("(1 2)", "not closed"),
        ("1 2", "unexpected '2'"),
        ("2**9", r"unexpected '\*'"),
        ("__import__('os')", "unexpected '_'"),
        ("9" * 65, "longer than 64"),
        (")", r"unexpected '\)'"),
    ],
)
def test_what_is_no_expression_is_refused(expression, message):
    with pytest.raises(CalculationError, match=message):
        calculate(expression)


EXPRESSIONS = st.recursive(
    st.integers(0, 20).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: (
            f"({parts[0][0]}{parts[1]}{parts[2][0]})",
            {"+": parts[0][1] + parts[2][1], "-": parts[0][1] - parts[2][1], "*": parts[0][1] * parts[2][1]}[parts[1]],
        )
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_any_expression_has_the_value_of_its_tree(pair):
    expression, value = pair
    if len(expression) <= 64:
        assert calculate(expression) == value


@given(st.text("0123456789+-*/(). ", max_size=64))
def test_any_text_has_a_value_or_is_refused(text):
    try:
        assert isinstance(calculate(text), Fraction)
    except CalculationError as error:
        assert str(error)

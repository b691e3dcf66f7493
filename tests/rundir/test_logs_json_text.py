"""JSON that every reader takes, whatever the values hold."""

import json

import numpy as np
import pytest

from penstock.rundir.logs import to_json


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_a_number_that_is_not_finite_is_null_wherever_it_stands(value):
    text = to_json({"a": value, "b": [1.5, (value,)], "c": {"d": value, "e": True}})
    expected = {"a": None, "b": [1.5, [None]], "c": {"d": None, "e": True}}
    assert json.loads(text, parse_constant=refuse) == expected
    assert to_json({"a": value}, allow_nan=True) == json.dumps({"a": value})


def test_halves_of_pairs_are_escaped_beside_numbers_that_are_not_finite():
    assert json.loads(to_json(["\udc80 😀", float("nan")])) == ["\\udc80 😀", None]


def test_what_json_has_no_form_for_is_refused():
    with pytest.raises(TypeError):
        to_json({"a": object()})

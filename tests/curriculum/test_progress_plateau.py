"""Slopes, their significance, and plateaus."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.curriculum.progress import is_plateaued, slope_test, student_t_p_value


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [
        (6.314, 1, 0.10),  # from the usual table of Student's t
        (12.706, 1, 0.05),
        (2.920, 2, 0.10),
        (2.353, 3, 0.10),
        (2.571, 5, 0.05),
        (2.228, 10, 0.05),
        (1.812, 10, 0.10),
        (1.677, 48, 0.10),
        (2.682, 48, 0.01),
    ],
)
def test_p_values_of_the_table(t, freedom, p):
    assert student_t_p_value(t, freedom) == pytest.approx(p, rel=2e-3)
    assert student_t_p_value(-t, freedom) == student_t_p_value(t, freedom)


@given(st.floats(0, 50), st.integers(1, 200))
def test_p_values_are_probabilities_and_fall_with_t(t, freedom):
    p = student_t_p_value(t, freedom)
    assert 0.0 <= p <= 1.0
    assert student_t_p_value(t + 0.5, freedom) <= p + 1e-12
    assert student_t_p_value(0.0, freedom) == 1.0


def test_a_worked_slope():
    # y = 1, 3, 2, 5, 4: x centred −2…2, Sxy = 8, Sxx = 10, Syy = 10, residual 10 − 8²/10 = 3.6, se = √(3.6 / 3 / 10)
    slope, p = slope_test([1, 3, 2, 5, 4])
    assert slope == pytest.approx(0.8)
    assert p == pytest.approx(student_t_p_value(0.8 / math.sqrt(0.12), 3))
    assert p == pytest.approx(0.1041, abs=1e-4)


def test_a_perfect_line_and_a_constant():
    assert slope_test([0, 1, 2, 3]) == (1.0, 0.0)
    assert slope_test([3, 2, 1, 0]) == (-1.0, 0.0)
    assert slope_test([0.1, 0.1, 0.1]) == slope_test([0.5, 0.5, 0.5]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("series", "window", "threshold", "level"),
    [
        ([0.0] * 10, 10, 0.01, True),
        ([0.1] * 10, 10, 0.01, True),
        ([0.5] * 9, 10, 0.01, False),  # shorter than the window
        ([0.0] * 50 + [0.7] * 10, 10, 0.01, True),  # only the window counts
        ([0.5 + 0.02 * i for i in range(10)], 10, 0.5, False),  # under the threshold, but a significant slope
        ([0.5, 0.6, 0.5, 0.4, 0.5], 5, 0.3, True),  # relative change 0.02 · 5 / 0.5 = 0.2, p = 0.6
        ([0.5, 0.6, 0.5, 0.4, 0.5], 5, 0.2, False),
        ([-0.5, -0.6, -0.5, -0.4, -0.5], 5, 0.3, True),  # relative to the mean's size
        ([0.5, -0.5, 0.5, -0.5, 0.5, -0.5], 6, 0.1, False),  # mean 0: any slope is large beside it
    ],
)
def test_plateaus(series, window, threshold, level):
    assert is_plateaued(series, window, threshold) is level


def test_noise_around_a_level_is_mostly_level_and_a_climb_is_not():
    noises = np.random.default_rng(0).normal(0, 0.05, (200, 50))
    assert 0.85 < np.mean([is_plateaued(list(0.8 + noise), 50, 0.2) for noise in noises]) < 0.95  # p > 0.1 in 90%
    climb = 0.3 + 0.01 * np.arange(50)
    assert not any(is_plateaued(list(climb + noise), 50, 0.2) for noise in noises)

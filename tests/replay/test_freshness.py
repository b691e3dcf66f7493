"""The freshness window: both boundaries of both limits, and versions from the future."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replay import FreshnessWindow
from penstock.types import RolloutMetadata


def fate(window, step, timestamp, current, now):
    verdict = window.judge(RolloutMetadata("w", timestamp, step), current, now)
    return None if verdict is None else verdict.fate


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (7, "stale_step"),
        (8, None),  # current − delay is fresh
        (10, None),  # current is fresh
        (11, "invalid"),  # the future is not
    ],
)
def test_both_ends_of_the_step_window(step, expected):
    assert fate(FreshnessWindow(2, None), step, 0.0, current=10, now=1e9) == expected


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (99.999, "stale_time"),
        (100.0, "stale_time"),  # timestamp > now − limit must hold
        (100.001, None),
        (5000.0, None),  # a clock that runs ahead makes nothing stale
    ],
)
def test_the_end_of_the_time_window(timestamp, expected):
    assert fate(FreshnessWindow(0, 60.0), 3, timestamp, current=3, now=160.0) == expected


def test_no_time_limit_keeps_a_rollout_for_ever():
    assert fate(FreshnessWindow(0, None), 3, -1e12, current=3, now=1e12) is None


def test_the_reason_names_the_numbers():
    window = FreshnessWindow(1, 60.0)
    future = window.judge(RolloutMetadata("w", 0.0, 9), 4, 0.0)
    assert future is not None and future.reason == "weight_step 9 is from the future: the learner is at version 4"
    stale = window.judge(RolloutMetadata("w", 0.0, 2), 4, 0.0)
    assert stale is not None and "weight_step 2 is more than 1 versions behind 4" in stale.reason


@given(
    st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.one_of(st.none(), st.integers(0, 50)),
    st.integers(0, 100), st.integers(0, 100),
)  # fmt: skip
def test_the_window_is_the_formula(delay, step, current, limit, timestamp, now):
    fresh = current - delay <= step <= current and (limit is None or timestamp > now - limit)
    assert (fate(FreshnessWindow(delay, limit), step, timestamp, current, now) is None) == fresh

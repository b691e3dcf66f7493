"""Sampling probabilities."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.curriculum.progress import choose, lesson_probabilities, lesson_weight
from penstock.types import generator


@pytest.mark.parametrize(
    ("success", "rollouts", "weight"),
    [
        (None, 0, 2.0),
        (0.5, 0, 2.0),
        (0.5, 100, 1 + math.exp(-1)),
        (0.1, 10**6, 0.36),
        (0.9, 10**6, 0.36),
        (0.0, 0, 0.0),
        (1.0, 5, 0.0),
    ],
)
def test_weights(success, rollouts, weight):
    assert lesson_weight(success, rollouts) == pytest.approx(weight)


def test_a_worked_example():
    # K = 2, floor 0.1, one graduated at 0.02: free = 1 − 0.2 − 0.02 = 0.78, shared 3 : 1
    found = lesson_probabilities({"a": 1.5, "b": 0.5}, ["c"], 0.1, 0.02)
    assert found == pytest.approx({"a": 0.1 + 0.585, "b": 0.1 + 0.195, "c": 0.02})


def test_all_weights_zero_is_uniform():
    assert lesson_probabilities({"a": 0.0, "b": 0.0}, [], 0.1, 0.02) == pytest.approx({"a": 0.5, "b": 0.5})


def test_small_weights_are_shared_by_proportion_too():
    assert lesson_probabilities({"a": 0.1, "b": 0.3}, [], 0.1, 0.0) == pytest.approx({"a": 0.3, "b": 0.7})


def test_without_active_lessons_the_graduated_share_evenly():
    assert lesson_probabilities({}, ["a", "b"], 0.1, 0.02) == {"a": 0.5, "b": 0.5}


@given(
    weights=st.lists(st.floats(0, 2), min_size=0, max_size=6),
    graduated=st.integers(0, 6),
    floor=st.floats(0, 1),
    rehearsal=st.floats(0, 1),
)
def test_probabilities_sum_to_one_and_floors_are_respected(weights, graduated, floor, rehearsal):
    n = len(weights) + graduated
    floor, rehearsal = floor / max(n, 1), rehearsal / max(n, 1)  # such as the configuration accepts
    active = {f"a{i}": weight for i, weight in enumerate(weights)}
    done = [f"g{i}" for i in range(graduated)]
    found = lesson_probabilities(active, done, floor, rehearsal)
    assert set(found) == {*active, *done}
    if n:
        assert sum(found.values()) == pytest.approx(1.0)
    if weights:
        assert all(found[lesson] >= floor - 1e-9 for lesson in active)
        assert all(found[lesson] == rehearsal for lesson in done)
        assert all(found[a] >= found[b] - 1e-12 for a in active for b in active if active[a] > active[b])


def test_choosing_follows_the_probabilities_and_the_seed_alone():
    probabilities = {"a": 0.7, "b": 0.1, "c": 0.2}
    drawn = Counter(choose(probabilities, generator(seed)) for seed in range(4000))
    for lesson, probability in probabilities.items():
        assert drawn[lesson] / 4000 == pytest.approx(probability, abs=0.03)
    assert choose(probabilities, generator(7)) == choose(probabilities, generator(7))
    assert choose({"a": 0.0, "b": 1.0}, generator(0)) == "b"
    assert choose({"a": 0.0, "b": 1e-9, "c": 0.0}, generator(0)) == "b"  # beyond the last

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare

from penstock.batch import draws
from penstock.batch.draws import RankSampler


def exact(n: int, alpha: float, count: int) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of ranks, drawn one after the other without replacement."""
    weights = np.arange(1, n + 1) ** float(alpha)
    probabilities = {}
    for ranks in permutations(range(n), count):
        p, left = 1.0, weights.sum()
        for rank in ranks:
            p, left = p * weights[rank] / left, left - weights[rank]
        probabilities[ranks] = p
    return probabilities


def check(n: int, alpha: float, count: int, seed: int, repeats: int = 6000) -> None:
    drawer, rng = RankSampler(alpha), np.random.default_rng(seed)
    found = Counter(tuple(drawer.draw(n, count, rng)) for _ in range(repeats))
    expected = exact(n, alpha, count)
    assert set(found) <= set(expected)
    # Cells of less than five expected draws count as one, as the test's approximation needs.
    often = [ranks for ranks, p in expected.items() if p * repeats >= 5]
    rest = repeats - sum(found[ranks] for ranks in often)
    counts = [found[ranks] for ranks in often] + [rest]
    wanted = [expected[ranks] * repeats for ranks in often]
    wanted.append(repeats - sum(wanted))
    if wanted[-1] < 1e-6:
        counts, wanted = counts[:-1], wanted[:-1]
        assert rest == 0
    assert chisquare(counts, wanted).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("n", "count"), [(8, 1), (16, 2)])
def test_few_out_of_many_have_the_exact_probabilities(n, count, alpha):
    assert count * draws.RACE_SHARE <= n
    check(n, alpha, count, seed=1)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("n", "count"), [(3, 1), (4, 2), (4, 4)])
def test_many_out_of_few_have_the_exact_probabilities(n, count, alpha):
    assert count * draws.RACE_SHARE > n
    check(n, alpha, count, seed=2)


def test_a_race_may_decide_the_rest_without_a_bias(monkeypatch):
    """One round only, so that the second of two equal ranks is always drawn by a race among the others."""
    monkeypatch.setattr(draws, "ROUNDS", 1)
    check(16, 3.0, 2, seed=3)


def test_the_middle_of_the_distribution_at_scale():
    """Half of the probability lies above rank n·2^(−1/(alpha + 1)) for large n."""
    drawer, rng = RankSampler(3.0), np.random.default_rng(4)
    median = 100_000 * 0.5 ** (1 / 4)
    above = sum(rank > median for _ in range(100) for rank in drawer.draw(100_000, 64, rng))
    assert abs(above / 6400 - 0.5) < 3 * 0.5 / np.sqrt(6400)


def test_weights_beyond_any_float_are_drawn_by_their_logarithms():
    drawer, rng = RankSampler(1e6), np.random.default_rng(5)
    assert drawer.draw(50, 3, rng) == [49, 48, 47]
    assert drawer.draw(1000, 2, rng) == [999, 998]


@pytest.mark.parametrize(("n", "count"), [(0, 0), (5, 0), (5, 5), (100, 3), (100, 99)])
def test_ranks_are_distinct_and_in_range(n, count):
    drawn = RankSampler(2.0).draw(n, count, np.random.default_rng(6))
    assert len(set(drawn)) == count and all(0 <= rank < n for rank in drawn)


def test_a_larger_n_after_a_smaller_one():
    drawer, rng = RankSampler(1.0), np.random.default_rng(7)
    drawer.draw(10, 1, rng)
    assert max(drawer.draw(1000, 100, rng)) > 500

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.types.intervals import (
    Interval,
    mean_interval,
    pass_at_k,
    proportion_interval,
    t_quantile,
    wilson_interval,
)

SHARES = st.floats(0, 1, allow_nan=False)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [  # any table of Student's t
        (1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (29, 2.045230),
        (30, 2.042272), (63, 1.998341), (100, 1.983972), (199, 1.971957), (200, 1.971896), (201, 1.971837),
        (1000, 1.962339),
    ],
)  # fmt: skip
def test_quantiles_of_t(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-6)


def test_mean_interval_of_independent_values():
    # mean 3, s = sqrt(2.5), t(4) = 2.776445: half width 2.776445 · sqrt(2.5 / 5)
    low, high = mean_interval([1, 2, 3, 4, 5])
    assert low == pytest.approx(3 - 1.963243, abs=1e-6) and high == pytest.approx(3 + 1.963243, abs=1e-6)


def test_repeating_every_rollout_of_a_prompt_teaches_nothing():
    values = [0.0, 0.2, 0.9, 0.4]
    clusters = [prompt for prompt in range(4) for _ in range(8)]
    repeated = [value for value in values for _ in range(8)]
    assert mean_interval(repeated, clusters) == pytest.approx(mean_interval(values))
    naive = mean_interval(repeated)
    assert naive.high - naive.low < 0.5 * (mean_interval(values).high - mean_interval(values).low)


def test_clusters_of_unequal_size():
    # mean 1.5; sums of residuals: (0 + 1 − 3) = −2 and (2 + 3 − 3) = 2 → Var = 2 · 8 / 16 = 1; t(1) = 12.7062
    low, high = mean_interval([0, 1, 2, 3], ["a", "a", "b", "b"])
    assert (low, high) == pytest.approx((1.5 - 12.706205, 1.5 + 12.706205), abs=1e-5)


@pytest.mark.parametrize("values", [[], [0.5]])
def test_from_fewer_than_two_prompts_nothing_is_known_about_a_mean(values):
    assert mean_interval(values) == Interval(-math.inf, math.inf)
    assert mean_interval(values * 7, ["same"] * len(values) * 7) == Interval(-math.inf, math.inf)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.277533),
        (5, 10, 0.236593, 0.763407),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3, from here on
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(successes, trials, low, high):
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=6e-5)
    values = [1.0] * successes + [0.0] * (trials - successes)
    assert proportion_interval(values) == pytest.approx((low, high), abs=6e-5)


def test_a_proportion_of_clustered_rollouts_counts_prompts():
    values = [1.0] * 3 + [0.0] * 5
    clusters = [prompt for prompt in range(8) for _ in range(16)]
    repeated = [value for value in values for _ in range(16)]
    assert proportion_interval(repeated, clusters) == pytest.approx(proportion_interval(values))


def test_a_proportion_without_variance_is_no_point():
    low, high = proportion_interval([0.0] * 64, [i // 8 for i in range(64)])
    assert low == 0.0 and high == pytest.approx(wilson_interval(0.0, 8).high)
    assert proportion_interval([]) == wilson_interval(0.0, 0) == Interval(0.0, 1.0)


@given(st.lists(SHARES, min_size=1, max_size=30), st.integers(1, 5))
def test_a_proportion_interval_holds_its_mean_and_stays_within_0_and_1(values, size):
    low, high = proportion_interval(values, [index // size for index in range(len(values))])
    mean = math.fsum(values) / len(values)
    assert 0 <= low <= mean + 1e-9 and mean - 1e-9 <= high <= 1


@pytest.mark.parametrize(
    ("samples", "successes", "k", "expected"),
    [
        (1, 1, 1, 1.0), (1, 0, 1, 0.0), (10, 3, 1, 0.3), (4, 2, 2, 5 / 6), (4, 1, 4, 1.0), (5, 2, 3, 0.9),
        (8, 7, 2, 1.0), (200, 10, 100, 1 - math.comb(190, 100) / math.comb(200, 100)),
    ],
)  # fmt: skip
def test_pass_at_k(samples, successes, k, expected):
    assert pass_at_k(samples, successes, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Averaged over all draws of n = 5 samples with success rate p it is exactly 1 − (1 − p)^k."""
    n, p = 5, 0.3
    for k in range(1, n + 1):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("samples", "successes", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_what_has_no_meaning(samples, successes, k):
    with pytest.raises(ValueError, match="1 <= k <= samples is needed"):
        pass_at_k(samples, successes, k)

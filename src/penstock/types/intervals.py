"""95% intervals of means, shares and paired differences, and the unbiased pass@k: what evaluations' numbers are worth.

Rollouts of one prompt are not independent: prompts are the independent draws; the n rollouts of a prompt form a
cluster. Where nothing can be known (no values, or a mean over a single prompt) the interval is unbounded or [0, 1].
Two policies that answered the same prompts are compared by the differences, prompt by prompt.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

_Z = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """A two-sided 95% confidence interval."""

    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.high - self.low):
            return "(one alone: no interval)"
        return f"[{number_text(self.low)}, {number_text(self.high)}]"


def number_text(value: float) -> str:
    """Three decimals, or three digits where those would hide a number or be drowned by it: 0.25 -> 0.250, 3e31."""
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e9 else f"{value:.3g}"


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval:
    """Student's t interval of a mean, robust to dependence within clusters.

    With G clusters, N values and residuals e, the variance of the mean is
    G / (G − 1) · Σ_g (Σ_{i in g} e_i)² / N², and t has G − 1 degrees of freedom; with every value its own cluster
    that is s² / N. Liang and Zeger 1986, https://doi.org/10.1093/biomet/73.1.13.

    Args:
        values: Any real numbers.
        clusters: Which values belong together, one label per value; None: all independent.

    Returns:
        The interval; unbounded for fewer than two clusters, and a point where all values are equal.
    """
    labels = range(len(values)) if clusters is None else clusters
    count = len(set(labels))
    if count < 2:
        return Interval(-math.inf, math.inf)
    mean = math.fsum(values) / len(values)
    half = t_quantile(count - 1) * math.sqrt(_variance_of_mean(values, labels))
    return Interval(mean - half, mean + half)


def reward_interval(rewards: Sequence[float], prompts: Sequence[Hashable] | None = None) -> Interval:
    """Interval of a mean reward: `proportion_interval` where all lie in [0, 1], else `mean_interval`.

    Args:
        rewards: Any real numbers.
        prompts: Which problem each belongs to.
    """
    bounded = len(rewards) > 0 and all(0.0 <= reward <= 1.0 for reward in rewards)
    return (proportion_interval if bounded else mean_interval)(rewards, prompts)


def difference_interval(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]
) -> tuple[float, Interval]:
    """Mean difference of two policies that answered the same prompts with the same seeds, and its interval.

    Answers are paired in order, prompt by prompt; what has no counterpart is left out. The interval is `mean_interval`
    of the differences with the prompts as clusters: how hard a prompt is cancels out, and several answers to one prompt
    are no independent draws. Miller 2024, https://arxiv.org/abs/2411.00640 (paired differences, clustered standard
    errors).

    Args:
        ours: Values by prompt.
        theirs: Values of the baseline.
    """
    pairs = [(prompt, *pair) for prompt in ours for pair in zip(ours[prompt], theirs.get(prompt, ()), strict=False)]
    differences = [mine - other for _, mine, other in pairs]
    mean = math.fsum(differences) / len(differences) if differences else math.nan
    return mean, mean_interval(differences, [prompt for prompt, _, _ in pairs])


def proportion_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval:
    """Wilson's interval for a mean of values in [0, 1], at the effective sample size of clustered data.

    The effective size is p (1 − p) / Var(mean), but at least the number of clusters and at most that of values; for
    independent zeros and ones it is their number, and the interval is Wilson's own. Unlike a t interval it stays
    within [0, 1] and does not shrink to a point where all values agree. Dean and Pagano 2015,
    https://doi.org/10.1093/jssam/smv024.

    Args:
        values: Within [0, 1].
        clusters: As in `mean_interval`.
    """
    labels = range(len(values)) if clusters is None else clusters
    count = len(set(labels))
    if count == 0:
        return Interval(0.0, 1.0)
    share = math.fsum(values) / len(values)
    variance = _variance_of_mean(values, labels) if count > 1 else 0.0
    effective = share * (1 - share) / variance if variance > 0 else count
    return wilson_interval(share, min(max(effective, count), len(values)))


def wilson_interval(share: float, trials: float) -> Interval:
    """Wilson's score interval for a binomial proportion.

    Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953.

    Args:
        share: Successes by trials, in [0, 1].
        trials: Their number, or an effective one; 0 gives [0, 1].
    """
    if trials <= 0:
        return Interval(0.0, 1.0)
    centre = (share + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2)) / (1 + _Z**2 / trials)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples succeeds: 1 − C(n − c, k) / C(n, k).

    Chen et al. 2021, https://arxiv.org/abs/2107.03374.

    Args:
        samples: n, samples of one prompt.
        successes: c, those that succeeded.
        k: Between 1 and n.

    Raises:
        ValueError: k is not between 1 and `samples`, or there are more successes than samples.
    """
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"pass@{k} of {successes} successes in {samples} samples: 1 <= k <= samples is needed")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def _variance_of_mean(values: Sequence[float], labels: Sequence[Hashable]) -> float:
    mean = math.fsum(values) / len(values)
    sums: dict[Hashable, float] = defaultdict(float)
    for value, label in zip(values, labels, strict=True):
        sums[label] += value - mean
    count = len(sums)
    return count / (count - 1) * math.fsum(total**2 for total in sums.values()) / len(values) ** 2


def t_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t."""
    # Here, because it costs a moment that most commands need not pay.
    from scipy.special import stdtrit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return float(stdtrit(freedom, 0.975))

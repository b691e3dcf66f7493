"""Has a series stopped changing? A relative slope, and a t-test that the slope is not there.

Pure functions over the last results of a lesson, without SciPy.
"""

import math
from collections.abc import Sequence

import numpy as np

SIGNIFICANCE = 0.1
"""A slope with a p-value of at most this is there."""
_LEAST_MEAN = 1e-6


def is_plateaued(results: Sequence[float], window: int, threshold: float) -> bool:
    """Whether the last `window` results are level.

    That is |slope| · window / max(|mean|, 1e-6) < threshold, and the slope is not significant (p > 0.1). A constant
    series is level; one shorter than the window is not.

    Args:
        results: Oldest first.
        window: At least 3.
        threshold: Largest relative change over the window, not reached.
    """
    if len(results) < window:
        return False
    recent = np.asarray(results[-window:], np.float64)
    if float(np.ptp(recent)) == 0.0:
        return True
    slope, p_value = slope_test(recent)
    relative = abs(slope) * window / max(abs(float(recent.mean())), _LEAST_MEAN)
    return relative < threshold and p_value > SIGNIFICANCE


def slope_test(results: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Least-squares slope per result, and the two-sided p-value that there is none.

    t = slope / standard error with n − 2 degrees of freedom. A perfect line has p 0, a constant series p 1.

    Args:
        results: n ≥ 3 values.
    """
    y = np.asarray(results, np.float64)
    x = np.arange(len(y), dtype=np.float64)
    x -= x.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residual = y - y.mean() - slope * x
    freedom = len(y) - 2
    error = math.sqrt(float(residual @ residual) / freedom / spread)
    if error <= abs(slope) * 1e-12:
        return slope, 0.0 if slope else 1.0
    return slope, student_t_p_value(slope / error, freedom)


def student_t_p_value(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) for Student's t with integer degrees of freedom, exactly.

    The finite trigonometric series with θ = atan(t / √ν): Abramowitz and Stegun, Handbook of Mathematical Functions,
    26.7.3 and 26.7.4.

    Args:
        t: The statistic.
        freedom: ν ≥ 1.
    """
    theta = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))

"""What the curriculum remembers of one lesson (its JSON form is in a checkpoint), and what it concludes from that.

Pure functions over a lesson's last results: the counts of a batch of training groups, whether a series has stopped
changing (a relative slope, and a t-test that the slope is not there, without SciPy), how often each lesson is sampled
(most where success is neither certain nor out of reach), and what happens to lessons, for the event log.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from penstock.types import CheckpointError, RolloutBatchStats

SIGNIFICANCE = 0.1
"""A slope with a p-value of at most this is there."""
_LEAST_MEAN = 1e-6


def is_plateaued(results: Sequence[float], window: int, threshold: float) -> bool:
    """Whether the last `window` results are level.

    That is |slope| · window / max(|mean|, 1e-6) < threshold, and the slope is not significant (p > 0.1). A constant
    series is level; one shorter than the window is not.

    Args:
        results: One success rate per group, oldest first.
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
        t: The value of Student's t statistic.
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
    return max(0.0, 1.0 - inside)


def lesson_weight(success: float | None, rollouts: int) -> float:
    """The weight w = 4 s (1 − s) · (1 + exp(−0.01 · N)): largest at s = ½, and larger while a lesson is young.

    Args:
        success: s, the smoothed success rate; ½ while None.
        rollouts: N so far.
    """
    s = 0.5 if success is None else success
    return 4.0 * s * (1.0 - s) * (1.0 + math.exp(-0.01 * rollouts))


def lesson_probabilities(
    active: Mapping[str, float], graduated: Sequence[str], minimum: float, rehearsal: float
) -> dict[str, float]:
    """Sampling probabilities; they sum to 1.

    Each graduated lesson has `rehearsal`, and each of the K active ones
    p = minimum + (1 − K · minimum − reserved) · w / Σw, by equal shares where all weights are 0. Without active
    lessons the graduated ones share evenly.

    Args:
        active: Weights w of the active lessons.
        graduated: The graduated lessons.
        minimum: No active lesson's probability is lower.
        rehearsal: Of each graduated lesson; its sum is what is reserved.

    Returns:
        Lesson to probability; empty where there are no lessons at all.
    """
    if not active:
        return {lesson: 1.0 / len(graduated) for lesson in graduated}
    free = max(0.0, 1.0 - len(active) * minimum - len(graduated) * rehearsal)  # floors may fill it up to rounding
    total = sum(active.values())
    shares = {lesson: weight / total if total > 0 else 1.0 / len(active) for lesson, weight in active.items()}
    return {lesson: minimum + free * share for lesson, share in shares.items()} | dict.fromkeys(graduated, rehearsal)


def choose(probabilities: Mapping[str, float], rng: np.random.Generator) -> str:
    """One lesson by its probability; which one depends on the generator, and on the lessons' order."""
    point = rng.random()
    reached = 0.0
    for lesson, probability in probabilities.items():
        reached += probability
        if point < reached:
            return lesson
    return max(probabilities, key=lambda lesson: probabilities[lesson])  # rounding left the point behind them all


def success_rate(stats: RolloutBatchStats, threshold: float) -> float:
    """Share of rollouts with reward ≥ threshold; the recorded share where the rewards themselves are not there."""
    return _share(stats.rewards, threshold) if stats.rewards else stats.success_rate


def group_results(stats: RolloutBatchStats, threshold: float) -> list[tuple[float, float, int]]:
    """Of each training group success rate, mean reward and number of rollouts.

    Groups are of equal size; where sizes are not known, all are alike.
    """
    n = max(1, stats.groups)
    size, rest = divmod(len(stats.rewards), n)
    if size == 0 or rest:
        return [(success_rate(stats, threshold), stats.reward_mean, stats.rollouts // n)] * n
    groups = [stats.rewards[start : start + size] for start in range(0, len(stats.rewards), size)]
    return [(_share(group, threshold), sum(group) / size, size) for group in groups]


def _share(rewards: tuple[float, ...], threshold: float) -> float:
    return sum(reward >= threshold for reward in rewards) / len(rewards)


LessonStatus = Literal["locked", "active", "graduated"]
SMOOTHING = 0.1
"""Weight of a new group in the smoothed success rate."""


@dataclass(slots=True)
class LessonProgress:
    """One lesson's record. Changed by `Curriculum` under its lock.

    Attributes:
        status: Whether it may be sampled.
        success: Smoothed success rate s of training groups; None before the first.
        rollouts: Training rollouts so far.
        groups: Training groups so far.
        succeeded: Whether any training rollout ever succeeded.
        results: Mean rewards of the last training groups, oldest first; as many as the plateau looks at.
        evaluation: Success rate of the last full evaluation, in whatever status; None before the first.
        evaluation_step: At which step that was.
        qualification: Success rate of the last full evaluation since the lesson became active: what it may graduate
            by. None before one.
        graduation_level: Evaluation success rate at which it graduated; None while it has not.
    """

    status: LessonStatus = "locked"
    success: float | None = None
    rollouts: int = 0
    groups: int = 0
    succeeded: bool = False
    results: list[float] = field(default_factory=list[float])
    evaluation: float | None = None
    evaluation_step: int | None = None
    qualification: float | None = None
    graduation_level: float | None = None

    def add_group(self, success_rate: float, reward_mean: float, rollouts: int, window: int) -> None:
        """Takes one training group in; keeps the last `window` results."""
        before = self.success
        self.success = success_rate if before is None else before + SMOOTHING * (success_rate - before)
        self.rollouts += rollouts
        self.groups += 1
        self.succeeded = self.succeeded or success_rate > 0
        self.results = [*self.results, reward_mean][-window:]

    def graduate(self, level: float) -> None:
        """Leaves the lesson to rehearsal."""
        self.status = "graduated"
        self.graduation_level = level

    def regress(self) -> None:
        """Makes a graduated lesson active again; it needs a new plateau and a new evaluation to graduate."""
        self.status = "active"
        self.graduation_level = None
        self.qualification = None
        self.results = []

    def state(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], lesson_id: str) -> "LessonProgress":
        """Reads the JSON form.

        Raises:
            CheckpointError: it has other fields.
        """
        names = {f.name for f in fields(cls)}
        if odd := ", ".join(sorted(state.keys() ^ names)):
            raise CheckpointError(f"curriculum state of lesson {lesson_id!r}: unexpected or missing fields: {odd}")
        values: dict[str, Any] = {**state, "results": list(state["results"])}
        return cls(**values)


EventKind = Literal["unlocked", "graduated", "regressed", "completed", "added", "removed"]


@dataclass(frozen=True, slots=True)
class CurriculumEvent:
    """Something that happened to a lesson, for the event log.

    Attributes:
        kind: `completed` is the curriculum's own, named by the lesson that graduated last; `added` and `removed` are
            differences between a restored state and the configuration.
        lesson_id: The lesson.
        reason: One clause with the numbers behind it.
    """

    kind: EventKind
    lesson_id: str
    reason: str


def evaluation_due(frequency: int, last_step: int, step: int) -> bool:
    """Whether a multiple of the frequency was passed, hit or not, since the last evaluation.

    Args:
        frequency: In steps; 0 never.
        last_step: Step of the last evaluation, 0 before the first.
        step: The step now.
    """
    return frequency > 0 and step // frequency > last_step // frequency

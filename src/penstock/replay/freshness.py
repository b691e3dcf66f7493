"""Freshness, decided rollout by rollout from its own metadata.

With the learner at version `current`, a rollout is fresh while
``current − step_delay ≤ weight_step ≤ current`` and ``timestamp > now − timestamp_delay_s``. A newer stamp than
`current` is from the future (a generator that outlived the trainer it served) and makes the rollout invalid: the
buffer hears of a version before that is published, so no honest generator can be ahead of it.
"""

from dataclasses import dataclass

from penstock.replay.config import ReplayBufferConfig
from penstock.types import Fate, RolloutMetadata


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a rollout may not be trained.

    Attributes:
        fate: What it becomes.
        reason: In words, with the numbers.
    """

    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True)
class FreshnessWindow:
    """How old a rollout may be.

    Attributes:
        step_delay: In versions.
        timestamp_delay_s: In seconds; None without limit.
    """

    step_delay: int
    timestamp_delay_s: float | None

    def oldest_step(self, current: int) -> int:
        """The oldest weight step that is fresh at version `current`."""
        return current - self.step_delay

    def oldest_timestamp(self, now: float) -> float:
        """Timestamps up to and including this one are stale."""
        return float("-inf") if self.timestamp_delay_s is None else now - self.timestamp_delay_s

    def judge(self, metadata: RolloutMetadata, current: int, now: float) -> Verdict | None:
        """What is wrong with a rollout's age; None where it is fresh."""
        step = metadata.weight_step
        if step > current:
            return Verdict("invalid", f"weight_step {step} is from the future: the learner is at version {current}")
        if step < self.oldest_step(current):
            return Verdict("stale_step", f"weight_step {step} is more than {self.step_delay} versions behind {current}")
        if metadata.timestamp <= self.oldest_timestamp(now):
            age = now - metadata.timestamp
            return Verdict("stale_time", f"finished {age:.1f} s ago, the limit is {self.timestamp_delay_s} s")
        return None


class FreshnessRules:
    """The window of each lesson.

    Args:
        config: Limits of the buffer, and of single lessons.
    """

    def __init__(self, config: ReplayBufferConfig) -> None:
        self._config = config
        self._windows: dict[str, FreshnessWindow] = {}

    def of(self, lesson_id: str) -> FreshnessWindow:
        """How old rollouts of a lesson may be; lessons with equal limits share one window."""
        window = self._windows.get(lesson_id)
        if window is None:
            window = FreshnessWindow(self._config.step_delay(lesson_id), self._config.timestamp_delay_s(lesson_id))
            self._windows[lesson_id] = window
        return window

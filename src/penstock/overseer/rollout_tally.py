"""Training groups, summed up lesson by lesson for the next line of metrics."""

import threading
from collections import defaultdict
from collections.abc import Mapping

from penstock.overseer.config import RunConfig
from penstock.types import RolloutBatch, RolloutBatchStats, RolloutGroup


def success_thresholds(config: RunConfig) -> dict[str, float]:
    """By lesson, the reward from which a rollout counts as a success."""
    return {lesson_id: lesson.success_threshold for lesson_id, lesson in config.curriculum.lessons.items()}


class RolloutTally:
    """Collects groups until they are asked for. Thread-safe.

    Args:
        thresholds: See `success_thresholds`.
    """

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._thresholds = thresholds
        self._lock = threading.Lock()
        self._groups: dict[str, list[RolloutGroup]] = defaultdict(list)

    def add(self, group: RolloutGroup) -> None:
        """Takes a group in, filtered or not."""
        with self._lock:
            self._groups[group.rollouts[0].lesson_id].append(group)

    def take(self) -> dict[str, float]:
        """``rollout/<lesson>/…`` over the groups since the last call."""
        with self._lock:
            groups, self._groups = self._groups, defaultdict(list)
        values: dict[str, float] = {}
        for lesson_id in sorted(groups):
            batch = RolloutBatch.of(tuple(groups[lesson_id]))
            stats = RolloutBatchStats.of(lesson_id, batch, self._thresholds[lesson_id])
            values |= {
                f"rollout/{lesson_id}/reward_mean": stats.reward_mean,
                f"rollout/{lesson_id}/success_rate": stats.success_rate,
                f"rollout/{lesson_id}/pass_at_k": stats.pass_at_k,
                f"rollout/{lesson_id}/response_tokens": stats.response_tokens,
                f"rollout/{lesson_id}/truncated_fraction": stats.truncated_fraction,
                f"rollout/{lesson_id}/groups": float(stats.groups),
            }
        return values

"""What happened while one update waited for its batch: the numbers behind the ``replay/…`` metrics.

Also the place where a wait that cannot end is recognised: when the zero-variance filter leaves nothing.
"""

from collections import Counter
from collections.abc import Sequence

from penstock.replay.config import ReplayBufferConfig
from penstock.types import Experience, Fate, RunFailed


class Tally:
    """Counts since the last batch.

    Args:
        config: Limits.
    """

    def __init__(self, config: ReplayBufferConfig) -> None:
        self._config = config
        self.dropped: Counter[Fate] = Counter()
        self.dead_in_batch = 0
        self._filtered_groups: Counter[str] = Counter()
        self._filtered_rewards: dict[str, float] = {}

    def count_filtered(self, lesson_id: str, reward: float) -> RunFailed | None:
        """Counts a group without signal; returns the error that ends the run where the limit is reached.

        Args:
            lesson_id: Its lesson.
            reward: Of its members.
        """
        self._filtered_groups[lesson_id] += 1
        self._filtered_rewards[lesson_id] = self._filtered_rewards.get(lesson_id, 0.0) + reward
        total = self._filtered_groups.total()
        return RunFailed(self._nothing_left(total)) if total >= self._config.filtered_limit else None

    def batch_metrics(self, step: int, rollouts: Sequence[Experience]) -> dict[str, float]:
        """Metrics of a batch that was formed; starts counting anew.

        Args:
            step: The update.
            rollouts: What it trains on, with metadata.
        """
        ages = [step - rollout.metadata.weight_step for rollout in rollouts if rollout.metadata is not None]
        metrics = {
            "replay/staleness_mean": sum(ages) / len(ages) if ages else 0.0,
            "replay/staleness_max": float(max(ages, default=0)),
            "replay/filtered": float(self.dropped["filtered"]),
            "replay/aborted": float(self.dropped["aborted"]),
            "replay/stale": float(self.dropped["stale_step"] + self.dropped["stale_time"]),
            "replay/invalid": float(self.dropped["invalid"] + self.dropped["rolled_back"]),
            "replay/evicted": float(self.dropped["evicted"]),
            "replay/dead_in_batch": float(self.dead_in_batch),
        }
        self.dead_in_batch = 0
        self.dropped.clear()
        self._filtered_groups.clear()
        self._filtered_rewards.clear()
        return metrics

    def _nothing_left(self, total: int) -> str:
        lessons = ", ".join(
            f"{lesson} ({count} groups, mean reward {self._filtered_rewards[lesson] / count:.3g})"
            for lesson, count in sorted(self._filtered_groups.items())
        )
        cause, remedy = "the batch maker found no advantage in them", "choose another replay.batch_maker.name"
        if self._config.batch_maker.filter_zero_variance:
            cause, remedy = "in each, all rewards were equal", "set replay.batch_maker.filter_zero_variance: false"
        return (
            f"{total} groups were filtered while one batch waited (replay.max_filtered_groups_per_batch): {cause}. "
            f"Lessons: {lessons}. Make rewards differ (an easier lesson, a warm start, a higher temperature, a larger "
            f"n_generations_per_prompt), or {remedy}"
        )

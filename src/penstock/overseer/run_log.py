"""The single writer of a run's metrics, events and samples; it also feeds the live view.

Every component is handed one of these methods and knows nothing of the files behind them.
"""

from collections import defaultdict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from penstock.overseer.config import RunConfig
from penstock.overseer.terminal import Progress, Sample
from penstock.rundir import EventLog, MetricsLog, RunDirectory
from penstock.tracking import conversation_of, make_tracker
from penstock.types import RolloutBatch, RolloutBatchStats, RolloutGroup

SHOWN_EVENTS = frozenset(
    {
        "evaluation_failed", "graduated", "group_failed", "regressed", "rollouts_quarantined", "tracker_failed",
        "unlocked",
    }
)  # fmt: skip
"""Events that concern the user at once."""


class RunLog:
    """Writes what happens to the run directory, the trackers and the view.

    Args:
        directory: Whose metrics.jsonl and events.jsonl are appended to.
        config: The run's; trackers and success thresholds come from it.
        progress: What the view shows.
    """

    def __init__(self, directory: RunDirectory, config: RunConfig, progress: Progress) -> None:
        self._metrics = MetricsLog(directory.metrics_path)
        self._events = EventLog(directory.events_path)
        self._tracker = make_tracker(config.tracking, directory.path, config.dump(), self._tracker_failed)
        self._samples_per_log = config.tracking.samples_per_log
        self._thresholds = {name: lesson.success_threshold for name, lesson in config.curriculum.lessons.items()}
        self._lock = Lock()
        self._groups: dict[str, list[RolloutGroup]] = defaultdict(list)
        self.progress = progress
        self.step = 0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line of metrics."""
        self._metrics.append(step, values)
        self._tracker.log(values, step)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Appends one event, of the present step by default, and shows it where it concerns the user."""
        self._events.append(kind, step=self.step if step is None else step, **fields)
        if kind in SHOWN_EVENTS:
            self.progress.notes.append(" ".join([kind, *(f"{name}={value}" for name, value in fields.items())]))

    def samples(self, batch: RolloutBatch) -> None:
        """Tracks sample conversations."""
        rollouts = list(batch.rollouts())[: self._samples_per_log]
        self._tracker.log_samples(self.step, [conversation_of(rollout) for rollout in rollouts])

    def group(self, group: RolloutGroup) -> None:
        """Counts a training group into the next step's ``rollout/…`` metrics, and shows one of its answers."""
        with self._lock:
            self._groups[group.rollouts[0].lesson_id].append(group)
        self.progress.samples.append(_sample(group))

    def _tracker_failed(self, name: str, error: Exception) -> None:
        self.event("tracker_failed", tracker=name, message=str(error))

    def close(self) -> None:
        """Closes the logs and the tracker."""
        self._tracker.close()
        self._metrics.close()
        self._events.close()

    def take_rollout_metrics(self) -> dict[str, float]:
        """``rollout/<lesson>/…`` over the groups since the last call."""
        with self._lock:
            groups, self._groups = self._groups, defaultdict(list)
        values: dict[str, float] = {}
        for lesson_id in sorted(groups):
            batch = RolloutBatch.of(tuple(groups[lesson_id]))
            stats = RolloutBatchStats.of(lesson_id, batch, self._thresholds[lesson_id])
            self.progress.reward[lesson_id] = stats.reward_mean
            values |= {
                f"rollout/{lesson_id}/reward_mean": stats.reward_mean,
                f"rollout/{lesson_id}/success_rate": stats.success_rate,
                f"rollout/{lesson_id}/pass_at_k": stats.pass_at_k,
                f"rollout/{lesson_id}/response_tokens": stats.response_tokens,
                f"rollout/{lesson_id}/truncated_fraction": stats.truncated_fraction,
                f"rollout/{lesson_id}/groups": float(stats.groups),
            }
        return values


def _sample(group: RolloutGroup) -> Sample:
    rollout = group.rollouts[0]
    asked = [turn.content for turn in rollout.turns if turn.role == "user"]
    answered = [turn.content for turn in rollout.turns if turn.role in ("assistant", "tool")]
    return Sample(" ".join(asked), " ".join(answered), rollout.episode_reward, rollout.lesson_id)

"""Updates of a fleet run, as its learner tells of them: a line of metrics, the bottleneck, what the view shows."""

from collections.abc import Collection, Mapping

from penstock.overseer.fleet_pace import FleetPace
from penstock.overseer.run_log import RunLog
from penstock.overseer.terminal import step_line


class FleetUpdates:
    """Writes one line per update.

    Args:
        log: The run's single writer.
        tasks: Of the fleet.

    Attributes:
        step: The learner's version, as far as it was told.
        metrics: Of the last update.
    """

    def __init__(self, log: RunLog, tasks: Collection[str]) -> None:
        self.step = log.step
        self.metrics: dict[str, float] = {}
        self._log = log
        self._tasks = tasks
        self._pace = FleetPace()

    @property
    def bottleneck(self) -> str:
        """What set the pace lately, in words."""
        return self._pace.bottleneck.words

    @property
    def steps_per_s(self) -> float | None:
        """Simulator steps per second, lately; None where that is not known yet."""
        return self._pace.steps_per_s

    def begin_at(self, step: int) -> None:
        """The learner begins with that version."""
        self.step = self._log.step = step

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """One update.

        Args:
            step: The version reached.
            metrics: The learner's, and the fleet's.
        """
        values = {**metrics}
        values |= self._pace.note(values)
        self._log.step = step
        self.metrics = values
        self._log.bottleneck(self._pace.bottleneck.part, self._pace.bottleneck.words)
        self._log.metrics(step, values)
        self.step = step  # whoever sees it finds its metrics
        rewards = {task: values[name] for task in self._tasks if (name := f"fleet/{task}/reward_mean") in values}
        progress = self._log.progress
        progress.step = step
        progress.reward = rewards
        if rewards:
            progress.rewards.append(sum(rewards.values()) / len(rewards))
        progress.units_per_s = self._pace.steps_per_s
        progress.staleness = values.get("train/step_staleness_mean", 0.0)
        progress.step_s = sum(values.get(name, 0.0) for name in ("time/wait_for_batch", "time/update"))
        progress.lines.append(step_line(progress))

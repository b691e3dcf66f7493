"""Updates as the learner tells of them: a line of metrics, the bottleneck, what the view shows."""

from collections.abc import Mapping

from penstock.overseer.bottleneck import find_bottleneck
from penstock.overseer.distributed.look import Look
from penstock.overseer.distributed.numbers import IdleShares
from penstock.overseer.run_log import RunLog
from penstock.overseer.terminal import step_line


class Updates:
    """Writes one line per update, and an event where another part than before sets the pace.

    Args:
        log: The run's single writer.
        staleness_budget: The run's.

    Attributes:
        step: The learner's version, as far as it was told.
        bottleneck: What set the pace lately, in words.
    """

    def __init__(self, log: RunLog, staleness_budget: int) -> None:
        self.step = log.step
        self.bottleneck = ""
        self._log = log
        self._gauges = {"staleness_budget": float(staleness_budget)}
        self._idle = IdleShares()

    def begin_at(self, step: int) -> None:
        """The learner begins with that version."""
        self.step = self._log.step = step

    def add(self, step: int, metrics: Mapping[str, float], look: Look, overseer: Mapping[str, float]) -> None:
        """One update.

        Args:
            step: The version reached.
            metrics: The learner's.
            look: The others, as they were last seen.
            overseer: The overseer's own numbers.
        """
        self._idle.look(look.reports.values())
        found, shares = find_bottleneck(self._idle.of_roles, self._gauges)
        shares |= {f"time/idle/{name}": share for name, share in sorted(self._idle.of_components.items())}
        self.bottleneck = found.words
        self._log.step = step
        self._log.bottleneck(found.part, found.words)
        values = {**look.numbers(), **shares, **overseer, **metrics}
        self._log.metrics(step, values)
        self.step = step  # whoever sees it finds its metrics
        progress = self._log.progress
        progress.step = step
        progress.rewards.append(values.get("train/reward_mean", 0.0))
        progress.staleness = values.get("replay/staleness_mean", 0.0)
        progress.step_s = values["time/wait_for_batch"] + values["time/update"]
        progress.lines.append(step_line(progress))

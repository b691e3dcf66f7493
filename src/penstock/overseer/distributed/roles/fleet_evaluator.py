"""The evaluator of a fleet run in a process of its own: each version that is due, in simulators of its own.

It fetches a version's weights before it plays, so that training goes on meanwhile. A version that is gone before it
could be fetched is passed over for the newest.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from penstock.model.control import named_arrays
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition
from penstock.overseer.distributed.roles.base import POLL_S, ThreadedComponent
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.distributed.roles.weight_feed import WeightFeed
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_evaluator import FleetEvaluator
from penstock.overseer.fleet_policies import make_policy
from penstock.overseer.result_rows import write_stats
from penstock.overseer.simulator_events import is_news
from penstock.types import NoProgressError, Spaces, Stopped, UnreachableError, WeightsError, WeightVersion

WAITING = "waiting for a version that is due"


class FleetEvaluatorRole(ThreadedComponent[FleetRunConfig]):
    """Runs one `FleetEvaluator`: when a version is due, and when the overseer asks.

    Args:
        around: What its host gives it.
        settings: The run.
        spaces: What the policy sees and does.
        state: Checkpointed; None for a run that begins.
    """

    def __init__(
        self,
        around: Surroundings,
        settings: Settings[FleetRunConfig],
        spaces: Spaces,
        state: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(around, settings)
        policy = make_policy(settings.config, spaces)
        self._feed = WeightFeed(around, settings, named_arrays(policy))
        self._evaluator = FleetEvaluator(settings.config, policy, around.metrics, self._on_event)
        if state:
            self._evaluator.restore(state)
        self._one_at_a_time = threading.Lock()

    def start(self) -> None:
        """See `Component.start`."""
        self.activity.begin()
        self.state, self.doing = "running", WAITING
        if self.config.evaluation.every:
            self.crew.start(f"{self.name}.versions", self._run)

    def _run(self) -> None:
        seen: WeightVersion | None = None
        while not (self.stopping.is_set() or self.draining):
            try:
                version = self._feed.wait_for(seen, POLL_S) if self._feed.training else None
                if version is None:
                    self.stopping.wait(0.0 if self._feed.training else POLL_S)
                    continue
                if self._evaluator.is_due(version):
                    arrays = self._feed.fetch(version)
                    with self._one_at_a_time, self.activity.busy():
                        self._evaluator.attempt(version, arrays)
                seen = version
            except (UnreachableError, WeightsError):
                self.stopping.wait(POLL_S)  # a restart, or a newer version meanwhile
            except Stopped:
                return

    # --- what the overseer calls ---------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, Any]:
        """A full evaluation of every task with weights of that step; a task.

        Raises:
            NoProgressError: the weights could not be fetched within ``overseer.no_progress_s``.
        """
        version, arrays = self._fetched(step)
        with self._one_at_a_time, self.activity.busy():
            return write_stats(self._evaluator.evaluate(version, arrays))

    def _fetched(self, step: int) -> tuple[WeightVersion, Mapping[str, Any]]:
        reason: Exception | None = None
        limit = time.monotonic() + self.config.overseer.no_progress_s
        while time.monotonic() < limit and not self.stopping.is_set():
            version = WeightVersion(self.around.view.lineage, step)
            try:
                return version, self._feed.fetch(version)
            except (UnreachableError, WeightsError) as failure:
                reason = failure
            self.stopping.wait(POLL_S / 2)
        raise NoProgressError(f"version {step} could not be fetched within overseer.no_progress_s: {reason}")

    def evaluation_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._evaluator.state()

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self._evaluator.stop()
        self._feed.close()
        super().stop(timeout_s)

    def _has_work(self) -> bool:
        return self._one_at_a_time.locked()

    def _on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if is_news(kind, fields):
            rest = {name: value for name, value in fields.items() if name != "step"}
            self.around.event(kind, int(fields.get("step", 0)), **rest)

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        doing = self._evaluator.doing
        facts = self._facts(state=self._evaluator.state())
        progress = float(self._evaluator.steps) if doing else None
        return Condition(self.state, doing or self.doing, progress, busy_s, idle_s, facts=facts)


def make_fleet_evaluator(around: Surroundings, settings: Mapping[str, Any]) -> FleetEvaluatorRole:
    """Factory of a fleet's evaluator; `settings` has the ``spaces`` and its checkpointed ``state``, or None."""
    spaces = Spaces.from_values(settings["spaces"])
    return FleetEvaluatorRole(around, Settings.of(settings, FleetRunConfig), spaces, settings.get("state"))

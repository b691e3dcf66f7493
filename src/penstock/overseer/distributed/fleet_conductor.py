"""The conductor of a distributed fleet run; see `conducting` for what all of them do.

load → evaluate untrained → train → evaluate trained. Rollout workers start their simulators with the run, roll out
while the learner trains, and are drained when it has reached its last step; where the run goes back after that, there
are as many again.
"""

from collections.abc import Collection, Mapping
from typing import Any

from penstock.overseer.distributed.conducting import ProcessConductor
from penstock.overseer.distributed.fleet_plan import FleetPlan
from penstock.overseer.distributed.launcher import Launcher
from penstock.overseer.distributed.look import Look
from penstock.overseer.distributed.numbers import IdleShares
from penstock.overseer.distributed.records import Message
from penstock.overseer.distributed.script import Turns
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_evaluator import metrics_of
from penstock.overseer.fleet_updates import FleetUpdates
from penstock.overseer.result_rows import Results
from penstock.overseer.run_log import RunLog


class DistributedUpdates(FleetUpdates):
    """Updates whose other numbers come from the components' last reports."""

    def __init__(self, log: RunLog, tasks: Collection[str]) -> None:
        super().__init__(log, tasks)
        self._idle = IdleShares()

    def add(self, step: int, metrics: Mapping[str, float], look: Look, overseer: Mapping[str, float]) -> None:
        """One update; see `UpdateLog.add`."""
        self._idle.look(look.reports.values())
        idle = {**self._idle.of_roles, **self._idle.of_components}
        shares = {f"time/idle/{name}": share for name, share in idle.items()}
        self.note(step, {**look.numbers(), **shares, **overseer, **metrics})


class DistributedFleetConductor(ProcessConductor[FleetRunConfig]):
    """One fleet run in many processes.

    Args:
        plan: Its components.
        launcher: Starts them.
        log: The run's single writer.
    """

    def __init__(self, plan: FleetPlan, launcher: Launcher, log: RunLog) -> None:
        self._fleet_updates = DistributedUpdates(log, plan.settings.config.fleet.tasks)
        super().__init__(plan, launcher, log, self._fleet_updates)
        self._workers = plan.settings.config.fleet.workers

    def _units_per_s(self) -> float | None:
        return self._fleet_updates.steps_per_s

    def _metrics_of(self, results: Results) -> dict[str, float]:
        return metrics_of(results)

    def _prepared(self) -> Turns:
        """As many workers as before, where the run went back after they were drained."""
        if not self._supervisor.names("rollout"):
            self._supervisor.scale("rollout", self._workers)
        yield

    def _before_training(self) -> Turns:
        if self._config.evaluation.before:
            self._phase("evaluating the untrained policy")
            self.results["untrained"] = self.results["before"] = yield from self._evaluate("untrained")

    def _after_training(self) -> Turns:
        """Nobody acts any more, so that the account of steps closes."""
        yield from self._stage.call("learner-0", "publish_last")
        names = self._supervisor.names("rollout")
        self._workers = len(names) or self._workers
        for name in names:
            self._supervisor.drain(name, "the training is over")
        yield from self._ending_with_the_run(self._stage.until(self._all_are_drained))

    def _all_are_drained(self) -> bool | None:
        return None if any(report.startswith("rollout-") for report in self._supervisor.describe()) else True

    def _heard(self, message: Message) -> None:
        self._log.simulators_event(message.name, message.fields)

    @property
    def failed_groups(self) -> int:
        """Failures of simulators in this life of the run; they are restarted or given up, and no group fails."""
        return self._log.failures

    @property
    def last_failure(self) -> str:
        """What the last of them said."""
        return self._log.last_failure

    def status(self) -> dict[str, Any]:
        """For status.json."""
        status = super().status() | {
            "account": self._seen.facts("replay-0").get("account", {}),
            "simulators": {"failed": self.failed_groups, "last_failure": self.last_failure},
        }
        del status["groups"]
        return status

"""The conductor of a fleet run: takes it through its phases, in a thread of its own.

compile → evaluate untrained → train → evaluate trained. A resumed run skips what its checkpoint holds. Whatever ends
the training but an error of the learner's own, the last update boundary is checkpointed before the fleet is stopped.
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.learner import save_checkpoint
from penstock.overseer.control.evaluator import metrics_of
from penstock.overseer.control.updates import FleetUpdates
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.fleet_local import FleetComponents, wire_fleet
from penstock.overseer.kind import RunStart
from penstock.overseer.local_run import LocalRun
from penstock.overseer.results import Results, require_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.simulator_events import is_news
from penstock.overseer.supervision import ThreadGroup
from penstock.rundir import RunDirectory
from penstock.types import PenstockError

FLEET_THREAD, EVALUATOR_THREAD = "fleet", "fleet-evaluator"
SUPERVISE_S = 0.5


class FleetConductor(LocalRun[FleetComponents]):
    """One fleet run, phase by phase; arguments as of `LocalRun`."""

    def __init__(
        self, config: FleetRunConfig, directory: RunDirectory, crew: ThreadGroup, log: RunLog, start: RunStart
    ) -> None:
        super().__init__(config, directory, crew, log, start)
        self._fleet_over = threading.Event()
        self._updates = FleetUpdates(log, config.fleet.tasks)

    @property
    def lessons(self) -> dict[str, str]:
        """Each task's simulator and episodes so far, in words."""
        if self._parts is None:
            return {}
        statistics, tasks = self._parts.manager.statistics, self._config.fleet.tasks
        return {name: f"{task.id}, {statistics.count(name):,} episodes" for name, task in tasks.items()}

    @property
    def failed_groups(self) -> int:
        """Failures of simulators in this life of the run; they are restarted or given up, and no group fails."""
        return self._log.failures

    @property
    def last_failure(self) -> str:
        """What the last of them said."""
        return self._log.last_failure

    # --- phases --------------------------------------------------------------------------------------------------

    def _wired(self) -> FleetComponents:
        return wire_fleet(
            self._config, self._directory, self._log, self.start, self._on_event, self._on_step, self._save
        )

    def _go_through(self, parts: FleetComponents) -> None:
        self._prepare(parts)
        self._train(parts)
        self._phase("evaluating the trained policy")
        self._crew.join(self._config.overseer.no_progress_s, [EVALUATOR_THREAD])
        self.results["after"] = self._evaluate(parts, "after")

    def _prepare(self, parts: FleetComponents) -> None:
        self._phase("compiling the learner")
        fleet, replay = self._config.fleet, self._config.replay
        parts.learner.compile(replay.fragments_per_batch, fleet.fragment_length)
        if self.start.checkpoint is None and self._config.evaluation.before:
            self._phase("evaluating the untrained policy")
            self.results["untrained"] = self.results["before"] = self._evaluate(parts, "untrained")

    def _train(self, parts: FleetComponents) -> None:
        if self.start.checkpoint is None:
            self._save(parts.learner.step)
        self._phase("starting simulators")
        parts.manager.start()
        self._phase("training")
        started = time.monotonic()
        self._crew.start(FLEET_THREAD, partial(self._supervise, parts))
        if self._config.evaluation.every:
            self._crew.start(EVALUATOR_THREAD, parts.evaluator.run)
        try:
            parts.loop.run()
        finally:
            self.training_s = time.monotonic() - started
            self._stop_fleet(parts)

    def _supervise(self, parts: FleetComponents) -> None:
        """Has failed workers made anew; one that fails too often ends the run."""
        while not self._fleet_over.wait(SUPERVISE_S):
            parts.manager.supervise()

    def _stop_fleet(self, parts: FleetComponents) -> None:
        self._fleet_over.set()
        parts.evaluator.finish()
        parts.buffer.close()
        self._crew.join(self._config.overseer.stop_timeout_s, [FLEET_THREAD])
        try:
            parts.manager.stop(self._config.overseer.stop_timeout_s)
        except PenstockError as error:  # must not hide what ended the run
            self._log.event("still_running", message=str(error))
        parts.weights.close()

    def _evaluate(self, parts: FleetComponents, when: str) -> Results:
        results = parts.evaluator.evaluate(parts.loop.version, parts.learner.named_arrays())
        self._log.evaluation(when, parts.learner.step, results, metrics_of(results))
        if when == "after":
            require_results(results, self._directory.path)
        return results

    # --- what others are told ------------------------------------------------------------------------------------

    def _on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Of workers and simulators, in their threads."""
        if is_news(kind, fields):
            self._log.event(kind, **fields)
        self._log.simulators_event(kind, fields)

    def _on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = self._parts
        assert parts is not None  # the loop that calls this is one of them
        self._updates.note(step, {**metrics, **parts.manager.log_statistics()})

    def _save(self, step: int) -> None:
        parts = self._parts
        assert parts is not None
        write = partial(save_checkpoint, self._directory.checkpoints, step, parts.learner, None)
        self._save_with(parts, step, write, statistics=parts.manager.statistics.state())

    def refresh(self) -> None:
        """Brings the view up to date; called by the supervising thread."""
        if self._parts is None:
            return
        self._log.progress.ledger = self._parts.ledger.snapshot()
        self._log.progress.lessons = self.lessons

    def counters(self) -> dict[str, float]:
        """What grows while the run makes progress."""
        if self._parts is None:
            return {}
        return {
            "fleet": float(self._parts.manager.account().started),
            "learner": float(self._parts.learner.step),
            "evaluator": float(self._parts.evaluator.steps),
            "phases": float(self._phases),
        }

    def stalled_components(self) -> str:
        """In words, for the error that ends a silent run."""
        if self._parts is None or self._log.progress.phase != "training":
            doing = (
                f" ({self._parts.evaluator.doing})" if self._parts is not None and self._parts.evaluator.doing else ""
            )
            return f"the run is still at «{self._log.progress.phase}»{doing}"
        parts = self._parts
        workers = "; ".join(
            f"{name} is {report.condition.state} and silent for {report.condition.silent_s:.0f} s"
            for name, report in parts.manager.reports().items()
        )
        return f"the learner is at «{parts.loop.doing}»; {parts.buffer.waiting_for()}; {workers}"

    def status(self) -> dict[str, Any]:
        """For status.json."""
        status = self._status(self._updates.bottleneck) | {
            "simulators": {"failed": self.failed_groups, "last_failure": self.last_failure}
        }
        if self._parts is None:
            return status
        parts, metrics = self._parts, self._updates.metrics
        numbers = {name: metrics[name] for name in sorted(metrics) if name.startswith(("fleet/", "replay/"))}
        return status | {
            "learner": parts.loop.doing,
            "evaluator": parts.evaluator.doing,
            "ledger": parts.ledger.snapshot(),
            "lessons": self.lessons,
            "account": parts.manager.account().to_values(),
            "numbers": numbers,
            "components": {name: _component(report.condition) for name, report in parts.manager.reports().items()},
        }


def _component(condition: Any) -> dict[str, Any]:
    """A rollout worker, as `penstock status` shows components."""
    version = condition.version
    return {
        "incarnation": condition.incarnation,
        "state": condition.state,
        "version": None if version is None else [version.lineage, version.step],
        "doing": condition.failure or f"{condition.steps:,} steps",
    }

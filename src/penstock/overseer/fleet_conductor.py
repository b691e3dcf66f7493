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
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_evaluator import metrics_of
from penstock.overseer.fleet_local import FleetComponents, FleetStart, wire_fleet
from penstock.overseer.fleet_updates import FleetUpdates
from penstock.overseer.full_disk import when_there_is_room
from penstock.overseer.result_rows import Results, read_results, write_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.simulator_events import is_news
from penstock.overseer.supervision import Crew
from penstock.rundir import RunDirectory
from penstock.types import PenstockError, Stopped

FLEET_THREAD, EVALUATOR_THREAD = "fleet", "fleet-evaluator"
SUPERVISE_S = 0.5


class FleetConductor:
    """One fleet run, phase by phase. Implements `penstock.overseer.overseer.RunConductor`.

    Args:
        config: What to run.
        directory: Where it is written.
        crew: Starts the components' threads.
        log: The run's single writer.
        start: The policy, or the checkpoint to resume from.
    """

    def __init__(
        self, config: FleetRunConfig, directory: RunDirectory, crew: Crew, log: RunLog, start: FleetStart
    ) -> None:
        self.results: dict[str, Results] = {}
        self.training_s = 0.0
        self.start = start
        self._config = config
        self._directory = directory
        self._crew = crew
        self._log = log
        self._stopping = threading.Event()
        self._fleet_over = threading.Event()
        self._parts: FleetComponents | None = None
        self._updates = FleetUpdates(log, config.fleet.tasks)
        self._phases = 0

    def run(self) -> None:
        """Takes the run through its phases; returns at the last step or after `stop`."""
        try:
            parts = self._load()
            self._prepare(parts)
            self._train(parts)
            self._phase("evaluating the trained policy")
            self._crew.join(self._config.overseer.no_progress_s, [EVALUATOR_THREAD])
            self.results["after"] = self._evaluate(parts, "after")
        except Stopped:
            if not self._stopping.is_set():
                raise
        finally:
            self._shut_down()

    def stop(self) -> None:
        """Asks the run to end at the next update boundary, with a checkpoint."""
        self._stopping.set()
        if self._parts is not None:
            self._parts.loop.stop()
            self._parts.evaluator.stop()
            self._parts.buffer.close()

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping.is_set()

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take."""
        return self._config.overseer.stop_timeout_s

    @property
    def lineage(self) -> int:
        """Which life of the run this is."""
        return self.start.lineage

    @property
    def step(self) -> int:
        """The learner's version."""
        return self._parts.learner.step if self._parts is not None else self._log.step

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

    @property
    def complete(self) -> bool:
        """Whether the run reached its last step and was evaluated there."""
        return "after" in self.results

    # --- phases --------------------------------------------------------------------------------------------------

    def _phase(self, words: str) -> None:
        if self._stopping.is_set():
            raise Stopped(words)
        self._phases += 1
        self._log.progress.phase = words
        self._log.event("phase", phase=words)

    def _load(self) -> FleetComponents:
        self._phase("loading")
        self._parts = wire_fleet(
            self._config, self._directory, self._log, self.start, self._on_event, self._on_step, self._save
        )
        if self.start.checkpoint is not None:
            self.results = read_results(self.start.checkpoint.states["run"]["results"])
        return self._parts

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
        self._log.metrics(parts.learner.step, metrics_of(results))
        self._log.event("evaluation", when=when, reward={task: stats.reward_mean for task, stats in results.items()})
        return results

    def _shut_down(self) -> None:
        if self._parts is not None:
            self._parts.store.close()

    # --- what others are told ------------------------------------------------------------------------------------

    def _on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Of workers and simulators, in their threads."""
        if is_news(kind, fields):
            self._log.event(kind, **fields)
        self._log.simulators_event(kind, fields)

    def _on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = self._parts
        assert parts is not None  # the loop that calls this is one of them
        self._updates.note(step, {**metrics, **parts.manager.metrics()})

    def _save(self, step: int) -> None:
        parts = self._parts
        assert parts is not None
        with parts.buffer.boundary():
            states: dict[str, Any] = {name: part.state() for name, part in parts.checkpointables.items()}
        states["statistics"] = parts.manager.statistics.state()
        states["run"] = {"lineage": self.start.lineage, "results": write_results(self.results)}
        save = partial(
            save_checkpoint,
            self._directory.checkpoints,
            step,
            parts.learner,
            None,
            states,
            self._config.overseer.keep_checkpoints,
        )
        path = when_there_is_room(save, self._config.replay.store.full_disk_s, self._wait_for_room)
        parts.buffer.checkpoint_saved()
        self._log.event("checkpoint", step, path=str(path))

    def _wait_for_room(self, seconds: float, why: str) -> None:
        self._log.progress.note(why)
        time.sleep(seconds)  # also while the run ends: its last checkpoint is worth the wait

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

    def who_owes_progress(self) -> str:
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
        status: dict[str, Any] = {
            "phase": self._log.progress.phase,
            "step": self.step,
            "steps": self._config.steps,
            "lineage": self.start.lineage,
            "bottleneck": self._updates.bottleneck,
            "simulators": {"failed": self.failed_groups, "last_failure": self.last_failure},
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

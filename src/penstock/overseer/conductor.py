"""The conductor: takes one run through its phases, in a thread of its own.

load → evaluate untrained → warm start → evaluate before → parity probe → train → evaluate after. A resumed run
skips what its checkpoint already holds. Whatever ends the training but an error of the learner's own, the last update
boundary is checkpointed before the other components are stopped, with the tickets that were outstanding then.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from penstock.environments import Environment
from penstock.learner import save_checkpoint
from penstock.learner.config import WarmStartConfig
from penstock.model.language import named_arrays
from penstock.overseer.config import RunConfig
from penstock.overseer.kind import RunStart
from penstock.overseer.language.evaluator import metrics_of
from penstock.overseer.language.preparation import probe_parity, warm_start
from penstock.overseer.local import WORKER_ID, Components, wire
from penstock.overseer.local_run import LocalRun
from penstock.overseer.metrics import find_bottleneck, idle_shares
from penstock.overseer.results import Results, require_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.terminal import step_line
from penstock.rundir import RunDirectory
from penstock.types import EnvironmentFailure, Stopped

WEIGHTS_THREAD, TICKETS_THREAD, RECEIVER_THREAD = f"{WORKER_ID}.weights", f"{WORKER_ID}.tickets", "rollout-receiver"


class Conductor(LocalRun[Components]):
    """One run of a language model, phase by phase.

    Args:
        config: As of `LocalRun`, like what follows.
        directory: Likewise.
        crew: Likewise.
        log: Likewise.
        start: Likewise.
        environments: By lesson.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        crew: ThreadGroup,
        log: RunLog,
        start: RunStart,
        environments: dict[str, Environment],
    ) -> None:
        super().__init__(config, directory, crew, log, start)
        self._environments = environments
        self._warm_steps = 0
        self._engine_busy_s = 0.0
        self._bottleneck = ""

    @override
    def stop(self) -> None:
        super().stop()
        if self._parts is not None:
            self._parts.storage.close()

    @property
    def lessons(self) -> dict[str, str]:
        """Each lesson's status in words."""
        return self._parts.curriculum.describe() if self._parts is not None else {}

    @property
    def failed_groups(self) -> int:
        """Groups whose environment or reward function failed in this life of the run."""
        return self._parts.worker.groups_failed if self._parts is not None else 0

    @property
    def last_failure(self) -> str:
        """What the last of them said."""
        return self._parts.worker.last_failure if self._parts is not None else ""

    @property
    def _graduated(self) -> bool:
        stops = self._config.curriculum.when_complete == "stop"
        return stops and self._parts is not None and self._parts.curriculum.complete

    # --- phases --------------------------------------------------------------------------------------------------

    def _wired(self) -> Components:
        return wire(self._config, self._directory, self._log, self.start, self._environments, self._on_step, self._save)

    def _go_through(self, parts: Components) -> None:
        self._prepare(parts)
        self._train(parts)
        self._phase("evaluating the trained policy")
        self._wait_for_evaluation()
        parts.manager.update_model(parts.loop.version, named_arrays(parts.learner.decoder))
        self.results["after"] = self._evaluate(parts, "after")

    def _prepare(self, parts: Components) -> None:
        self._phase("compiling engine and learner")
        parts.engine.start()
        parts.learner.compile()  # beside the engine, which compiles in its own thread
        parts.engine.wait_until_ready(self._config.overseer.no_progress_s)
        if self.start.checkpoint is None:
            self._phase("evaluating the untrained policy")
            self.results["untrained"] = self.results["before"] = self._evaluate(parts, "untrained")
            if self._config.learner.warm_start is not None:
                self._warm_start(parts, self._config.learner.warm_start)
        self._phase("checking that engine and learner agree")
        self._probe(parts)

    def _warm_start(self, parts: Components, config: WarmStartConfig) -> None:
        def on_step(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if self._stopping.is_set():
                raise Stopped("warm start")
            self._warm_steps = done
            self._log.progress.phase = f"warm start {done}/{total}"
            self._log.metrics(0, {"warm_start/step": float(done), **metrics})

        self._phase("warm start")
        warm_start(parts.learner, parts.manager, config, self._config.seed, on_step)
        parts.manager.update_model(parts.loop.version, named_arrays(parts.learner.decoder))
        self._phase("evaluating the warm start")
        self.results["before"] = self._evaluate(parts, "before")

    def _probe(self, parts: Components) -> None:
        lesson_id = next(iter(self._config.curriculum.lessons))
        limit = self._config.learner.mismatch_limit
        try:
            worst = probe_parity(parts.manager, parts.learner, lesson_id, self._config.learner.row_length, limit)
        except EnvironmentFailure as failure:  # counted where it trains; parity is checked at every step, too
            self._log.event("parity_not_probed", lesson=lesson_id, reason=str(failure))
            return
        self._log.event("parity", largest_difference=worst, limit=limit)

    def _train(self, parts: Components) -> None:
        if self.start.checkpoint is None:
            self._save(parts.learner.step)
        self._phase("training")
        started = time.monotonic()
        if self._graduated:  # before this life began
            parts.loop.stop()
        self._crew.start(RECEIVER_THREAD, parts.receiver.run)
        self._crew.start(WEIGHTS_THREAD, parts.worker.run_weights)
        self._crew.start(TICKETS_THREAD, parts.worker.run_tickets)
        try:
            parts.loop.run()
        finally:
            self.training_s = time.monotonic() - started
            self._stop_worker(parts)

    def _stop_worker(self, parts: Components) -> None:
        parts.worker.stop()
        parts.buffer.close()
        parts.storage.close()
        parts.stop_prefetch(self._config.overseer.stop_timeout_s)
        if self._stopping.is_set():  # nobody waits for what still generates
            self._shut_down_manager(parts)
        threads = [RECEIVER_THREAD, WEIGHTS_THREAD, TICKETS_THREAD]
        left = self._crew.join(self._config.overseer.stop_timeout_s, threads)
        if left:
            self._log.event("still_running", threads=left)

    def _wait_for_evaluation(self) -> None:
        """Of an earlier version, which must not see the last one's weights; the watchdog limits the wait."""
        while self._crew.join(1.0, [WEIGHTS_THREAD]):
            if self._stopping.is_set():
                raise Stopped("waiting for an evaluation")

    def _evaluate(self, parts: Components, when: str) -> Results:
        results = parts.evaluator.evaluate(parts.learner.step)
        self._log.evaluation(when, parts.learner.step, results, metrics_of(results, "eval"))
        if when == "after":
            require_results(results, self._directory.path)
        return results

    def _shut_down(self, parts: Components) -> None:
        self._shut_down_manager(parts)
        super()._shut_down(parts)

    def _shut_down_manager(self, parts: Components) -> None:
        try:
            parts.manager.shutdown()
        except Exception as error:  # must not hide what ended the run
            self._log.event("shutdown_failed", error=type(error).__name__, message=str(error))

    # --- what others are told ------------------------------------------------------------------------------------

    def _on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        parts, progress = self._parts, self._log.progress
        assert parts is not None  # the loop that calls this is one of them
        self._log.step = step
        rollout_metrics = self._log.take_rollout_metrics()
        values = {
            **metrics,
            **rollout_metrics,
            **parts.engine.stats(),
            **parts.curriculum.metrics(),
            **parts.storage.metrics(),
            **self._name_bottleneck(parts, metrics),
        }
        self._log.metrics(step, values)
        if self._graduated:
            parts.loop.stop()
        progress.step = step
        progress.rewards.append(values.get("train/reward_mean", 0.0))
        progress.staleness = values.get("replay/staleness_mean", 0.0)
        progress.step_s = sum(values.get(name, 0.0) for name in ("time/wait_for_batch", "time/update"))
        progress.lines.append(step_line(progress))

    def _name_bottleneck(self, parts: Components, metrics: Mapping[str, float]) -> dict[str, float]:
        before, self._engine_busy_s = self._engine_busy_s, parts.engine.busy_s
        idle = idle_shares(metrics, self._engine_busy_s - before)
        gauges = {"staleness_budget": float(self._config.replay.staleness_budget)}
        found, shares = find_bottleneck(idle, gauges, local=True)
        self._bottleneck = found.words
        self._log.bottleneck(found.part, found.words)
        return shares

    def _save(self, step: int) -> None:
        parts = self._parts
        assert parts is not None
        write = partial(save_checkpoint, self._directory.checkpoints, step, parts.learner, parts.tokenizer)
        self._save_with(parts, step, write)

    def refresh(self) -> None:
        """Brings the view up to date; called by the supervising thread."""
        if self._parts is None:
            return
        progress = self._log.progress
        progress.units_per_s = self._parts.engine.stats().get("inference/tokens_per_s", 0.0)
        progress.ledger = self._parts.ledger.snapshot()
        progress.lessons = self._parts.curriculum.describe()

    def counters(self) -> dict[str, float]:
        """What grows while the run makes progress."""
        if self._parts is None:
            return {}
        return {
            "engine": self._parts.engine.stats().get("inference/tokens_total", 0.0),
            "learner": float(self._parts.learner.step + self._warm_steps),
            "worker": float(self._parts.worker.groups_finished),
            "receiver": float(self._parts.receiver.groups_received),
            "phases": float(self._phases),
        }

    def stalled_components(self) -> str:
        """In words, for the error that ends a silent run."""
        if self._parts is None or self._log.progress.phase != "training":
            return f"the run is still at «{self._log.progress.phase}»"
        parts = self._parts
        return (
            f"the learner is at «{parts.loop.doing}»; {parts.buffer.waiting_for()}; "
            f"the rollout receiver is at «{parts.receiver.doing}»"
        )

    def status(self) -> dict[str, Any]:
        """For status.json."""
        status = self._status(self._bottleneck)
        if self._parts is not None:
            status |= {
                "learner": self._parts.loop.doing,
                "ledger": self._parts.ledger.snapshot(),
                "lessons": self._parts.curriculum.describe(),
                "engine": self._parts.engine.stats(),
                "rollout_storage": {
                    "receiver": self._parts.receiver.doing,
                    **self._parts.storage.metrics(),
                    **self._parts.receiver.metrics(),
                },
                "groups": {
                    "finished": self._parts.worker.groups_finished,
                    "failed": self._parts.worker.groups_failed,
                    "last_failure": self._parts.worker.last_failure,
                },
            }
        return status

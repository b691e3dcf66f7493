"""The evaluator in a process of its own: each version that is due, on one server that keeps that version meanwhile.

The other servers go on with newer weights. The server is leased: the lease is renewed while answers come. A completion
of another version than the evaluated one (the server died, the lease ran out) makes the attempt count for nothing; that
is told by an event, and it is made again on another server.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from penstock.curriculum import Curriculum, CurriculumConfig, CurriculumEvent
from penstock.inference import RemoteContext
from penstock.overseer.config import RunConfig
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition, Peer, View
from penstock.overseer.distributed.roles.base import POLL_S, ThreadedComponent
from penstock.overseer.distributed.roles.contexts import InterruptedEvaluation, PinnedContext
from penstock.overseer.distributed.roles.servers import make_pool, servers_of, serving
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.evaluator import Evaluator
from penstock.overseer.result_rows import write_stats
from penstock.rollout import RolloutManager
from penstock.types import (
    Caller,
    NoProgressError,
    PenstockError,
    RolloutBatchStats,
    Stopped,
    UnreachableError,
    WeightVersion,
)

CALL_S = 30.0
"""Longest wait for a server or the replay service."""
RENEW_SHARE = 0.25
"""Of the length of a lease: so often it is renewed, where an answer came meanwhile."""

WAITING = "waiting for a version that is due"

_Found = TypeVar("_Found")


class EvaluatorRole(ThreadedComponent):
    """Runs one `Evaluator`: when a version is due, and when the overseer asks."""

    def __init__(self, around: Surroundings, settings: Settings, state: Mapping[str, Any] | None) -> None:
        super().__init__(around, settings)
        config = settings.config
        self._pool = make_pool(settings)
        self._contexts = RemoteContext(self._pool, settings.tokenizer())
        self._context = PinnedContext(self._contexts, self.activity)
        curriculum = cast(Curriculum, _Reporting(config.curriculum, around.caller("replay-0")))
        self._manager = RolloutManager(curriculum, self._context, config.seed)
        self._evaluator = Evaluator(
            self._manager,
            around.metrics,
            lambda lesson_id, failure: around.event("evaluation_failed", lesson=lesson_id, error=str(failure)),
        )
        if state is not None:
            self._evaluator.restore(state)
        self._seen: WeightVersion | None = None
        self._one_at_a_time = threading.Lock()

    def start(self) -> None:
        """See `Component.start`."""
        self.look(self.around.view)
        self.activity.begin()
        self.state, self.doing = "running", WAITING
        self.crew.start(f"{self.name}.versions", self._run)

    def look(self, view: View) -> None:
        """Follows servers and lineage."""
        self._pool.set_servers(servers_of(view))
        self._manager.lineage = view.lineage
        super().look(view)

    # --- versions as they come -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self.stopping.is_set() or self.draining):
            self.view_changed.wait(POLL_S)
            self.view_changed.clear()
            version = self._newest()
            learner = self.around.view.peer("learner-0")
            if learner is None or not learner.address.get("training") or version in (None, self._seen):
                continue
            try:
                if self._evaluator.is_due(version.step):
                    self._on_one_server(version, partial(self._evaluator, version))
                if self.config.replay.synchronous:
                    self.around.caller("replay-0").call("cleared", version.lineage, version.step, timeout_s=CALL_S)
            except (UnreachableError, NoProgressError, InterruptedEvaluation):
                self.stopping.wait(POLL_S)  # somebody died; the view will tell
                continue
            except Stopped:
                return
            self._seen = version

    def _newest(self) -> WeightVersion | None:
        return max((_version(peer) for peer in serving(self.around.view)), default=None)

    def _on_one_server(self, version: WeightVersion, evaluate: Callable[[], _Found]) -> _Found:
        """Runs `evaluate` against a server that keeps the version meanwhile.

        Raises:
            InterruptedEvaluation: the version was not held to the end, or this evaluator drains.
        """
        peer = next((p for p in serving(self.around.view) if _version(p) == version), None)
        if peer is None:
            raise InterruptedEvaluation(f"no server holds {version}")
        name = peer.identity.name
        with self._one_at_a_time, self._leased(name) as held:
            self._context.pin(self._contexts.only(name, peer.identity.incarnation), version)
            if self.draining:
                raise InterruptedEvaluation("it drains: the next evaluator will")
            if held != version:
                raise InterruptedEvaluation(f"{name} went on to {held}")
            self.doing = f"evaluating version {version.step} on {name}"
            try:
                with self.activity.busy():
                    return evaluate()
            except (UnreachableError, NoProgressError, InterruptedEvaluation) as failure:
                self.around.event("evaluation_interrupted", version.step, server=name, reason=str(failure))
                raise
            finally:
                self.doing = WAITING

    @contextmanager
    def _leased(self, name: str) -> Iterator[WeightVersion | None]:
        """Inside, a server keeps the version that it gives, as long as answers come."""
        server, over = self.around.caller(name), threading.Event()
        lease = self.config.overseer.no_progress_s, self.around.identity.incarnation
        keeper = f"{self.name}.lease"
        try:
            held = server.call("hold", *lease, timeout_s=CALL_S)
            self.crew.start(keeper, lambda: self._renew(server, lease, over))
            yield held
        finally:
            over.set()
            self.crew.join(CALL_S, [keeper])  # a renewal that came late would hold the server up for nothing
            with suppress(UnreachableError):  # a dead server holds nothing
                server.call("release", timeout_s=CALL_S)

    def _renew(self, server: Caller, lease: tuple[float, int], over: threading.Event) -> None:
        answered = self._pool.answers
        while not over.wait(RENEW_SHARE * lease[0]):
            before, answered = answered, self._pool.answers
            if answered > before:
                with suppress(UnreachableError):  # the evaluation is told by its own requests
                    server.call("hold", *lease, timeout_s=CALL_S)

    # --- what the overseer calls ---------------------------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, Any]:
        """A full evaluation of every lesson with weights of that step; a task.

        Raises:
            NoProgressError: no server held them to the end, and no answer came for as long as a server may take to
                start.
        """
        reason: PenstockError | None = None
        limit_s, answered = self.config.overseer.start_limit_s, self._pool.answers
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and not self.stopping.is_set():
            version = WeightVersion(self.around.view.lineage, step)
            try:
                return write_stats(self._on_one_server(version, partial(self._evaluator.evaluate, step)))
            except (UnreachableError, InterruptedEvaluation) as failure:
                reason = failure
            if self._pool.answers > answered:  # it was begun, and is begun again
                limit, answered = time.monotonic() + limit_s, self._pool.answers
            self.stopping.wait(POLL_S)
        raise NoProgressError(f"version {step} was not evaluated, and no server answered for {limit_s:g} s: {reason}")

    def evaluation_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._evaluator.state()

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self._evaluator.stop()
        super().stop(timeout_s)
        self._pool.close()
        self._manager.shutdown()

    def _has_work(self) -> bool:
        return self._one_at_a_time.locked()

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        facts = self._facts(state=self._evaluator.state(), seen=None if self._seen is None else self._seen.step)
        progress = float(self._pool.answers) if self.activity.working else None
        return Condition(self.state, self.doing, progress, busy_s, idle_s, facts=facts)


class _Reporting:
    """Stands for the curriculum: evaluations go to the replay service, which keeps the curriculum's log."""

    def __init__(self, config: CurriculumConfig, replay: Caller) -> None:
        self.config = config
        self._replay = replay

    def update_evaluation(self, stats: RolloutBatchStats, step: int) -> tuple[CurriculumEvent, ...]:
        self._replay.call("update_evaluation", stats, step, timeout_s=CALL_S)
        return ()  # the replay service tells of events


def _version(peer: Peer) -> WeightVersion:
    return WeightVersion(int(peer.address["lineage"]), int(peer.address["step"]))


def make_evaluator(around: Surroundings, settings: Mapping[str, Any]) -> EvaluatorRole:
    """Factory of the evaluator; `settings` has its checkpointed ``state``, or None, beside those of the run."""
    return EvaluatorRole(around, Settings.of(settings, RunConfig), settings.get("state"))

"""Evaluation during the training of a language policy: which versions, with what outcome; and as a component.

An evaluation is due when a multiple of its frequency has been *passed*, so none is skipped when versions jump. All its
rollouts come from one version. It counts as done only at its end: a run that is checkpointed or stopped in the middle
of it owes it still, and so does its resume. Then, too, what was said in it is kept, apart from what is trained.

The component leases one server, which keeps its version meanwhile, while the others go on with newer weights; the lease
is renewed while answers come. A completion of another version than the evaluated one (the server died, the lease ran
out) makes the attempt count for nothing; an event says so, and it is made again on another server.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from typing_extensions import override

from penstock.curriculum import Curriculum, CurriculumConfig, CurriculumEvent, evaluation_due
from penstock.inference import AgentEndpoint, RemoteContext
from penstock.overseer.component import POLL_S, Settings, ThreadedComponent
from penstock.overseer.config import RunConfig
from penstock.overseer.language.rollout import (
    InterruptedEvaluation,
    PinnedContext,
    make_pool,
    reproducible,
    servers_of,
    serving,
)
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.results import EvaluationLog, write_stats
from penstock.overseer.supervisor.messages import ComponentStatus, Membership, Peer
from penstock.rollout import RolloutManager
from penstock.rollout.manager import EvalType
from penstock.rundir import write_evaluation
from penstock.tracking import conversation_of
from penstock.types import (
    Caller,
    EnvironmentFailure,
    InvalidRolloutError,
    NoProgressError,
    PenstockError,
    RolloutBatch,
    RolloutBatchStats,
    Stopped,
    UnreachableError,
    WeightVersion,
)


class Evaluator:
    """Evaluates versions as they start to serve.

    What was said is kept as files of the run, and trackers get one conversation of each lesson, once an evaluation is
    over; one that was cut short leaves nothing. A lesson whose environment failed altogether is told by the event
    `evaluation_failed`, what cannot be written by `evaluation_not_kept`; the run goes on without that.

    Args:
        ctx: Of the component that evaluates.
        settings: The run, with its config and directory.
        manager: Generates, and tells the curriculum of full evaluations.
        last_lesson: Which lesson the newest group was drawn from, None before the first; for micro evaluations of it.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings,
        manager: RolloutManager,
        last_lesson: Callable[[], str | None],
    ) -> None:
        self._ctx = ctx
        self._directory = settings.directory
        self._log = EvaluationLog(ctx, settings.config.overseer.keep_best)
        self._manager = manager
        self._last_lesson = last_lesson
        self._evaluated_step = 0
        self._glanced_step = 0
        self._stopping = threading.Event()

    def __call__(self, version: WeightVersion) -> None:
        """Runs the evaluation that is due at this version, if any."""
        step, due = version.step, self.due(version.step)
        if due == "eval":
            self._log.begin(step)
            self._log.metrics(step, metrics_of(self._attempt(due, step, due, self._lessons), due))
            self._evaluated_step = self._glanced_step = step
        elif due is not None:
            self._log.metrics(step, metrics_of(self._attempt(due, step, due, self._lessons_looked_at()), due))
            self._glanced_step = step

    def due(self, step: int) -> EvalType | None:
        """What a call with a version of that step would evaluate, if anything."""
        config = self._manager.curriculum.config
        if evaluation_due(config.eval_frequency, self._evaluated_step, step):
            return "eval"
        return "micro_eval" if evaluation_due(config.micro_eval_frequency, self._glanced_step, step) else None

    @property
    def _lessons(self) -> Collection[str]:
        return self._manager.curriculum.config.lessons

    def _lessons_looked_at(self) -> Collection[str]:
        """Of a micro evaluation: all, or the one just sampled, where that is asked for and known."""
        sampled = self._last_lesson() if self._manager.curriculum.config.micro_eval_lessons == "sampled" else None
        return self._lessons if sampled is None else [sampled]

    def _attempt(
        self, eval_type: EvalType, step: int, label: str, lessons: Collection[str]
    ) -> dict[str, RolloutBatchStats]:
        results: dict[str, RolloutBatchStats] = {}
        said: list[RolloutBatch] = []
        for lesson_id in lessons:
            if self._stopping.is_set():
                raise Stopped("the evaluation was cut short")
            try:
                results[lesson_id], batch = self._manager.evaluate_lesson(lesson_id, None, eval_type, step, label=label)
                said.append(batch)
            except (EnvironmentFailure, InvalidRolloutError) as failure:
                if self._stopping.is_set():
                    raise Stopped("the evaluation was cut short") from failure
                self._ctx.event("evaluation_failed", lesson=lesson_id, error=str(failure))
                results[lesson_id] = RolloutBatchStats.failed(lesson_id, str(failure))
        self._keep(label, step, said)
        return results

    def _keep(self, label: str, step: int, batches: Sequence[RolloutBatch]) -> None:
        chosen = [next(batch.rollouts()) for batch in batches if batch.groups]
        if chosen:
            self._ctx.samples(step, [conversation_of(rollout, "eval") for rollout in chosen])
        try:
            write_evaluation(self._directory, batches, label, self._manager.lineage, step)
        except OSError as error:
            self._ctx.event("evaluation_not_kept", step, evaluation=label, reason=str(error))

    def evaluate(self, step: int, when: str | None = None) -> dict[str, RolloutBatchStats]:
        """A report on every lesson, by which nothing is decided; one whose every group failed has a `failure`.

        Args:
            step: Number of the version that the engine holds.
            when: Names it among the evaluations that are kept: `untrained`, `before`, `after`.

        Raises:
            Stopped: `stop` was called.
        """
        return self._attempt("report", step, when or "report", self._lessons)

    def stop(self) -> None:
        """No lesson is begun any more."""
        self._stopping.set()

    def state(self) -> dict[str, Any]:
        """The steps last evaluated."""
        return {"evaluated_step": self._evaluated_step, "glanced_step": self._glanced_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes `state` back."""
        self._evaluated_step = int(state["evaluated_step"])
        self._glanced_step = int(state["glanced_step"])


def metrics_of(results: Mapping[str, RolloutBatchStats], group: str) -> dict[str, float]:
    """Flattens evaluation results to ``<group>/<lesson>/<name>`` metrics; a lesson that failed has none.

    Answers to the problems that are kept apart for reports are ``<group>_report/<lesson>/<name>``: they and those by
    which the curriculum decides are no points of one curve.
    """
    return {
        f"{group}{'_report' if stats.reports else ''}/{lesson_id}/{name}": value
        for lesson_id, stats in results.items()
        if not stats.failure
        for name, value in {
            "reward_mean": stats.reward_mean,
            "success_rate": stats.success_rate,
            "pass_at_k": stats.pass_at_k,
            "response_tokens": stats.response_tokens,
            "truncated_fraction": stats.truncated_fraction,
            "rollouts": float(stats.rollouts),
            **stats.metrics,
        }.items()
    }


CALL_S = 30.0
"""Longest wait for a server or the replay service."""
RENEW_SHARE = 0.25
"""Of the length of a lease: so often it is renewed, where an answer came meanwhile."""

WAITING = "waiting for a version that is due"

_Found = TypeVar("_Found")


class EvaluatorRole(ThreadedComponent):
    """Runs one `Evaluator`: when a version is due, and when the overseer asks."""

    def __init__(self, ctx: ComponentContext, settings: Settings, state: Mapping[str, Any] | None) -> None:
        super().__init__(ctx, settings)
        config = settings.config
        self._pool = make_pool(settings)
        tokenizer = settings.tokenizer()
        self._contexts = RemoteContext(self._pool, tokenizer, ordered=reproducible(settings.config))
        self._context = PinnedContext(self._contexts, self.activity)
        replay = ctx.caller("replay-0")
        curriculum = cast(Curriculum, _Reporting(config.curriculum, replay))
        agents = AgentEndpoint.of(config.inference, tokenizer)
        self._manager = RolloutManager(curriculum, self._context, config.seed, agents=agents)
        self._evaluator = Evaluator(ctx, settings, self._manager, lambda: replay.call("last_lesson", timeout_s=CALL_S))
        if state is not None:
            self._evaluator.restore(state)
        self._seen: WeightVersion | None = None
        self._one_at_a_time = threading.Lock()

    @override
    def start(self) -> None:
        self.look(self.ctx.view)
        self.activity.begin()
        self.state, self.doing = "running", WAITING
        self.crew.start(f"{self.name}.versions", self._run)

    def look(self, view: Membership) -> None:
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
            learner = self.ctx.view.peer("learner-0")
            if learner is None or not learner.address.get("training") or version in (None, self._seen):
                continue
            try:
                if self._evaluator.due(version.step) is not None:
                    self._on_one_server(version, partial(self._evaluator, version))
                if self.config.replay.synchronous:
                    self.ctx.caller("replay-0").call("cleared", version.lineage, version.step, timeout_s=CALL_S)
            except (UnreachableError, NoProgressError, InterruptedEvaluation):
                self.stopping.wait(POLL_S)  # somebody died; the view will tell
                continue
            except Stopped:
                return
            self._seen = version

    def _newest(self) -> WeightVersion | None:
        return max((_version(peer) for peer in serving(self.ctx.view)), default=None)

    def _on_one_server(self, version: WeightVersion, evaluate: Callable[[], _Found]) -> _Found:
        """Runs `evaluate` against a server that keeps the version meanwhile.

        Raises:
            InterruptedEvaluation: the version was not held to the end, or this evaluator drains.
        """
        peer = next((p for p in serving(self.ctx.view) if _version(p) == version), None)
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
                self.ctx.event("evaluation_interrupted", version.step, server=name, reason=str(failure))
                raise
            finally:
                self.doing = WAITING

    @contextmanager
    def _leased(self, name: str) -> Iterator[WeightVersion | None]:
        """Inside, a server keeps the version that it gives, as long as answers come."""
        server, over = self.ctx.caller(name), threading.Event()
        lease = self.config.overseer.no_progress_s, self.ctx.identity.incarnation
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

    def evaluate(self, step: int, when: str | None = None) -> dict[str, Any]:
        """A full evaluation of every lesson with weights of that step, kept under the name `when`; a task.

        Raises:
            NoProgressError: no server held them to the end, and no answer came for as long as a server may take to
                start.
        """
        reason: PenstockError | None = None
        limit_s, answered = self.config.overseer.start_limit_s, self._pool.answers
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and not self.stopping.is_set():
            version = WeightVersion(self.ctx.view.lineage, step)
            try:
                return write_stats(self._on_one_server(version, partial(self._evaluator.evaluate, step, when)))
            except (UnreachableError, InterruptedEvaluation) as failure:
                reason = failure
            if self._pool.answers > answered:  # it was begun, and is begun again
                limit, answered = time.monotonic() + limit_s, self._pool.answers
            self.stopping.wait(POLL_S)
        raise NoProgressError(f"version {step} was not evaluated, and no server answered for {limit_s:g} s: {reason}")

    def evaluation_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._evaluator.state()

    @override
    def stop(self, timeout_s: float) -> None:
        self._evaluator.stop()
        super().stop(timeout_s)
        self._pool.close()
        self._manager.shutdown()

    def _has_work(self) -> bool:
        return self._one_at_a_time.locked()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        facts = self._facts(state=self._evaluator.state(), seen=None if self._seen is None else self._seen.step)
        progress = float(self._pool.answers) if self.activity.working else None
        return ComponentStatus(self.state, self.doing, progress, busy_s, idle_s, facts=facts)


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


def make_evaluator(ctx: ComponentContext, settings: Mapping[str, Any]) -> EvaluatorRole:
    """Factory of the evaluator; `settings` has its checkpointed ``state``, or None, beside those of the run."""
    return EvaluatorRole(ctx, Settings.of(settings, RunConfig), settings.get("state"))

"""A run of a language policy in one process: what its components share, and those that are of this process alone.

One engine, one curriculum and one rollout worker, by reference: weights are handed over as they are, rollouts go
through the rollout storage and its receiver. The worker evaluates, too: at staleness zero nothing else is generated
meanwhile, and a version is evaluated before anything is generated with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, final

import numpy as np
from typing_extensions import override

from penstock.curriculum import Curriculum, CurriculumEvent
from penstock.environments import Environment
from penstock.inference import AgentEndpoint, EngineContext, InferenceEngine, RemoteContext
from penstock.overseer.assembly import (
    LocalBatches,
    config_error_for,
    make_batch_makers,
    open_replay,
    restore_parts,
)
from penstock.overseer.component import LOOK_S, Settings, ThreadedComponent
from penstock.overseer.config import RunConfig
from penstock.overseer.kind import PolicyKind, RunStart, SharedParts
from penstock.overseer.language.evaluator import Evaluator
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.language.inference import AnyEngine, serve_weights
from penstock.overseer.language.replay import ReferenceScores, arrived_examples, problem_rules
from penstock.overseer.language.rollout import engine_config, located, make_pool, tell_samples
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.results import write_stats
from penstock.overseer.run import step_of
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.messages import ComponentStatus, Membership
from penstock.overseer.tasks import LocalComponent
from penstock.overseer.trainer import LearnerComponent
from penstock.replay import (
    LANGUAGE,
    PacedReplayBuffer,
    ProblemRules,
    RolloutReceiver,
    TicketRules,
    open_rollout_storage,
)
from penstock.rollout import RolloutManager, RolloutWorker
from penstock.types import (
    Completion,
    InferenceContext,
    RLExample,
    RolloutGroup,
    Stopped,
    SupersededVersionError,
    WeightVersion,
)
from penstock.weights import InProcessBroadcaster, trained_arrays

WORKER_ID = "rollout-worker-0"
ENGINE_NAME = "inference-0#0"
"""As its only incarnation would be named in a process of its own."""


def local_components(
    kind: PolicyKind,
    settings: Settings[RunConfig],
    start: RunStart,
    environments: Mapping[str, Environment],
    context: Callable[[str], ComponentContext],
    log: RunLog,
) -> dict[str, LocalComponent]:
    """Makes the components of a run in this process and connects them; nothing is started.

    Raises:
        ConfigError: a place for files cannot be used.
    """
    config = settings.config
    weights = InProcessBroadcaster()
    make_serving = LocalInference if config.inference.external is None else LocalExternalInference
    serving = make_serving(context("inference-0"), settings, start, weights)

    def tell(event: CurriculumEvent) -> None:
        log.event(event.kind, lesson=event.lesson_id, reason=event.reason)

    manager = RolloutManager(
        Curriculum(config.curriculum),
        serving.context,
        config.seed,
        settings.lineage,
        environments,
        serving.set_weights,
        serving.end,
        tell,
        agents=AgentEndpoint.of(config.inference, start.codec),
    )
    of_evaluator = context("evaluator-0")
    evaluator = Evaluator(of_evaluator, settings, manager, lambda: replay.issuer.last_lesson)
    names = {environment.name for environment in environments.values()}
    replay = LocalReplay(context("replay-0"), settings, manager, names, log, problem_rules(config, environments))
    rollout = LocalRollout(context("rollout-0"), settings, manager, replay, weights, evaluator)
    replay.on_admit = rollout.begin
    serving.connect(manager, rollout, replay)
    shared = SharedParts(weights, LocalBatches(replay.opened, replay.states), manager)
    if start.checkpoint is not None:
        evaluator.restore(start.checkpoint.states["evaluator"])
    replay.restore(start, tell)
    return {
        "inference-0": serving,
        "rollout-0": rollout,
        "evaluator-0": LocalEvaluator(of_evaluator, settings, evaluator),
        "replay-0": replay,
        "learner-0": LearnerComponent(context("learner-0"), settings, kind, shared, start),
    }


@final
class LocalReplay(ThreadedComponent):
    """The replay buffer and the curriculum, and the receiver of rollouts.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        manager: Has the curriculum, and hears of every group.
        environment_names: Of its environments.
        log: Shows groups, and writes their metrics with those of the next update.
        problems: As `problem_rules` gives them.

    Attributes:
        opened: Store, ledger, buffer, batches.
        on_admit: Called when the learner trains.
        add_environment: Takes the environment's metrics of a training group.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings,
        manager: RolloutManager,
        environment_names: Collection[str],
        log: RunLog,
        problems: Mapping[str, ProblemRules],
    ) -> None:
        super().__init__(ctx, settings)
        self.on_admit: Callable[[], None] = lambda: None
        self.add_environment = log.environment
        self._curriculum = curriculum = manager.curriculum
        assert isinstance(curriculum, Curriculum)  # it was made with one
        config = settings.config

        def on_group(group: RolloutGroup) -> None:
            manager.update_training_stats(group)
            log.group(group)

        def group_size_of(lesson_id: str) -> int:
            return manager.group_size(lesson_id) if lesson_id in config.curriculum.lessons else 0

        self.opened = open_replay(
            ctx,
            settings,
            config.replay,
            LANGUAGE,
            make_batch_makers(config, environment_names),
            tickets=TicketRules(config.seed, curriculum, group_size_of, problems=problems),
            on_group=on_group,
        )
        storage = config.rollout.storage
        with config_error_for("rollout.storage.path", storage.path or settings.directory.path):
            self.storage = open_rollout_storage(
                storage,
                settings.directory.path / "rollout_storage",
                lambda source, reason: ctx.event("rollouts_quarantined", source=source, reason=reason),
                new_run=settings.checkpoint is None,
            )
        buffer = self.opened.buffer
        assert isinstance(buffer, PacedReplayBuffer) and self.opened.issuer is not None  # there are rules for tickets
        self.issuer = self.opened.issuer
        ReferenceScores(config, ctx.caller("learner-0")).attach(buffer.pool)
        digests = buffer.digests
        self.expect_digests, self.tell_digests = digests.expect_digests, digests.tell_digests
        self.mark_engine = digests.mark_engine
        self._receiver = RolloutReceiver(self.storage, buffer, buffer if storage.kind == "file" else None)

    def restore(self, start: RunStart, tell: Callable[[CurriculumEvent], None]) -> None:
        """Brings all to where the checkpoint was, where there is one."""
        parts = {"curriculum": self._curriculum, "issuer": self.issuer, "replay": self.opened.buffer}
        states = None if start.checkpoint is None else start.checkpoint.states
        restore_parts(parts, self.opened.buffer, states, self.settings.lineage)
        for event in self._curriculum.restored_events if states is not None else ():
            tell(event)
        for lesson_id, reason in self.issuer.data_changes.items():
            self.ctx.event("data_changed", lesson=lesson_id, reason=reason)

    def states(self) -> dict[str, Any]:
        """What belongs into a checkpoint beside the buffer's state."""
        return {"curriculum": self._curriculum.state(), "issuer": self.issuer.state()}

    def arrived_under(self, step: int, most: int) -> list[tuple[RLExample, tuple[str, ...]]]:
        """`arrived_examples`."""
        return arrived_examples(self.opened.buffer, step, most)

    def admit(self) -> None:
        """The learner trains: tickets are handed out, and rollouts taken."""
        self.doing = "serving"
        self.crew.start("rollout-receiver", self._receiver.run)
        self.on_admit()

    def finish(self) -> None:
        """Ends the waits of the learner and of whoever hands over."""
        self.opened.buffer.close()
        self.storage.close()

    @override
    def stop(self, timeout_s: float) -> None:
        self.finish()
        self.opened.stop_prefetch(timeout_s)
        super().stop(timeout_s)
        self.opened.store.close()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        storage = self.storage.metrics()
        return ComponentStatus(
            self.state,
            self.doing,
            float(self._receiver.groups_received),
            metrics={**self._curriculum.metrics(), **storage},
            facts=self._facts(
                complete=self._curriculum.complete,
                ledger=self.opened.ledger.snapshot(),
                lessons=self._curriculum.describe(),
                waiting_for=f"{self.opened.buffer.waiting_for()}; the receiver of rollouts is {self._receiver.doing}",
                rollout_storage={"receiver": self._receiver.doing, **storage, **self._receiver.metrics()},
            ),
        )


@final
class LocalRollout(ThreadedComponent):
    """The run's only rollout worker; it ends with the training.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        manager: Generates.
        replay: Gives tickets, and takes rollouts.
        weights: Newer versions come from here.
        evaluator: Is given each new version.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings,
        manager: RolloutManager,
        replay: LocalReplay,
        weights: InProcessBroadcaster,
        evaluator: Evaluator,
    ) -> None:
        super().__init__(ctx, settings)
        config = settings.config
        self._replay = replay
        self._trains = False
        self._worker = RolloutWorker(
            located(WORKER_ID),
            manager,
            replay.issuer,
            replay.storage.writer(WORKER_ID),
            weights,
            config.rollout,
            concurrency=config.concurrency,
            lockstep=config.replay.synchronous,
            evaluate=evaluator,
            log_samples=partial(tell_samples, ctx, config),
            on_failure=lambda ticket, reason: ctx.event("group_failed", ticket=ticket.ticket_id, reason=reason),
            on_environment=replay.add_environment,
        )

    def begin(self) -> None:
        """The learner trains."""
        self._trains, self.doing = True, "generating"
        self.crew.start(f"{WORKER_ID}.weights", self._worker.run_weights)
        self.crew.start(f"{WORKER_ID}.tickets", self._worker.run_tickets)

    def look(self, view: Membership) -> None:
        """Ends the worker with the training; an evaluation of an earlier version is completed."""
        learner = view.peer("learner-0")
        if self._trains and learner is not None and not learner.address.get("training"):
            self.doing = "ending"
            self.finish()
            self._replay.finish()
            self._trains = bool(self.crew.join(0.0))

    @property
    def trains(self) -> bool:
        """Whether it follows the learner's weights by itself."""
        return self._trains

    def finish(self) -> None:
        """Nothing new is begun; groups that run are cut short."""
        self._worker.stop()

    @override
    def stop(self, timeout_s: float) -> None:
        self.finish()
        super().stop(timeout_s)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        worker = self._worker
        counts = {"finished": worker.groups_finished, "failed": worker.groups_failed, "running": worker.running}
        return ComponentStatus(
            self.state,
            self.doing,
            float(worker.groups_finished + worker.groups_failed),
            facts=self._facts(groups=counts, last_failure=worker.last_failure),
        )


class LocalServing(ThreadedComponent, Generic[AnyEngine]):
    """What answers in a run of one process. While the worker does not follow the learner's weights, it does.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        start: The policy that it begins with.
        engine: What answers, in this process or driven by it.
        context: Asks it, for environments.
        weights: Come from here.

    Attributes:
        context: As given.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings,
        start: RunStart,
        engine: AnyEngine,
        context: InferenceContext,
        weights: InProcessBroadcaster,
    ) -> None:
        super().__init__(ctx, settings)
        self.context = context
        self._engine, self._weights = engine, weights
        self._still = (*settings.config.learner.optimizer.frozen, *start.policy.config.still)
        self._held: tuple[WeightVersion, str] | None = None

    def connect(self, manager: RolloutManager, rollout: LocalRollout, replay: LocalReplay) -> None:
        """Takes what is made with its context: who hands it new weights, who follows them, who hears of them."""
        self._manager, self._rollout, self._replay = manager, rollout, replay

    def set_weights(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Returns when they are served, and known to be what the learner made."""
        moving, limit_s = trained_arrays(arrays, self._still), self.config.overseer.no_progress_s
        served, digests = serve_weights(self.ctx, self._engine, version, moving, limit_s)
        self._replay.tell_digests(ENGINE_NAME, served.lineage, served.step, digests)

    def end(self) -> None:
        """Ends what answers, within ``overseer.stop_timeout_s``."""
        self._engine.stop(self.config.overseer.stop_timeout_s)

    def _take_offered(self, has_first: bool) -> None:
        """Takes the weights that are offered, unless the worker does, or the engine was made with them."""
        newest = self._weights.latest()
        if newest is None or self._rollout.trains:
            return
        offered = newest, str(self._weights.endpoint()["incarnation"])
        if self._held != offered and not (has_first and self._held is None):
            try:
                self._manager.update_model(newest, self._weights.fetch(newest))
            except SupersededVersionError:  # a newer one is offered meanwhile
                return
        self._held = offered

    def canary(
        self, version: tuple[int, int], prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        """The engine's, for the learner."""
        return self._engine.canary(WeightVersion(*version), prompts, max_tokens, timeout_s)

    def finish(self) -> None:
        """The engine goes on: an answer that is waited for still comes."""

    @override
    def stop(self, timeout_s: float) -> None:
        self.stopping.set()
        self._manager.shutdown()
        super().stop(timeout_s)

    def _described(self, doing: str, steps: float, answers: bool) -> ComponentStatus:
        """Its status, of what it does, the steps that it made beside tokens, and whether it may be asked."""
        stats, held = self._engine.stats(), self._held
        address: dict[str, Any] = {"digests": True}
        if held is not None and answers and not self._rollout.trains:
            address |= {"lineage": held[0].lineage, "step": held[0].step, "weights": held[1]}
        return ComponentStatus(
            self.state,
            doing,
            stats.get("inference/tokens_total", 0.0) + steps,
            self._engine.busy_s,
            address=address,
            metrics=stats,
            facts=self._facts(),
        )


@final
class LocalInference(LocalServing[InferenceEngine]):
    """The engine of this process, made with the learner's first weights."""

    def __init__(
        self, ctx: ComponentContext, settings: Settings, start: RunStart, weights: InProcessBroadcaster
    ) -> None:
        config, self._first = settings.config, WeightVersion(settings.lineage, step_of(settings.checkpoint))
        engine = InferenceEngine(
            start.policy, self._first, start.codec, engine_config(config), ENGINE_NAME, start.begun
        )
        context = EngineContext(engine, start.codec, ordered=config.replay.synchronous)
        super().__init__(ctx, settings, start, engine, context, weights)

    @override
    def start(self) -> None:
        self.crew.start("inference-0.engine", self._run)

    def _run(self) -> None:
        self._engine.start(lazily=True)
        self.state, self.doing = "running", "serving"
        with suppress(Stopped):
            for program in self._engine.compiling(None):
                self.note_compiled(program)

    def look(self, view: Membership) -> None:
        """Takes the weights that are offered; from the first to the end of the training has the rest compiled."""
        newest, learner = self._weights.latest(), view.peer("learner-0")
        if learner is None or not learner.address.get("training"):
            self._engine.compile_no_more()  # the end would wait for what is begun
        elif newest is not None and newest > self._first:  # nothing is in the first update's way any more
            self._engine.compile_rest()
        if self.state == "running":
            self._take_offered(has_first=True)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        return self._described(self.doing, float(self.compiled), True)


@final
class LocalExternalInference(LocalServing[ExternalEngine]):
    """A server of another make beside this process; the learner has it sleep and wake."""

    def __init__(
        self, ctx: ComponentContext, settings: Settings, start: RunStart, weights: InProcessBroadcaster
    ) -> None:
        engine = ExternalEngine(ctx.identity, settings, start.policy, start.codec, ctx.event)
        self._pool = pool = make_pool(settings)
        engine.on_change = lambda server: pool.set_servers([] if server is None else [server])
        super().__init__(ctx, settings, start, engine, RemoteContext(pool, start.codec), weights)
        self.sleep, self.wake = engine.sleep, engine.wake

    @override
    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        self._pool.close()

    @override
    def start(self) -> None:
        self.state = "running"
        self.crew.start("inference-0.server", self._run)

    def _run(self) -> None:
        with suppress(Stopped):
            while not self.stopping.wait(LOOK_S):
                self._take_offered(has_first=False)
                self._engine.watch()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        return self._described(self._engine.doing, self._engine.progress, self._engine.server is not None)


@final
class LocalEvaluator(ThreadedComponent):
    """Evaluates before and after the training; in between the rollout worker does, with the same `Evaluator`.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        evaluator: Of this process.
    """

    def __init__(self, ctx: ComponentContext, settings: Settings, evaluator: Evaluator) -> None:
        super().__init__(ctx, settings)
        self._evaluator = evaluator

    @override
    def start(self) -> None:
        self.state, self.doing = "running", "waiting for a version that is due"

    def evaluate(self, step: int, when: str | None = None) -> dict[str, Any]:
        """A full evaluation of every lesson with the weights that the engine has, kept under the name `when`.

        Raises:
            Stopped: `finish` was called.
        """
        return write_stats(self._evaluator.evaluate(step, when))

    def evaluation_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._evaluator.state()

    def finish(self) -> None:
        """Cuts an evaluation short, where the run is to stop."""
        self._evaluator.stop()

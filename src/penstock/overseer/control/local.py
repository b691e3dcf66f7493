"""A run of a control policy in one process: rollout workers are threads, simulators are processes.

Weights and fragments are handed over by reference. The workers are looked after by their own manager, which makes
failed ones anew; the evaluator is offered each version when it is published, so that none that is due is passed over.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast, final

from typing_extensions import override

from penstock.fleet import CountingSink, RolloutManager, RolloutWorkerWrapper
from penstock.fleet.worker import WorkerStatus
from penstock.learner import ControlLearner
from penstock.overseer.assembly import LocalBatches
from penstock.overseer.component import Settings, ThreadedComponent
from penstock.overseer.control.evaluator import FleetEvaluator
from penstock.overseer.control.policies import make_worker_runner
from penstock.overseer.control.replay import FleetReplayRole
from penstock.overseer.control.simulators import filmed_pool, require_films, worker_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.kind import PolicyKind, RunStart, SharedParts
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.results import write_stats
from penstock.overseer.run_log import simulators_told
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.overseer.tasks import LocalComponent
from penstock.overseer.trainer import LearnerComponent
from penstock.types import WeightVersion
from penstock.weights import InProcessBroadcaster

SUPERVISE_S = 0.5
"""Seconds between two looks at the workers."""


def local_components(
    kind: PolicyKind, settings: Settings[FleetRunConfig], start: RunStart, context: Callable[[str], ComponentContext]
) -> dict[str, LocalComponent]:
    """Makes the components of a run in this process and connects them; nothing is started.

    Raises:
        ConfigError: the store's place cannot be used, or packages for films are missing.
    """
    config = settings.config
    require_films(config)
    ctx = context("evaluator-0")
    evaluator = FleetEvaluator(ctx, config, start.policy)
    if start.checkpoint is not None:
        evaluator.restore(start.checkpoint.states["evaluator"])
    weights = _OfferedWeights(evaluator, config.steps)
    replay = LocalFleetReplay(context("replay-0"), settings)
    shared = SharedParts(weights, LocalBatches(replay.opened, replay.states))
    learner = LearnerComponent(context("learner-0"), settings, kind, shared, start)
    fleet = LocalFleet(context("rollout-0"), settings, learner, replay, weights)
    evaluations = LocalFleetEvaluator(ctx, settings, evaluator, weights)
    replay.on_admit = (fleet.begin, evaluations.begin)
    return {"rollout-0": fleet, "evaluator-0": evaluations, "replay-0": replay, "learner-0": learner}


class _OfferedWeights(InProcessBroadcaster):
    """The evaluator sees every version but the last, which is evaluated after the training in any case."""

    def __init__(self, evaluator: FleetEvaluator, steps: int) -> None:
        super().__init__()
        self._evaluator = evaluator
        self._steps = steps

    @override
    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        super().publish(version, arrays)
        if version.step < self._steps:
            self._evaluator.offer(version, arrays)


@final
class LocalFleetReplay(FleetReplayRole):
    """The replay buffer; nothing reaches it by messages.

    Attributes:
        on_admit: Called when the learner trains.
    """

    on_admit: tuple[Callable[[], None], ...] = ()

    @override
    def admit(self) -> None:
        super().admit()
        for begin in self.on_admit:
            begin()

    def finish(self) -> None:
        """Ends the waits of the learner and of whoever delivers."""
        self.opened.buffer.close()

    @override
    def numbers(self) -> dict[str, float]:
        """None: batches and the fleet have theirs."""
        return {}


@final
class LocalFleet(ThreadedComponent[FleetRunConfig]):
    """All rollout workers, under one `penstock.fleet.RolloutManager`.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        learner: Has the weights that a worker begins with.
        replay: Takes fragments.
        weights: Come from here.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings[FleetRunConfig],
        learner: LearnerComponent,
        replay: LocalFleetReplay,
        weights: InProcessBroadcaster,
    ) -> None:
        super().__init__(ctx, settings)
        overseer = settings.config.overseer
        self._sink = CountingSink(replay.opened.buffer, replay.reports.note_delivery)
        self._on_event = simulators_told(ctx)
        self._learner = learner
        self._replay = replay
        self._weights = weights
        self._manager = RolloutManager(
            settings.config.fleet,
            self._make_worker,
            on_event=self._on_event,
            reports=replay.reports,
            max_restarts=overseer.max_restarts,
            restart_window_s=overseer.restart_window_s,
        )
        self._over = threading.Event()

    def _make_worker(self, name: str, incarnation: int) -> RolloutWorkerWrapper:
        """An incarnation of a worker, with the learner's weights of this moment."""
        number, on_event = int(name.rpartition("-")[2]), self._on_event
        config, lineage = self.config, self.settings.lineage
        learner = cast(ControlLearner, self._learner.learner)
        runner = make_worker_runner(learner.policy, config, number, WeightVersion(lineage, learner.step), incarnation)
        runner.compile()
        worker = f"{name}.{lineage}"  # every life of a run has workers of its own, with fragments of their own
        pool = worker_pool(config, number, lineage, incarnation, on_event)
        filmed = filmed_pool(pool, config, self.settings.directory, f"{worker}-{incarnation}", on_event)
        return RolloutWorkerWrapper(
            worker, incarnation, config.fleet, filmed or pool, runner, self._sink, self._weights, on_event=on_event,
            on_batch=(filmed.note,) if filmed else (),
        )  # fmt: skip

    def begin(self) -> None:
        """The learner trains: simulators are started."""
        self.doing = "starting simulators"
        self._manager.start()
        self.doing = "rolling out"
        self.crew.start(f"{self.name}.supervision", self._supervise)

    def _supervise(self) -> None:
        """Has failed workers made anew; one that fails too often ends the run."""
        while not self._over.wait(SUPERVISE_S):
            self._manager.supervise()

    def drain(self) -> None:
        """Nobody acts any more."""
        self.crew.start(f"{self.name}.drain", self._drain)

    def _drain(self) -> None:
        self.finish()
        self._replay.finish()  # nobody takes what is still to be sent
        self.crew.join(self.config.overseer.stop_timeout_s, [f"{self.name}.supervision"])
        self._manager.stop(self.config.overseer.stop_timeout_s)
        self.state, self.doing = "drained", "done"

    def finish(self) -> None:
        """No worker is made any more."""
        self._over.set()

    @override
    def stop(self, timeout_s: float) -> None:
        self.finish()
        if self.state != "drained":
            self._manager.stop(timeout_s)
        super().stop(timeout_s)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        metrics = self._manager.metrics()  # reads all, of which the replay buffer's component tells the account
        workers = {name: report.condition for name, report in self._manager.reports().items()}
        said = [f"{name} is {worker.state} and silent for {worker.silent_s:.0f} s" for name, worker in workers.items()]
        return ComponentStatus(
            self.state,
            "; ".join(said) or self.doing,
            metrics.get("fleet/steps_total", 0.0),
            metrics=metrics,
            facts=self._facts(workers={name: _described(worker) for name, worker in workers.items()}),
        )


def _described(worker: WorkerStatus) -> dict[str, Any]:
    """A rollout worker, as `penstock status` shows components."""
    version = worker.version
    return {
        "incarnation": worker.incarnation,
        "state": worker.state,
        "version": None if version is None else [version.lineage, version.step],
        "doing": worker.failure or f"{worker.steps:,} steps",
    }


@final
class LocalFleetEvaluator(ThreadedComponent[FleetRunConfig]):
    """Evaluates versions as they are offered, and when the run asks.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        evaluator: Is offered versions.
        weights: Has the newest.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings[FleetRunConfig],
        evaluator: FleetEvaluator,
        weights: InProcessBroadcaster,
    ) -> None:
        super().__init__(ctx, settings)
        self._evaluator = evaluator
        self._weights = weights
        self._thread = f"{self.name}.versions"

    @override
    def start(self) -> None:
        self.state, self.doing = "running", "waiting for a version that is due"

    def begin(self) -> None:
        """The learner trains."""
        if self.config.evaluation.every:
            self.crew.start(self._thread, self._evaluator.run)

    def evaluate(self, step: int, when: str | None = None) -> dict[str, Any]:
        """A full evaluation of every task with the newest weights; after the training, when its last one is over.

        Its episodes are not kept, under whatever name.

        Raises:
            Stopped: `finish` was called.
            WeightsError: they are of another step.
        """
        if self.crew.alive(self._thread):
            self._evaluator.finish()
            self.crew.join(self.config.overseer.no_progress_s, [self._thread])
        version = WeightVersion(self.settings.lineage, step)
        return write_stats(self._evaluator.evaluate(version, self._weights.fetch(version)))

    def evaluation_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._evaluator.state()

    def finish(self) -> None:
        """Cuts an evaluation short, where the run is to stop."""
        self._evaluator.stop()

    @override
    def stop(self, timeout_s: float) -> None:
        self._weights.close()
        super().stop(timeout_s)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        doing = self._evaluator.doing or self.doing
        return ComponentStatus(self.state, doing, float(self._evaluator.steps), facts=self._facts())

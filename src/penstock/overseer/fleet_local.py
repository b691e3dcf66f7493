"""Wires a fleet run in one process: learner, buffer and rollout workers as threads, simulators as processes.

`wire_fleet` is the only place that knows every component of it; none of them knows it. Which threads run them, and how
they end, is the `FleetConductor`'s business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.batch import FragmentBatchMaker
from penstock.fleet import CountingSink, FleetReports, RolloutManager, RolloutWorkerWrapper
from penstock.learner import ControlLearner
from penstock.overseer.assembly import make_training_loop, open_replay, restore_parts
from penstock.overseer.control.evaluator import FleetEvaluator
from penstock.overseer.control.policies import make_worker_runner
from penstock.overseer.control.simulators import OnEvent, filmed_pool, require_films, worker_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.kind import RunStart
from penstock.overseer.run_log import RunLog
from penstock.overseer.training_loop import TrainingLoop
from penstock.replay import FRAGMENTS, Ledger, ReplayBuffer, RolloutStore
from penstock.rundir import RunDirectory
from penstock.types import Checkpointable, WeightVersion
from penstock.weights import InProcessBroadcaster


@dataclass(slots=True)
class FleetComponents:
    """Everything that one local fleet run consists of."""

    learner: ControlLearner
    manager: RolloutManager
    evaluator: FleetEvaluator
    ledger: Ledger
    store: RolloutStore
    buffer: ReplayBuffer
    weights: InProcessBroadcaster
    loop: TrainingLoop

    @property
    def checkpointables(self) -> dict[str, Checkpointable]:
        """What travels in a checkpoint beside the learner and the statistics."""
        return {"evaluator": self.evaluator, "replay": self.buffer}


def wire_fleet(
    config: FleetRunConfig,
    directory: RunDirectory,
    log: RunLog,
    start: RunStart,
    on_event: OnEvent,
    on_step: Callable[[int, Mapping[str, float]], None],
    save: Callable[[int], None],
) -> FleetComponents:
    """Makes the components of a fleet run and connects them; nothing is started.

    Raises:
        ConfigError: the store's place cannot be used, or packages for films are missing.
    """
    require_films(config)
    learner = ControlLearner(start.policy, config.learner, config.steps, config.seed)
    if start.checkpoint is not None:
        learner.restore_arrays(start.checkpoint.learner_arrays)
    replay = open_replay(
        config.replay.buffer_config(),
        directory,
        start.lineage,
        FRAGMENTS,
        FragmentBatchMaker(config.replay.order, config.replay.max_samples),
        steps=config.steps,
        keep_checkpoints=config.overseer.keep_checkpoints,
        on_damage=log.damage,
    )
    buffer = replay.buffer
    assert isinstance(buffer, ReplayBuffer)  # there are no tickets
    weights = InProcessBroadcaster()
    evaluator = FleetEvaluator(config, start.policy, log.metrics, on_event)

    reports = FleetReports(config.fleet.stats_window)
    sink = CountingSink(buffer, reports.note_delivery)
    make_worker = _WorkerMaker(config, directory, start.lineage, learner, sink, weights, on_event)
    manager = RolloutManager(
        config.fleet, make_worker, broadcaster=weights, on_event=on_event, reports=reports,
        max_restarts=config.overseer.max_restarts, restart_window_s=config.overseer.restart_window_s,
    )  # fmt: skip
    loop = make_training_loop(
        config.overseer,
        learner,
        learner.named_arrays,
        replay.batches,
        buffer,
        _Publisher(manager, evaluator),
        lineage=start.lineage,
        steps=config.steps,
        progress=lambda: manager.account().started,
        on_step=on_step,
        save=save,
    )
    parts = FleetComponents(learner, manager, evaluator, replay.ledger, replay.store, buffer, weights, loop)
    statistics = {"statistics": manager.statistics}
    states = None if start.checkpoint is None else start.checkpoint.states
    restore_parts(parts.checkpointables | statistics, buffer, states, start.lineage)
    return parts


@dataclass(frozen=True, slots=True)
class _WorkerMaker:
    """Makes incarnations of rollout workers, with the learner's weights of that moment."""

    config: FleetRunConfig
    directory: RunDirectory
    lineage: int
    learner: ControlLearner
    sink: CountingSink
    weights: InProcessBroadcaster
    on_event: OnEvent

    def __call__(self, name: str, incarnation: int) -> RolloutWorkerWrapper:
        config, on_event, number = self.config, self.on_event, int(name.rpartition("-")[2])
        version = WeightVersion(self.lineage, self.learner.step)
        runner = make_worker_runner(self.learner.policy, config, number, version, incarnation)
        runner.compile()
        worker = f"{name}.{self.lineage}"  # every life of a run has workers of its own, with fragments of their own
        pool = worker_pool(config, number, self.lineage, incarnation, on_event)
        filmed = filmed_pool(pool, config, self.directory, f"{worker}-{incarnation}", on_event)
        return RolloutWorkerWrapper(
            worker, incarnation, config.fleet, filmed or pool, runner, self.sink, self.weights, on_event=on_event,
            on_batch=(filmed.note,) if filmed else (),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Publisher:
    """New weights go to the workers, and to the evaluator that may want them."""

    manager: RolloutManager
    evaluator: FleetEvaluator

    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        self.manager.update_model(version, arrays)
        self.evaluator.offer(version, arrays)

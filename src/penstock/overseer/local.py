"""The local launcher: wires all components of one run in one process, without Ray.

`wire` is the only place that knows every component; none of them knows it. Weights go by reference, rollouts
through the rollout storage and its receiver. Which threads run them, and how they end, is the `Conductor`'s business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.curriculum import Curriculum, CurriculumEvent
from penstock.environments import Environment
from penstock.inference import EngineContext, InferenceEngine
from penstock.learner import Learner
from penstock.model.language import named_arrays, with_named_arrays
from penstock.overseer.assembly import (
    Replay,
    TicketRules,
    config_error_for,
    make_batch_makers,
    make_training_loop,
    open_replay,
    restore_parts,
)
from penstock.overseer.config import RunConfig
from penstock.overseer.kind import RunStart
from penstock.overseer.language.evaluator import Evaluator
from penstock.overseer.run_log import RunLog
from penstock.overseer.training_loop import TrainingLoop
from penstock.replay import (
    LANGUAGE,
    Ledger,
    PacedReplayBuffer,
    RolloutReceiver,
    RolloutStorage,
    RolloutStore,
    TicketIssuer,
    open_rollout_storage,
)
from penstock.rollout import RolloutManager, RolloutWorker
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer
from penstock.types import Checkpointable, RolloutGroup, WeightVersion
from penstock.weights import InProcessBroadcaster

WORKER_ID = "rollout-worker-0"


@dataclass(slots=True)
class Components:
    """Everything that one local run consists of."""

    tokenizer: Tokenizer
    learner: Learner
    engine: InferenceEngine
    curriculum: Curriculum
    manager: RolloutManager
    evaluator: Evaluator
    issuer: TicketIssuer
    ledger: Ledger
    store: RolloutStore
    buffer: PacedReplayBuffer
    stop_prefetch: Callable[[float], None]
    storage: RolloutStorage
    receiver: RolloutReceiver
    worker: RolloutWorker
    loop: TrainingLoop

    @property
    def checkpointables(self) -> dict[str, Checkpointable]:
        """What travels in a checkpoint beside the learner."""
        return {
            "curriculum": self.curriculum,
            "evaluator": self.evaluator,
            "issuer": self.issuer,
            "replay": self.buffer,
        }


def wire(
    config: RunConfig,
    directory: RunDirectory,
    log: RunLog,
    start: RunStart,
    environments: dict[str, Environment],
    on_step: Callable[[int, Mapping[str, float]], None],
    save: Callable[[int], None],
) -> Components:
    """Makes the components of a run and connects them; nothing is started.

    Raises:
        ConfigError: a place for files cannot be used.
    """
    learner = Learner(start.policy, config.learner, config.steps)
    if start.checkpoint is not None:
        learner.restore_arrays(start.checkpoint.learner_arrays)
    version = WeightVersion(start.lineage, learner.step)
    engine = InferenceEngine(start.policy, version, start.codec, config.inference)
    curriculum = Curriculum(config.curriculum)
    wiring = _Wiring(config, directory, log, start, environments)
    manager = wiring.manager(curriculum, engine)
    replay = wiring.replay(curriculum, manager)
    buffer, issuer = replay.buffer, replay.issuer
    assert isinstance(buffer, PacedReplayBuffer) and issuer is not None  # there are rules for tickets
    storage = wiring.storage()
    receiver = RolloutReceiver(storage, buffer, buffer if config.rollout.storage.kind == "file" else None)
    weights = InProcessBroadcaster()
    evaluator = Evaluator(
        manager,
        log.metrics,
        lambda lesson_id, failure: log.event("evaluation_failed", lesson=lesson_id, error=str(failure)),
    )
    worker = wiring.worker(manager, issuer, storage, weights, evaluator)
    loop = make_training_loop(
        config.overseer,
        learner,
        lambda: named_arrays(learner.decoder),
        replay.batches,
        buffer,
        weights,
        lineage=start.lineage,
        steps=config.steps,
        progress=lambda: (
            engine.stats()["inference/tokens_total"],
            worker.groups_finished,
            worker.groups_failed,
            receiver.groups_received,
        ),
        on_step=on_step,
        save=save,
    )
    parts = Components(
        start.codec, learner, engine, curriculum, manager, evaluator, issuer, replay.ledger, replay.store,
        buffer, replay.stop_prefetch, storage, receiver, worker, loop,
    )  # fmt: skip
    wiring.restore(parts)
    return parts


@dataclass(frozen=True, slots=True)
class _Wiring:
    """What every part of `wire` needs to know."""

    config: RunConfig
    directory: RunDirectory
    log: RunLog
    start: RunStart
    environments: dict[str, Environment]

    def manager(self, curriculum: Curriculum, engine: InferenceEngine) -> RolloutManager:
        """Of environments, whose tokens the engine makes."""
        config, decoder = self.config, self.start.policy

        def set_weights(version: WeightVersion, arrays: Mapping[str, Any]) -> None:
            engine.set_weights(version, with_named_arrays(decoder, arrays))

        return RolloutManager(
            curriculum,
            EngineContext(engine, self.start.codec),
            config.seed,
            self.start.lineage,
            self.environments,
            set_weights,
            partial(engine.stop, config.overseer.stop_timeout_s),
            self.tell,
        )

    def tell(self, event: CurriculumEvent) -> None:
        """Logs what the curriculum did."""
        self.log.event(event.kind, lesson=event.lesson_id, reason=event.reason)

    def replay(self, curriculum: Curriculum, manager: RolloutManager) -> Replay:
        """What stores rollouts, counts them, and asks for more."""
        config, log, lineage = self.config, self.log, self.start.lineage

        def on_group(group: RolloutGroup) -> None:
            manager.update_training_stats(group)
            log.group(group)

        def group_size_of(lesson_id: str) -> int:
            return manager.group_size(lesson_id) if lesson_id in config.curriculum.lessons else 0

        return open_replay(
            config.replay,
            self.directory,
            lineage,
            LANGUAGE,
            make_batch_makers(config, {environment.name for environment in self.environments.values()}),
            steps=config.steps,
            keep_checkpoints=config.overseer.keep_checkpoints,
            tickets=TicketRules(config.seed, curriculum, group_size_of),
            on_group=on_group,
            on_damage=log.damage,
        )

    def storage(self) -> RolloutStorage:
        """Through which rollouts reach the buffer."""
        config = self.config.rollout.storage
        with config_error_for("rollout.storage.path", config.path or self.directory.path):
            return open_rollout_storage(
                config,
                self.directory.path / "rollout_storage",
                lambda source, reason: self.log.event("rollouts_quarantined", source=source, reason=reason),
                new_run=self.start.checkpoint is None,
            )

    def worker(
        self,
        manager: RolloutManager,
        issuer: TicketIssuer,
        storage: RolloutStorage,
        weights: InProcessBroadcaster,
        evaluator: Evaluator,
    ) -> RolloutWorker:
        """The run's only one."""
        config, log = self.config, self.log
        return RolloutWorker(
            WORKER_ID,
            manager,
            issuer,
            storage.writer(WORKER_ID),
            weights,
            config.rollout,
            concurrency=config.concurrency,
            lockstep=config.replay.synchronous,
            evaluate=evaluator,
            log_samples=log.samples,
            on_failure=lambda ticket, reason: log.event("group_failed", ticket=ticket.ticket_id, reason=reason),
        )

    def restore(self, parts: Components) -> None:
        """Brings all parts but the learner to where the checkpoint was, where there is one."""
        checkpoint = self.start.checkpoint
        states = None if checkpoint is None else checkpoint.states
        restore_parts(parts.checkpointables, parts.buffer, states, self.start.lineage)
        for event in parts.curriculum.restored_events if checkpoint is not None else ():
            self.tell(event)

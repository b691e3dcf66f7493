"""Wires what every run has, whatever it trains and wherever its components run: replay, and its checkpoints.

The only place where a store, its ledger and a buffer are made (the training loop is made in `trainer`). Pure wiring:
nothing is started, and JAX is not loaded. A place that cannot be written to is an error that names its key. Not
covered: what makes experience, and what one kind of policy has beside that.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.batch import BatchMaker, make_batch_maker
from penstock.overseer.component import Settings
from penstock.overseer.config import RunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.replay import (
    Ledger,
    OpenAdmission,
    PacedReplayBuffer,
    ReplayBuffer,
    ReplayBufferConfig,
    ReplayDataLoader,
    RolloutStore,
    SampledBatches,
    TicketIssuer,
    TicketRules,
)
from penstock.replay.history import ExperienceFormat
from penstock.types import Clock, ConfigError, RolloutGroup, fold


def make_batch_makers(config: RunConfig, environments: Collection[str]) -> list[BatchMaker]:
    """The run's batch makers: one for each environment that has its own, and one for the others.

    Raises:
        ConfigError: ``replay.batch_makers`` names an environment that the run does not have, or
            ``learner.loss.module`` is none.
    """
    replay, learner = config.replay, config.learner
    unknown = sorted(replay.batch_makers.keys() - set(environments))
    if unknown:
        raise ConfigError(
            f"replay.batch_makers names {', '.join(unknown)}: no such environment; this run has "
            f"{', '.join(sorted(environments))}"
        )
    advantage = learner.loss.estimator()
    return [
        make_batch_maker(
            maker,
            advantage=advantage,
            max_tokens=learner.row_length,
            max_samples=replay.max_samples,
            ordered=replay.synchronous,
            allow_truncated_sampling=learner.allow_truncated_sampling,
            seed=fold(config.seed, "batch maker", name or ""),
            environment_name=name,
        )
        for name, maker in [(None, replay.batch_maker), *replay.batch_makers.items()]
    ]


@contextmanager
def config_error_for(key: str, place: object) -> Iterator[None]:
    """A place that cannot be used is bad input.

    Raises:
        ConfigError: whatever the system refused inside, told by its key.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: {place} cannot be used: {error}; name a place that can be written") from error


@dataclass(frozen=True, slots=True)
class Replay:
    """What a run has of replay.

    Attributes:
        store: Files of experience and batches.
        ledger: Counts every group's fate.
        buffer: Holds what waits for the learner.
        batches: Forms the learner's batches.
        issuer: Hands out tickets; None where experience comes unasked.
    """

    store: RolloutStore
    ledger: Ledger
    buffer: ReplayBuffer | PacedReplayBuffer
    batches: ReplayDataLoader | SampledBatches
    issuer: TicketIssuer | None

    def stop_prefetch(self, timeout_s: float) -> None:
        """Forms no batch ahead any more, where it did."""
        if isinstance(self.batches, ReplayDataLoader):
            self.batches.stop(timeout_s)


class LocalBatches:
    """The learner's side of replay in its own process, as `penstock.replay.RemoteBatches` is in another.

    Implements `penstock.types.BatchSource`, and what a training loop commits to.

    Args:
        replay: Gives batches, and hears of updates.
        states: Gives what else belongs into the checkpoint, by name; called while the buffer stands still.
    """

    def __init__(self, replay: Replay, states: Callable[[], Mapping[str, Any]]) -> None:
        self._replay = replay
        self._states = states
        self.next_batch, self.peek = replay.batches.next_batch, replay.batches.peek
        self.finish_update = replay.buffer.finish_update
        self.set_current_step = replay.buffer.set_current_step

    def expect_digests(self, step: int, digests: Mapping[str, str]) -> None:
        """Version `step`, which is about to be offered, has arrays with these digests."""
        buffer, issuer = self._replay.buffer, self._replay.issuer
        assert isinstance(buffer, PacedReplayBuffer) and issuer is not None  # of others nobody asks for digests
        buffer.digests.expect_digests(issuer.lineage, step, digests)

    def checkpoint_states(self, step: int, timeout_s: float) -> dict[str, Any]:
        """Of the boundary before update `step`: ``replay``, and what else there is."""
        with self._replay.buffer.boundary():
            return {**self._states(), "replay": self._replay.buffer.state()}

    def checkpoint_saved(self, step: int) -> None:
        """That checkpoint is there."""
        self._replay.buffer.checkpoint_saved()

    def stop(self) -> None:
        """Ends every wait with `Stopped`."""
        self._replay.buffer.close()


def open_replay(
    ctx: ComponentContext,
    settings: Settings[Any],
    limits: ReplayBufferConfig,
    experience: ExperienceFormat,
    makers: BatchMaker[Any, Any] | Sequence[BatchMaker[Any, Any]],
    *,
    tickets: TicketRules | None = None,
    clock: Clock = time.time,
    on_group: Callable[[RolloutGroup[Any]], None] | None = None,
    writing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Replay:
    """Opens a run's store and ledger, and the buffer over them.

    Args:
        ctx: Of the component; the run's log gets the event `files_damaged`.
        settings: The run, with its config, directory and lineage; no batch is formed for an update after its last.
        limits: Pace, freshness and files.
        experience: How records become rows.
        makers: Form the batches.
        tickets: None where experience comes unasked.
        clock: Unix seconds.
        on_group: Given each group that is trainable.
        writing: Entered around each write.

    Raises:
        ConfigError: the store's place cannot be used.
    """
    config, directory, lineage = settings.config, settings.directory, settings.lineage

    def on_damage(place: str, reason: str) -> None:
        ctx.event("files_damaged", path=place, reason=reason)

    store = RolloutStore(directory, limits.store, clock, experience, on_damage=on_damage, writing=writing)
    with config_error_for("replay.store.url", limits.store.url or directory.path):
        ledger = store.open_ledger(lineage)
    common: Any = {"clock": clock, "keep_checkpoints": config.overseer.keep_checkpoints}
    issuer = None if tickets is None else TicketIssuer(limits, tickets, lineage, ledger, clock)
    if issuer is None:
        admission = OpenAdmission(ledger, lineage, limits.failed_limit)
        buffer = ReplayBuffer(limits, store, makers, admission, **common)
        batches = SampledBatches(buffer, limits.groups_per_batch)
    else:
        buffer = PacedReplayBuffer(limits, store, makers, issuer, **common)
        batches = ReplayDataLoader(buffer, 0 if limits.synchronous else limits.prefetch, config.steps)
    buffer.pool.logs_drops = False
    if on_group is not None:
        buffer.pool.on_group = on_group
    return Replay(store, ledger, buffer, batches, issuer)


def restore_parts(
    parts: Mapping[str, Any], buffer: ReplayBuffer | PacedReplayBuffer, states: Mapping[str, Any] | None, lineage: int
) -> None:
    """Brings the parts beside the learner to where a checkpoint was.

    Args:
        parts: What has a method `restore`, by the name of its state and in the order of restoring.
        buffer: Settles what earlier lives began, where those ended before their first checkpoint.
        states: The checkpoint's; None for a life that begins without one.
        lineage: Of this life of the run.
    """
    if states is not None:
        for name, part in parts.items():
            part.restore(states[name])
    elif lineage:
        buffer.begin_anew()

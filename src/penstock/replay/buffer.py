"""The replay buffer: takes rollouts over, makes them durable, owns freshness, capacity, uses and fates.

The way of a group: delivered → ingested (`intake`) → sealed to a file (`sealing`) → offered to a batch maker, taken
by an update (`outlet`), trained (`stock`). What a checkpoint brings back of it is `restoration`'s. This module holds
the lock, and is what others see.

Two kinds, by admission. A paced buffer (`TicketIssuer`) gives every update its batch: `next_batch`, `finish_update`. An
open one (`OpenAdmission`) takes what arrives and is sampled: `sample`, and `set_current_step` finishes what earlier
updates trained on.

Invariants, tested with random schedules: no rollout is trained before its file has its name, after its
deadline, or more often than `max_samples`; every rollout that was started is in exactly one state; every wait is
bounded and says what it waits for. State is guarded by the admission's condition; files are written outside it.

Not covered: which of the fresh groups make a batch, and with what advantage (`penstock.batch.BatchMaker`).
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.replay.admission import Admission, OpenAdmission
from penstock.replay.config import ReplayBufferConfig
from penstock.replay.disk_space import DiskSpace
from penstock.replay.feed import AnyMaker, MakerFeed
from penstock.replay.freshness import FreshnessRules
from penstock.replay.inspection import Inspector
from penstock.replay.intake import CurriculumHook, Intake
from penstock.replay.issuer import TicketIssuer
from penstock.replay.outlet import NAP_S, Outlet
from penstock.replay.restoration import Restoration
from penstock.replay.room import Room
from penstock.replay.sealing import Sealer
from penstock.replay.stock import Stock
from penstock.replay.store import ExperienceStore
from penstock.replay.tally import Tally
from penstock.replay.upkeep import Upkeep
from penstock.replay.wait_report import describe_stock, describe_wait
from penstock.types import (
    Clock,
    ConfigError,
    NoProgressError,
    RolloutBatch,
    RolloutGroup,
    RunFailed,
    TrainingBatch,
    WeightVersion,
)


class ReplayBuffer:
    """Implements `penstock.types.RolloutSink`, `BatchSource` and `Checkpointable`. Thread-safe.

    Args:
        config: Pace and limits.
        store: Where groups and batches are written.
        makers: Choose batches; several must be bound to different environments.
        admission: Who may deliver: a `TicketIssuer`, or None to take whatever arrives.
        clock: Unix seconds.
        curriculum_hook: Called once per ingested group, in ticket order at staleness zero, the lock held.
        keep_checkpoints: How many checkpoints stay: what one of them may need is not deleted.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        store: ExperienceStore,
        makers: AnyMaker | Sequence[AnyMaker],
        admission: Admission | None = None,
        clock: Clock = time.time,
        curriculum_hook: CurriculumHook | None = None,
        keep_checkpoints: int = 1,
    ) -> None:
        self._config = config
        self._store = store
        self._admission = OpenAdmission(store.open_ledger()) if admission is None else admission
        self._ledger = self._admission.ledger
        self._clock = clock
        self._changed = self._admission.changed
        rules = FreshnessRules(config)
        feed = MakerFeed(makers)
        self._stock = Stock(config, rules, self._admission, feed, Tally(config))
        self._space, self._space_to_merge = (DiskSpace(config.store.full_disk_s) for _ in range(2))
        self._sealer = Sealer(store, self._changed, config.store.buffer_size, config.store.seal_s, clock, self._space)
        inspector = Inspector(rules, self._survives)
        self._intake = Intake(
            config, rules, self._admission, self._stock, self._sealer, inspector, clock, curriculum_hook
        )
        self._upkeep = Upkeep(self._tend, min(5.0, config.store.seal_s), self._fail)
        if self._admission.paced and config.max_waiting is not None:
            raise ConfigError(f"replay.max_waiting is {config.max_waiting}, but tickets limit what waits: leave it out")
        self._room = Room(config.max_waiting, config.max_waiting_s)
        self._outlet = Outlet(
            config, store, self._admission, self._stock, self._sealer, self._seal, self._room, self._space, clock,
            self._numbers,
        )  # fmt: skip
        self._restoration = Restoration(
            store, self._admission, self._stock, self._intake, self._survives, clock, keep_checkpoints
        )
        self._admission.attach(self._intake)

    # --- rollouts in ---------------------------------------------------------------------------------------------

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """See `RolloutSink.add_batches`. Groups of unknown or aborted tickets are refused and counted.

        An open buffer with `max_waiting` waits before each group until there is room for it.

        Raises:
            Stopped: the buffer was closed.
            NoProgressError: there was no room for too long; the groups before were taken.
            InvalidRolloutError: in an open buffer, a group whose ids do not fit; nothing of that group was taken.
        """
        for batch in batches:
            for group in batch.groups:
                with self._changed:
                    self._room.wait(self._changed, self._count_unused, self._describe_wait)
                    seal = self._take(group)
                self._after_taking(seal)

    def offer(self, group: RolloutGroup[Any]) -> bool:
        """Takes one group if there is room for it now; never waits for any.

        Returns:
            Whether it was taken.

        Raises:
            Stopped: the buffer was closed.
            InvalidRolloutError: in an open buffer, a group whose ids do not fit.
            DuplicateGroupError: in an open buffer, it was taken before.
        """
        with self._changed:
            if self._room.most is not None and self._count_unused() >= self._room.most:
                return False
            seal = self._take(group)
        self._after_taking(seal)
        return True

    def _take(self, group: RolloutGroup[Any]) -> bool:
        """With the lock held; whether its file is due."""
        self._admission.raise_if_over()
        self._intake.deliver(group)
        if self._admission.paced or self._stock.waiting.rollouts >= self._outlet.awaited:
            self._changed.notify_all()
        return self._config.synchronous and self._admission.paced and self._admission.next_turn() is None

    def _after_taking(self, seal: bool) -> None:
        if seal or self._sealer.due:
            self._seal()
        self._upkeep.start()

    @property
    def most_waiting(self) -> int | None:
        """How many rollouts may wait for their first batch; None means any number."""
        return self._room.most

    @property
    def has_room(self) -> bool:
        """Whether the next group would be taken at once."""
        with self._changed:
            return self._room.most is None or self._count_unused() < self._room.most

    def _count_unused(self) -> int:
        """How many rollouts wait for their first batch, without those that have grown stale meanwhile."""
        self._admission.raise_if_over()
        if self._room.most is not None and self._stock.unused >= self._room.most:
            self._stock.drop_expired(self._clock())
        return self._stock.unused

    def is_stored(self, group_id: str) -> bool:
        """Whether a group that was delivered is in a file by now, or was refused."""
        with self._changed:
            return not (self._intake.holds(group_id) or self._sealer.holds(group_id))

    def flush(self) -> None:
        """Writes the file of what waits for one, which is kept for the next try where the disk refuses (OSError)."""
        self._seal()

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`; called before that is published. Drops what is no longer fresh.

        In an open buffer the batches of updates before `step` are trained with that.

        Raises:
            RunFailed: the step lies behind the present one.
        """
        with self._changed:
            if step < self._stock.current:
                raise RunFailed(f"current step {step} lies behind {self._stock.current}: versions only grow")
            self._stock.current = step
            self._admission.advance_to(step)
            if not self._admission.paced:
                self._stock.finish_before(step)
                self._ledger.check()
            self._stock.drop_expired(self._clock())
            self._intake.expire_claims(self._clock())
            self._changed.notify_all()
        if self._sealer.due:
            self._seal()

    # --- batches out ---------------------------------------------------------------------------------------------

    def sample(
        self, batch_size: int, environment_name: str | None = None, step: int | None = None
    ) -> TrainingBatch[Any] | None:
        """A batch of an open buffer, its file written; None where too little is fresh.

        Args:
            batch_size: In the batch maker's units; several makers share it evenly.
            environment_name: Ask only the maker of this environment.
            step: The update that will train on it; None means the one that turns the current version into the next.

        Raises:
            ConfigError: `batch_size` is below 1.
            RunFailed: the buffer is paced: its updates have one batch each, from `next_batch`.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: a batch has at least 1")
        if self._admission.paced:
            raise RunFailed("a paced replay buffer is not sampled: ask next_batch for the batch of an update")
        return self._outlet.sample(batch_size, environment_name, step)

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """See `BatchSource.next_batch`; `finish_update` must follow once the update was applied.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the source was closed.
            RunFailed: no batch can come: too many groups were filtered, or failed.
        """
        batch = self.await_batch(step, timeout_s, lambda: True)
        if batch is None:
            raise NoProgressError(f"no batch within {timeout_s:.1f} s: {self.waiting_for()}")
        return batch

    def await_batch(
        self, step: int, timeout_s: float, wanted: Callable[[], bool], batch_size: int | None = None
    ) -> TrainingBatch[Any] | None:
        """`next_batch` for whoever works ahead of the learner; None at the timeout.

        Args:
            step: The update.
            timeout_s: Longest wait.
            wanted: Whether the learner waits for it by now. Only then is a file written before it is due, and are
                stragglers aborted. Call `wake` when it changes.
            batch_size: Of an open buffer, in the batch maker's units; None means `groups_per_batch`.
        """
        return self._outlet.wait(step, timeout_s, wanted, batch_size)

    def try_next_batch(self, step: int) -> TrainingBatch[Any] | None:
        """`next_batch` without waiting; None where the batch cannot be formed yet."""
        return self.await_batch(step, 0.0, lambda: True)

    def wake(self) -> None:
        """Those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def finish_update(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used, and their fates follow."""
        with self._changed:
            if not self._stock.is_training(step):
                raise RunFailed(f"update {step} cannot be finished: it has no batch, or was finished before")
            self._stock.finish(step)
            self._admission.finish(step)
            self._changed.notify_all()

    def _seal(self) -> None:
        self._sealer.seal(self._offer)
        self._upkeep.wake()

    def _tend(self) -> None:
        """What the upkeep thread does: files that are due although nobody comes by, and merging."""
        if self._sealer.due:
            self._sealer.seal(self._offer)
        self._ledger.write_backlog()
        if self._space_to_merge.retry_in_s:
            return
        try:
            self._store.maintain()
            self._space_to_merge.note_written()
        except OSError as error:
            self._space_to_merge.note(error)

    def _offer(self, group_ids: list[str]) -> None:
        for group_id in group_ids:
            self._stock.offer(group_id)
        self._changed.notify_all()

    def _fail(self, failure: RunFailed) -> None:
        with self._changed:
            self._admission.end_with(failure)

    # --- what others see ------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of this moment."""
        return {**self._numbers(), **self._store.metrics()}

    def _numbers(self) -> dict[str, float]:
        with self._changed:
            counts = self._ledger.snapshot()
            return {
                "replay/size": float(self._stock.waiting.rollouts),
                "replay/in_flight": float(counts["in_flight"]),
                "replay/outstanding_groups": float(len(self._admission.outstanding)),
                "replay/late_deliveries": float(self._admission.late_deliveries),
                "replay/overdue_groups": float(self._sealer.overdue),
                **self._room.metrics(),
                **{f"replay/ledger/{state}": float(count) for state, count in counts.items()},
            }

    def waiting_for(self) -> str:
        """In words, what the next update waits for."""
        with self._changed:
            return self._describe_wait()

    def _describe_wait(self) -> str:
        if isinstance(self._admission, TicketIssuer):
            words = describe_wait(self._admission, self._config.groups_per_batch, self._clock())
        else:
            words = describe_stock(self._stock, len(self._sealer), self._config)
        full = self._space.describe() or self._ledger.space.describe()
        return f"{full}; {words}" if full else words

    def check_ledger(self) -> None:
        """Compares the ledger with what is actually held, id by id; done at every checkpoint.

        Raises:
            RunFailed: they differ; the message names rollouts.
        """
        with self._changed:
            self._ledger.check({*self._stock.ids(), *self._intake.unsettled_ids()})

    @contextmanager
    def boundary(self) -> Generator[None, None, None]:
        """Nothing is admitted, ingested or told to the curriculum inside: take checkpoint states in it.

        All that was delivered is stored; a full disk is waited for before.

        Raises:
            RunFailed: the disk has been full for too long.
        """
        while True:
            with self._sealer.paused():
                self._seal()
                if not len(self._sealer) and self._ledger.write_backlog():
                    yield
                    return
            time.sleep(min(max(self._space.retry_in_s, self._ledger.space.retry_in_s), NAP_S))

    def close(self) -> None:
        """Wakes everybody with `Stopped`; what was delivered is still stored.

        A disk that refuses it now ends the run with that error instead; the groups' tickets are issued again.
        """
        self._admission.close()
        try:
            self._sealer.seal(self._offer, blocking=False)  # it may run in a signal handler, and must not wait
        except Exception as error:  # whatever a disk or a remote store raises, the others must be stopped too
            self._fail(RunFailed(f"the last rollouts could not be stored: {error}"))
        finally:
            self._upkeep.stop()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See `Checkpointable.state`, an open buffer's admission included; what was decided is flushed first."""
        with self.boundary():
            self.check_ledger()
            return self._restoration.state()

    def checkpoint_saved(self) -> None:
        """The checkpoint of the last `state` has its name: files that nobody can need any more may go."""
        self._restoration.checkpoint_saved()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Checkpointable.restore`: rebuilds ledger and stock from the run's files (`recovery`).

        A ticket issuer, with the new lineage, must have been restored before, and nothing may have been generated.

        Raises:
            CheckpointError: the state does not fit.
            RunFailed: what the files say and what was brought back differ.
        """
        with self._changed:
            self._restoration.restore(state)
            self.check_ledger()

    def begin_anew(self) -> None:
        """`restore` where the run ended before its first checkpoint: all that earlier lives started is settled."""
        with self._changed:
            self._restoration.begin_anew()

    def _survives(self, version: WeightVersion) -> bool:
        return self._store.lineages.survives(version, self._admission.lineage)

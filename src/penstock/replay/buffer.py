"""The open replay buffer: takes whatever arrives, and is sampled.

The way of simulators, which cannot be paused, and of scripts. Freshness and capacity decide what becomes of what
arrives; `set_current_step` finishes what earlier updates trained on. Runs whose generators can be paused use
`penstock.replay.PacedReplayBuffer`.

Not covered: storage, freshness, uses and fates (`training_pool`); which of the fresh groups make a batch, and with what
advantage (`penstock.batch.BatchMaker`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.replay.config import ReplayBufferConfig
from penstock.replay.history import History
from penstock.replay.ledger import RECHECK_S, Ledger, TicketKey, rollout_ids
from penstock.replay.recovery import CheckpointView, abandon_earlier, restore_pool
from penstock.replay.store import ExperienceStore
from penstock.replay.training_pool import FormedBatch, TrainingPool
from penstock.replay.waiting_groups import AnyMaker
from penstock.types import (
    CheckpointError,
    Clock,
    ConfigError,
    DuplicateGroupError,
    Experience,
    InvalidRolloutError,
    NoProgressError,
    RolloutBatch,
    RolloutGroup,
    RunDirectoryError,
    RunFailed,
    Ticket,
    TrainingBatch,
)

_REMEMBERED = 65_536
"""Ids of groups by which an open buffer knows a second delivery: more than any storage holds back."""


class OpenAdmission:
    """Takes every group that arrives. Implements `Checkpointable`. Thread-safe.

    Groups are counted as started when they arrive, unless their generator said so before (`start`).

    Args:
        ledger: Learns what was started.
        lineage: Of this life of the run.
        most_refused: So many groups in a row of which nothing may be trained end the run; None: no limit.

    Attributes:
        changed: The lock of the buffer that it belongs to.
    """

    def __init__(self, ledger: Ledger, lineage: int = 0, most_refused: int | None = None) -> None:
        self.changed = ledger.changed
        self.ledger = ledger
        self.lineage = lineage
        self._most_refused = most_refused
        self._refused_in_a_row = 0
        self._started: dict[str, int] = {}
        self._admitted = 0
        self._restored_admitted = 0
        self._recent: dict[str, None] = {}
        self._lost: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()

    @property
    def update(self) -> int:
        """The current version: fates are logged with it."""
        return self.ledger.update

    def start(self, group_id: str, lesson_id: str, size: int) -> None:
        """A generator has begun a group: its rollouts are in flight from now on.

        Raises:
            DuplicateGroupError: a group of that id was started before.
            RunDirectoryError: the directory holds an earlier life that was not restored.
        """
        with self.changed:
            self._open(group_id, lesson_id, size)
            self._started[group_id] = size

    def fail(self, group_id: str, fate: Literal["invalid", "aborted"], reason: str) -> None:
        """A group that was announced will not come.

        Raises:
            InvalidRolloutError: no group of that id was announced, or it has come.
        """
        with self.changed:
            size = self._started.pop(group_id, None)
            if size is None:
                raise InvalidRolloutError(f"group_id {group_id!r} is not in flight: announce it with start first")
            self.ledger.settle(rollout_ids(group_id, size), fate, self.update, reason)

    def accept(self, group: RolloutGroup[Experience]) -> int:
        """Opens a delivered group, unless it was started before; returns how many rollouts were started for it.

        Raises:
            InvalidRolloutError: its rollouts are not named ``<group_id>/<index>``.
            DuplicateGroupError: it was delivered before.
            RunDirectoryError: the directory holds an earlier life that was not restored.
        """
        with self.changed:
            if group.group_id in self._lost:
                size = self._lost.pop(group.group_id)
                self.ledger.reopen(group.group_id, size, self.update)
                return size
            size = self._started.pop(group.group_id, None)
            if size is not None:
                return size
            expected = rollout_ids(group.group_id, len(group.rollouts))
            named = [rollout.rollout_id for rollout in group.rollouts]
            if not group.group_id or named != expected:
                raise InvalidRolloutError(
                    f"group_id is {group.group_id!r} and its rollouts are {named[:3]}: name the group, and its "
                    "rollouts <group_id>/0, <group_id>/1, … with Rollout.with_metadata"
                )
            self._open(group.group_id, group.rollouts[0].lesson_id, len(expected))
            return len(expected)

    def note_ingested(self, failure: str | None) -> None:
        """Ends the run, saying why, where nothing of too many groups in a row may be trained.

        Args:
            failure: Why nothing of the last group may be trained; None where something may.
        """
        self._refused_in_a_row = 0 if failure is None else self._refused_in_a_row + 1
        if failure and self._most_refused is not None and self._refused_in_a_row >= self._most_refused:
            self.changed.end_with(
                RunFailed(
                    f"nothing of the last {self._refused_in_a_row} deliveries may be trained; the last: {failure}: "
                    "look at what the simulators and the policy give"
                )
            )

    def in_flight(self) -> list[str]:
        """Ids of rollouts that `start` was called for and that have not arrived."""
        return [name for group_id, size in self._started.items() for name in rollout_ids(group_id, size)]

    def was_started(self, key: TicketKey) -> bool:
        """Whether a group had been started before the checkpoint that was restored."""
        return key[0] in self._known

    def recover(self, started: Sequence[str], lost: Mapping[str, int]) -> None:
        """What the run's files say.

        Args:
            started: The groups that were ever started, in order.
            lost: Those of which nothing was stored, and their sizes: a storage may deliver them again.
        """
        self._known = frozenset(started[: self._restored_admitted])
        self._admitted = len(started)
        self._recent = dict.fromkeys(started[-_REMEMBERED:])
        self._lost = dict(lost)

    def end_recovery(self) -> None:
        """The ids of the earlier life are not needed any more."""
        self._known = frozenset()

    def state(self) -> dict[str, Any]:
        """The version, and how many groups were started: JSON-serialisable."""
        with self.changed:
            return {"lineage": self.lineage, "update": self.update, "admitted": self._admitted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes `state` back.

        Raises:
            CheckpointError: it does not fit.
        """
        try:
            with self.changed:
                self.ledger.update, self._admitted = int(state["update"]), int(state["admitted"])
                self._restored_admitted = self._admitted
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of admission does not fit: {error!r}") from error

    def _open(self, group_id: str, lesson_id: str, size: int) -> None:
        if self.ledger.past:
            raise RunDirectoryError(
                f"{self.ledger.past} holds the rollouts of an earlier life: choose another directory, or go on with "
                "that life by ReplayBuffer.restore and the next lineage"
            )
        if group_id in self._recent or self.ledger.is_live(group_id):
            raise DuplicateGroupError(f"group_id {group_id!r} was used before: every group needs an id of its own")
        self._recent[group_id] = None
        if len(self._recent) > 2 * _REMEMBERED:
            self._recent = dict.fromkeys(list(self._recent)[-_REMEMBERED:])
        ticket = Ticket(group_id, lesson_id, 0, 0, deadline_step=self.update, admitted_step=self.update)
        self.ledger.count_started(ticket, size)
        self.ledger.open(group_id, size)
        self._admitted += 1


@dataclass(slots=True)
class AdmissionLimit:
    """Back-pressure: a delivery waits for room, for a limited time, instead of having others evicted.

    Who gets the room first is left open; those who wait all look, and each takes one group's worth.

    Attributes:
        most: Rollouts that may wait for their first batch; None means any number.
        timeout_s: Longest wait of one delivery.
        clock: Monotonic seconds.
    """

    most: int | None
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    _since: dict[object, float] = field(default_factory=dict[object, float])
    _ended_s: float = 0.0

    def wait(self, changed: threading.Condition, waiting: Callable[[], int], describe: Callable[[], str]) -> None:
        """Returns when fewer than `most` rollouts wait.

        Args:
            changed: Held; told whenever `waiting` may have fallen.
            waiting: How many wait now; raises where the buffer is over.
            describe: Says in words what the learner does, for the error.

        Raises:
            NoProgressError: at the timeout.
        """
        if self.most is None or waiting() < self.most:
            return
        token, started = object(), self.clock()
        self._since[token] = started
        try:
            while (count := waiting()) >= self.most:
                left_s = started + self.timeout_s - self.clock()
                if left_s <= 0:
                    raise NoProgressError(
                        f"a delivery waited {self.timeout_s:g} s (replay.max_waiting_s): {count} rollouts wait for "
                        f"their first batch, as many as may (replay.max_waiting = {self.most}), and the learner takes "
                        f"none; {describe()}"
                    )
                changed.wait(min(left_s, RECHECK_S))
        finally:
            self._ended_s += self.clock() - self._since.pop(token)

    def metrics(self) -> dict[str, float]:
        """``replay/blocked_senders`` now, and ``replay/blocked_s`` so far, theirs included; none without a limit."""
        if self.most is None:
            return {}
        now = self.clock()
        waited_s = self._ended_s + sum(now - since for since in self._since.values())
        return {"replay/blocked_senders": float(len(self._since)), "replay/blocked_s": waited_s}


class ReplayBuffer:
    """Implements `penstock.types.RolloutSink`, `BatchSource` and `Checkpointable`. Thread-safe.

    Args:
        config: Limits.
        store: Where groups and batches are written.
        makers: Choose batches; several must be bound to different environments.
        admission: Counts what was started; None makes one over a ledger of the store.
        clock: Unix seconds.
        keep_checkpoints: How many checkpoints stay: what one of them may need is not deleted.

    Attributes:
        pool: The groups.

    Raises:
        ConfigError: `admission` is a `TicketIssuer`.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        store: ExperienceStore,
        makers: AnyMaker | Sequence[AnyMaker],
        admission: OpenAdmission | None = None,
        clock: Clock = time.time,
        keep_checkpoints: int = 1,
    ) -> None:
        self._admission = _checked(OpenAdmission(store.open_ledger()) if admission is None else admission)
        self._changed = self._admission.changed
        self._groups_per_batch = config.groups_per_batch
        self._limit = AdmissionLimit(config.max_waiting, config.max_waiting_s)
        self._awaited = 0
        self.pool = TrainingPool(config, store, makers, self._admission.ledger, clock, keep_checkpoints)

    # --- rollouts in ---------------------------------------------------------------------------------------------

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """Takes groups one by one; with `max_waiting`, waits before each until there is room for it.

        Raises:
            Stopped: the buffer was closed.
            NoProgressError: there was no room for too long; the groups before were taken.
            InvalidRolloutError: a group's ids do not fit; nothing of that group was taken.
            DuplicateGroupError: a group was taken before.
        """
        for group in [group for batch in batches for group in batch.groups]:
            with self._changed:
                self.pool.sealer.await_entry()
                self._limit.wait(self._changed, self._count_unused, self.waiting_for)
                self._take(group)
            self.pool.sealer.note_delivery()
            self.pool.log_drops(at_once=False)

    def offer(self, group: RolloutGroup[Any]) -> bool:
        """Takes one group if there is room for it now; never waits for any.

        Returns:
            Whether it was taken.

        Raises:
            Stopped: the buffer was closed.
            InvalidRolloutError: its ids do not fit.
            DuplicateGroupError: it was taken before.
        """
        with self._changed:
            self.pool.sealer.await_entry()
            if not self.has_room:
                return False
            self._take(group)
        self.pool.sealer.note_delivery()
        self.pool.log_drops(at_once=False)
        return True

    @property
    def most_waiting(self) -> int | None:
        """How many rollouts may wait for their first batch; None means any number."""
        return self._limit.most

    @property
    def has_room(self) -> bool:
        """Whether the next group would be taken at once."""
        with self._changed:
            return self._limit.most is None or self._count_unused() < self._limit.most

    def _take(self, group: RolloutGroup[Any]) -> None:
        self._changed.raise_if_over()
        size = self._admission.accept(group)
        expected_ids = rollout_ids(group.group_id, size)
        self._admission.note_ingested(self.pool.ingest(group, expected_ids, group.rollouts[0].lesson_id))
        if self.pool.waiting.rollouts >= self._awaited:
            self._changed.notify_all()

    def _count_unused(self) -> int:
        """How many rollouts wait for their first batch, without those that have grown stale meanwhile."""
        self._changed.raise_if_over()
        if self._limit.most is not None and self.pool.unused >= self._limit.most:
            self.pool.drop_expired()
        return self.pool.unused

    def is_stored(self, group_id: str) -> bool:
        """Whether a group that was delivered is in a file by now, or was refused."""
        return not self.pool.sealer.holds(group_id)

    def flush(self) -> None:
        """Writes the file of what waits for one, which is kept for the next try where the disk refuses (OSError)."""
        self.pool.sealer.seal()

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`; called before that is published.

        The batches of updates before `step` are trained with that, and what is no longer fresh is dropped.

        Raises:
            RunFailed: the step lies behind the present one.
        """
        with self._changed:
            self.pool.advance_to(step)
            self.pool.ledger.update = step
            self.pool.finish_before(step)
            self.pool.drop_expired()
        self.pool.log_drops(at_once=True)
        if self.pool.sealer.due:
            self.pool.sealer.seal()

    # --- batches out ---------------------------------------------------------------------------------------------

    def sample(
        self, batch_size: int, environment_name: str | None = None, step: int | None = None
    ) -> TrainingBatch[Any] | None:
        """A batch, its file written; None where too little is fresh.

        Args:
            batch_size: In the batch maker's units; several makers share it evenly.
            environment_name: Ask only the maker of this environment.
            step: The update that will train on it; None means the one that turns the current version into the next.

        Raises:
            ConfigError: `batch_size` is below 1.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: a batch has at least 1")
        self._changed.raise_if_over()
        self.pool.sealer.seal()
        with self._changed:
            self._changed.raise_if_over()
            formed = self._form(self.pool.current if step is None else step, batch_size, environment_name)
        return None if formed is None else self.pool.write_intent(formed, 0.0)

    def await_batch(
        self, step: int, timeout_s: float, wanted: Callable[[], bool], batch_size: int | None = None
    ) -> TrainingBatch[Any] | None:
        """A batch for whoever works ahead of the learner; None at the timeout.

        Args:
            step: The update.
            timeout_s: Longest wait.
            wanted: Whether the learner waits for it by now. Only then is a file written before it is due. Call `wake`
                when it changes.
            batch_size: In the batch maker's units; None means `groups_per_batch`.
        """
        size = batch_size or self._groups_per_batch

        def form(hurry: bool) -> FormedBatch | None:
            self._awaited = size  # with fewer rollouts no arrival need wake anybody
            return self._form(step, size)

        return self.pool.wait_for_batch(form, lambda: self.pool.waiting.rollouts >= size, wanted, timeout_s)

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of update `step`, of `groups_per_batch` units; `finish_update` must follow once it was applied.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the buffer was closed.
            RunFailed: no batch can come.
        """
        batch = self.await_batch(step, timeout_s, lambda: True)
        if batch is None:
            raise NoProgressError(f"no batch within {timeout_s:.1f} s: {self.waiting_for()}")
        return batch

    def peek(self, step: int) -> None:
        """None: a batch is formed when it is asked for."""

    def try_next_batch(self, step: int) -> TrainingBatch[Any] | None:
        """`next_batch` without waiting; None where too little is fresh."""
        return self.await_batch(step, 0.0, lambda: True)

    def wake(self) -> None:
        """Those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def finish_update(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used, and their fates follow.

        Raises:
            RunFailed: it has no batch, or was finished before.
        """
        self.pool.finish(step)

    def _form(self, step: int, batch_size: int, env_name: str | None = None) -> FormedBatch | None:
        self.pool.drop_expired(step)
        self.pool.judge_arrivals()
        formed = self.pool.draw(step, self.pool.makers.even_shares(batch_size, env_name))
        if formed is not None:
            formed.metrics.update(self._numbers())
            if self._limit.most is not None:
                self._changed.notify_all()
        return formed

    # --- what others see -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of this moment."""
        return {**self._numbers(), **self.pool.store.metrics()}

    def _numbers(self) -> dict[str, float]:
        with self._changed:
            no_tickets = {"replay/outstanding_groups": 0.0, "replay/late_deliveries": 0.0}
            return {**self.pool.metrics(), **no_tickets, **self._limit.metrics()}

    def waiting_for(self) -> str:
        """In words, what the next update waits for."""
        with self._changed:
            pool = self.pool
            return "; ".join(
                [
                    *filter(None, [pool.describe_disk(), pool.drops.commonest()]),
                    f"an open buffer with {pool.waiting.rollouts} fresh rollouts, of which {pool.unused} were in no "
                    "batch yet",
                    f"an update needs {self._groups_per_batch}",
                    f"in no file yet: {len(pool.sealer)} groups",
                    f"the learner is at version {pool.current}",
                ]
            )

    def check_ledger(self) -> None:
        """Compares the ledger with what is actually held, id by id; done at every checkpoint.

        Raises:
            RunFailed: they differ; the message names rollouts.
        """
        with self._changed:
            self.pool.check_ledger(self._admission.in_flight())

    def close(self) -> None:
        """Wakes everybody with `Stopped`; what was delivered is still stored.

        A disk that refuses it now ends the run with that error instead.
        """
        self.pool.close()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def boundary(self) -> AbstractContextManager[None]:
        """Nothing is ingested or told to the curriculum inside: take checkpoint states in it.

        All that was delivered is stored; a full disk is waited for before.

        Raises:
            RunFailed: the disk has been full for too long.
        """
        return self.pool.sealer.boundary()

    def state(self) -> dict[str, Any]:
        """What belongs into a checkpoint, JSON-serialisable; what was decided is flushed to the disk first."""
        with self.boundary():
            self.check_ledger()
            return {**self.pool.state(self.pool.groups()), "admission": self._admission.state()}

    def checkpoint_saved(self) -> None:
        """The checkpoint of the last `state` has its name: files that nobody can need any more may go."""
        self.pool.checkpoint_saved()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Rebuilds ledger and pool from the run's files and a `state`; nothing may have been generated.

        Raises:
            CheckpointError: the state does not fit.
            RunFailed: what the files say and what was brought back differ.
        """
        admission = self._admission

        def view(history: History, alive: Mapping[str, set[str]]) -> CheckpointView:
            admission.recover(list(history.tickets()), history.lost())
            return CheckpointView(
                admission.update, {}, alive, _key_of, admission.was_started, self.pool.survives, has_tickets=False
            )

        with self._changed:
            admission.restore(state.get("admission", {}))
            restore_pool(self.pool, state, view)
            admission.end_recovery()
            self.check_ledger()

    def begin_anew(self) -> None:
        """`restore` where the run ended before its first checkpoint: all that earlier lives started is settled."""
        abandon_earlier(self.pool, _key_of)


def _checked(admission: OpenAdmission) -> OpenAdmission:
    if not isinstance(admission, OpenAdmission):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"a ReplayBuffer takes what arrives, and was given a {type(admission).__name__}: with tickets use "
            "PacedReplayBuffer(config, store, makers, issuer, …)"
        )
    return admission


def _key_of(group_id: str) -> TicketKey:
    """Groups are never generated again, so the id says it all."""
    return (group_id, 0)

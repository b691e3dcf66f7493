"""Admission: whose rollouts the buffer takes, and by when they must be trained.

Two ways. A `penstock.replay.TicketIssuer` admits groups against the staleness budget before they are generated: the
way of language policies. `OpenAdmission` takes whatever arrives, and leaves it to freshness and capacity what becomes
of it: the way of simulators, which cannot be paused, and of scripts. The buffer knows no difference but this contract.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from penstock.replay.ledger import Ledger, rollout_ids
from penstock.replay.outstanding import Outstanding, OutstandingTickets
from penstock.types import (
    CheckpointError,
    DuplicateGroupError,
    Experience,
    InvalidRolloutError,
    PenstockError,
    RolloutGroup,
    RunDirectoryError,
    RunFailed,
    Stopped,
    Ticket,
)

_REMEMBERED = 65_536
"""Ids of groups by which an open buffer knows a second delivery: more than any storage holds back."""

TicketKey = tuple[str, int]
"""Lesson and index: the same group in every lineage."""


class Claim(NamedTuple):
    """A sealed group of an earlier life that stands for a ticket drawn again."""

    group_id: str
    size: int
    deadline_step: int


class TicketListener(Protocol):
    """What admission asks of the replay buffer; always called with `Admission.changed` held."""

    def claim(self, lesson_id: str, index: int, deadline_step: int) -> Claim | None:
        """A group that need not be generated again; it counts as delivered."""
        ...

    def advance(self) -> None:
        """A ticket was resolved: groups whose turn has come may be ingested."""
        ...


class Changes(threading.Condition):
    """A condition that others can listen to without waiting in it.

    Attributes:
        on_news: Called at every `notify_all`, with the lock held; it must return at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_news: Callable[[], None] = _nothing

    def notify_all(self) -> None:
        """See `threading.Condition.notify_all`."""
        super().notify_all()
        self.on_news()


def _nothing() -> None:
    """Nobody listens."""


class Admission(ABC):
    """Who may deliver. State is guarded by `changed`, which the buffer shares; only `close` takes it itself.

    Attributes:
        changed: Notified of all news.
        ledger: Learns what was started.
        lineage: Of this life of the run.
        update: The next update without a batch; in an open buffer the current version.
        late_deliveries: Groups that were refused because nobody may deliver them (any more).
        outstanding: Groups with a deadline.
    """

    def __init__(self, ledger: Ledger, lineage: int, groups_per_batch: int) -> None:
        self.changed = Changes()
        self.ledger = ledger
        self.lineage = lineage
        self.update = 0
        self.late_deliveries = 0
        self.outstanding = OutstandingTickets(groups_per_batch)
        self._closed = False
        self._failure: PenstockError | None = None

    @property
    @abstractmethod
    def paced(self) -> bool:
        """Whether groups have deadlines, and updates their batches."""

    @abstractmethod
    def attach(self, listener: TicketListener) -> None:
        """Whom to tell of resolved tickets."""

    @abstractmethod
    def receive(self, group: RolloutGroup[Experience]) -> Outstanding | None:
        """The place of a delivered group; None where it is refused."""

    @abstractmethod
    def next_turn(self) -> str | None:
        """At staleness zero: the first ticket in issue order that is neither ingested nor gone."""

    @abstractmethod
    def is_stuck(self) -> bool:
        """Whether nothing more can come before the next batch is taken."""

    @abstractmethod
    def free(self, group_id: str, failure: str | None = None) -> None:
        """A group is gone before its first use; with a reason where it failed."""

    @abstractmethod
    def take(self, step: int, group_ids: Collection[str]) -> dict[str, float]:
        """Update `step` has its batch, with the first use of these groups; returns metrics of the pace."""

    @abstractmethod
    def finish(self, step: int) -> None:
        """Update `step` was applied."""

    @abstractmethod
    def advance_to(self, step: int) -> None:
        """The learner holds version `step`."""

    @abstractmethod
    def key_of(self, group_id: str) -> TicketKey:
        """Names a group across the lives of a run."""

    @abstractmethod
    def was_drawn(self, key: TicketKey) -> bool:
        """Whether the checkpoint that was restored knew the group, alive or settled."""

    @abstractmethod
    def restored_tickets(self) -> dict[TicketKey, str]:
        """Outstanding at the checkpoint that was restored: ids by key."""

    @abstractmethod
    def recover(self, started: Sequence[str], lost: Mapping[str, int]) -> None:
        """What the run's files say.

        Args:
            started: The groups that were ever started, in order.
            lost: Those of which nothing was stored, and their sizes: the dead life had them in flight.
        """

    @abstractmethod
    def readmit(self) -> None:
        """Admits what the checkpoint left outstanding again."""

    def announced(self) -> Iterable[tuple[str, int]]:
        """Groups and sizes that generators have begun without a place among the outstanding."""
        return ()

    def note_accepted(self) -> None:
        """A delivered group may be trained, or what is left of it."""
        return

    def note_refused(self, failure: str) -> None:
        """Nothing of a delivered group may be trained."""
        return

    def raise_if_over(self) -> None:
        """Raises `Stopped` after `close`, and what `end_with` was given after that."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Stopped("the replay buffer is closed")

    def end_with(self, failure: PenstockError) -> None:
        """Every wait ends with this error."""
        self._failure = self._failure or failure
        self.changed.notify_all()

    def close(self) -> None:
        """Ends every wait, now and later, with `Stopped`."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()


class OpenAdmission(Admission):
    """Takes every group that arrives. Implements `Checkpointable`.

    Groups are counted as started when they arrive, unless their generator said so before (`start`).

    Args:
        ledger: Learns what was started.
        lineage: Of this life of the run.
        most_refused: So many groups in a row of which nothing may be trained end the run; None: no limit.
    """

    def __init__(self, ledger: Ledger, lineage: int = 0, most_refused: int | None = None) -> None:
        super().__init__(ledger, lineage, groups_per_batch=1)
        self._most_refused = most_refused
        self._refused_in_a_row = 0
        self._started: dict[str, int] = {}
        self._admitted = 0
        self._restored_admitted = 0
        self._recent: dict[str, None] = {}
        self._lost: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()

    @property
    def paced(self) -> bool:
        """Never."""
        return False

    def attach(self, listener: TicketListener) -> None:
        """Nothing here is ever resolved later."""

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

    def receive(self, group: RolloutGroup[Experience]) -> Outstanding | None:
        """Opens the group, unless it was started before.

        Raises:
            InvalidRolloutError: its rollouts are not named ``<group_id>/<index>``.
            DuplicateGroupError: it was delivered before.
        """
        if group.group_id in self._lost:
            size = self._lost.pop(group.group_id)
            self.ledger.reopen(group.group_id, size, self.update)
        else:
            size = self._started.pop(group.group_id, None)
        lesson_id = group.rollouts[0].lesson_id
        if size is None:
            size = len(group.rollouts)
            expected = rollout_ids(group.group_id, size)
            named = [rollout.rollout_id for rollout in group.rollouts]
            if not group.group_id or named != expected:
                raise InvalidRolloutError(
                    f"group_id is {group.group_id!r} and its rollouts are {named[:3]}: name the group, and its "
                    "rollouts <group_id>/0, <group_id>/1, … with Rollout.with_metadata"
                )
            self._open(group.group_id, lesson_id, size)
        ticket = Ticket(group.group_id, lesson_id, 0, 0, deadline_step=self.update, admitted_step=self.update)
        return Outstanding(ticket, size, self._admitted, "running")

    def note_accepted(self) -> None:
        """Whatever was refused before, something comes."""
        self._refused_in_a_row = 0

    def note_refused(self, failure: str) -> None:
        """Where nothing else comes, the run ends and says why."""
        self._refused_in_a_row += 1
        if self._most_refused is not None and self._refused_in_a_row >= self._most_refused:
            self.end_with(
                RunFailed(
                    f"nothing of the last {self._refused_in_a_row} deliveries may be trained; the last: {failure}: "
                    "look at what the simulators and the policy give"
                )
            )

    def announced(self) -> Iterable[tuple[str, int]]:
        """What `start` was called for and has not arrived."""
        return self._started.items()

    def next_turn(self) -> str | None:
        """There is no order."""
        return None

    def is_stuck(self) -> bool:
        """Never: whatever comes is taken."""
        return False

    def free(self, group_id: str, failure: str | None = None) -> None:
        """There are no places to free."""

    def take(self, step: int, group_ids: Collection[str]) -> dict[str, float]:
        """There is no pace to measure."""
        return {}

    def finish(self, step: int) -> None:
        """There are no tickets."""

    def advance_to(self, step: int) -> None:
        """Fates are logged with the current version."""
        self.update = step

    def key_of(self, group_id: str) -> TicketKey:
        """Groups are never generated again, so the id says it all."""
        return (group_id, 0)

    def was_drawn(self, key: TicketKey) -> bool:
        """Whether the group was started before the checkpoint."""
        return key[0] in self._known

    def restored_tickets(self) -> dict[TicketKey, str]:
        """None: what was in flight is lost with its simulator."""
        return {}

    def recover(self, started: Sequence[str], lost: Mapping[str, int]) -> None:
        """Learns which groups were started before the checkpoint, and which a storage may deliver again."""
        self._known = frozenset(started[: self._restored_admitted])
        self._admitted = len(started)
        self._recent = dict.fromkeys(started[-_REMEMBERED:])
        self._lost = dict(lost)

    def readmit(self) -> None:
        """Nothing is outstanding; the ids of the earlier life are not needed any more."""
        self._known = frozenset()

    def state(self) -> dict[str, Any]:
        """See `Checkpointable.state`."""
        with self.changed:
            return {"lineage": self.lineage, "update": self.update, "admitted": self._admitted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Checkpointable.restore`."""
        try:
            with self.changed:
                self.update, self._admitted = int(state["update"]), int(state["admitted"])
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

"""The outstanding tickets and the arithmetic of their deadlines. No locks, no clocks, no files.

With u the next update whose batch has not been taken, v the version that serves, B groups per batch and a budget of
S updates, at most ``(S + 1 − (u − v))·B`` tickets are outstanding, and each new one is due at ``d = v + S``. Hence
``N(≤ d) ≤ (d − u + 1)·B`` for every deadline d, N(≤ d) being the outstanding tickets due at d or before: exactly what
the updates u … d can train. An update keeps that true for its successor if it takes at least

    owed(d) = max(0, min(B, N(≤ d) − (d − u)·B))

of the tickets due by d, for every d. Taking only what is due *now* is not enough: with B = 1 and S = 2, two slow
groups due at update 2 can be overtaken by a fast third one at update 1, and then update 2 cannot train both. With
this rule nothing ever has to be trained after its deadline, nor dropped for its age.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.types import Ticket

Phase = Literal["pending", "running", "returned", "delivered", "waiting", "trainable"]
"""`pending`: admitted, not handed out yet; `running`: at a generator; `returned`: its generator died, and the next one
that asks gets it; `delivered`: back, but an earlier ticket's turn comes first (staleness zero); `waiting`: ingested,
its file not written yet; `trainable`: durable."""


@dataclass(slots=True)
class Outstanding:
    """One admitted group that no update has taken.

    Attributes:
        ticket: Its ticket.
        size: Rollouts that were started for it.
        number: Counts admissions; the issue order.
        phase: How far it is.
        since: When it was handed out last; None before.
        holder: Who generates it, where the one who asked for it gave a name; None otherwise.
        overtaken: How many groups that were admitted later were trained before it.
    """

    ticket: Ticket
    size: int
    number: int
    phase: Phase = "pending"
    since: float | None = None
    overtaken: int = 0
    holder: str | None = None


@dataclass(slots=True)
class _Due:
    outstanding: int = 0
    trainable: int = 0


class OutstandingTickets:
    """Admitted groups in issue order, counted by deadline.

    Args:
        groups_per_batch: B.
    """

    def __init__(self, groups_per_batch: int) -> None:
        self._groups_per_batch = groups_per_batch
        self._entries: dict[str, Outstanding] = {}
        self._due: dict[int, _Due] = {}
        self.trainable = 0

    def __len__(self) -> int:
        """How many are outstanding."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Outstanding]:
        """In issue order."""
        return iter(self._entries.values())

    def get(self, ticket_id: str) -> Outstanding | None:
        """The entry of a ticket; None where it is not outstanding (any more)."""
        return self._entries.get(ticket_id)

    def add(self, entry: Outstanding) -> None:
        """Admits a group that is not trainable yet."""
        self._entries[entry.ticket.ticket_id] = entry
        self._due.setdefault(entry.ticket.deadline_step, _Due()).outstanding += 1

    @property
    def ingested(self) -> int:
        """How many are back and judged, their file written or not."""
        return sum(entry.phase in ("waiting", "trainable") for entry in self)

    def set_trainable(self, ticket_id: str) -> None:
        """Its group is durable."""
        entry = self._entries[ticket_id]
        entry.phase = "trainable"
        self._due[entry.ticket.deadline_step].trainable += 1
        self.trainable += 1

    def remove(self, ticket_id: str) -> Outstanding:
        """Its group was taken, dropped or failed: the place is free."""
        entry = self._entries.pop(ticket_id)
        deadline = entry.ticket.deadline_step
        due = self._due[deadline]
        due.outstanding -= 1
        if entry.phase == "trainable":
            due.trainable -= 1
            self.trainable -= 1
        if not due.outstanding:
            del self._due[deadline]
        return entry

    def missing(self, update: int) -> list[tuple[int, int]]:
        """(d, how many more groups due by d must become trainable before update `update` can be formed)."""
        return [(deadline, owed - trainable) for deadline, owed, trainable in self._owed(update) if owed > trainable]

    def must_take(self, update: int) -> list[str]:
        """Trainable groups that this update has to take, whatever else it picks: earliest deadlines first.

        Deadlines that any B groups satisfy are left out, so that this is empty unless something is pressing.
        """
        owed = [owed for deadline, owed, _ in self._owed(update) if deadline < max(self._due)]
        count = max(owed, default=0)
        ready = [entry for entry in self if entry.phase == "trainable"] if count else []
        ready.sort(key=lambda entry: entry.ticket.deadline_step)
        return [entry.ticket.ticket_id for entry in ready[:count]]

    def fits(self, deadline_step: int, update: int) -> bool:
        """Whether one more group due at `deadline_step` leaves every group trainable in time."""
        if deadline_step < update:
            return False
        outstanding = 1
        for deadline in sorted({*self._due, deadline_step}):
            outstanding += self._due[deadline].outstanding if deadline in self._due else 0
            if deadline >= deadline_step and outstanding > (deadline - update + 1) * self._groups_per_batch:
                return False
        return True

    def _owed(self, update: int) -> Iterator[tuple[int, int, int]]:
        """(d, owed(d), trainable groups due by d) for every deadline d, ascending."""
        outstanding = trainable = 0
        for deadline in sorted(self._due):
            outstanding += self._due[deadline].outstanding
            trainable += self._due[deadline].trainable
            later = max(0, deadline - update) * self._groups_per_batch
            yield deadline, max(0, min(self._groups_per_batch, outstanding - later)), trainable

"""The ticket issuer: admits groups against the staleness budget, so that no work is begun that cannot be used.

`penstock.replay.outstanding` states the rule. At staleness zero tickets are admitted a whole cohort at a time: only
when the engine serves the newest version and every group of the cohort before is trainable or gone, so that the
lessons drawn cannot depend on the order in which groups finished. The issuer shares one condition (`changed`)
with the replay buffer: what one of them decides, the other never sees half-done.

Not covered: what becomes of a delivered group; that is the buffer's.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from penstock.replay.config import ReplayConfig
from penstock.replay.draws import TicketDraws
from penstock.replay.ledger import Ledger, rollout_ids
from penstock.replay.outstanding import Outstanding, OutstandingTickets
from penstock.types import CheckpointError, Clock, LessonChooser, PenstockError, RunFailed, Stopped, Ticket


class Claim(NamedTuple):
    """A sealed group of an earlier life that stands for a ticket drawn again."""

    group_id: str
    size: int
    deadline_step: int


class TicketListener(Protocol):
    """What the issuer asks of the replay buffer; always called with `TicketIssuer.changed` held."""

    def claim(self, lesson_id: str, index: int, deadline_step: int) -> Claim | None:
        """A group that need not be generated again; it counts as delivered."""
        ...

    def advance(self) -> None:
        """A ticket was resolved: groups whose turn has come may be ingested."""
        ...


class TicketIssuer:
    """Implements `penstock.types.TicketSource` and `Checkpointable`.

    Args:
        config: Pace and limits.
        run_seed: Seeds derive from it.
        lineage: Of this life of the run.
        lesson_chooser: The curriculum.
        ledger: Learns what was started and what failed.
        group_size_of: Rollouts per group of a lesson.
        clock: Unix seconds, for the age of running groups.
    """

    def __init__(
        self,
        config: ReplayConfig,
        run_seed: int,
        lineage: int,
        lesson_chooser: LessonChooser,
        ledger: Ledger,
        group_size_of: Callable[[str], int],
        clock: Clock = time.time,
    ) -> None:
        self.changed = threading.Condition()
        self.lineage = lineage
        self.update = 0
        self.outstanding = OutstandingTickets(config.groups_per_batch)
        self.late_deliveries = 0
        self.failed_since_batch = 0
        self.last_failure = ""
        self._config = config
        self._draws = TicketDraws(run_seed, lineage, lesson_chooser)
        self._ledger = ledger
        self._group_size_of = group_size_of
        self._clock = clock
        self._listener: TicketListener | None = None
        self._serving: int | None = None
        self._pending: deque[str] = deque()
        self._turns: deque[str] = deque()
        self._in_training: dict[int, list[Ticket]] = {}
        self._admissions = 0
        self._closed = False
        self._failure: PenstockError | None = None

    # --- for rollout workers -----------------------------------------------------------------------------------

    def acquire(self, most: int, timeout_s: float) -> list[Ticket]:
        """See `TicketSource.acquire`. Nothing is admitted before `set_serving_step` was called once."""
        limit = time.monotonic() + timeout_s
        with self.changed:
            while True:
                self.raise_if_over()
                while not self._pending and self._admit(most):
                    pass  # claimed groups take places too, and may free them at once
                if self._pending:
                    return self._hand_out(most)
                remaining = limit - time.monotonic()
                if remaining <= 0:
                    return []
                self.changed.wait(remaining)

    def set_serving_step(self, step: int) -> None:
        """See `TicketSource.set_serving_step`.

        Raises:
            RunFailed: the version is older than the last one, or the learner has not made it yet.
        """
        with self.changed:
            if step > self.update or (self._serving is not None and step < self._serving):
                raise RunFailed(
                    f"version {step} cannot serve: version {self._serving} did, and the learner is at {self.update}"
                )
            self._serving = step
            self.changed.notify_all()

    def fail(self, ticket: Ticket, fate: Literal["invalid", "aborted"], reason: str) -> None:
        """See `TicketSource.fail`. A ticket that was aborted meanwhile is counted as a late delivery."""
        with self.changed:
            entry = self.outstanding.get(ticket.ticket_id)
            if entry is None or entry.phase != "running":
                self.late_deliveries += 1
                return
            self._ledger.settle(rollout_ids(ticket.ticket_id, entry.size), fate, self.update, reason)
            self.free(ticket.ticket_id, f"lesson {ticket.lesson_id}: {reason}")
            self._advance()

    def close(self) -> None:
        """Ends every wait, now and later, with `Stopped`."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    # --- for the replay buffer, with `changed` held ------------------------------------------------------------

    def attach(self, listener: TicketListener) -> None:
        """Whom to tell of resolved tickets."""
        self._listener = listener

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

    def next_turn(self) -> str | None:
        """At staleness zero: the first ticket in issue order that is neither ingested nor gone."""
        while self._turns:
            entry = self.outstanding.get(self._turns[0])
            if entry is not None and entry.phase in ("pending", "running", "delivered"):
                return self._turns[0]
            self._turns.popleft()
        return None

    def free(self, ticket_id: str, failure: str | None = None) -> None:
        """Gives a group's place to a fresh ticket; with a reason where the group failed."""
        self.outstanding.remove(ticket_id)
        if failure is not None:
            self.failed_since_batch += 1
            self.last_failure = failure
            if self.failed_since_batch >= self._config.failed_limit:
                self.end_with(
                    RunFailed(
                        f"{self.failed_since_batch} groups failed while update {self.update} waited for its "
                        f"batch (replay.max_failed_groups_per_batch); the last: {failure}"
                    )
                )
        self.changed.notify_all()

    def abort_stragglers(self, waited_since: float) -> None:
        """Aborts running groups that the next update has waited for too long; no more than it needs gone."""
        now = self._clock()
        for deadline, _ in self.outstanding.missing(self.update):
            for entry in [e for e in self.outstanding if e.ticket.deadline_step <= deadline]:
                still = dict(self.outstanding.missing(self.update)).get(deadline, 0)
                if still and entry.phase == "running" and entry.since is not None:
                    waited = now - max(waited_since, entry.since)
                    if waited >= self._config.straggler_timeout_s:
                        reason = f"update {self.update} waited {waited:.1f} s for it"
                        self.fail(entry.ticket, "aborted", reason)

    def take(self, group_ids: Collection[str]) -> int:
        """The next update has its batch; returns how many of its groups overtook one that is still outstanding."""
        taken = [self.outstanding.remove(group_id) for group_id in group_ids]
        oldest = next(iter(self.outstanding), None)
        self._in_training[self.update] = [entry.ticket for entry in taken]
        self.update += 1
        self.failed_since_batch = 0
        self.changed.notify_all()
        return 0 if oldest is None else sum(entry.number > oldest.number for entry in taken)

    def finish(self, step: int) -> None:
        """Update `step` was applied: its tickets are done."""
        del self._in_training[step]

    def adopt(self, ticket: Ticket, claim: Claim) -> None:
        """A restored ticket needs no new group: a sealed one of an earlier life stands for it."""
        entry = self.outstanding.get(ticket.ticket_id)
        assert entry is not None and entry.phase == "pending"
        entries = list(self.outstanding)
        for each in entries:  # rebuilt, because a group keeps its id and the issue order must not change
            self.outstanding.remove(each.ticket.ticket_id)
        self._pending.clear()
        self._turns.clear()
        for each in entries:
            if each is entry:
                self._register(_renamed(ticket, claim), claim.size, "delivered")
            else:
                self._register(each.ticket, each.size, each.phase)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See `Checkpointable.state`: counters, and the outstanding tickets in issue order.

        Groups of a batch whose update is not finished count as outstanding.
        """
        with self.changed:
            unfinished = [ticket for step in sorted(self._in_training) for ticket in self._in_training[step]]
            tickets = unfinished + [entry.ticket for entry in self.outstanding]
            return {
                "lineage": self.lineage,
                "update": min(self._in_training, default=self.update),
                **self._draws.state(),
                "outstanding": [
                    [t.ticket_id, t.lesson_id, t.index, t.admitted_step, t.deadline_step] for t in tickets
                ],
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Checkpointable.restore`: outstanding tickets are pending again, under this lineage's ids."""
        try:
            with self.changed:
                self.update = int(state["update"])
                self._draws.restore(state)
                for _, lesson_id, index, admitted_step, deadline_step in state["outstanding"]:
                    ticket = self._draws.ticket(lesson_id, index, admitted_step, deadline_step)
                    self._register(ticket, self._group_size_of(lesson_id))
                self.changed.notify_all()
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the ticket issuer's state does not fit: {error!r}") from error

    def was_drawn(self, lesson_id: str, index: int) -> bool:
        """Whether that ticket was drawn before the checkpoint."""
        return self._draws.was_drawn(lesson_id, index)

    # --- admission ---------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """How many tickets may be outstanding now."""
        if self._serving is None:
            return 0
        behind = self.update - self._serving
        return max(0, (self._config.staleness_budget + 1 - behind) * self._config.groups_per_batch)

    @property
    def serving_step(self) -> int | None:
        """The version that the engine serves; None before the first."""
        return self._serving

    def _room(self, most: int) -> int:
        room = max(0, self.limit - len(self.outstanding))
        if not self._config.synchronous:
            return min(most, room)
        settled = self.outstanding.trainable == len(self.outstanding)
        return room if settled else 0

    def _admit(self, most: int) -> int:
        """Draws tickets into `pending`; returns how many were admitted, claimed ones included."""
        drawn = [self._draws.draw() for _ in range(self._room(most))]
        claims = 0
        for lesson_id, index in drawn:  # all lessons are drawn before any claimed group may change them
            assert self._serving is not None
            deadline = self._serving + self._config.staleness_budget
            ticket = self._draws.ticket(lesson_id, index, self._serving, deadline)
            claim = self._listener.claim(lesson_id, index, deadline) if self._listener else None
            if claim is None:
                self._register(ticket, self._group_size_of(lesson_id))
            else:
                claims += 1
                self._register(_renamed(ticket, claim), claim.size, "delivered")
        if claims:
            self._advance()
        return len(drawn)

    def _register(self, ticket: Ticket, size: int, phase: Literal["pending", "delivered"] = "pending") -> None:
        self._admissions += 1
        self.outstanding.add(Outstanding(ticket, size, self._admissions, phase))
        if phase == "pending":
            self._pending.append(ticket.ticket_id)
        if self._config.synchronous:
            self._turns.append(ticket.ticket_id)

    def _hand_out(self, most: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        while self._pending and len(tickets) < most:
            entry = self.outstanding.get(self._pending.popleft())
            if entry is None:
                continue
            entry.phase, entry.since = "running", self._clock()
            self._ledger.count_started(entry.ticket, entry.size)
            self._ledger.open(rollout_ids(entry.ticket.ticket_id, entry.size))
            tickets.append(entry.ticket)
        return tickets

    def _advance(self) -> None:
        if self._listener is not None:
            self._listener.advance()
        self.changed.notify_all()


def _renamed(ticket: Ticket, claim: Claim) -> Ticket:
    return Ticket(
        claim.group_id, ticket.lesson_id, ticket.index, ticket.seed, claim.deadline_step, ticket.admitted_step
    )

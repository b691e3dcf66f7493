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
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

from penstock.replay.config import ReplayConfig
from penstock.replay.draws import TicketDraws
from penstock.replay.ledger import Ledger, rollout_ids
from penstock.replay.outstanding import Outstanding, OutstandingTickets, Phase
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
        group_size_of: Rollouts per group of a lesson; 0 of one that was removed: its tickets do not come back.
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
        self._restored: list[tuple[str, str, int, int, int]] = []
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
                while self._admit(most):
                    pass  # a claimed group may have freed its place at once
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
        for deadline, _ in self.outstanding.missing(self.update):
            for entry, waited in self._stragglers(deadline, waited_since):
                if all(due != deadline for due, _ in self.outstanding.missing(self.update)):
                    break
                self.fail(entry.ticket, "aborted", f"update {self.update} waited {waited:.1f} s for it")

    def _stragglers(self, deadline: int, waited_since: float) -> list[tuple[Outstanding, float]]:
        """Groups due by `deadline` that were waited for too long, oldest first, and for how long."""
        now = self._clock()
        waits = [
            (entry, now - max(waited_since, entry.since))
            for entry in self.outstanding
            if entry.phase == "running" and entry.since is not None and entry.ticket.deadline_step <= deadline
        ]
        return [(entry, waited) for entry, waited in waits if waited >= self._config.straggler_timeout_s]

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

    def readmit(self) -> None:
        """Admits the tickets of the checkpoint again, claiming what an earlier life finished of them."""
        restored, self._restored = self._restored, []
        if sum(self._admit_one(*ticket[1:]) for ticket in restored):
            self._advance()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See `Checkpointable.state`: counters, and the outstanding tickets in issue order.

        Groups of a batch whose update is not finished count as outstanding.
        """
        with self.changed:
            self.readmit()
            unfinished = [ticket for step in sorted(self._in_training) for ticket in self._in_training[step]]
            tickets = unfinished + [entry.ticket for entry in self.outstanding]
            return {
                "lineage": self.lineage,
                "update": min(self._in_training, default=self.update),
                **self._draws.state(),
                "outstanding": [[t.ticket_id, t.lesson_id, t.index, t.admitted_step, t.deadline_step] for t in tickets],
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Checkpointable.restore`: outstanding tickets are pending again, under this lineage's ids."""
        try:
            with self.changed:
                self.update = int(state["update"])
                self._draws.restore(state)
                self._restored = [
                    (str(name), str(lesson_id), int(index), int(admitted_step), int(deadline_step))
                    for name, lesson_id, index, admitted_step, deadline_step in state["outstanding"]
                    if self._group_size_of(str(lesson_id))
                ]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the ticket issuer's state does not fit: {error!r}") from error

    def restored_tickets(self) -> dict[tuple[str, int], str]:
        """The checkpoint's outstanding tickets that were not admitted again yet: ids by lesson and index."""
        return {(lesson_id, index): name for name, lesson_id, index, _, _ in self._restored}

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
        self.readmit()
        serving = self._serving
        if self._pending or serving is None:
            return 0
        drawn = [self._draws.draw() for _ in range(self._room(most))]
        deadline = serving + self._config.staleness_budget
        # All lessons are drawn before a claimed group may change their probabilities.
        if sum(self._admit_one(lesson_id, index, serving, deadline) for lesson_id, index in drawn):
            self._advance()
        return len(drawn)

    def _admit_one(self, lesson_id: str, index: int, admitted_step: int, deadline_step: int) -> bool:
        """Returns whether a group of an earlier life was claimed for it."""
        ticket = self._draws.ticket(lesson_id, index, admitted_step, deadline_step)
        claim = self._listener.claim(lesson_id, index, deadline_step) if self._listener else None
        if claim is None:
            self._register(ticket, self._group_size_of(lesson_id), "pending")
            self._pending.append(ticket.ticket_id)
            return False
        self._register(
            replace(ticket, ticket_id=claim.group_id, deadline_step=claim.deadline_step), claim.size, "delivered"
        )
        return True

    def _register(self, ticket: Ticket, size: int, phase: Phase) -> None:
        self._admissions += 1
        self.outstanding.add(Outstanding(ticket, size, self._admissions, phase))
        if self._config.synchronous:
            self._turns.append(ticket.ticket_id)

    def _hand_out(self, most: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        while self._pending and len(tickets) < most:
            entry = self.outstanding.get(self._pending.popleft())
            assert entry is not None  # only a running group can fail
            entry.phase, entry.since = "running", self._clock()
            self._ledger.count_started(entry.ticket, entry.size)
            self._ledger.open(rollout_ids(entry.ticket.ticket_id, entry.size))
            tickets.append(entry.ticket)
        return tickets

    def _advance(self) -> None:
        if self._listener is not None:
            self._listener.advance()
        self.changed.notify_all()

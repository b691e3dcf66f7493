"""The ticket issuer: admits groups against the staleness budget, so that no work is begun that cannot be used.

`penstock.replay.outstanding` states the rule. At staleness zero tickets are admitted a whole cohort at a time: only
when the engine serves the newest version and every group of the cohort before is trainable or gone, so that the
lessons drawn cannot depend on the order in which groups finished. The issuer's lock (`changed`) is also its buffer's:
what one of them decides, the other never sees half-done.

Lessons come from the curriculum, problems from the lesson's epochs (`penstock.replay.draws`), seeds from names: the
draw of ticket number k depends on the run's seed, k, and the curriculum's probabilities at that moment; a ticket's seed
depends on its lesson and index alone. A group of an earlier life stands for a ticket that is drawn again only where
lesson, index and problem are the same. Overtaking is bounded by the deadlines, so no lesson starves; `PaceMetrics`
shows it, and a lesson that is slow.

Not covered: what becomes of a delivered group; that is the buffer's.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from penstock.replay.config import ReplayBufferConfig
from penstock.replay.draws import Draw, ProblemRules, TicketSampler, parse_ticket_id, place_of
from penstock.replay.ledger import Ledger, TicketKey, rollout_ids
from penstock.replay.outstanding import Outstanding, OutstandingTickets, Phase
from penstock.types import CheckpointError, Clock, LessonChooser, RunFailed, Ticket


class PaceMetrics:
    """Counts batch by batch."""

    def __init__(self) -> None:
        self._last_trained: dict[str, int] = {}

    def record(self, step: int, taken: Sequence[Outstanding], left: Sequence[Outstanding]) -> dict[str, float]:
        """Update `step` has its batch.

        Args:
            step: The update.
            taken: Groups that it trains for the first time.
            left: Groups that stay outstanding, in issue order.

        Returns:
            ``replay/overtakes`` (groups of the batch that passed one which is still outstanding), and for every lesson
            that is concerned ``replay/<lesson>/`` ``groups`` (in the batch), ``overtaken`` (most groups that have
            passed one of its groups) and ``starved_updates`` (since it was trained last, while it has groups).
        """
        for entry in left:
            entry.overtaken += sum(other.number > entry.number for other in taken)
        oldest = left[0].number if left else None
        metrics = {"replay/overtakes": float(sum(oldest is not None and entry.number > oldest for entry in taken))}
        trained = {entry.ticket.lesson_id for entry in taken}
        for lesson_id in sorted(trained.union(entry.ticket.lesson_id for entry in left)):
            mine = [entry for entry in (*taken, *left) if entry.ticket.lesson_id == lesson_id]
            if lesson_id in trained:
                self._last_trained[lesson_id] = step
            since = self._last_trained.setdefault(lesson_id, step - 1)
            metrics[f"replay/{lesson_id}/groups"] = float(sum(entry.ticket.lesson_id == lesson_id for entry in taken))
            metrics[f"replay/{lesson_id}/overtaken"] = float(max(entry.overtaken for entry in mine))
            metrics[f"replay/{lesson_id}/starved_updates"] = float(step - since)
        for lesson_id in self._last_trained.keys() - {entry.ticket.lesson_id for entry in left}:
            del self._last_trained[lesson_id]  # a lesson without groups waits for nothing
        return metrics


class RestoredGroup(NamedTuple):
    """A sealed group of an earlier life that stands for a ticket drawn again."""

    group_id: str
    size: int
    deadline_step: int


@dataclass(frozen=True, slots=True)
class TicketRules:
    """What tickets are drawn by, beside the limits of replay.

    Attributes:
        seed: The run's; seeds of tickets derive from it.
        curriculum: Chooses the lesson of each.
        group_size_of: Rollouts per group of a lesson; 0 of one that was removed: its tickets do not come back.
        may_draw: Whether the curriculum knows all that it has to know before the next lesson is drawn. Notify the
            issuer's `changed` when it does.
        problems: By lesson; those of a lesson without them are selected by the tickets' seeds.
    """

    seed: int
    curriculum: LessonChooser
    group_size_of: Callable[[str], int]
    may_draw: Callable[[], bool] = lambda: True
    problems: Mapping[str, ProblemRules] = field(default_factory=dict[str, ProblemRules])


class TicketIssuer:
    """Implements `penstock.types.TicketSource` and `Checkpointable`. Thread-safe.

    Args:
        config: Pace and limits.
        rules: What tickets are drawn by.
        lineage: Of this life of the run.
        ledger: Learns what was started and what failed.
        clock: Unix seconds, for the age of running groups.

    Attributes:
        changed: The lock, notified of all news.
        ledger: As given; its `update` is the next update without a batch.
        lineage: As given.
        outstanding: Admitted groups that no update has taken.
        late_deliveries: Groups that were refused because their ticket does not run (any more).
        failed_since_batch: Groups that failed since the last batch.
        last_failure: Why the last of them did.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        rules: TicketRules,
        lineage: int,
        ledger: Ledger,
        clock: Clock = time.time,
    ) -> None:
        self.changed = ledger.changed
        self.ledger = ledger
        self.lineage = lineage
        self.outstanding = OutstandingTickets(config.groups_per_batch)
        self.late_deliveries = 0
        self.failed_since_batch = 0
        self.last_failure = ""
        self._config = config
        self._draws = TicketSampler(rules.seed, lineage, rules.curriculum, rules.problems)
        self._group_size_of = rules.group_size_of
        self._clock = clock
        self._may_draw = rules.may_draw
        self._pace = PaceMetrics()
        self._claim: Callable[[Ticket], RestoredGroup | None] = lambda ticket: None
        self._on_resolved: Callable[[], None] = lambda: None
        self._serving: int | None = None
        self._pending: deque[str] = deque()
        self._returned: deque[str] = deque()
        self._turns: deque[str] = deque()
        self._unplaced: deque[Draw] = deque()
        self._restored: list[tuple[str, Draw, int, int]] = []
        self._in_training: dict[int, list[Ticket]] = {}
        self._admissions = 0

    def bind(self, claim: Callable[[Ticket], RestoredGroup | None], on_resolved: Callable[[], None]) -> None:
        """Connects the one buffer that these tickets' groups go to; both are called with the lock held.

        Args:
            claim: A finished group for a ticket, which then counts as delivered; None where it has to be generated.
            on_resolved: A ticket was resolved: groups whose turn has come may be ingested.
        """
        self._claim, self._on_resolved = claim, on_resolved

    @property
    def update(self) -> int:
        """The next update without a batch."""
        return self.ledger.update

    @property
    def last_lesson(self) -> str | None:
        """The lesson of the newest group that was drawn; None before the first of this process."""
        return self._draws.last_lesson

    @property
    def data_changes(self) -> Mapping[str, str]:
        """By lesson, what of its problems was changed since the checkpoint, in words; another epoch begins there."""
        return self._draws.data_changes

    def metrics(self) -> dict[str, float]:
        """``data/…`` numbers of this moment."""
        with self.changed:
            return self._draws.metrics()

    # --- for rollout workers -----------------------------------------------------------------------------------

    def acquire(self, most: int, timeout_s: float) -> list[Ticket]:
        """See `TicketSource.acquire`. Nothing is admitted before `set_serving_step` was called once."""
        limit = time.monotonic() + timeout_s
        with self.changed:
            while True:
                tickets = self.offer(most)
                remaining = limit - time.monotonic()
                if tickets or remaining <= 0:
                    return tickets
                self.changed.wait(remaining)

    def offer(self, most: int, lessons: Collection[str] | None = None, holder: str | None = None) -> list[Ticket]:
        """`acquire` without waiting. What came back from the dead is handed out first.

        Args:
            most: Tickets at once.
            lessons: Only these; tickets of others that were admitted on the way wait for others. None means any.
            holder: Who asks, for `reissue`.

        Raises:
            Stopped: after `close`.
        """
        with self.changed:
            self.changed.raise_if_over()
            while self._admit(most, lessons):
                pass  # a claimed group may have freed its place at once, and another lesson may have been drawn
            return self._hand_out(most, lessons, holder)

    @property
    def available(self) -> int:
        """How many tickets could be handed out now, if every lesson's were asked for."""
        with self.changed:
            return len(self._returned) + len(self._pending) + self._room(self.limit)

    def reissue(self, holder: str) -> list[str]:
        """A holder died: its tickets are handed out again as they are, and are not counted again.

        Returns:
            Their ids, in issue order.
        """
        with self.changed:
            returned = [e for e in self.outstanding if e.phase == "running" and e.holder == holder]
            for entry in returned:
                entry.phase, entry.holder = "returned", None
            self._returned.extend(entry.ticket.ticket_id for entry in returned)
            self.changed.notify_all()
            return [entry.ticket.ticket_id for entry in returned]

    def held_by(self, holder: str) -> list[str]:
        """Ids of the tickets that a holder generates, in issue order."""
        with self.changed:
            return [e.ticket.ticket_id for e in self.outstanding if e.phase == "running" and e.holder == holder]

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
            self.ledger.settle(rollout_ids(ticket.ticket_id, entry.size), fate, self.update, reason)
            self.free(ticket.ticket_id, f"lesson {ticket.lesson_id}: {reason}")
            self._advance()

    # --- for the replay buffer, with `changed` held ------------------------------------------------------------

    def accept(self, group_id: str) -> Outstanding | None:
        """The place of a delivered group; None where its ticket does not run, nor did until its generator died."""
        entry = self.outstanding.get(group_id)
        if entry is not None and entry.phase == "returned":
            self._returned.remove(group_id)
            return entry
        return entry if entry is not None and entry.phase == "running" else None

    def next_turn(self) -> str | None:
        """At staleness zero: the first ticket in issue order that is neither ingested nor gone."""
        while self._turns:
            entry = self.outstanding.get(self._turns[0])
            if entry is not None and entry.phase in ("pending", "running", "returned", "delivered"):
                return self._turns[0]
            self._turns.popleft()
        return None

    def set_trainable(self, group_id: str) -> None:
        """A group that was ingested is durable."""
        entry = self.outstanding.get(group_id)
        if entry is not None and entry.phase == "waiting":
            self.outstanding.set_trainable(group_id)

    def is_stuck(self) -> bool:
        """Nothing can come before the next batch: the newest version serves, all places are taken and trainable."""
        held = len(self.outstanding)
        return self._serving == self.update and held >= self.limit and self.outstanding.trainable == held

    def free(self, group_id: str, failure: str | None = None, finished: bool = False) -> None:
        """Gives a group's place to a fresh ticket.

        Args:
            group_id: The group, which no update will take.
            failure: Why it failed; None where it only had no signal.
            finished: Whether its problem is done with in its epoch all the same.
        """
        ticket = self.outstanding.remove(group_id).ticket
        if failure is None or finished:
            self._draws.finish(ticket)
        else:
            self._draws.fail(ticket, failure)
        if failure is not None:
            self.failed_since_batch += 1
            self.last_failure = failure
            if self.failed_since_batch >= self._config.failed_limit:
                self.changed.end_with(
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

    def take(self, step: int, group_ids: Collection[str]) -> dict[str, float]:
        """Update `step` has its batch, with the first use of these groups: their places are free.

        Returns:
            Metrics of the pace.
        """
        taken = [self.outstanding.remove(group_id) for group_id in group_ids]
        self._in_training[step] = [entry.ticket for entry in taken]
        self.ledger.update = step + 1
        self.failed_since_batch = 0
        self.changed.notify_all()
        return self._pace.record(step, taken, list(self.outstanding))

    def finish(self, step: int) -> None:
        """Update `step` was applied: its tickets are done."""
        for ticket in self._in_training.pop(step):
            self._draws.finish(ticket)

    def key_of(self, group_id: str) -> TicketKey:
        """Names a group across the lives of a run."""
        lesson_id, _, index = parse_ticket_id(group_id)
        return lesson_id, index

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
                "unplaced": [draw.row for draw in self._unplaced],
                "outstanding": [
                    [t.ticket_id, t.lesson_id, t.index, t.admitted_step, t.deadline_step, *(place_of(t) or ())]
                    for t in tickets
                ],
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Checkpointable.restore`: outstanding tickets are pending again, under this lineage's ids."""
        try:
            with self.changed:
                self.ledger.update = int(state["update"])
                self._draws.restore(state)
                self._restored = [
                    (str(name), self._redraw(lesson_id, index, *place), int(admitted_step), int(deadline_step))
                    for name, lesson_id, index, admitted_step, deadline_step, *place in state["outstanding"]
                    if self._group_size_of(str(lesson_id))
                ]
                self._unplaced = deque(
                    self._redraw(lesson_id, index, *place)
                    for lesson_id, index, *place in state["unplaced"]
                    if self._group_size_of(str(lesson_id))
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the ticket issuer's state does not fit: {error!r}") from error

    def _redraw(self, lesson_id: Any, index: Any, *place: Any) -> Draw:
        return self._draws.redraw(str(lesson_id), int(index), *map(int, place))

    def restored_tickets(self) -> dict[TicketKey, str]:
        """The checkpoint's outstanding tickets that were not admitted again yet: ids by lesson and index."""
        return {draw.key: name for name, draw, _, _ in self._restored}

    def was_drawn(self, key: TicketKey) -> bool:
        """Whether the restored checkpoint had admitted the group; one without a place yet may still be claimed."""
        return self._draws.was_drawn(*key) and all(draw.key != key for draw in self._unplaced)

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

    def _admit(self, most: int, lessons: Collection[str] | None) -> int:
        """Draws tickets into `pending` while none of these lessons is there; returns how many, claimed ones too."""
        self.readmit()
        serving = self._serving
        if serving is None or self._next(lessons) is not None or not self._may_draw():
            return 0
        room = self._room(most)
        # All lessons are drawn before a claimed group may change their probabilities.
        self._unplaced.extend(self._draws.draw() for _ in range(room - len(self._unplaced)))
        admitted, claimed = 0, False
        while admitted < room and self._unplaced:
            deadline = serving + self._config.budget(self._unplaced[0].lesson_id)
            if not self.outstanding.fits(deadline, self.update):
                break  # a lesson of less tolerance waits for its version, and the others behind it
            claimed |= self._admit_one(self._unplaced.popleft(), serving, deadline)
            admitted += 1
        if claimed:
            self._advance()
        return admitted

    def _admit_one(self, draw: Draw, admitted_step: int, deadline_step: int) -> bool:
        """Returns whether a group of an earlier life was claimed for it."""
        ticket = self._draws.ticket(draw, admitted_step, deadline_step)
        restored = self._claim(ticket)
        if restored is None:
            self._register(ticket, self._group_size_of(draw.lesson_id), "pending")
            self._pending.append(ticket.ticket_id)
            return False
        ticket = replace(ticket, ticket_id=restored.group_id, deadline_step=restored.deadline_step)
        self._register(ticket, restored.size, "delivered")
        return True

    def _register(self, ticket: Ticket, size: int, phase: Phase) -> None:
        self._admissions += 1
        self.outstanding.add(Outstanding(ticket, size, self._admissions, phase))
        if self._config.synchronous:
            self._turns.append(ticket.ticket_id)

    def _next(self, lessons: Collection[str] | None) -> str | None:
        """The first ticket that may be handed out; None where there is none of these lessons."""
        for ticket_id in chain(self._returned, self._pending):
            if lessons is None or parse_ticket_id(ticket_id)[0] in lessons:
                return ticket_id
        return None

    def _hand_out(self, most: int, lessons: Collection[str] | None, holder: str | None) -> list[Ticket]:
        tickets: list[Ticket] = []
        while len(tickets) < most and (ticket_id := self._next(lessons)) is not None:
            entry = self.outstanding.get(ticket_id)
            assert entry is not None  # only a running group can fail
            if entry.phase == "returned":
                self._returned.remove(ticket_id)
            else:
                self.ledger.count_started(entry.ticket, entry.size)
                self.ledger.open(ticket_id, entry.size)
                self._pending.remove(ticket_id)
            entry.phase, entry.since, entry.holder = "running", self._clock(), holder
            tickets.append(entry.ticket)
        return tickets

    def _advance(self) -> None:
        self._on_resolved()
        self.changed.notify_all()

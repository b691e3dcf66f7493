"""From a delivered group to a waiting one: judged, told to the curriculum, filtered, queued for its file.

At staleness zero groups pass in ticket order, so that nothing downstream depends on which finished first; groups
that come early are held until their turn. Everything here happens with the buffer's lock held.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from penstock.batch import has_signal
from penstock.replay.admission import Admission, Claim, TicketKey
from penstock.replay.config import ReplayBufferConfig
from penstock.replay.freshness import FreshnessRules, Verdict
from penstock.replay.inspection import Inspector
from penstock.replay.ledger import rollout_ids
from penstock.replay.outstanding import Outstanding
from penstock.replay.sealing import Sealer
from penstock.replay.stock import Stock
from penstock.replay.waiting import WaitingGroup
from penstock.types import Clock, Experience, PackedRollout, Rollout, RolloutGroup, RolloutRecord

CurriculumHook = Callable[[RolloutGroup[Any]], None]
"""Told of groups of the kind that it is meant for."""


class Intake:
    """Implements `penstock.replay.admission.TicketListener`.

    Args:
        config: Pace and limits.
        rules: What is fresh.
        admission: Knows who may deliver.
        stock: Takes what passes.
        sealer: Takes what is to be stored.
        inspector: Judges rollouts.
        clock: Unix seconds.
        hook: Called once per group with at least one trainable rollout, filtered ones included.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        rules: FreshnessRules,
        admission: Admission,
        stock: Stock,
        sealer: Sealer,
        inspector: Inspector,
        clock: Clock,
        hook: CurriculumHook | None,
    ) -> None:
        self._config = config
        self._rules = rules
        self._admission = admission
        self._ledger = admission.ledger
        self._stock = stock
        self._sealer = sealer
        self._inspector = inspector
        self._clock = clock
        self._hook = hook
        self._held: dict[str, tuple[RolloutGroup[Experience], Outstanding]] = {}
        self._claimed: dict[str, RolloutGroup[Experience]] = {}
        self.claims: dict[TicketKey, RolloutGroup[Experience]] = {}
        self.recorded: set[str] = set()

    def deliver(self, group: RolloutGroup[Experience]) -> None:
        """Takes a group from a generator; one that nobody waits for (any more) is refused and counted."""
        entry = self._admission.receive(group)
        if entry is None:
            self._admission.late_deliveries += 1
            return
        entry.phase = "delivered"
        self._held[group.group_id] = (group, entry)
        self.advance()

    def holds(self, group_id: str) -> bool:
        """Whether a delivered group waits for its turn."""
        return group_id in self._held

    def claim(self, lesson_id: str, index: int, deadline_step: int) -> Claim | None:
        """See `TicketListener.claim`; a group that could not be trained in time is given up as stale."""
        group = self.claims.pop((lesson_id, index), None)
        if group is None:
            return None
        due = min(deadline_step, _oldest_step(group) + self._config.step_delay(lesson_id))
        if not self._admission.outstanding.fits(due, self._admission.update):
            ids = [rollout.rollout_id for rollout in group.rollouts]
            self._stock.settle(ids, "stale_step", f"due at update {due}: no place is left before it")
            return None
        self._claimed[group.group_id] = group
        return Claim(group.group_id, len(group.rollouts), due)

    def advance(self) -> None:
        """See `TicketListener.advance`."""
        for group_id in [group_id for group_id in self._claimed if group_id not in self._held]:
            entry = self._admission.outstanding.get(group_id)
            if entry is not None:
                self._held[group_id] = (self._claimed[group_id], entry)
        if not self._config.synchronous or not self._admission.paced:
            while self._held:
                self._ingest(next(iter(self._held)))
            return
        while (turn := self._admission.next_turn()) is not None and turn in self._held:
            self._ingest(turn)

    def expire_claims(self, now: float) -> None:
        """Gives up groups of an earlier life that nobody will claim while they are fresh."""
        for key, group in list(self.claims.items()):
            verdicts = [self._stale(rollout, now) for rollout in group.rollouts]
            if all(verdicts):
                del self.claims[key]
                for rollout, verdict in zip(group.rollouts, verdicts, strict=True):
                    assert verdict is not None
                    self._stock.settle([rollout.rollout_id], verdict.fate, verdict.reason)

    def unsettled_ids(self) -> Iterator[str]:
        """Rollouts that are live although no group in stock holds them."""
        for entry in self._admission.outstanding:
            name = entry.ticket.ticket_id
            if name in self._claimed:
                yield from (rollout.rollout_id for rollout in self._claimed[name].rollouts)
            elif entry.phase in ("running", "returned", "delivered"):
                yield from rollout_ids(name, entry.size)
        for name, size in self._admission.announced():
            yield from rollout_ids(name, size)
        for group in self.claims.values():
            yield from (rollout.rollout_id for rollout in group.rollouts)

    def _ingest(self, group_id: str) -> None:
        group, entry = self._held.pop(group_id)
        entry.phase = "waiting"
        durable = self._claimed.pop(group_id, None) is not None
        trainable = self._judge(group, entry, durable)
        if trainable is None:
            return
        if group_id not in self.recorded and self._hook is not None:
            self._hook(trainable)
        self.recorded.discard(group_id)
        if self._config.batch_maker.filter_zero_variance and _is_flat(trainable):
            ids = [rollout.rollout_id for rollout in trainable.rollouts]
            self._stock.settle(ids, "filtered", "the group's valid rewards are all equal")
            first = trainable.rollouts[0]
            self._stock.count_filtered(group_id, first.lesson_id, first.episode_reward)
        else:
            deadline_step = entry.ticket.deadline_step if self._admission.paced else None
            self._stock.add(waiting_group(trainable, deadline_step), durable=durable)

    def _judge(
        self, group: RolloutGroup[Experience], entry: Outstanding, durable: bool
    ) -> RolloutGroup[Experience] | None:
        """What of the group may be trained; the rest meets its fate, and a group with nothing left its end."""
        ticket = entry.ticket
        if durable:
            expected = [rollout.rollout_id for rollout in group.rollouts]
        else:
            expected = rollout_ids(ticket.ticket_id, entry.size)
            self._ledger.deliver(ticket.ticket_id)
        outcome = self._inspector.inspect(group, ticket, expected, self._stock.current, self._clock())
        if not durable:
            self._sealer.add(ticket.ticket_id, [_record(r, group, entry) for r in outcome.storable])
        for rollout_id, verdict in outcome.rejected.items():
            self._stock.settle([rollout_id], verdict.fate, verdict.reason)
        if outcome.trainable:
            self._admission.note_accepted()
            return replace(group, rollouts=outcome.trainable)
        verdict = next(iter(outcome.rejected.values()))
        failure = f"lesson {ticket.lesson_id}: {verdict.fate}, {verdict.reason}"
        self._admission.free(ticket.ticket_id, failure)
        self._admission.note_refused(failure)
        return None

    def _stale(self, rollout: Experience, now: float) -> Verdict | None:
        assert rollout.metadata is not None
        return self._rules.of(rollout.lesson_id).judge(rollout.metadata, self._stock.current, now)


def waiting_group(group: RolloutGroup[Experience], deadline_step: int | None) -> WaitingGroup:
    """A group as it enters the stock, its rollouts packed."""
    packed: list[Experience] = []
    for rollout in group.rollouts:
        neighbour = packed[0] if packed and isinstance(packed[0], PackedRollout) else None
        packed.append(PackedRollout(rollout, neighbour) if isinstance(rollout, Rollout) else rollout)
    first = group.rollouts[0]
    return WaitingGroup(group.group_id, group.key, first.env_name, first.lesson_id, packed, deadline_step)


def _record(rollout: Experience, group: RolloutGroup[Experience], entry: Outstanding) -> RolloutRecord[Experience]:
    timings: dict[str, float] = {}
    if entry.since is not None and rollout.metadata is not None:
        timings["generate_s"] = max(0.0, rollout.metadata.timestamp - entry.since)
    return RolloutRecord(rollout, group.group_id, timings, group.key)


def _is_flat(group: RolloutGroup[Any]) -> bool:
    """Of language rollouts only: a fragment is a group of one and would always be."""
    return not has_signal(group)


def _oldest_step(group: RolloutGroup[Experience]) -> int:
    return min(r.metadata.weight_step for r in group.rollouts if r.metadata is not None)

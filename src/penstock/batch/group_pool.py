"""Groups that a batch maker holds, what it may hold at all, and the orders in which it takes them.

A maker keeps the rollouts that it was given and, beside them, one small object per group: everything that is told apart
by rollout (uses, advantages) stands in the columns of a `DrawPool`. Groups are told apart by their id, so two groups of
one prompt stay two.

- `DrawPool` gives every unit (a group, or one of its rollouts) a slot by arrival, to be drawn by rank; beside it stand,
  in columns, whether it may be drawn, how often it was used and its advantage: 21 bytes per unit. A slot of something
  that left stays empty until the empty ones outnumber the others; then all are closed up. So a unit costs O(1) to place
  or remove, amortised, and a batch one look at the flags of all: a millisecond for a million.
- `OrderedGroups` (by age) is a queue from which any group may leave. Leaving is lazy: the entry stays until it comes
  up, or until entries of groups that left outnumber the others and all of them are swept out. So every operation costs
  O(log n), amortised, and no queue holds more than about twice what waits in it.
- `DeadlineQueue` tells groups apart by their deadlines, which are few.
"""

import heapq
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock.batch.examples import Advantage, check_trainable
from penstock.types import AnyRollout, InvalidRolloutError, RolloutGroup

if TYPE_CHECKING:
    from penstock.batch.reservoir import Baseline


@dataclass(slots=True, eq=False)
class PooledGroup:
    """One group in a batch maker.

    Attributes:
        group_id: The ticket's id.
        order: Smaller is older: its number of arrival, or its ticket's order.
        members: Its rollouts; None where one has left whose neighbours have their own places in a `DrawPool`.
        deadline_step: The last update that may use it first; None without one, and after the first use.
        uses: How often the group as a whole was used.
        line: The `OrderedGroups` that it stands in.
        pool: The `DrawPool` that it has places in.
        first_slot: Where those begin.
        baseline: What its advantages are measured against, where the maker keeps that.
        flat: Whether its rewards are all equal, where the maker has looked.
    """

    group_id: str
    order: Any
    members: list[AnyRollout | None]
    deadline_step: int | None = None
    uses: int = 0
    line: "OrderedGroups | None" = None
    pool: "DrawPool | None" = None
    first_slot: int = 0
    baseline: "Baseline | None" = None
    flat: bool = False

    def rollouts(self) -> list[AnyRollout]:
        """Its members that are still here."""
        return [member for member in self.members if member is not None]

    def as_group(self) -> RolloutGroup:
        """Its members that are still here, as a group; there must be one."""
        return group_of(self.rollouts())

    def find(self, rollout_id: str) -> int | None:
        """The index of a member; None where it is not here."""
        for index, member in enumerate(self.members):
            if member is not None and member.rollout_id == rollout_id:
                return index
        return None


@dataclass(slots=True)
class GroupTable:
    """Every group in a batch maker, by id, and those that came since it last looked.

    Attributes:
        max_tokens: Longest trainable sequence that is taken, prompt and response together: the learner's row length.
        allow_truncated_sampling: Take rollouts of truncated sampling, such as top-k.
        environment_name: The one environment whose rollouts are taken; None means any.
        ordered: Older means an earlier ticket, not an earlier arrival.
    """

    max_tokens: int
    allow_truncated_sampling: bool = False
    environment_name: str | None = None
    ordered: bool = False
    _groups: dict[str, PooledGroup] = field(default_factory=dict[str, PooledGroup])
    _new: dict[str, PooledGroup] = field(default_factory=dict[str, PooledGroup])
    _arrivals: int = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, rollout: AnyRollout) -> None:
        """Takes one rollout into its group.

        Raises:
            InvalidRolloutError: it cannot be trained on, is another maker's, or comes after its group's members got
                their places.
        """
        if self.environment_name is not None and rollout.env_name != self.environment_name:
            raise InvalidRolloutError(
                f"rollout {rollout.rollout_id} is of environment {rollout.env_name!r}, but this batch maker takes "
                f"{self.environment_name!r} only: give it to another one, or bind this one to none"
            )
        check_trainable(rollout, self.max_tokens, self.allow_truncated_sampling)
        group_id = rollout.group_id
        group = self._groups.get(group_id)
        if group is None:
            order = (*ticket_order(group_id), self._arrivals) if self.ordered else self._arrivals
            self._groups[group_id] = self._new[group_id] = PooledGroup(group_id, order, [rollout])
            self._arrivals += 1
        elif group.pool is not None and group.pool.by_member:
            raise InvalidRolloutError(
                f"rollout {rollout.rollout_id} came after the other rollouts of its group were ready for a batch: "
                "add all rollouts of a group before the next create_batch"
            )
        else:
            group.members.append(rollout)

    def arrived(self) -> list[PooledGroup]:
        """The groups that came since the last call and are still here, oldest first."""
        new, self._new = list(self._new.values()), {}
        return new

    def get(self, group_id: str) -> PooledGroup | None:
        """A group by its id; None where it is not here."""
        return self._groups.get(group_id)

    def unplaced(self) -> Iterable[PooledGroup]:
        """The groups that `arrived` will return next."""
        return self._new.values()

    def forget(self, group: PooledGroup) -> None:
        """A group leaves; its line and its places in a pool are its batch maker's to clear."""
        del self._groups[group.group_id]
        self._new.pop(group.group_id, None)

    def discard(self, rollout_id: str) -> PooledGroup | None:
        """One rollout leaves, an unknown one is ignored. Returns its group where that is gone with it."""
        group = self._groups.get(rollout_id.rpartition("/")[0])
        index = None if group is None else group.find(rollout_id)
        if group is None or index is None:
            return None
        if group.pool is not None and group.pool.by_member:
            return next(iter(self.retire(group.pool, [group.first_slot + index])), None)
        del group.members[index]
        if group.members:
            return None
        if group.pool is not None:
            group.pool.remove(group.pool.slots(group))
        self.forget(group)
        return group

    def retire(self, pool: "DrawPool", slots: Sequence[int]) -> list[PooledGroup]:
        """Units leave a pool and this. Returns the groups that are gone with them."""
        owners = dict.fromkeys(pool.owner(slot) for slot in slots)
        pool.remove(slots)
        gone = [group for group in owners if not pool.slots(group)]
        for group in gone:
            self.forget(group)
        return gone


def group_of(rollouts: Sequence[AnyRollout]) -> RolloutGroup:
    """Rollouts of one group, of which there is at least one."""
    first = rollouts[0]
    return RolloutGroup(f"{first.env_name}:{first.env_example_id}", tuple(rollouts), first.group_id)


def ticket_order(ticket_id: str) -> tuple[str, int, int]:
    """Sorts tickets ``lesson-lineage-index`` by lesson, index and lineage; other ids as text.

    The index comes before the lineage, so that a cohort of which a resumed run had to reissue one half keeps
    the order that it has in a run without interruption.
    """
    match = re.fullmatch(r"(.*)-(\d+)-(\d+)", ticket_id)
    if match is None:
        return (ticket_id, 0, 0)
    return (match[1], int(match[3]), int(match[2]))


SLACK = 64
"""Entries of groups that left which are kept in any case, so that short queues are not swept all the time."""


@final
class OrderedGroups:
    """Groups by a key, smallest first. A group stands in one line at most; if it leaves one, it leaves for good."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, PooledGroup]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def join(self, group: PooledGroup, key: Any) -> None:
        """A group that stands in no line comes in; keys are unique in a line, and comparable."""
        group.line = self
        heapq.heappush(self._heap, (key, group))
        self._live += 1

    def leave(self, group: PooledGroup) -> None:
        """A group that stands in this line goes."""
        group.line = None
        self._live -= 1
        if len(self._heap) > 2 * self._live + SLACK:
            self._heap = [entry for entry in self._heap if entry[1].line is self]
            heapq.heapify(self._heap)

    def pop(self) -> PooledGroup:
        """Takes the first group out; there must be one."""
        while True:
            _, group = heapq.heappop(self._heap)
            if group.line is self:
                group.line = None
                self._live -= 1
                return group


@final
class DeadlineQueue:
    """Groups by the last update that may use them first."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, PooledGroup]] = {}

    def set(self, group: PooledGroup, step: int) -> None:
        """Gives a group its deadline; it may come nearer, not move away."""
        if group.deadline_step is None or step < group.deadline_step:
            self.clear(group)
            group.deadline_step = step
            self._by_step.setdefault(step, {})[group.group_id] = group

    def clear(self, group: PooledGroup) -> None:
        """A group has no deadline any more; one that never had is ignored."""
        if group.deadline_step is not None:
            of_step = self._by_step[group.deadline_step]
            del of_step[group.group_id]
            if not of_step:
                del self._by_step[group.deadline_step]
            group.deadline_step = None

    def pop_due(self, step: int) -> list[PooledGroup]:
        """Takes out, oldest first, every group whose deadline is `step` or has passed."""
        passed = [deadline for deadline in self._by_step if deadline <= step]
        due = [group for deadline in passed for group in self._by_step.pop(deadline).values()]
        for group in due:
            group.deadline_step = None
        return sorted(due, key=lambda group: group.order)


@final
class FirstUseQueue:
    """Groups with a deadline: those due first, then the oldest."""

    def __init__(self) -> None:
        self._line = OrderedGroups()
        self._deadlines = DeadlineQueue()

    def __len__(self) -> int:
        return len(self._line)

    def set_deadline(self, group: PooledGroup, step: int) -> None:
        """A group that stands in no line comes in, or one of these has its deadline brought nearer."""
        if group.line is not self._line:
            self._line.join(group, group.order)
        self._deadlines.set(group, step)

    def leave(self, group: PooledGroup) -> None:
        """A group goes; one that is not here is ignored."""
        if group.line is self._line:
            self._line.leave(group)
            self._deadlines.clear(group)

    def pop_due(self, step: int) -> list[PooledGroup]:
        """Takes out, oldest first, every group whose deadline is `step` or has passed."""
        due = self._deadlines.pop_due(step)
        for group in due:
            self._line.leave(group)
        return due

    def pop(self) -> PooledGroup:
        """Takes the oldest group out; there must be one."""
        group = self._line.pop()
        self._deadlines.clear(group)
        return group


@final
class DrawPool:
    """Units in order of arrival, each drawable or not yet.

    Slots are good until the next `remove`.

    Args:
        by_member: The units are single rollouts: each member of a group has a slot, side by side. Otherwise a group
            has one.
    """

    def __init__(self, by_member: bool) -> None:
        self.by_member = by_member
        self._owners: list[PooledGroup | None] = []
        self._drawable = bytearray()
        self._uses = array("i")
        self._advantages: list[Advantage] = []
        self._live = 0
        self._count = 0

    def __len__(self) -> int:
        """How many units may be drawn."""
        return self._count

    @property
    def units(self) -> int:
        """How many units are here, those that may not be drawn yet included."""
        return self._live

    def place(
        self, group: PooledGroup, drawable: bool, advantages: Sequence[Advantage] | np.ndarray | None = None
    ) -> None:
        """Gives a group its places, behind all others.

        Args:
            group: In no pool.
            drawable: Whether it may be drawn at once.
            advantages: One per unit, where they are kept here.
        """
        width = len(group.members) if self.by_member else 1
        group.pool, group.first_slot = self, len(self._owners)
        for index in range(width):
            self._owners.append(group)
            self._drawable.append(drawable)
            self._uses.append(0)
            self._advantages.append(0.0 if advantages is None else advantages[index])
        self._live += width
        self._count += width if drawable else 0

    def slots(self, group: PooledGroup) -> list[int]:
        """The slots of a group's units that are still here."""
        first = group.first_slot
        end = first + (len(group.members) if self.by_member else 1)
        return [slot for slot, owner in enumerate(self._owners[first:end], first) if owner is group]

    def owner(self, slot: int) -> PooledGroup:
        """Whose place it is; it must not be empty."""
        group = self._owners[slot]
        assert group is not None
        return group

    def select(self, ranks: Sequence[int]) -> list[int]:
        """The slots of what may be drawn, by rank: 0 is the oldest."""
        return np.flatnonzero(np.frombuffer(self._drawable, np.bool_))[list(ranks)].tolist()

    def set_drawable(self, slots: Iterable[int], drawable: bool) -> None:
        """Lets units be drawn from now on, or not."""
        for slot in slots:
            self._count += drawable - self._drawable[slot]
            self._drawable[slot] = drawable

    def uses(self, slot: int) -> int:
        """How often a unit was used."""
        return self._uses[slot]

    def advantage(self, slot: int) -> Advantage:
        """The advantage that a unit was placed with."""
        return self._advantages[slot]

    def count_use(self, slot: int) -> int:
        """One use more; returns how many."""
        self._uses[slot] += 1
        return self._uses[slot]

    def remove(self, slots: Sequence[int]) -> None:
        """Units leave, single ones out of their group's members too."""
        self.set_drawable(slots, False)
        for slot in slots:
            group = self.owner(slot)
            if self.by_member:
                group.members[slot - group.first_slot] = None
            self._owners[slot] = None
            self._live -= 1
        if len(self._owners) > 2 * self._live + SLACK:
            self._close_up()

    def _close_up(self) -> None:
        kept = np.flatnonzero(np.fromiter((owner is not None for owner in self._owners), np.bool_, len(self._owners)))
        self._drawable = bytearray(np.frombuffer(self._drawable, np.uint8)[kept].tobytes())
        self._uses = array("i", np.frombuffer(self._uses, np.int32)[kept].tobytes())
        self._advantages = [self._advantages[slot] for slot in kept]
        self._owners = [owner for owner in self._owners if owner is not None]
        last = None
        for slot, group in enumerate(self._owners):
            if group is not last:
                assert group is not None
                group.first_slot, last = slot, group
                if self.by_member:
                    group.members = [member for member in group.members if member is not None]

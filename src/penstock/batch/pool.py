"""Places by arrival: what a batch maker draws from, by rank.

Every unit (a group, or one of its rollouts) has a slot; beside it stand, in columns, how often it was used and its
advantage: 20 bytes per unit. A slot of something that left stays empty until the empty ones outnumber the others;
then all are closed up. So a unit costs O(log n) to draw or remove, amortised.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from penstock.batch.holding import HeldGroup
from penstock.batch.ranks import Ranks

SLACK = 64
"""Empty slots that are kept in any case."""


@final
class Pool:
    """Units in order of arrival, each drawable or not yet.

    Slots are good until the next `remove`.

    Args:
        by_member: The units are single rollouts: each member of a group has a slot, side by side. Otherwise a group
            has one.
    """

    def __init__(self, by_member: bool) -> None:
        self.by_member = by_member
        self._owners: list[HeldGroup | None] = []
        self._ranks = Ranks()
        self._uses = array("i")
        self._advantages = array("f")
        self._live = 0

    def __len__(self) -> int:
        """How many units may be drawn."""
        return len(self._ranks)

    @property
    def units(self) -> int:
        """How many units are here, those that may not be drawn yet included."""
        return self._live

    def place(self, group: HeldGroup, drawable: bool, advantages: Sequence[float] | np.ndarray | None = None) -> None:
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
            self._ranks.append(drawable)
            self._uses.append(0)
            self._advantages.append(0.0 if advantages is None else advantages[index])
        self._live += width

    def slots(self, group: HeldGroup) -> list[int]:
        """The slots of a group's units that are still here."""
        first = group.first_slot
        end = first + (len(group.members) if self.by_member else 1)
        return [slot for slot, owner in enumerate(self._owners[first:end], first) if owner is group]

    def owner(self, slot: int) -> HeldGroup:
        """Whose place it is; it must not be empty."""
        group = self._owners[slot]
        assert group is not None
        return group

    def select(self, ranks: Iterable[int]) -> list[int]:
        """The slots of what may be drawn, by rank: 0 is the oldest."""
        return [self._ranks.select(rank) for rank in ranks]

    def set_drawable(self, slots: Iterable[int], drawable: bool) -> None:
        """Lets units be drawn from now on, or not."""
        for slot in slots:
            self._ranks.mark(slot, drawable)

    def uses(self, slot: int) -> int:
        """How often a unit was used."""
        return self._uses[slot]

    def advantage(self, slot: int) -> float:
        """The advantage that a unit was placed with."""
        return self._advantages[slot]

    def count_use(self, slot: int) -> int:
        """One use more; returns how many."""
        self._uses[slot] += 1
        return self._uses[slot]

    def remove(self, slots: Iterable[int]) -> None:
        """Units leave, single ones out of their group's members too."""
        for slot in slots:
            group = self.owner(slot)
            if self.by_member:
                group.members[slot - group.first_slot] = None
            self._owners[slot] = None
            self._ranks.mark(slot, False)
            self._live -= 1
        if len(self._owners) > 2 * self._live + SLACK:
            self._close_up()

    def _close_up(self) -> None:
        kept = np.flatnonzero(np.fromiter((owner is not None for owner in self._owners), np.bool_, len(self._owners)))
        self._ranks.keep(kept)
        self._uses = array("i", np.frombuffer(self._uses, np.int32)[kept].tobytes())
        self._advantages = array("f", np.frombuffer(self._advantages, np.float32)[kept].tobytes())
        self._owners = [owner for owner in self._owners if owner is not None]
        last = None
        for slot, group in enumerate(self._owners):
            if group is not last:
                assert group is not None
                group.first_slot, last = slot, group
                if self.by_member:
                    group.members = [member for member in group.members if member is not None]

"""Groups that a batch maker holds, and what it may hold at all.

A maker keeps the rollouts that it was given and, beside them, one small object per group: everything that is told
apart by rollout (uses, advantages) stands in the columns of a `Pool`. Groups are told apart by their id, so two groups
of one prompt stay two.

Not covered: the order in which groups are taken (`queues`, `pool`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.batch.examples import assemble_example, check_trainable
from penstock.types import AnyRollout, InvalidRolloutError, RLExample, RolloutGroup

if TYPE_CHECKING:
    from penstock.batch.baselines import Baseline
    from penstock.batch.pool import Pool
    from penstock.batch.queues import Line


@dataclass(slots=True, eq=False)
class HeldGroup:
    """One group in a batch maker.

    Attributes:
        group_id: The ticket's id.
        order: Smaller is older: its number of arrival, or its ticket's order.
        members: Its rollouts; None where one has left whose neighbours have their own places in a `Pool`.
        deadline_step: The last update that may use it first; None without one, and after the first use.
        uses: How often the group as a whole was used.
        line: The `queues.Line` that it stands in.
        pool: The `pool.Pool` that it has places in.
        first_slot: Where those begin.
        baseline: What its advantages are measured against, where the maker keeps that.
        flat: Whether its rewards are all equal, where the maker has looked.
    """

    group_id: str
    order: Any
    members: list[AnyRollout | None]
    deadline_step: int | None = None
    uses: int = 0
    line: "Line | None" = None
    pool: "Pool | None" = None
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


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a batch maker takes.

    Attributes:
        max_tokens: Longest trainable sequence, prompt and response together: the learner's row length.
        allow_truncated_sampling: Take rollouts of truncated sampling, such as top-k.
        environment_name: The one environment; None means any.
    """

    max_tokens: int
    allow_truncated_sampling: bool
    environment_name: str | None

    def check(self, rollout: AnyRollout) -> None:
        """Refuses what cannot be trained on, or is another maker's.

        Raises:
            InvalidRolloutError: naming the rollout, the field, and what to do.
        """
        if self.environment_name is not None and rollout.env_name != self.environment_name:
            raise InvalidRolloutError(
                f"rollout {rollout.rollout_id} is of environment {rollout.env_name!r}, but this batch maker takes "
                f"{self.environment_name!r} only: give it to another one, or bind this one to none"
            )
        check_trainable(rollout, self.max_tokens, self.allow_truncated_sampling)

    def example(self, rollout: AnyRollout, advantage: float | np.floating[Any]) -> RLExample:
        """The example of a rollout that passed `check`."""
        return assemble_example(rollout, float(advantage))


@dataclass(slots=True)
class HeldGroups:
    """Every group in a batch maker, by id, and those that came since it last looked.

    Attributes:
        acceptance: What is taken.
        ordered: Older means an earlier ticket, not an earlier arrival.
    """

    acceptance: Acceptance
    ordered: bool = False
    _groups: dict[str, HeldGroup] = field(default_factory=dict[str, HeldGroup])
    _new: dict[str, HeldGroup] = field(default_factory=dict[str, HeldGroup])
    _arrivals: int = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, rollout: AnyRollout) -> None:
        """Takes one rollout into its group.

        Raises:
            InvalidRolloutError: it cannot be trained on, or comes after its group's members got their places.
        """
        self.acceptance.check(rollout)
        group_id = rollout.group_id
        group = self._groups.get(group_id)
        if group is None:
            order = (*ticket_order(group_id), self._arrivals) if self.ordered else self._arrivals
            self._groups[group_id] = self._new[group_id] = HeldGroup(group_id, order, [rollout])
            self._arrivals += 1
        elif group.pool is not None and group.pool.by_member:
            raise InvalidRolloutError(
                f"rollout {rollout.rollout_id} came after the other rollouts of its group were ready for a batch: "
                "add all rollouts of a group before the next create_batch"
            )
        else:
            group.members.append(rollout)

    def arrived(self) -> list[HeldGroup]:
        """The groups that came since the last call and are still here, oldest first."""
        new, self._new = list(self._new.values()), {}
        return new

    def get(self, group_id: str) -> HeldGroup | None:
        """A group by its id; None where it is not here."""
        return self._groups.get(group_id)

    def unplaced(self) -> Iterable[HeldGroup]:
        """The groups that `arrived` will return next."""
        return self._new.values()

    def forget(self, group: HeldGroup) -> None:
        """A group leaves; its line and its places in a pool are its batch maker's to clear."""
        del self._groups[group.group_id]
        self._new.pop(group.group_id, None)

    def discard(self, rollout_id: str) -> HeldGroup | None:
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

    def retire(self, pool: "Pool", slots: Sequence[int]) -> list[HeldGroup]:
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

"""A batch maker that prefers what is new, and still reaches what is old.

Costs O(log n) per unit that comes or goes, and one pass over flags of all units per batch. Not covered: which rollouts
are too old to be drawn at all; the replay buffer discards those.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from typing_extensions import override

from penstock.batch.advantages import OF_THE_BATCH, AdvantageName, GroupAdvantage, compute_advantages, has_signal
from penstock.batch.draws import Balance, LargestRemainder, RankSampler
from penstock.batch.examples import Advantage, assemble_examples, batch_metadata
from penstock.batch.group_pool import DrawPool, FirstUseQueue, GroupTable, PooledGroup, group_of
from penstock.batch.maker import BatchRandomness, Dropped, PacedBatchMaker, Unit, check_choice, uses_limit
from penstock.types import AnyRollout, ConfigError, RLExample, RolloutGroup


@final
class RecencyBatchMaker(PacedBatchMaker):
    """Draws newer groups or rollouts more often than older ones.

    Environments get places in a batch by `balance`. Inside one, P(i) ∝ (i + 1)^alpha over the rank by arrival, 0 the
    oldest, among what may be drawn when the batch is made; nothing is drawn twice for one batch. Groups with a deadline
    come before any draw, whole: those due, then the oldest; they may be drawn from their first use on.

    Args:
        advantage: Name of the advantage; `penstock.batch.ADVANTAGES`, reinforce_pp, reinforce_pp_baseline or turn;
            or one's own function of a group. With single rollouts as units a group's advantages are computed once, over
            all its rollouts that are here at the first `create_batch` after they were added, and stay when some of them
            leave; reinforce_pp is always of the batch, and reinforce_pp_baseline needs whole groups.
        max_tokens: Longest trainable sequence, prompt and response together: the learner's row length.
        alpha: 0 is uniform.
        balance: Environments share a batch by their ``size`` (units that may be drawn), or ``even``.
        unit: What is drawn, and what `batch_size` counts: a ``group`` or a ``rollout``.
        max_samples: Batches that a unit may be in; −1 means any number.
        seed: Two makers with the same seed, steps and rollouts make the same batches; None means from the
            operating system.
        environment_name: Take rollouts of this environment only; None means any.
        ordered: Take groups with a deadline by ticket, not by arrival.
        allow_truncated_sampling: Take rollouts of truncated sampling, such as top-k.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        advantage: AdvantageName | GroupAdvantage = "rloo",
        max_tokens: int = 2048,
        alpha: float = 3.0,
        balance: Balance = "size",
        unit: Unit = "group",
        max_samples: int = 1,
        seed: int | None = 0,
        environment_name: str | None = None,
        ordered: bool = False,
        allow_truncated_sampling: bool = False,
    ) -> None:
        if not 0 <= alpha < math.inf:
            raise ConfigError(f"alpha is {alpha}: it must be a finite number, 0 (uniform) or more")
        check_choice("balance", balance, Balance)
        check_choice("unit", unit, Unit)
        if not callable(advantage):
            check_choice("advantage", advantage, AdvantageName)
        if unit == "rollout" and advantage == "reinforce_pp_baseline":
            raise ConfigError(
                "unit is rollout and advantage reinforce_pp_baseline, whose baseline is of the group's rollouts in the "
                "batch: draw whole groups (unit: group), or take reinforce_pp"
            )
        self._advantage: AdvantageName | GroupAdvantage = advantage
        self._uses = uses_limit(max_samples)
        self.unit = unit
        self.environment_name = environment_name
        self._held = GroupTable(max_tokens, allow_truncated_sampling, environment_name, ordered)
        self._draw = RankSampler(alpha)
        self._shares = LargestRemainder(balance)
        self._randomness = BatchRandomness(seed)
        self._step = 0
        self._paced = FirstUseQueue()
        self._pools: dict[str, DrawPool] = {}
        self._last: list[RolloutGroup] = []
        self._flat: list[bool] = []

    def __len__(self) -> int:
        """How many units are here."""
        placed = sum(pool.units for pool in self._pools.values())
        return placed + sum(self._width(group) for group in self._held.unplaced())

    @override
    def add_rollout(self, rollout: AnyRollout) -> None:
        self._held.add(rollout)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """See `BatchMaker.create_batch`; `batch_size` counts units, and groups with a deadline may exceed it."""
        self.judge_arrivals()
        if len(self) < max(batch_size, 1):
            return None
        chosen = self._choose(batch_size)
        self._last = [_chosen_members(group, slots) for group, slots in chosen]
        advantages = self._advantages(chosen)
        self._flat = [group.flat for group, _ in chosen]
        self._count_use(chosen)
        return assemble_examples(self._last, advantages)

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """See `BatchMaker.get_batch_metadata`; what is in it says `penstock.batch.examples.batch_metadata`."""
        flat = self._flat if self.unit == "rollout" else [not has_signal(group) for group in self._last]
        return batch_metadata(self._last, flat, batch)

    @override
    def set_step(self, step: int) -> None:
        self._step = step

    def set_deadline(self, group_id: str, deadline_step: int) -> None:
        """See `PacedBatchMaker.set_deadline`; ignored for groups that are not here or were used."""
        group = self._held.get(group_id)
        if group is None or group.uses:
            return
        if group.pool is not None:
            group.pool.set_drawable(group.pool.slots(group), False)
        self._paced.set_deadline(group, deadline_step)

    @override
    def judge_arrivals(self) -> None:
        for group in self._held.arrived():
            as_group = group.as_group()
            pool = self._pools.setdefault(as_group.rollouts[0].env_name, DrawPool(by_member=self.unit == "rollout"))
            by_batch = self.unit == "group" or self._advantage in OF_THE_BATCH
            advantages = None if by_batch else compute_advantages(self._advantage, [as_group])[0]
            if pool.by_member:
                group.flat = len({rollout.episode_reward for rollout in as_group.rollouts}) == 1
            pool.place(group, group.deadline_step is None, advantages)

    def discard(self, rollout_ids: Iterable[str]) -> None:
        """See `PacedBatchMaker.discard`; a group without rollouts is gone."""
        for rollout_id in rollout_ids:
            gone = self._held.discard(rollout_id)
            if gone is not None:
                self._paced.leave(gone)

    def dropped(self) -> list[Dropped]:
        """Nothing: what is here leaves by its uses, or by `discard`."""
        return []

    # --- choosing --------------------------------------------------------------------------------------------------

    def _choose(self, batch_size: int) -> list[tuple[PooledGroup, list[int]]]:
        """Groups with the slots of their units that the batch takes, in batch order."""
        first = self._paced.pop_due(self._step)
        taken = sum(self._width(group) for group in first)
        while taken < batch_size and len(self._paced):
            first.append(self._paced.pop())
            taken += self._width(first[-1])
        chosen = {group: _pool(group).slots(group) for group in first}
        rng = self._randomness.next(self._step)
        sizes = {name: len(pool) for name, pool in self._pools.items()}
        for name, places in self._shares.split(max(0, batch_size - taken), sizes).items():
            pool = self._pools[name]
            for slot in pool.select(self._draw.draw(len(pool), places, rng)):
                chosen.setdefault(pool.owner(slot), []).append(slot)
        return list(chosen.items())

    def _width(self, group: PooledGroup) -> int:
        return 1 if self.unit == "group" else len(group.rollouts())

    def _advantages(self, chosen: list[tuple[PooledGroup, list[int]]]) -> Sequence[np.ndarray | Sequence[Advantage]]:
        if self.unit == "group" or self._advantage in OF_THE_BATCH:
            return compute_advantages(self._advantage, self._last)
        return [[_pool(group).advantage(slot) for slot in slots] for group, slots in chosen]

    def _count_use(self, chosen: list[tuple[PooledGroup, list[int]]]) -> None:
        finished: dict[DrawPool, list[int]] = {}
        for group, slots in chosen:
            pool = _pool(group)
            group.uses += 1
            pool.set_drawable(slots, True)
            finished.setdefault(pool, []).extend(slot for slot in slots if pool.count_use(slot) >= self._uses)
        for pool, slots in finished.items():
            self._held.retire(pool, slots)


def _pool(group: PooledGroup) -> DrawPool:
    assert group.pool is not None  # every group was placed when create_batch began
    return group.pool


def _chosen_members(group: PooledGroup, slots: list[int]) -> RolloutGroup:
    """The rollouts behind these slots, as a group."""
    if not _pool(group).by_member:
        return group.as_group()
    members = [group.members[slot - group.first_slot] for slot in slots]
    return group_of([member for member in members if member is not None])

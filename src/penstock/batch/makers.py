"""Batch makers: which of the fresh rollouts make the next training batch, and with what advantage.

In memory only. The replay buffer owns freshness, durability, uses and fates; it adds rollouts that may be
trained now, takes batches, and says which groups are gone. A maker never drops anything by itself: a group
leaves it in a batch or by `discard`. Whoever calls holds a lock; makers have none.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.batch.advantages import AdvantageName, compute_advantages, has_signal
from penstock.batch.examples import check_trainable, example_from_rollout
from penstock.types import RLExample, Rollout, RolloutGroup


class BatchMaker(ABC):
    """Chooses training batches; `penstock.replay.ReplayBuffer` is its only caller in a run."""

    @abstractmethod
    def add_rollout(self, rollout: Rollout, deadline_step: int | None = None) -> None:
        """Takes one rollout; its group is the part of its id before the last slash.

        All rollouts of a group are added before the next `create_batch`.

        Args:
            rollout: With metadata and id.
            deadline_step: The last update that may train its group; None for no deadline.

        Raises:
            InvalidRolloutError: it cannot be trained on, and was not taken.
        """

    @abstractmethod
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """The next batch, taken out of this maker; None while there is too little for one."""

    @abstractmethod
    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """Facts about the batch that `create_batch` returned last: group ids, rewards, versions."""

    @abstractmethod
    def set_step(self, step: int) -> None:
        """The update that the next batch is for."""

    @abstractmethod
    def discard(self, group_ids: Iterable[str]) -> None:
        """Forgets groups that became stale or were evicted; unknown ids are ignored."""


@dataclass(slots=True)
class _Waiting:
    """A finished group that no batch has taken yet."""

    arrival: int
    deadline_step: int | None
    rollouts: list[Rollout] = field(default_factory=list[Rollout])


class DeadlineBatchMaker(BatchMaker):
    """Groups due at the current step first, then the oldest finished ones; the default for language policies.

    A batch has `batch_size` groups, or all that are due where those are more. Nothing overtakes without
    bound: whatever waits long enough becomes due (docs/batch.md).

    Args:
        advantage: Name of the advantage; `penstock.batch.ADVANTAGES` or reinforce_pp.
        max_tokens: Longest trainable sequence, prompt and response together: the learner's row length.
        ordered: Order by ticket, not by arrival, so that staleness zero does not depend on thread timing.
        allow_truncated_sampling: Take rollouts that were sampled with top-k or top-p.
    """

    def __init__(
        self,
        advantage: AdvantageName = "rloo",
        max_tokens: int = 2048,
        ordered: bool = False,
        allow_truncated_sampling: bool = False,
    ) -> None:
        self._advantage: AdvantageName = advantage
        self._max_tokens = max_tokens
        self._ordered = ordered
        self._allow_truncated_sampling = allow_truncated_sampling
        self._step = 0
        self._arrivals = 0
        self._groups: dict[str, _Waiting] = {}
        self._last: list[RolloutGroup] = []

    def __len__(self) -> int:
        """How many groups wait."""
        return len(self._groups)

    def add_rollout(self, rollout: Rollout, deadline_step: int | None = None) -> None:
        """See `BatchMaker.add_rollout`."""
        check_trainable(rollout, self._max_tokens, self._allow_truncated_sampling)
        if rollout.group_id not in self._groups:
            self._groups[rollout.group_id] = _Waiting(self._arrivals, deadline_step)
            self._arrivals += 1
        self._groups[rollout.group_id].rollouts.append(rollout)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """See `BatchMaker.create_batch`; `batch_size` counts groups."""
        if len(self._groups) < max(batch_size, 1):
            return None
        ranked = sorted(self._groups, key=self._rank)
        due = sum(self._is_due(self._groups[group_id]) for group_id in ranked)
        self._last = [self._take(group_id) for group_id in ranked[: max(batch_size, due)]]
        advantages = compute_advantages(self._advantage, self._last)
        return [
            example_from_rollout(rollout, float(value), self._max_tokens, self._allow_truncated_sampling)
            for group, values in zip(self._last, advantages, strict=True)
            for rollout, value in zip(group.rollouts, values, strict=True)
        ]

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """See `BatchMaker.get_batch_metadata`.

        Returns:
            ``group_ids`` and ``rollout_ids`` (tuples, in batch order), ``metrics`` (``train/reward_mean``,
            ``train/reward_std``, ``train/response_tokens``, ``train/zero_variance_groups``: a share).
        """
        rewards = np.concatenate([np.zeros(0, np.float32), *(group.rewards for group in self._last)])
        sampled = [int(example.loss_mask.sum()) for example in batch]
        flat = [not has_signal(group) for group in self._last]
        return {
            "group_ids": tuple(group.group_id for group in self._last),
            "rollout_ids": tuple(rollout_id for example in batch for rollout_id in example.rollout_ids),
            "metrics": {
                "train/reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
                "train/reward_std": float(rewards.std()) if len(rewards) else 0.0,
                "train/response_tokens": float(np.mean(sampled)) if sampled else 0.0,
                "train/zero_variance_groups": float(np.mean(flat)) if flat else 0.0,
            },
        }

    def set_step(self, step: int) -> None:
        """See `BatchMaker.set_step`."""
        self._step = step

    def discard(self, group_ids: Iterable[str]) -> None:
        """See `BatchMaker.discard`."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    def _is_due(self, group: _Waiting) -> bool:
        return group.deadline_step is not None and group.deadline_step <= self._step

    def _rank(self, group_id: str) -> tuple[Any, ...]:
        group = self._groups[group_id]
        order = ticket_order(group_id) if self._ordered else (group.arrival,)
        return (not self._is_due(group), *order)

    def _take(self, group_id: str) -> RolloutGroup:
        rollouts = self._groups.pop(group_id).rollouts
        first = rollouts[0]
        return RolloutGroup(f"{first.env_name}:{first.env_example_id}", tuple(rollouts), group_id)


def ticket_order(ticket_id: str) -> tuple[str, int, int]:
    """Sorts tickets ``lesson-lineage-index`` by lesson, index and lineage; other ids as text.

    The index comes before the lineage, so that a cohort of which a resumed run had to reissue one half keeps
    the order that it has in a run without interruption.
    """
    match = re.fullmatch(r"(.*)-(\d+)-(\d+)", ticket_id)
    if match is None:
        return (ticket_id, 0, 0)
    return (match[1], int(match[3]), int(match[2]))

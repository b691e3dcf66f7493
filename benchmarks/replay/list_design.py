"""The peer: the usual replay buffer in plain Python, a list of rollouts per environment.

Every operation decides freshness by filtering whole lists; sampling weighs the whole list by recency and asks
`numpy.random.Generator.choice`. Advantages are computed as groups arrive; drawn rollouts become the same examples as
ours. Nothing is made durable, and no books are kept.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.batch import example_from_rollout
from penstock.types import AnyRollout, RLExample, RolloutBatch


@dataclass
class _Entry:
    rollout: AnyRollout
    advantage: float
    uses: int = 0


class ListReplay:
    """Lists, filters, and one weighted choice.

    Args:
        capacity: Rollouts per environment.
        max_step_delay: Oldest weight step that is fresh, counted back.
        max_age_s: Oldest timestamp that is fresh, counted back.
        alpha: P(i) ∝ (i + 1)^alpha over the position in the list.
        max_tokens: Longest sequence.
        max_samples: Uses of a rollout before it is done; −1 never.
    """

    def __init__(
        self,
        capacity: int,
        max_step_delay: int,
        max_age_s: float,
        alpha: float,
        max_tokens: int,
        max_samples: int = -1,
    ) -> None:
        self._capacity = capacity
        self._max_step_delay = max_step_delay
        self._max_age_s = max_age_s
        self._alpha = alpha
        self._max_tokens = max_tokens
        self._max_samples = max_samples
        self._rng = np.random.default_rng(0)
        self._step = 0
        self._entries: dict[str, list[_Entry]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def add_batches(self, batches: Sequence[RolloutBatch]) -> None:
        for batch in batches:
            for group in batch.groups:
                entries = self._entries[group.rollouts[0].env_name]
                for rollout, advantage in zip(group.rollouts, group.compute_rloo_advantages(), strict=True):
                    entries.append(_Entry(rollout, float(advantage)))
        self._keep_fresh()
        for name, entries in self._entries.items():
            self._entries[name] = entries[-self._capacity :]

    def set_current_step(self, step: int) -> None:
        self._step = step
        self._keep_fresh()

    def sample(self, batch_size: int) -> list[RLExample] | None:
        self._keep_fresh()
        if len(self) < batch_size:
            return None
        sizes = np.array([len(entries) for entries in self._entries.values()])
        counts = np.floor(batch_size * sizes / sizes.sum()).astype(int)
        counts[: batch_size - counts.sum()] += 1
        chosen = [
            entry
            for count, entries in zip(counts, self._entries.values(), strict=True)
            for entry in self._draw(entries, count)
        ]
        for entry in chosen:
            entry.uses += 1
        if self._max_samples >= 0:
            for name, entries in self._entries.items():
                self._entries[name] = [entry for entry in entries if entry.uses < self._max_samples]
        return [example_from_rollout(entry.rollout, entry.advantage, self._max_tokens) for entry in chosen]

    def _draw(self, entries: list[_Entry], count: int) -> list[_Entry]:
        weights = np.arange(1, len(entries) + 1, dtype=np.float64) ** self._alpha
        picked = self._rng.choice(len(entries), count, replace=False, p=weights / weights.sum())
        return [entries[index] for index in picked]

    def _keep_fresh(self) -> None:
        oldest_step, oldest_time = self._step - self._max_step_delay, time.time() - self._max_age_s
        for name, entries in self._entries.items():
            self._entries[name] = [entry for entry in entries if self._fresh(entry.rollout, oldest_step, oldest_time)]

    def _fresh(self, rollout: AnyRollout, oldest_step: int, oldest_time: float) -> bool:
        metadata = rollout.metadata
        assert metadata is not None
        return oldest_step <= metadata.weight_step <= self._step and metadata.timestamp > oldest_time

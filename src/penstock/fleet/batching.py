"""Inference batches: arrivals of processes, or of parts of them, gathered in arrays that are allocated once.

A `BatchFiller` is filled, decided on, acted on and reported, then filled again; a worker has two, so that one fills
while the other is in inference. Large leaves (frames) are copied when they arrive, which overlaps with inference; small
ones and the scalars of all processes are joined in one call each when the batch begins.

Not covered: when a batch begins (`RolloutWorker`).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.fleet.aligned import aligned_zeros
from penstock.fleet.arrivals import STEP_ROW, Arrival, Decision, Leaves, StepBatch, StepRows, whole_rows
from penstock.types import LeafSpace, Spaces

LARGE_BYTES = 1024
"""Leaves of at least so many bytes are copied one by one; smaller ones are joined, or scattered over all slots."""


class BatchFiller(StepRows):
    """Room for one inference batch of at most `capacity` slots.

    Args:
        spaces: What arrives.
        capacity: Most slots; at least those of one arrival.

    Attributes:
        count: Slots in it.
        first_at: When the first of them came, in the caller's seconds.
        rows: `STEP_ROW` [n], after `join`.
    """

    def __init__(self, spaces: Spaces, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.first_at = 0.0
        self._arrivals: list[Arrival] = []
        self._rows = np.zeros(capacity, STEP_ROW)
        self.rows = self._rows[:0]
        self._observations = {
            leaf.name: aligned_zeros((capacity, *leaf.shape), np.dtype(leaf.dtype)) for leaf in spaces.observations
        }
        self._finals = {leaf.name: leaf.zeros(capacity) for leaf in spaces.observations}
        self._large = [leaf.name for leaf in spaces.observations if is_large(leaf)]
        self._small = [leaf.name for leaf in spaces.observations if not is_large(leaf)]

    def takes(self, arrival: Arrival) -> bool:
        """Whether there is room for all of its slots."""
        return self.count + len(arrival.rows) <= self.capacity

    def add(self, arrival: Arrival, now: float) -> None:
        """Takes an arrival in."""
        if self.count == 0:
            self.first_at = now
        begin, end = self.count, self.count + len(arrival.rows)
        for name in self._large:
            self._observations[name][begin:end] = arrival.observations[name]
        self._arrivals.append(arrival)
        self.count = end

    def join(self) -> None:
        """Joins what was not copied yet; after it nothing refers to the arrivals' own arrays."""
        count, arrivals = self.count, self._arrivals
        self.rows = self._rows[:count]
        np.concatenate([whole_rows(arrival.rows) for arrival in arrivals], out=whole_rows(self.rows))
        for name in self._small:
            np.concatenate([arrival.observations[name] for arrival in arrivals], out=self._observations[name][:count])
        if self.has_final.any():
            self._copy_finals()

    def _copy_finals(self) -> None:
        begin = 0
        for arrival in self._arrivals:
            for row in np.flatnonzero(arrival.has_final):
                for name, array in self._finals.items():
                    array[begin + row] = arrival.final_observations[name][row]
            begin += len(arrival.rows)

    @property
    def room(self) -> Leaves:
        """By leaf name, [capacity, …]: the observations of the n slots, after `join`, and old ones."""
        return self._observations

    def simulate_s(self) -> Sequence[float]:
        """How long each arrival took."""
        return [arrival.simulate_s for arrival in self._arrivals]

    def shares(self, actions: Leaves) -> Iterator[tuple[Arrival, Leaves]]:
        """Each arrival with its share of the actions, as views."""
        begin = 0
        for arrival in self._arrivals:
            end = begin + len(arrival.rows)
            yield arrival, {name: array[begin:end] for name, array in actions.items()}
            begin = end

    def reported(self, decision: Decision) -> StepBatch:
        """What progress handlers are told; views that hold until `clear`."""
        count = self.count
        return StepBatch(
            rows=self.rows,
            observations={name: array[:count] for name, array in self._observations.items()},
            final_observations={name: array[:count] for name, array in self._finals.items()},
            decision=decision,
        )

    def clear(self) -> None:
        """Makes it empty."""
        self.count = 0
        self._arrivals = []


def is_large(leaf: LeafSpace) -> bool:
    """Whether a leaf's arrays are worth a copy of their own."""
    return leaf.nbytes >= LARGE_BYTES

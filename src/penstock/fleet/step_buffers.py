"""Room for L + 1 steps of each of n slots, one leaf at a time: small leaves in one block, large ones slot by slot.

A block is written for all slots of a batch in one call, and copied out likewise. Large leaves (frames) have an array
for each slot, which a fragment takes over without a copy; the slot then gets another one. That is one which an earlier
fragment had, where nobody holds that fragment any more: the system's fresh pages cost ten times what writing a frame
into used ones does (2 µs for 48 KiB).
"""

import sys
from collections import deque
from collections.abc import Sequence

import numpy as np

from penstock.fleet.batching import is_large
from penstock.types import LeafSpace

_LENT_PER_SLOT = 4  # arrays that are remembered; fragments beyond them are freed as usual
_LOOKED_AT = 8  # of them at each exchange
_OWN_REFERENCES = 2  # the variable, and the argument of getrefcount


class BlockBuffer:
    """[n, L + 1, …] in one array.

    Args:
        leaf: What one step holds.
        slots: n.
        length: L.
    """

    def __init__(self, leaf: LeafSpace, slots: int, length: int) -> None:
        self._steps = leaf.zeros(slots, length + 1)
        self._flat = self._steps.reshape(-1, *leaf.shape)
        self._length = length

    def write(self, slots: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """Row i goes to step `at[i]` of slot `slots[i]`."""
        self._flat[slots * (self._length + 1) + at] = values

    def take(self, slots: np.ndarray) -> Sequence[np.ndarray]:
        """The L + 1 steps of each of these slots; step L begins their next buffers."""
        taken = self._steps[slots]
        self._steps[slots, 0] = taken[:, self._length]
        return taken  # type: ignore[return-value]  # its rows are what is asked for


class SlotBuffer:
    """[L + 1, …] for each slot. The arguments are `BlockBuffer`'s."""

    def __init__(self, leaf: LeafSpace, slots: int, length: int) -> None:
        self._length = length
        self._arrays = [np.full((length + 1, *leaf.shape), 0, leaf.dtype) for _ in range(slots)]  # touches its pages
        self._lent: deque[np.ndarray] = deque(maxlen=_LENT_PER_SLOT * slots)

    def write(self, slots: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """Row i goes to step `at[i]` of slot `slots[i]`."""
        for slot, step, row in zip(slots.tolist(), at.tolist(), values, strict=True):
            self._arrays[slot][step] = row

    def take(self, slots: np.ndarray) -> Sequence[np.ndarray]:
        """The L + 1 steps of each of these slots, without a copy; step L begins their next buffers."""
        return [self._exchange(slot) for slot in slots.tolist()]

    def _exchange(self, slot: int) -> np.ndarray:
        taken = self._arrays[slot]
        returned = self._returned()
        self._arrays[slot] = np.empty_like(taken) if returned is None else returned
        self._arrays[slot][0] = taken[self._length]
        self._lent.append(taken)
        return taken[:]

    def _returned(self) -> np.ndarray | None:
        """An array that was lent, and of which no view is left: every view counts as a reference to it."""
        for _ in range(min(_LOOKED_AT, len(self._lent))):
            array = self._lent.popleft()
            if sys.getrefcount(array) == _OWN_REFERENCES:
                return array
            self._lent.append(array)
        return None


def step_buffer(leaf: LeafSpace, slots: int, length: int) -> BlockBuffer | SlotBuffer:
    """The kind that suits the leaf's size."""
    return (SlotBuffer if is_large(leaf) else BlockBuffer)(leaf, slots, length)

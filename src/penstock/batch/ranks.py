"""Order statistics: which of the slots that are present comes k-th, in O(log n).

A Fenwick tree (binary indexed tree) over slots that are handed out in order and never used again until the owner
rebuilds; four bytes and a flag per slot. Fenwick 1994, https://doi.org/10.1002/spe.4380240306.
"""

from array import array
from typing import final

import numpy as np
from jaxtyping import Bool, Int


@final
class Ranks:
    """Slots 0, 1, …, each present or not; the rank of a present slot is the number of present ones before it."""

    def __init__(self) -> None:
        self._tree = array("i", [0])  # _tree[i] counts the present slots among the last (i & −i) up to slot i − 1
        self._present = bytearray()
        self._count = 0

    def __len__(self) -> int:
        """How many slots are present."""
        return self._count

    def __contains__(self, slot: int) -> bool:
        return bool(self._present[slot])

    def append(self, present: bool) -> None:
        """Hands out the next slot."""
        index = len(self._tree)
        total, child = int(present), 1
        while child < index & -index:
            total += self._tree[index - child]
            child <<= 1
        self._tree.append(total)
        self._present.append(present)
        self._count += present

    def mark(self, slot: int, present: bool) -> None:
        """Makes a slot present or absent; it may be so already."""
        change = present - self._present[slot]
        if not change:
            return
        self._present[slot] = present
        self._count += change
        index = slot + 1
        while index < len(self._tree):
            self._tree[index] += change
            index += index & -index

    def select(self, rank: int) -> int:
        """The slot of a rank, 0 ≤ rank < len(self)."""
        tree, size = self._tree, len(self._tree)
        index, step = 0, 1 << (size - 1).bit_length()
        while step:
            reached = index + step
            if reached < size and tree[reached] <= rank:
                index = reached
                rank -= tree[reached]
            step >>= 1
        return index

    def keep(self, slots: Int[np.ndarray, " k"]) -> None:
        """Forgets every slot but these, which become 0, 1, …; O(number of slots)."""
        present: Bool[np.ndarray, " k"] = np.frombuffer(bytes(self._present), np.bool_)[slots]
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(present)])
        ends = np.arange(len(before))
        self._tree = array("i", (before - before[ends - (ends & -ends)]).astype(np.int32).tobytes())
        self._present = bytearray(present.tobytes())
        self._count = int(before[-1])

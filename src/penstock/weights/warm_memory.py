"""Memory for received arrays that is used again, version after version.

The first write to fresh memory costs several times as much as the next (the system clears each page when it is first
touched), and a large model needs that much anew with every version. So the memory of arrays that nobody refers to any
more is kept for the next ones of the same size. That is one version's memory beside those in use, at most.
"""

import mmap
import weakref
from collections import deque

import numpy as np

_SMALLEST_BYTES = 1 << 20
_ALIGNMENT = 64
"""Bytes; XLA takes arrays on the host by reference only if they are aligned so."""


class WarmMemory:
    """Gives out memory. Arrays, and views of them, may outlive it. One thread at a time takes."""

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}

    def take(self, size: int) -> np.ndarray:
        """uint8 [size], writeable, aligned to 64 bytes, with any content."""
        if size < _SMALLEST_BYTES:
            return plain_memory(size)
        free = self._free.setdefault(size, deque())
        try:
            memory = free.popleft()
        except IndexError:
            memory = _fresh(size)
        array = np.frombuffer(memory, np.uint8, size)
        # Every view has this very array as its base, since `memory` is no array: it goes last.
        weakref.finalize(array, free.append, memory).atexit = False
        return array

    @property
    def free_bytes(self) -> int:
        """What is kept for the next arrays."""
        return sum(size * len(free) for size, free in self._free.items())

    def clear(self) -> None:
        """Gives back to the system what is not in use."""
        for free in self._free.values():
            free.clear()


def plain_memory(size: int) -> np.ndarray:
    """uint8 [size], aligned to 64 bytes, which is not used again."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def _fresh(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

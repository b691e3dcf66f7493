"""The slots of the engine: which response runs in which, and the arrays that the device reads each dispatch.

The lowest free slot is taken first, so that placement depends on nothing but what is running. Host-side only.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from penstock.inference.responses import Response
from penstock.inference.rows import HostRows, Sampled
from penstock.types import SAMPLING_FIELDS, WeightVersion

WORD_BITS = 32


class SlotTable:
    """Fixed slots, some of them running a response.

    Args:
        slots: How many.
        max_stop_token_ids: Room for stop tokens per slot.
    """

    def __init__(self, slots: int, max_stop_token_ids: int) -> None:
        self._responses: list[Response | None] = [None] * slots
        self._free = list(range(slots))
        self._rows = {
            "tokens": np.zeros(slots, np.int32),
            "positions": np.zeros(slots, np.int32),
            "budget": np.zeros(slots, np.int32),
            "seeds": np.zeros((slots, 2), np.uint32),
            **{name: np.full(slots, field.neutral, field.dtype) for name, field in SAMPLING_FIELDS.items()},
            "stop_token_ids": np.full((slots, max_stop_token_ids), -1, np.int32),
        }

    @property
    def rows(self) -> HostRows:
        """What the device reads. The arrays are reused: a dispatch must have ended before they change."""
        return self._rows

    @property
    def free(self) -> int:
        """Slots without a response."""
        return len(self._free)

    @property
    def running(self) -> int:
        """Slots with a response."""
        return len(self._responses) - len(self._free)

    @property
    def cached_tokens(self) -> int:
        """Positions of the cache that running responses use."""
        return int(self._rows["positions"][self._rows["budget"] > 0].sum())

    def reach(self, steps: int) -> int:
        """Positions that the cache must have so that every running response can take so many steps."""
        rows = self._rows
        return int(np.max((rows["positions"] + np.minimum(rows["budget"], steps))[rows["budget"] > 0], initial=0))

    def occupied(self) -> Iterator[tuple[int, Response]]:
        """Running responses by ascending slot; the table may be changed meanwhile."""
        for slot, response in enumerate(list(self._responses)):
            if response is not None:
                yield slot, response

    def assign(self, response: Response) -> int:
        """Puts a response that has not begun into the lowest free slot."""
        slot = heapq.heappop(self._free)
        self._responses[slot] = response
        rows, decoding = self._rows, response.pending.request.decoding
        rows["tokens"][slot] = response.prompt[-1]
        rows["positions"][slot] = len(response.prompt) - 1
        rows["budget"][slot] = response.room
        rows["seeds"][slot] = response.seed >> WORD_BITS, response.seed & (2**WORD_BITS - 1)
        for name, field in SAMPLING_FIELDS.items():
            value = getattr(decoding, name)
            rows[name][slot] = field.neutral if value is None else value
        stops = response.pending.stop_token_ids
        rows["stop_token_ids"][slot] = -1
        rows["stop_token_ids"][slot, : len(stops)] = stops
        return slot

    def release(self, slot: int) -> None:
        """Frees a slot; its cache entries stay, its parameters must not slow down the others."""
        self._responses[slot] = None
        self._rows["budget"][slot] = 0
        for name, field in SAMPLING_FIELDS.items():
            self._rows[name][slot] = field.neutral
        heapq.heappush(self._free, slot)

    def advance(self, sampled: Sampled, version: WeightVersion) -> list[tuple[int, Response]]:
        """Gives each response its new tokens; returns those that ended, still in their slots."""
        ended: list[tuple[int, Response]] = []
        for slot, response in self.occupied():
            count = int(sampled.count[slot])
            tokens = sampled.tokens[:count, slot].tolist()
            response.extend(tokens, sampled.logprobs[:count, slot].tolist(), version)
            self._rows["tokens"][slot] = tokens[-1]
            self._rows["positions"][slot] += count
            self._rows["budget"][slot] = response.room
            if response.finish_reason is not None:
                ended.append((slot, response))
        return ended

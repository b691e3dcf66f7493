"""What one dispatch of decode steps is given and what it returns, on the device and in host memory."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from penstock.types import SAMPLING_FIELDS, Alternatives

HostRows = Mapping[str, np.ndarray]
"""The fields of `SlotRows`, and those of `SlotRows.sampling`, by name in host memory."""


class SlotRows(NamedTuple):
    """State of slots between two dispatches, and what their requests ask for.

    Attributes:
        slots: Which slot of the cache each row is.
        tokens: The newest token: sampled or the prompt's last, not yet in the cache.
        positions: Its position, which is how many tokens the cache holds.
        budget: How many tokens may still be sampled; 0 for a row that is not live.
        seeds: The sample's seed in two words.
        sampling: [rows] each, by the names of `SAMPLING_FIELDS`: what `sampling.sample` takes.
        stop_token_ids: Padded with −1.
    """

    slots: Int32[Array, " rows"]
    tokens: Int32[Array, " rows"]
    positions: Int32[Array, " rows"]
    budget: Int32[Array, " rows"]
    seeds: UInt32[Array, "rows 2"]
    sampling: dict[str, Array]
    stop_token_ids: Int32[Array, "rows stops"]

    @classmethod
    def shapes(cls, rows: int, stops: int) -> Any:
        """Of that many rows, without arrays: what a program is lowered for."""
        whole, seeds = jax.ShapeDtypeStruct((rows,), np.int32), jax.ShapeDtypeStruct((rows, 2), np.uint32)
        sampling = {name: jax.ShapeDtypeStruct((rows,), each.dtype) for name, each in SAMPLING_FIELDS.items()}
        given: Any = (whole, whole, whole, whole, seeds, sampling, jax.ShapeDtypeStruct((rows, stops), np.int32))
        return cls._make(given)


class TextScores(NamedTuple):
    """What the weights make of some tokens of a text, each after those before it; on the device, or in host memory.

    Attributes:
        logprobs: Of the token at each position.
        ranks: 1 for the most probable one.
        top_tokens: The most probable ones.
        top_logprobs: Of those.
    """

    logprobs: Any  # float32 [length]
    ranks: Any  # int32 [length]
    top_tokens: Any  # int32 [alternatives, length]
    top_logprobs: Any  # float32 [alternatives, length]


class DeviceSamples(NamedTuple):
    """What one dispatch sampled: of row r, the first ``count[r]`` entries of column r.

    Attributes:
        tokens: By step, then row.
        logprobs: Of those tokens, before truncation.
        count: How many tokens the row sampled before it stopped or the dispatch ended.
        top_tokens: The most probable ones at each step; None in dispatches that nobody asks for them.
        top_logprobs: Of those, before truncation too.
    """

    tokens: Int32[Array, "steps rows"]
    logprobs: Float32[Array, "steps rows"]
    count: Int32[Array, " rows"]
    top_tokens: Int32[Array, "steps alternatives rows"] | None = None
    top_logprobs: Float32[Array, "steps alternatives rows"] | None = None


class HostSamples(NamedTuple):
    """`DeviceSamples` in host memory, a column per slot."""

    tokens: np.ndarray
    logprobs: np.ndarray
    count: np.ndarray
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def alternatives(self, slot: int) -> Alternatives | None:
        """Of what that slot sampled; None where the dispatch has none."""
        if self.top_tokens is None or self.top_logprobs is None:
            return None
        count = int(self.count[slot])
        return Alternatives(self.top_tokens[:count, :, slot], self.top_logprobs[:count, :, slot])


def to_device(rows: HostRows) -> SlotRows:
    """Puts rows on the device, which may read them where they are: they stay as they are until the dispatch has ended.

    Not by `jnp.asarray`, which compiles a program for each shape.
    """
    arrays = {name: jax.device_put(array) for name, array in rows.items()}
    sampling = {name: arrays.pop(name) for name in SAMPLING_FIELDS}
    return SlotRows(**arrays, sampling=sampling)


def to_host(emitted: DeviceSamples, chosen: np.ndarray, slots: int) -> HostSamples:
    """Waits for a dispatch and fetches its result.

    Args:
        emitted: Of the rows that ran.
        chosen: The slot of each.
        slots: How many there are; those that did not run sampled nothing.
    """
    fetched = [np.asarray(array) for array in emitted if array is not None]
    if len(chosen) == slots:  # all, in order
        return HostSamples(*fetched)
    found = [np.zeros((*array.shape[:-1], slots), array.dtype) for array in fetched]
    for whole, part in zip(found, fetched, strict=True):
        whole[..., chosen] = part
    return HostSamples(*found)


class PrefixIndex:
    """Knows which texts the cache holds, slot by slot, under the weights that are served."""

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}
        self._used: dict[int, int] = defaultdict(int)
        self._clock = 0
        self._shared: dict[bytes, dict[int, int]] = {}  # of texts that were asked for since anything changed

    def begin(self, slot: int, held: np.ndarray) -> None:
        """The slot is given to another response, and of what it held only this stays."""
        self._held[slot] = held
        self._shared.clear()
        self.touch(slot)

    def note(self, slot: int, held: np.ndarray) -> None:
        """The slot of a response holds this now, unless what it was given for is forgotten."""
        if slot in self._held:
            self._held[slot] = held
            self._shared.clear()
            self.touch(slot)

    def touch(self, slot: int) -> None:
        """Nothing was used later."""
        self._clock += 1
        self._used[slot] = self._clock

    def common(self, slot: int, text: np.ndarray) -> int:
        """How many tokens of that beginning the slot holds."""
        held = self._held.get(slot, text[:0])
        differ = held[: len(text)] != text[: len(held)]
        return int(differ.argmax()) if differ.any() else len(differ)

    def _commons(self, text: np.ndarray) -> dict[int, int]:
        """`common` of each slot that holds anything; samples of one prompt ask the same."""
        key = text.tobytes()
        if key not in self._shared:
            self._shared[key] = {slot: self.common(slot, text) for slot in self._held}
        return self._shared[key]

    def longest(self, text: np.ndarray) -> tuple[int, int]:
        """The first slot that holds the most tokens of that beginning, and how many; −1 where none holds any."""
        found = max(((common, -slot) for slot, common in self._commons(text).items()), default=(0, 1))
        return (-found[1], found[0]) if found[0] else (-1, 0)

    def home(self, text: np.ndarray, free: Sequence[int]) -> int | None:
        """The free slot in which that text can go on with at least half of what is there, and how much that is."""
        shared = self._commons(text)
        fits = [slot for slot in free if 0 < len(self._held.get(slot, ())) <= 2 * shared[slot]]
        return max(fits, key=lambda slot: (shared[slot], -slot), default=None)

    def oldest(self, free: Sequence[int]) -> int:
        """The slot of which least is lost."""
        return min(free, key=lambda slot: (slot in self._held, self._used[slot], slot))

    @property
    def reach(self) -> int:
        """Positions of the longest text."""
        return max(map(len, self._held.values()), default=0)

    def clear(self) -> None:
        """Forgets everything."""
        self._held.clear()
        self._shared.clear()
        self._used.clear()

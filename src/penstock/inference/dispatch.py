"""What one dispatch of decode steps is given and what it returns, on the device and in host memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32, Int64, UInt32

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
    def of(cls, rows: HostRows) -> Any:
        """As a program takes them, which may read them where they are: until it has ended they stay as they are.

        In host memory: to put each on the device before takes longer than the call that takes them along.
        """
        given: dict[str, Any] = dict(rows)
        sampling = {name: given.pop(name) for name in SAMPLING_FIELDS}
        return cls(**given, sampling=sampling)

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


_NEUTRAL = {name: each.neutral for name, each in SAMPLING_FIELDS.items() if each.truncates}


def truncates(rows: HostRows) -> bool:
    """Whether a live row asks that tokens be left out."""
    return any(((rows[name] != neutral) & (rows["budget"] > 0)).any() for name, neutral in _NEUTRAL.items())


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
        self._texts = np.full((0, 0), _NO_TOKEN, np.int32)  # [slots, longest], padded
        self._lengths = np.zeros(0, np.int64)
        self._is_held = np.zeros(0, np.bool_)  # given for a response's text, which may be empty
        self._used = np.zeros(0, np.int64)
        self._clock = 0
        self._shared: dict[bytes, np.ndarray] = {}  # of texts that were asked for since anything changed

    def begin(self, slot: int, held: np.ndarray) -> None:
        """The slot is given to another response, and of what it held only this stays."""
        self._grow(slot + 1, len(held))
        self._is_held[slot] = True
        self.note(slot, held)

    def note(self, slot: int, held: np.ndarray) -> None:
        """The slot of a response holds this now, unless what it was given for is forgotten."""
        if slot < len(self._is_held) and self._is_held[slot]:
            self._grow(slot + 1, len(held))
            self._texts[slot, : len(held)] = held
            self._texts[slot, len(held) :] = _NO_TOKEN
            self._lengths[slot] = len(held)
            self._shared.clear()
            self.touch(slot)

    def touch(self, slot: int) -> None:
        """Nothing was used later."""
        self._clock += 1
        self._used[slot] = self._clock

    def common(self, slot: int, text: np.ndarray) -> int:
        """How many tokens of that beginning the slot holds."""
        return int(_common(self._texts[slot : slot + 1], text).sum())

    def longest(self, text: np.ndarray) -> tuple[int, int]:
        """The first slot that holds the most tokens of that beginning, and how many; −1 where none holds any."""
        shared = self._commons(text)
        slot = int(shared.argmax()) if len(shared) else -1
        return (slot, int(shared[slot])) if slot >= 0 and shared[slot] else (-1, 0)

    def home(self, text: np.ndarray, free: Sequence[int]) -> int | None:
        """The free slot in which that text can go on with at least half of what is there, and how much that is."""
        shared = self._commons(text)
        fits = np.where(self._lengths <= 2 * shared, shared, 0)
        if not fits.any():
            return None
        slots = np.array([slot for slot in free if slot < len(fits)], np.int64)
        best = fits[slots]
        return int(slots[best.argmax()]) if best.any() else None

    def oldest(self, free: Sequence[int], count: int) -> list[int]:
        """So many slots, those first of which least is lost; of several alike as they are given."""
        slots = np.array(free, np.int64)
        self._grow(int(slots.max(initial=-1)) + 1, 0)
        return slots[self._used[slots].argsort(kind="stable")[:count]].tolist()

    @property
    def reach(self) -> int:
        """Positions of the longest text."""
        return int(self._lengths.max(initial=0))

    def clear(self) -> None:
        """Forgets everything."""
        self._texts.fill(_NO_TOKEN)
        self._shared.clear()
        for each in (self._lengths, self._is_held, self._used):
            each.fill(0)

    def _commons(self, text: np.ndarray) -> np.ndarray:
        """`common` of each slot; samples of one prompt ask the same."""
        key = text.tobytes()
        if key not in self._shared:
            self._shared[key] = _common(self._texts, text)
        return self._shared[key]

    def _grow(self, slots: int, length: int) -> None:
        """Room for that many."""
        more = max(0, slots - len(self._texts)), max(0, length - self._texts.shape[1])
        if any(more):
            self._texts = np.pad(self._texts, [(0, each) for each in more], constant_values=_NO_TOKEN)
            self._lengths, self._is_held, self._used = (
                np.pad(each, (0, more[0])) for each in (self._lengths, self._is_held, self._used)
            )
            self._shared.clear()


_NO_TOKEN = -1
_FIRST = 32
"""Tokens by which most texts differ already."""


def _common(texts: Int32[np.ndarray, "slots longest"], text: np.ndarray) -> Int64[np.ndarray, " slots"]:
    """How many tokens of that beginning each text begins with."""
    shared = _equal_until(texts[:, :_FIRST], text[:_FIRST])
    if len(text) > _FIRST:
        alike = np.flatnonzero(shared == _FIRST)
        shared[alike] += _equal_until(texts[alike, _FIRST:], text[_FIRST:])
    return shared


def _equal_until(texts: Int32[np.ndarray, "slots longest"], text: np.ndarray) -> Int64[np.ndarray, " slots"]:
    width = min(texts.shape[1], len(text))
    differ = np.ones((len(texts), width + 1), np.bool_)  # the last one always
    np.not_equal(texts[:, :width], text[:width], out=differ[:, :width])
    return differ.argmax(axis=1)

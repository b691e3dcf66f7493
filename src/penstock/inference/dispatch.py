"""What one dispatch of decode steps is given and what it returns, on the device and in host memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Int64, UInt32

from penstock.types import SAMPLING_FIELDS, Alternatives


class SlotRows(NamedTuple):
    """State of slots between two dispatches, and what their requests ask for; parts of one array, see `of`.

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
    def of(cls, whole: Any) -> Any:
        """What the one array that a program is given holds of each slot: in host memory views of it, to be written to.

        One, because each argument of a program costs a transfer, and a wait for the interpreter where other threads
        are busy.

        Args:
            whole: int32 [fields, rows], from `array`.
        """
        sampling = zip(SAMPLING_FIELDS.items(), whole[_BEFORE : _BEFORE + len(SAMPLING_FIELDS)], strict=True)
        return cls(
            *whole[: _BEFORE - 2],
            seeds=whole[_BEFORE - 2 : _BEFORE].view(np.uint32).T,
            sampling={name: column.view(each.dtype) for (name, each), column in sampling},
            stop_token_ids=whole[_BEFORE + len(SAMPLING_FIELDS) :].T,
        )

    @staticmethod
    def array(slots: int, stops: int) -> Int32[np.ndarray, "fields slots"]:
        """Of slots that are not live, in host memory; a program may read it where it is, until it has ended."""
        whole = np.zeros((_BEFORE + len(SAMPLING_FIELDS) + stops, slots), np.int32)
        rows = SlotRows.of(whole)
        rows.slots[:], rows.stop_token_ids[:] = np.arange(slots), -1
        for name, each in SAMPLING_FIELDS.items():
            rows.sampling[name][:] = each.neutral
        return whole


_BEFORE = 6
"""Rows of a `SlotRows` array before those of its sampling; of the seeds two."""


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

    def array(self) -> Int32[Array, "fields rows"]:
        """All of it in one, which is one transfer; `HostSamples.of` takes it apart."""
        parts = [self.count[None], self.tokens, self.logprobs]
        if self.top_tokens is not None and self.top_logprobs is not None:
            parts += [each.reshape(-1, self.count.size) for each in (self.top_tokens, self.top_logprobs)]
        return jnp.concatenate([part.view(jnp.int32) for part in parts])


class HostSamples(NamedTuple):
    """`DeviceSamples` in host memory, a column per slot."""

    tokens: np.ndarray
    logprobs: np.ndarray
    count: np.ndarray
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @classmethod
    def of(cls, emitted: Int32[Array, "fields rows"], steps: int, chosen: np.ndarray, slots: int) -> "HostSamples":
        """Waits for a dispatch and fetches its result.

        Args:
            emitted: `DeviceSamples.array` of the rows that ran.
            steps: Of the dispatch, at most.
            chosen: The slot of each row.
            slots: How many there are; those that did not run sampled nothing.
        """
        found = fetched = np.asarray(emitted)
        if len(chosen) < slots:
            found = np.zeros((len(fetched), slots), np.int32)
            found[:, chosen] = fetched
        count, tokens, logprobs, top = np.split(found, [1, 1 + steps, 1 + 2 * steps])
        sampled = tokens, logprobs.view(np.float32), count[0]
        if not top.size:
            return cls(*sampled)
        top_tokens, top_logprobs = top.reshape(2, steps, -1, slots)
        return cls(*sampled, top_tokens, top_logprobs.view(np.float32))

    def alternatives(self, slot: int) -> Alternatives | None:
        """Of what that slot sampled; None where the dispatch has none."""
        if self.top_tokens is None or self.top_logprobs is None:
            return None
        count = int(self.count[slot])
        return Alternatives(self.top_tokens[:count, :, slot], self.top_logprobs[:count, :, slot])


_NEUTRAL = {name: each.neutral for name, each in SAMPLING_FIELDS.items() if each.truncates}


def truncates(rows: SlotRows) -> bool:
    """Whether a live row asks that tokens be left out."""
    return any(bool(((rows.sampling[name] != neutral) & (rows.budget > 0)).any()) for name, neutral in _NEUTRAL.items())


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
        if slot >= len(self._lengths) or not self._lengths[slot]:
            return 0
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

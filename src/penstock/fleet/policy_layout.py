"""How a batch travels to the policy and back: one block of 32-bit words each way.

A transfer costs much more than the bytes of a small observation, so slots, `first` and all small observations go as
one int32 vector, floats and uint32 as their bits; leaves of `WHOLE_BYTES` and more go as they are. Answers come back
likewise. A batch of n rows is padded to a fixed number of rows; what stands in padding rows means nothing.
No number changes on its way but for float64, which becomes float32: see `LeafSpace.device_dtype`.

Whoever packs allocates anew: JAX may read the memory until the decision is there, and on a CPU does not copy it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from penstock.fleet.aligned import aligned_zeros
from penstock.fleet.arrivals import Leaves
from penstock.types import ConfigError, LeafSpace

Packed = tuple[np.ndarray, tuple[np.ndarray, ...]]
"""A block of words, and the leaves that are not in it."""

WHOLE_BYTES = 2048
"""A leaf of so many bytes per row is not packed."""

_FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class Words:
    """Where one array of [rows, …] lies in a block of words.

    Attributes:
        where: Its words.
        shape: [rows, …].
        dtype: Whose bits the words are: float32, int32 or uint32.
    """

    where: slice
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, block: np.ndarray) -> np.ndarray:
        """The array in a block on the host."""
        return block[self.where].view(self.dtype).reshape(self.shape)

    def read(self, block: Int32[Array, " words"]) -> Array:
        """The same on the device."""
        part = block[self.where].reshape(self.shape)
        return part if self.dtype == _INT else jax.lax.bitcast_convert_type(part, self.dtype)


def lay_out(rows: int, arrays: Sequence[tuple[tuple[int, ...], np.dtype]]) -> tuple[tuple[Words, ...], int]:
    """Places for arrays given as (shape of a row, dtype of `Words`), one after the other, and the number of words."""
    places: list[Words] = []
    start = 0
    for shape, dtype in arrays:
        end = start + rows * math.prod(shape)
        places.append(Words(slice(start, end), (rows, *shape), dtype))
        start = end
    return tuple(places), start


class InputLayout:
    """Slots, `first` and observations of one batch size."""

    def __init__(self, leaves: Sequence[LeafSpace], rows: int, padding_slot: int) -> None:
        self._rows = rows
        self._padding_slot = padding_slot
        self._small = [leaf for leaf in leaves if leaf.nbytes < WHOLE_BYTES]
        self._whole = [leaf for leaf in leaves if leaf.nbytes >= WHOLE_BYTES]
        columns = [((), _INT), ((), _INT), *((leaf.shape, word_dtype(leaf)) for leaf in self._small)]
        (self._slots, self._first, *self._places), self._size = lay_out(rows, columns)

    def pack(self, slots: np.ndarray, observations: Leaves, first: np.ndarray) -> Packed:
        """Words int32 [size], and the whole leaves [rows, …]: the caller's own where they have so many rows.

        Args:
            slots: [n].
            observations: By leaf name, [n or more, …].
            first: [n].

        Raises:
            ConfigError: an observation is missing or has another shape.
        """
        block = aligned_zeros((self._size,), np.int32)
        n = len(slots)
        indices = self._slots.view(block)
        indices[:n] = slots
        indices[n:] = self._padding_slot
        self._first.view(block)[:n] = first
        for leaf, place in zip(self._small, self._places, strict=True):
            place.view(block)[:n] = _checked(leaf, observations, n)[:n]
        return block, tuple(self._padded(_checked(leaf, observations, n), leaf, n) for leaf in self._whole)

    def unpack(self, block: Int32[Array, " words"], whole: Sequence[Array]) -> tuple[Array, Array, dict[str, Array]]:
        """Slots int32 [rows], first bool [rows] and observations by leaf name; traced."""
        observations = {leaf.name: place.read(block) for leaf, place in zip(self._small, self._places, strict=True)}
        observations |= {leaf.name: array for leaf, array in zip(self._whole, whole, strict=True)}
        return self._slots.read(block), self._first.read(block) > 0, observations

    def empty(self) -> Packed:
        """A batch of padding only."""
        no_rows = np.zeros(0, np.int64)
        return self.pack(no_rows, {leaf.name: leaf.zeros(0) for leaf in (*self._small, *self._whole)}, no_rows)

    def _padded(self, array: np.ndarray, leaf: LeafSpace, n: int) -> np.ndarray:
        dtype = leaf.device_dtype
        if len(array) >= self._rows and array.dtype == dtype and array.flags.c_contiguous:
            return array[: self._rows]
        padded = aligned_zeros((self._rows, *leaf.shape), dtype)
        padded[:n] = array[:n]
        return padded


class OutputLayout:
    """Actions, log-probabilities and values of one batch size."""

    def __init__(self, leaves: Sequence[LeafSpace], rows: int) -> None:
        self._leaves = tuple(leaves)
        self._rows = rows
        columns = [((), _FLOAT), ((), _FLOAT), *((leaf.shape, word_dtype(leaf)) for leaf in leaves)]
        (self._logprobs, self._values, *self._places), _ = lay_out(rows, columns)

    def join(self, actions: Mapping[str, Array], logprobs: Array, values: Array) -> Int32[Array, " words"]:
        """One block; traced."""
        arrays = [logprobs, values, *(actions[leaf.name] for leaf in self._leaves)]
        return jnp.concatenate([_bits(array) for array in arrays])

    def split(self, block: np.ndarray, n: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Actions of the spaces' dtypes, log-probabilities and values float32, of the first n rows; all copies."""
        actions = {
            leaf.name: place.view(block)[:n].astype(leaf.dtype)
            for leaf, place in zip(self._leaves, self._places, strict=True)
        }
        logprobs, values = (place.view(block)[:n].copy() for place in (self._logprobs, self._values))
        return actions, logprobs, values


def word_dtype(leaf: LeafSpace) -> np.dtype:
    """What a leaf's words are the bits of.

    Raises:
        ConfigError: no device holds the leaf exactly.
    """
    dtype = leaf.device_dtype
    if dtype.kind == "f":
        return _FLOAT
    return dtype if dtype == np.uint32 else _INT


def _bits(array: Array) -> Array:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32).ravel()
    return array.astype(jnp.int32).ravel()


def _checked(leaf: LeafSpace, observations: Leaves, n: int) -> np.ndarray:
    array = observations.get(leaf.name)
    if array is None or len(array) < n or array.shape[1:] != leaf.shape:
        found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise ConfigError(f"observation {leaf.name!r} is {found}: the policy needs {leaf.dtype}{[n, *leaf.shape]}")
    return array

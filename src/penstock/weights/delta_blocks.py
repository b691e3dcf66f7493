"""One block of a delta: which of its elements changed, and by how much, as two zstd frames.

A change is the difference of two bit patterns taken as integers: training moves most floats by one unit in the last
place, up or down, so it is small. It is folded to be small without a sign, and sent as planes of one byte each, of
which all but the lowest are then mostly zero.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.types import WeightsError

BLOCK_ELEMENTS = 1 << 20
"""Elements of one block; the last of an array has fewer."""

_LEVEL = 1
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class EncodedBlock(NamedTuple):
    """What is sent of a block.

    Attributes:
        changed: Elements that differ.
        mask: zstd frame of which those are, bit-packed; empty where all or none do.
        changes: zstd frame of their changes; empty where none do.
    """

    changed: int
    mask: bytes
    changes: bytes


def bits(array: np.ndarray) -> np.ndarray:
    """Unsigned integers [elements] of the array's own width: its bit patterns, by reference."""
    return array.reshape(-1).view(_UNSIGNED[array.dtype.itemsize])


def blocks_of(elements: int) -> Iterator[slice]:
    """Where the blocks of an array of so many elements lie."""
    return (slice(start, min(start + BLOCK_ELEMENTS, elements)) for start in range(0, elements, BLOCK_ELEMENTS))


def encode_block(old: np.ndarray, new: np.ndarray) -> EncodedBlock:
    """What leads from one block of bit patterns to another of the same size."""
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if changed == 0:
        return EncodedBlock(0, b"", b"")
    if changed == new.size:
        return EncodedBlock(changed, b"", _compress(_planes(new - old)))
    places = np.flatnonzero(differs)  # sooner than by the mask itself where few differ
    return EncodedBlock(changed, _compress(np.packbits(differs)), _compress(_planes(new[places] - old[places])))


def decode_block(old: np.ndarray, new: np.ndarray, changed: int, mask: np.ndarray, changes: np.ndarray) -> None:
    """Makes the new block of bit patterns.

    Args:
        old: The block that the base has.
        new: Written to; same size and dtype.
        changed: Elements that differ, at most all.
        mask: uint8, as encoded.
        changes: uint8, as encoded.

    Raises:
        WeightsError: the frames are damaged, or of other sizes than said.
    """
    np.copyto(new, old)
    if changed == 0:
        return
    width = new.dtype.itemsize
    step = _unplaned(_decompress(changes, changed * width), new.dtype)
    if changed == new.size:
        new += step
        return
    differs = np.unpackbits(_decompress(mask, -(-new.size // 8)), count=new.size).view(np.bool_)
    places = np.flatnonzero(differs)
    if places.size != changed:
        raise WeightsError("a delta of weights is damaged: its mask does not have as many elements as it says")
    new[places] += step


def _planes(step: np.ndarray) -> np.ndarray:
    width = step.dtype.itemsize
    signed = step.view(_SIGNED[width])
    folded = ((signed << 1) ^ (signed >> (8 * width - 1))).view(np.uint8)
    return np.ascontiguousarray(folded.reshape(-1, width).T)


def _unplaned(planes: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    folded = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)
    one = dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _compress(data: np.ndarray) -> bytes:
    return pa.Codec("zstd", compression_level=_LEVEL).compress(data, asbytes=True)


def _decompress(frame: np.ndarray, nbytes: int) -> np.ndarray:
    """uint8 [nbytes]; a frame of another size is an error."""
    try:
        return np.frombuffer(pa.Codec("zstd").decompress(frame, nbytes), np.uint8)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise WeightsError(f"a delta of weights is damaged: {error}") from error

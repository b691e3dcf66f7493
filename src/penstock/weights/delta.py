"""The lossless difference between two publications, as one message, and those that a broadcaster keeps.

Elements are compared by their bits, so that NaN and negative zero are right. Arrays are cut into blocks, on which
several threads work. A delta applies to one content only (`Manifest.content`), and every array that it makes is
verified by the new manifest's digests.

Of a block is sent, as two zstd frames, which of its elements changed and by how much. A change is the difference of two
bit patterns taken as integers: training moves most floats by one unit in the last place, up or down, so it is small. It
is folded to be small without a sign, and sent as planes of one byte each, of which all but the lowest are then mostly
zero.

The message: 8 bytes, little-endian, with the length of a JSON description (base, manifest, sizes of all frames); the
description; the frames, one after the other.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.types import WeightsError
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    ArraySpec,
    BufferPool,
    Content,
    Manifest,
    check_layout,
    damaged_arrays,
    from_raw_bytes,
    in_parallel,
    plain_memory,
    read_json,
    version_from_values,
)

BLOCK_ELEMENTS = 1 << 20
"""Elements of one block; the last of an array has fewer."""

_ZSTD_LEVEL = 1
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_FORMAT = 1
_PREFIX_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The way from one publication to another.

    Attributes:
        base: Version and digest of what it applies to.
        manifest: Of what it makes.
        buffers: The message, to be sent one after the other.
        changed_elements: Elements that differ.
        elements: Elements of all arrays.
    """

    base: Content
    manifest: Manifest
    buffers: tuple[bytes, ...]
    changed_elements: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return sum(len(buffer) for buffer in self.buffers)

    def to_bytes(self) -> bytes:
        """The message in one piece."""
        return b"".join(self.buffers)


def encode_delta(
    base_manifest: Manifest, base: Mapping[str, np.ndarray], manifest: Manifest, arrays: Mapping[str, np.ndarray]
) -> Delta:
    """The difference of two publications of one layout, whether or not it is smaller than the arrays.

    Raises:
        WeightsError: the layouts differ.
    """
    check_layout(base_manifest.layout, manifest.layout, "published arrays")
    pairs = [
        (old[where], new[where])
        for old, new in ((bits(base[spec.name]), bits(arrays[spec.name])) for spec in manifest.arrays)
        for where in blocks_of(new.size)
    ]
    blocks = in_parallel(lambda pair: encode_block(*pair), pairs, manifest.nbytes)
    version = base_manifest.version
    description = {
        "format": _FORMAT,
        "base": [[version.lineage, version.step], base_manifest.digest],
        "manifest": manifest.to_values(),
        "blocks": [[block.changed, len(block.mask), len(block.changes)] for block in blocks],
    }
    header = json.dumps(description, separators=(",", ":")).encode()
    frames = [frame for block in blocks for frame in (block.mask, block.changes) if frame]
    return Delta(
        base_manifest.content,
        manifest,
        (len(header).to_bytes(_PREFIX_BYTES, "little"), header, *frames),
        sum(block.changed for block in blocks),
        sum(new.size for _, new in pairs),
    )


def decode_delta(
    message: Any,
    base_manifest: Manifest,
    base: Mapping[str, np.ndarray],
    max_bytes: int,
    memory: BufferPool | None = None,
) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Applies a delta of another process.

    Args:
        message: What `Delta.to_bytes` gave, as any buffer of bytes.
        base_manifest: Of the arrays held.
        base: The arrays held, C-contiguous; they stay as they are.
        max_bytes: Most that all arrays may have.
        memory: Where the new arrays come from; None makes fresh ones.

    Returns:
        The new publication's manifest, and its arrays, read-only and verified. Those in which nothing changed are the
        base's own.

    Raises:
        WeightsError: the message is malformed or damaged, or applies to another base.
    """
    data = np.frombuffer(message, np.uint8)
    manifest, counts, start = _description(data, base_manifest, max_bytes)
    blocks = _blocks(manifest, counts, data[start:])
    held = {spec.name: spec.digest for spec in base_manifest.arrays}
    take = plain_memory if memory is None else memory.take
    arrays = {
        spec.name: _new_or_held(spec, blocks[spec.name], held[spec.name], base[spec.name], take)
        for spec in manifest.arrays
    }
    changed = [spec for spec in manifest.arrays if arrays[spec.name] is not base[spec.name]]
    work = [
        (bits(base[spec.name])[block.where], bits(arrays[spec.name])[block.where], *block.encoded)
        for spec in changed
        for block in blocks[spec.name]
    ]
    in_parallel(lambda arguments: decode_block(*arguments), work, sum(spec.nbytes for spec in changed))
    if damaged := damaged_arrays(changed, arrays):
        raise WeightsError(f"arrays are damaged after a delta was applied: {damaged}")
    for spec in changed:
        arrays[spec.name].flags.writeable = False
    return manifest, arrays


class DeltaHistory:
    """The last few deltas, from which a client that is some versions behind gets its way to the newest.

    Encodes each publication against the one before it. Not thread-safe; keeps the newest arrays by reference.

    Args:
        most: Deltas that are kept.
    """

    def __init__(self, most: int = 4) -> None:
        self._deltas: deque[Delta] = deque(maxlen=most)
        self._newest: tuple[Manifest, Mapping[str, np.ndarray]] | None = None

    def add(self, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> Delta | None:
        """Takes the next publication.

        Returns:
            Its delta to the one before; None for the first, and where the delta is not smaller than the arrays. From
            then on nobody who has an older version gets a delta.
        """
        previous, self._newest = self._newest, (manifest, arrays)
        if previous is None:
            return None
        delta = encode_delta(*previous, manifest, arrays)
        if delta.nbytes >= manifest.nbytes:
            self._deltas.clear()
            return None
        self._deltas.append(delta)
        return delta

    def chains(self) -> dict[Content, tuple[Delta, ...]]:
        """For each content (`Manifest.content`) from which the newest can be reached: the deltas, the oldest first.

        Ways that are not smaller than the arrays are left out. The newest content has an empty one.
        """
        if self._newest is None:
            return {}
        manifest = self._newest[0]
        deltas = tuple(self._deltas)
        chains = {delta.base: deltas[start:] for start, delta in enumerate(deltas)}
        chains[manifest.content] = ()
        return {base: chain for base, chain in chains.items() if sum(each.nbytes for each in chain) < manifest.nbytes}


class _PlacedBlock(NamedTuple):
    """A block of a message: its place in the array, and what `decode_block` takes of it."""

    where: slice
    encoded: tuple[int, np.ndarray, np.ndarray]


def _description(
    data: np.ndarray, base_manifest: Manifest, max_bytes: int
) -> tuple[Manifest, list[tuple[int, int, int]], int]:
    """The new manifest, the counts of every block, and where the frames begin."""
    length = int.from_bytes(data[:_PREFIX_BYTES].tobytes(), "little")
    start = _PREFIX_BYTES + length
    if data.size < _PREFIX_BYTES or length > MAX_MANIFEST_BYTES or start > data.size:
        raise WeightsError(f"a delta of weights is damaged: {data.size} bytes with a description of {length}")
    values = read_json(data[_PREFIX_BYTES:start].tobytes())
    try:
        if values["format"] != _FORMAT:
            raise WeightsError(f"a delta of weights has format {values['format']!r:.20}, this Penstock reads {_FORMAT}")
        base = version_from_values(values["base"][0]), values["base"][1]
        counts = [_counts(block) for block in values["blocks"]]
        manifest = Manifest.from_values(values["manifest"], max_bytes)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise WeightsError(f"a delta of weights is malformed: {type(error).__name__}: {error}") from error
    if base != base_manifest.content:
        raise WeightsError(f"a delta of weights applies to {base}, this client holds {base_manifest.content}")
    check_layout(base_manifest.layout, manifest.layout, "arrays of a delta")
    return manifest, counts, start


def _counts(values: Any) -> tuple[int, int, int]:
    changed, mask, changes = values
    if any(type(value) is not int or not 0 <= value < 1 << 40 for value in values):
        raise ValueError(f"a block is [changed, bytes, bytes], not {values!r:.100}")
    return changed, mask, changes


def _blocks(
    manifest: Manifest, counts: Sequence[tuple[int, int, int]], frames: np.ndarray
) -> dict[str, list[_PlacedBlock]]:
    """Every array's blocks, with their frames by reference; the counts must fit the arrays and the message."""
    places = [(spec.name, where) for spec in manifest.arrays for where in blocks_of(_elements(spec))]
    total = sum(mask + changes for _, mask, changes in counts)
    if len(places) != len(counts) or total != frames.size:
        raise WeightsError(
            f"a delta of weights is damaged: {len(counts)} blocks of {total} bytes, "
            f"the arrays have {len(places)} and the message {frames.size}"
        )
    blocks: dict[str, list[_PlacedBlock]] = {spec.name: [] for spec in manifest.arrays}
    at = 0
    for (name, where), (changed, mask, changes) in zip(places, counts, strict=True):
        if changed > where.stop - where.start:
            raise WeightsError(
                f"a delta of weights is damaged: {changed} changes in a block of {name} with fewer elements"
            )
        encoded = changed, frames[at : at + mask], frames[at + mask : at + mask + changes]
        blocks[name].append(_PlacedBlock(where, encoded))
        at += mask + changes
    return blocks


def _elements(spec: ArraySpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64))


def _new_or_held(
    spec: ArraySpec,
    blocks: Iterable[_PlacedBlock],
    held_digest: str,
    held: np.ndarray,
    take: Callable[[int], np.ndarray],
) -> np.ndarray:
    """A new array where something changed, else the one that is held."""
    if any(block.encoded[0] for block in blocks):
        return from_raw_bytes(spec, take(spec.nbytes))
    if spec.digest != held_digest:
        raise WeightsError(f"a delta of weights is damaged: {spec.name} changed, but the delta has no change of it")
    return held


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
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL).compress(data, asbytes=True)


def _decompress(frame: np.ndarray, nbytes: int) -> np.ndarray:
    """uint8 [nbytes]; a frame of another size is an error."""
    try:
        return np.frombuffer(pa.Codec("zstd").decompress(frame, nbytes), np.uint8)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise WeightsError(f"a delta of weights is damaged: {error}") from error

"""The lossless difference between two publications, as one message.

Elements are compared by their bits, so that NaN and negative zero are right. Arrays are cut into blocks (see
`delta_blocks`), on which several threads work. A delta applies to one content only (`Manifest.content`), and every
array that it makes is verified by the new manifest's digests.

The message: 8 bytes, little-endian, with the length of a JSON description (base, manifest, sizes of all frames); the
description; the frames, one after the other.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.types import WeightsError, WeightVersion
from penstock.weights.delta_blocks import bits, blocks_of, decode_block, encode_block
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    ArraySpec,
    Manifest,
    array_digest,
    check_layout,
    from_raw_bytes,
    read_json,
    version_from_values,
)
from penstock.weights.threads import in_parallel
from penstock.weights.warm_memory import WarmMemory, plain_memory

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

    base: tuple[WeightVersion, str]
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
    memory: WarmMemory | None = None,
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
        spec.name: _room(spec, blocks[spec.name], held[spec.name], base[spec.name], take) for spec in manifest.arrays
    }
    changed = [spec for spec in manifest.arrays if arrays[spec.name] is not base[spec.name]]
    work = [
        (bits(base[spec.name])[block.where], bits(arrays[spec.name])[block.where], *block.encoded)
        for spec in changed
        for block in blocks[spec.name]
    ]
    in_parallel(lambda arguments: decode_block(*arguments), work, sum(spec.nbytes for spec in changed))
    _verify(changed, arrays)
    return manifest, arrays


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


def _room(
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


def _verify(specs: Sequence[ArraySpec], arrays: Mapping[str, np.ndarray]) -> None:
    digests = in_parallel(lambda spec: array_digest(arrays[spec.name]), specs, sum(spec.nbytes for spec in specs))
    damaged = [spec.name for spec, digest in zip(specs, digests, strict=True) if digest != spec.digest]
    if damaged:
        raise WeightsError(f"arrays are damaged after a delta was applied: {damaged}")
    for spec in specs:
        arrays[spec.name].flags.writeable = False

"""What one publication holds, array by array, the digests by which damage is noticed, and the memory that it takes.

The digest of an array is CRC-32: it is in the standard library, runs at a third of the speed of a memory copy, and
finds torn and damaged arrays. It is no defence against forgery; that is the token's task. Manifests of other processes
are read with every number checked before anything is allocated for it.
"""

import hashlib
import json
import math
import mmap
import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from penstock.types import WeightsError, WeightVersion

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Layout = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by name."""

Content = tuple[WeightVersion, str]
"""Names the arrays of a publication, whoever published them: version and digest."""

_NUMPY_TYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NUMPY_TYPES} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Every dtype that travels."""

_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
"""NumPy spells a dtype out in microseconds, and does so for every array of every publication."""

MAX_ARRAYS = 100_000
MAX_NAME_CHARACTERS = 512
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_MAX_DIMENSIONS = 16
_COMPACT = json.JSONEncoder(separators=(",", ":"))

THREADS = min(4, os.cpu_count() or 1)
_MIN_PARALLEL_BYTES = 8 * 1024 * 1024
_MIN_POOLED_BYTES = 1 << 20
_ALIGNMENT = 64
"""Bytes; XLA takes arrays on the host by reference only if they are aligned so."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a publication.

    Attributes:
        name: Unique in it.
        dtype: A key of `DTYPES`.
        shape: Elements per dimension.
        nbytes: Size of its elements, in C order, little-endian.
        digest: CRC-32 of those bytes, 8 hexadecimal digits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a publication is.

    Attributes:
        job: The run whose weights these are.
        incarnation: The broadcaster that published them: 32 hexadecimal digits, another one at every start.
        version: Of these weights.
        arrays: In the order in which they are sent.
        digest: Of names, dtypes, shapes and digests of all arrays; equal for equal content, whoever published it.
    """

    job: str
    incarnation: str
    version: WeightVersion
    arrays: tuple[ArraySpec, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(spec.nbytes for spec in self.arrays)

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype by name."""
        return {spec.name: (spec.shape, spec.dtype) for spec in self.arrays}

    @property
    def content(self) -> Content:
        """Version and digest."""
        return self.version, self.digest

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "job": self.job,
            "incarnation": self.incarnation,
            "version": [self.version.lineage, self.version.step],
            "arrays": [[spec.name, spec.dtype, list(spec.shape), spec.digest] for spec in self.arrays],
            "digest": self.digest,
        }

    @classmethod
    def from_values(cls, values: Any, max_bytes: int) -> "Manifest":
        """Reads `to_values` of another process; nothing of the arrays' size is allocated.

        Args:
            values: JSON values of bounded size (`read_json`).
            max_bytes: Most that all its arrays may have.

        Raises:
            WeightsError: it is malformed, damaged, or larger than allowed.
        """
        try:
            specs = _specs(values["arrays"])
            manifest = cls(
                _text(values["job"]),
                _text(values["incarnation"]),
                version_from_values(values["version"]),
                specs,
                _text(values["digest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"not a manifest of weights: {type(error).__name__}: {error}") from error
        if manifest.nbytes > max_bytes:
            raise WeightsError(
                f"the publication has {manifest.nbytes} bytes, weights.max_bytes allows {max_bytes}: raise it if the "
                "model is that large"
            )
        if content_digest(specs) != manifest.digest:
            raise WeightsError("the manifest of weights is damaged: its digest is not that of its arrays")
        return manifest


def describe(job: str, incarnation: str, version: WeightVersion, arrays: Mapping[str, np.ndarray]) -> Manifest:
    """The manifest of arrays that `check_sendable` let pass, C-contiguous; reads them once, with several threads."""
    digests = _digests(arrays.values())
    specs = tuple(
        ArraySpec(name, _dtype_name(array.dtype), tuple(array.shape), array.nbytes, digest)
        for (name, array), digest in zip(arrays.items(), digests, strict=True)
    )
    return Manifest(job, incarnation, version, specs, content_digest(specs))


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 [nbytes]: the elements of a C-contiguous array as bytes, by reference."""
    return array.reshape(-1).view(np.uint8)


def from_raw_bytes(spec: ArraySpec, data: np.ndarray) -> np.ndarray:
    """The array that `raw_bytes` made uint8 [nbytes] of, by reference."""
    return data.view(DTYPES[spec.dtype]).reshape(spec.shape)


def array_digest(array: np.ndarray) -> str:
    """CRC-32 of an array's bytes; releases the interpreter lock meanwhile."""
    return f"{zlib.crc32(raw_bytes(array).data):08x}"


def content_digest(specs: Iterable[ArraySpec]) -> str:
    """One digest for all arrays."""
    text = json.dumps([[spec.name, spec.dtype, spec.shape, spec.digest] for spec in specs])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def damaged_arrays(specs: Sequence[ArraySpec], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Names of arrays whose bytes are not those that were published; they have the specs' layout."""
    digests = _digests(arrays[spec.name] for spec in specs)
    return [spec.name for spec, digest in zip(specs, digests, strict=True) if digest != spec.digest]


def layout_of(arrays: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by name, of JAX or NumPy arrays."""
    return {name: (tuple(array.shape), _dtype_name(array.dtype)) for name, array in arrays.items()}


def check_layout(expected: Layout, found: Layout, who: str) -> None:
    """Refuses another layout.

    Args:
        expected: Of the first publication.
        found: Of this one.
        who: Begins the message, such as ``published arrays``.

    Raises:
        WeightsError: naming what is missing, extra, or of another shape or dtype.
    """
    if found == expected:
        return
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    changed = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    changes = [f"{name} {expected[name]} became {found[name]}" for name in changed]
    raise WeightsError(f"{who} differ from the first publication: missing {missing}, extra {extra}, changed {changes}")


def check_next(newest: WeightVersion | None, first: Layout | None, version: WeightVersion, layout: Layout) -> None:
    """Refuses a publication that is no newer than the newest, or of another layout than the first, where there is one.

    Raises:
        WeightsError: saying which.
    """
    if newest is not None and version <= newest:
        raise WeightsError(f"{version} is not newer than the published {newest}")
    if first is not None:
        check_layout(first, layout, "published arrays")


def version_from_values(values: Any) -> WeightVersion:
    """Reads ``[lineage, step]``.

    Raises:
        ValueError: it is not that.
    """
    if not isinstance(values, list) or len(values) != 2:
        raise ValueError(f"a version is [lineage, step], not {values!r:.100}")
    lineage, step = (_count(value) for value in values)
    return WeightVersion(lineage, step)


def compact_json(values: Any) -> bytes:
    """JSON text without spaces."""
    return _COMPACT.encode(values).encode()


def read_json(text: bytes) -> Any:
    """JSON of bounded size, from another process.

    Raises:
        WeightsError: it is too large, or not JSON.
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"a description of weights has {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"a description of weights is not JSON: {error}") from error


def _dtype_name(dtype: Any) -> str:
    return _NAME_OF_DTYPE.get(dtype) or str(dtype)


def _digests(arrays: Iterable[np.ndarray]) -> list[str]:
    listed = list(arrays)
    return in_parallel(array_digest, listed, sum(array.nbytes for array in listed))


def check_sendable(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises WeightsError, naming the arrays whose dtype or name cannot travel."""
    wrong = [f"{name} is {array.dtype}" for name, array in arrays.items() if _dtype_name(array.dtype) not in DTYPES]
    wrong += [
        f"the name {name!r:.100} has {len(name)} characters, 1 to {MAX_NAME_CHARACTERS} are allowed"
        for name in arrays
        if not 0 < len(name) <= MAX_NAME_CHARACTERS
    ]
    if wrong or len(arrays) > MAX_ARRAYS:
        raise WeightsError(
            f"arrays cannot be sent: {wrong or len(arrays)}; at most {MAX_ARRAYS} arrays of {sorted(DTYPES)}"
        )


def _specs(values: Any) -> tuple[ArraySpec, ...]:
    if not isinstance(values, list) or len(values) > MAX_ARRAYS:
        raise ValueError(f"arrays must be a list of at most {MAX_ARRAYS}")
    specs = tuple(_spec(*value) for value in values)
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two arrays have one name")
    return specs


def _spec(name: Any, dtype: Any, shape: Any, digest: Any) -> ArraySpec:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r:.50} does not travel")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a shape has at most {_MAX_DIMENSIONS} dimensions")
    sizes = tuple(_count(size) for size in shape)
    name, digest = _text(name), _text(digest)
    if len(digest) != 8:
        raise ValueError(f"digest {digest!r} has not 8 digits")
    return ArraySpec(name, dtype, sizes, math.prod(sizes) * DTYPES[dtype].itemsize, digest)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r:.50} is not a number of elements, updates or lives")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"{value!r:.100} is not a text of 1 to {MAX_NAME_CHARACTERS} characters")
    return value


def in_parallel(work: Callable[[_Item], _Result], items: Iterable[_Item], nbytes: int) -> list[_Result]:
    """The results of `work` for all items, in their order; with several threads where that repays them.

    Args:
        work: Releases the interpreter lock while it computes.
        items: Its arguments.
        nbytes: How much is worked on in all.
    """
    if nbytes < _MIN_PARALLEL_BYTES or THREADS == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))


class BufferPool:
    """Memory for received arrays that is used again, version after version.

    The first write to fresh memory costs several times as much as the next (the system clears each page when it is
    first touched), and a large model needs that much anew with every version. So the memory of arrays that nobody
    refers to any more is kept for the next ones of the same size: one version's memory beside those in use, at most.
    Arrays, and views of them, may outlive the pool. One thread at a time takes.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}

    def take(self, size: int) -> np.ndarray:
        """uint8 [size], writeable, aligned to 64 bytes, with any content."""
        if size < _MIN_POOLED_BYTES:
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

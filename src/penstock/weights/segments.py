"""Named memory of this machine: files on a memory file system that several processes map.

A segment has one writer and any number of readers. Who maps it holds a shared lock on it until the last of the arrays
is gone, and the system gives that lock back when a process dies, however it dies. So the writer sees, without counting,
whether it may write over a segment.
"""

import ctypes
import fcntl
import mmap
import os
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from penstock.types import WeightsError
from penstock.weights.manifest import Manifest, from_raw_bytes, raw_bytes

_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64
_MOST_COPIERS = 4
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1 << 20, 1 << 23
_Piece = tuple[np.ndarray, np.ndarray, int, int]
"""To, from, first byte, last byte + 1."""

_core = getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
"""The core that the calling thread is on."""

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Maps all pages at once: touching fresh ones one by one takes ten times as long."""


def memory_folder() -> Path:
    """Where segments lie: memory where the system has a place for that, else temporary files."""
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


def segment_bytes(sizes: Iterable[int]) -> int:
    """Size of a segment for arrays of these sizes, which begin at multiples of 64 bytes each; at least one page."""
    return max(sum(map(_aligned, sizes)), mmap.PAGESIZE)


class Segment:
    """A segment as its writer has it.

    Args:
        path: Its file, made by this; only this user may read it.
        nbytes: Its size.

    Raises:
        WeightsError: there is no memory for it.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(self._descriptor, nbytes)
            self._map = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED | _POPULATE)
        except OSError as error:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise WeightsError(
                f"no shared memory for {nbytes} bytes of weights in {path.parent}: {error}. Make it larger (in a "
                "container: its shm size), or use weights.transport: arrow_flight"
            ) from error

    def take(self) -> bool:
        """Claims it for writing; False while somebody reads."""
        return _locked(self._descriptor, fcntl.LOCK_EX)

    def give(self) -> None:
        """Lets others read."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def write(self, arrays: Mapping[str, np.ndarray], copier: "Copier") -> Callable[[], None]:
        """Begins to copy the arrays in, in their order, and returns what ends that; the caller took the segment."""
        memory = np.frombuffer(self._map, np.uint8)
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        offset = 0
        for array in arrays.values():
            pairs.append((memory[offset : offset + array.nbytes], raw_bytes(array)))
            offset += _aligned(array.nbytes)
        return copier.begin(pairs)

    def remove(self) -> None:
        """Takes its name away. Its memory is freed when the last reader has let it go."""
        self.path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._descriptor)


class Copier:
    """Copies large memory with several threads: one core alone cannot use a machine's memory bandwidth.

    Where the system tells, the threads keep off the core of the thread that begins: woken there, they would wait for
    it, or it for them, while another core lies idle.
    """

    def __init__(self) -> None:
        self._helpers = min(_MOST_COPIERS, os.cpu_count() or 1) - 1
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), thread_name_prefix="weights-copy")

    def begin(self, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Callable[[], None]:
        """Begins to copy to the first of each pair from the second, uint8 [size] both; returns what ends it.

        Whoever calls that copies along.
        """
        pieces = _cut(pairs, 1 + self._helpers)
        cores = _other_cores()
        helpers = [self._pool.submit(_help, pieces, cores) for _ in range(min(self._helpers, len(pieces) - 1))]

        def finish() -> None:
            _copy(pieces)
            for helper in helpers:
                if not helper.cancel():  # one that found no free core until now has nothing to do any more
                    helper.result()

        return finish

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def _cut(pairs: Iterable[tuple[np.ndarray, np.ndarray]], threads: int) -> deque[_Piece]:
    """What there is to copy, in pieces that shrink towards the end.

    A thread that has done a piece needs the interpreter for the next one, while the publishing thread is at work with
    digests and the marker: so the first ones are large. The last ones are small, so that all threads end together.
    """
    listed = list(pairs)
    left = sum(to.size for to, _ in listed)
    pieces = deque[_Piece]()
    for to, source in listed:
        start = 0
        while start < to.size:
            size = min(max(left // (2 * threads), _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES, to.size - start)
            pieces.append((to, source, start, start + size))
            start += size
            left -= size
    return pieces


def _other_cores() -> set[int]:
    """Of those that this process may use, all but the one that this thread is on; none where that is not known."""
    return os.sched_getaffinity(0) - {_core()} if _core is not None else set()


def _help(pieces: deque[_Piece], cores: set[int]) -> None:
    if cores:
        with suppress(OSError):  # they were taken from the process meanwhile: it copies where it may
            os.sched_setaffinity(0, cores)  # of this thread
    _copy(pieces)


def _copy(pieces: deque[_Piece]) -> None:
    while True:
        try:
            to, source, start, end = pieces.popleft()
        except IndexError:
            return
        np.copyto(to[start:end], source[start:end])


def mapped_arrays(path: Path | str, manifest: Manifest) -> dict[str, np.ndarray]:
    """The arrays of a segment, read-only and by reference; it is not written over while any of them lives.

    Raises:
        WeightsError: it is gone, is being written, or is too small for the manifest.
    """
    name, nbytes = os.path.basename(path), segment_bytes(spec.nbytes for spec in manifest.arrays)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise WeightsError(f"the segment {name} of weights cannot be opened: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
            raise WeightsError(f"the segment {name} of weights has {status.st_size} bytes, too few")
        if not _locked(descriptor, fcntl.LOCK_SH):
            raise WeightsError(f"the segment {name} of weights is being written")
        memory = np.frombuffer(mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(descriptor)  # the map has a copy of it, and with that the lock
    arrays, offset = dict[str, np.ndarray](), 0
    for spec in manifest.arrays:
        arrays[spec.name] = from_raw_bytes(spec, memory[offset : offset + spec.nbytes])
        offset += _aligned(spec.nbytes)
    return arrays


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _reserve(descriptor: int, nbytes: int) -> None:
    """Gives the file its memory now: a write to memory that is not there would end the process."""
    os.ftruncate(descriptor, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

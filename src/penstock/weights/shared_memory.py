"""Weights in memory that the processes of one machine share: one copy in, none out.

Each version is copied into a *segment*, a file on a memory file system, that nobody reads; readers map it. Segments are
used again in turn, since memory that was touched before is written many times as fast as fresh memory: two of them
suffice while every client has let the version before go, and each version that a client keeps longer costs one more.
Only the newest is offered.

Nobody counts readers. Who maps a segment holds a shared lock on it until the last of the arrays is gone, and a job's
broadcaster holds a lock in the job's folder for as long as it lives. The system gives locks back when a process dies,
however it dies: so the writer sees whether it may write over a segment, and anybody sees whose folder is abandoned.
Such folders are freed by the next run of this user on the machine, whatever it trains and however it moves its weights,
and by ``penstock doctor --clean``.

Access is by the file system's rights (this user alone) and the signed pointer. Not covered: other machines. On machines
without a memory file system the segments are temporary files.
"""

import ctypes
import fcntl
import hashlib
import mmap
import os
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from penstock.rundir.storage import write_atomically
from penstock.types import UnreachableError, WeightsError
from penstock.weights.files import POINTER, VersionFiles, free_name
from penstock.weights.manifest import MAX_MANIFEST_BYTES, Manifest, from_raw_bytes, raw_bytes

_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64
_LOCK = "broadcaster.lock"
_TAKEOVER_S = 10.0
"""Longest wait for a broadcaster of the same job to end."""

_LOCK_POLL_S = 0.02
_MAX_COPIERS = 4
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 20, 1 << 23
_Piece = tuple[np.ndarray, np.ndarray, int, int]
"""To, from, first byte, last byte + 1."""

_core = getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
"""The core that the calling thread is on."""

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Maps all pages at once: touching fresh ones one by one takes ten times as long."""


class SharedMemoryFiles(VersionFiles):
    """A job's folder in memory: of a broadcaster after `prepare`, else of a client.

    Args:
        job: The run.
    """

    poll_s = 0.002
    may_hang = False

    def __init__(self, job: str) -> None:
        self._job = job
        self._path = job_folder(job)
        self._pointer_path = f"{self._path}/{POINTER}"
        self._seen: tuple[tuple[int, int, int], bytes] | None = None
        self._owned: JobFolder | None = None
        self._copier = ParallelCopier()
        self._segments: dict[str, Segment] = {}
        self._copying: tuple[Segment, Callable[[], None]] | None = None
        self._offered = ""

    @override
    def prepare(self) -> None:
        self._owned = JobFolder(self._job, _TAKEOVER_S)

    @override
    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        """They are copied while their digests are computed."""
        self._finish_copying()
        name, segment = self._free_segment(segment_bytes(array.nbytes for array in arrays.values()), taken)
        self._copying = segment, segment.write(arrays, self._copier)
        self._offered = name
        return name

    @override
    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        """They are being copied since `begin_arrays`."""

    @override
    def write_delta(self, name: str, buffers: Iterable[bytes]) -> None:
        self._write(name, b"".join(buffers))

    @override
    def write_pointer(self, content: bytes) -> None:
        self._finish_copying()  # first: once this thread gives the interpreter up, it waits long to be woken
        self._write(POINTER, content)

    @override
    def discard(self, names: set[str]) -> None:
        """One segment that nobody reads stays for the next version."""
        for name in names - self._segments.keys():
            (self._path / name).unlink(missing_ok=True)
        others = [name for name in sorted(self._segments) if name != self._offered]
        if len(others) < 2:
            return
        for name in [name for name in others if self._is_idle(name)][1:]:
            self._segments.pop(name).remove()

    @override
    def endpoint(self) -> dict[str, Any]:
        return {"folder": str(self._path)}

    @override
    def read_pointer(self) -> bytes | None:
        try:
            status = os.stat(self._pointer_path)
            identity = status.st_ino, status.st_mtime_ns, status.st_size
            if self._seen is None or self._seen[0] != identity:
                if not is_own_folder(self._path):
                    raise WeightsError(f"{self._path} is not a folder of this user alone")
                self._seen = identity, _read_bounded(self._pointer_path, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            if self._path.is_dir():
                return None
            raise UnreachableError(
                f"no broadcaster of this job runs on this machine: {self._path} is missing (shared memory reaches "
                "one machine only: where the learner runs on another, set weights.transport to arrow_flight)"
            ) from None
        return self._seen[1]

    @override
    def read_arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        return mapped_arrays(f"{self._path}/{name}", manifest)

    @override
    def read_delta(self, name: str, max_bytes: int) -> bytes:
        try:
            return _read_bounded(f"{self._path}/{name}", max_bytes)
        except FileNotFoundError as error:
            raise WeightsError(f"the delta {name} of weights is gone") from error

    @override
    def close(self) -> None:
        """Frees the memory, as far as nobody reads it any more."""
        self._finish_copying()
        self._copier.close()
        for segment in self._segments.values():
            segment.remove()
        self._segments.clear()
        if self._owned is not None:
            self._owned.remove()

    def _is_idle(self, name: str) -> bool:
        idle = self._segments[name].take()
        if idle:
            self._segments[name].give()
        return idle

    def _free_segment(self, nbytes: int, offered: set[str]) -> "tuple[str, Segment]":
        """A segment that nobody reads, locked for writing; a new one where there is none."""
        for name, segment in self._segments.items():
            if name not in offered and segment.nbytes == nbytes and segment.take():
                return name, segment
        name = free_name("segment", ".weights", set(self._segments))
        segment = Segment(self._path / name, nbytes)
        segment.take()
        self._segments[name] = segment
        return name, segment

    def _finish_copying(self) -> None:
        if self._copying is not None:
            (segment, finish), self._copying = self._copying, None
            try:
                finish()
            finally:
                segment.give()

    def _write(self, name: str, content: bytes) -> None:
        """Replaces a file in one move; memory needs no flush, and nobody else may enter the folder."""
        try:
            write_atomically(self._path / name, content, durable=False)
        except OSError as error:
            raise WeightsError(f"shared memory cannot be written: {error}") from error


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

    def write(self, arrays: Mapping[str, np.ndarray], copier: "ParallelCopier") -> Callable[[], None]:
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


class ParallelCopier:
    """Copies large memory with several threads: one core alone cannot use a machine's memory bandwidth.

    Where the system tells, the threads keep off the core of the thread that begins: woken there, they would wait for
    it, or it for them, while another core lies idle.
    """

    def __init__(self) -> None:
        self._helpers = min(_MAX_COPIERS, os.cpu_count() or 1) - 1
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
    digests and the pointer: so the first ones are large. The last ones are small, so that all threads end together.
    """
    listed = list(pairs)
    left = sum(to.size for to, _ in listed)
    pieces = deque[_Piece]()
    for to, source in listed:
        start = 0
        while start < to.size:
            size = min(max(left // (2 * threads), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES, to.size - start)
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


def job_folder(job: str) -> Path:
    """Where a job's segments lie; the same on both sides."""
    digest = hashlib.blake2b(job.encode(), digest_size=12).hexdigest()
    return memory_folder() / f"{_prefix()}{digest}"


class JobFolder:
    """A job's folder, emptied, with its lock held.

    Args:
        job: The run.
        timeout_s: How long to wait for a broadcaster of the job that still lives.

    Raises:
        WeightsError: it lives on, or the folder belongs to another user.
    """

    def __init__(self, job: str, timeout_s: float) -> None:
        self.path = job_folder(job)
        free_abandoned(but=self.path)
        self._lock = _lock_of(self.path, time.monotonic() + timeout_s)
        _empty(self.path)

    def remove(self) -> None:
        """Frees everything in it, and the folder itself."""
        _remove(self.path, self._lock)


@dataclass(frozen=True, slots=True)
class AbandonedFolder:
    """What a broadcaster that was killed left in memory.

    Attributes:
        path: The folder.
        nbytes: What its files take.
    """

    path: Path
    nbytes: int


def find_abandoned() -> list[AbandonedFolder]:
    """Folders of this user whose broadcasters are dead; nothing is changed."""
    return list(_visit_abandoned(None, lambda path, lock: os.close(lock)))


def free_abandoned(but: Path | None = None) -> list[AbandonedFolder]:
    """Removes them, and says what was there.

    Args:
        but: This one is left alone.
    """
    freed = list(_visit_abandoned(but, _remove))
    for path in memory_folder().glob(f"{_prefix()}*"):
        if path != but and is_own_folder(path) and not (path / _LOCK).exists():
            with suppress(OSError):  # not empty, or somebody moves in just now: he makes it again
                path.rmdir()
    return freed


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder of this user that others cannot write to."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _prefix() -> str:
    return f"penstock-{os.getuid()}-"


def _lock_of(path: Path, deadline: float) -> int:
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        if not is_own_folder(path):
            raise WeightsError(f"{path} is not a folder of this user alone: remove it, or give the run another id")
        descriptor = _try_lock(path, os.O_CREAT)
        if descriptor is not None:
            return descriptor
        if time.monotonic() >= deadline:
            raise WeightsError(f"another broadcaster of this job lives: it holds {path / _LOCK}; end it first")
        time.sleep(_LOCK_POLL_S)


def _try_lock(path: Path, flags: int) -> int | None:
    """The lock's descriptor; None where somebody has it, or it went away meanwhile."""
    file = path / _LOCK
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(file).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # taken by another broadcaster, or removed together with an abandoned folder
    os.close(descriptor)
    return None


def _visit_abandoned(but: Path | None, visit: Callable[[Path, int], None]) -> Iterator[AbandonedFolder]:
    """Calls `visit` with each folder and its lock, which is held until then: nobody can move in meanwhile."""
    for path in sorted(memory_folder().glob(f"{_prefix()}*")):
        descriptor = _try_lock(path, 0) if path != but and is_own_folder(path) else None
        if descriptor is not None:
            found = AbandonedFolder(path, _nbytes(path))
            visit(path, descriptor)
            yield found


def _nbytes(path: Path) -> int:
    """Blocks that its files take: a segment is reserved whole."""
    total = 0
    for file in path.iterdir():
        with suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512
    return total


def _remove(path: Path, lock: int) -> None:
    with suppress(FileNotFoundError):  # the system empties memory when a user logs out
        _empty(path)
    (path / _LOCK).unlink(missing_ok=True)
    os.close(lock)
    try:
        path.rmdir()
    except OSError:
        return  # gone already, or another broadcaster has just moved in


def _empty(path: Path) -> None:
    for file in path.iterdir():
        if file.name != _LOCK:
            file.unlink(missing_ok=True)


def _read_bounded(path: str, max_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > max_bytes:
            raise WeightsError(f"{path} has {nbytes} bytes, at most {max_bytes} are read")
        parts: list[bytes] = []
        while nbytes > 0 and (part := os.read(descriptor, nbytes)):
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)

"""Weights in memory that the processes of one machine share: one copy in, none out.

Each version is copied into a segment that nobody reads; readers map it. Segments are used again in turn, since memory
that was touched before is written many times as fast as fresh memory: two of them suffice while every client has let
the version before go, and each version that a client keeps longer costs one more. Only the newest is offered.

Access is by the file system's rights (this user alone) and the signed marker. Not covered: other machines. On machines
without a memory file system the segments are temporary files.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.types import UnreachableError, WeightsError
from penstock.weights.job_folder import OwnedFolder, is_own_folder, job_folder
from penstock.weights.manifest import MAX_MANIFEST_BYTES, Manifest
from penstock.weights.marker import free_name
from penstock.weights.segments import Copier, Segment, mapped_arrays, segment_bytes

_MARKER = "marker.json"
_TAKEOVER_S = 10.0


class SharedMemory:
    """A job's folder as its broadcaster has it (`shelf_store.WritableShelf`).

    Args:
        job: The run.

    Raises:
        WeightsError: another broadcaster of the job lives.
    """

    def __init__(self, job: str) -> None:
        self._folder = OwnedFolder(job, _TAKEOVER_S)
        self._segments: dict[str, Segment] = {}
        self._copier = Copier()
        self._copying: tuple[Segment, Callable[[], None]] | None = None
        self._offered = ""

    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        """See `WritableShelf.begin_arrays`. They are copied while their digests are reckoned."""
        self._finish_copying()
        name, segment = self._taken_segment(segment_bytes(array.nbytes for array in arrays.values()), taken)
        self._copying = segment, segment.write(arrays, self._copier)
        self._offered = name
        return name

    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        """See `WritableShelf.write_arrays`: they are on their way."""

    def write_message(self, name: str, buffers: Iterable[bytes]) -> None:
        """See `WritableShelf.write_message`."""
        self._write(name, b"".join(buffers))

    def write_marker(self, content: bytes) -> None:
        """See `WritableShelf.write_marker`."""
        self._finish_copying()  # first: once this thread gives the interpreter up, it waits long to be woken
        self._write(_MARKER, content)

    def discard(self, names: set[str]) -> None:
        """See `WritableShelf.discard`. One segment that nobody reads stays for the next version."""
        for name in names - self._segments.keys():
            (self._folder.path / name).unlink(missing_ok=True)
        others = [name for name in sorted(self._segments) if name != self._offered]
        if len(others) < 2:
            return
        for name in [name for name in others if self._is_idle(name)][1:]:
            self._segments.pop(name).remove()

    def endpoint(self) -> dict[str, Any]:
        """See `WritableShelf.endpoint`."""
        return {"folder": str(self._folder.path)}

    def close(self) -> None:
        """Frees the memory, as far as nobody reads it any more."""
        self._finish_copying()
        self._copier.close()
        for segment in self._segments.values():
            segment.remove()
        self._segments.clear()
        self._folder.remove()

    def _is_idle(self, name: str) -> bool:
        idle = self._segments[name].take()
        if idle:
            self._segments[name].give()
        return idle

    def _taken_segment(self, nbytes: int, offered: set[str]) -> tuple[str, Segment]:
        """A segment that nobody reads, claimed; a new one where there is none."""
        for name, segment in self._segments.items():
            if name not in offered and segment.nbytes == nbytes and segment.take():
                return name, segment
        name = free_name("segment", ".weights", set(self._segments))
        segment = Segment(self._folder.path / name, nbytes)
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
        """Replaces a file in one move; memory needs no flush, and the folder has one writer."""
        path = f"{self._folder.path}/{name}"
        aside = f"{path}.tmp"
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(descriptor, content)
            finally:
                os.close(descriptor)
            os.replace(aside, path)
        except OSError as error:
            Path(aside).unlink(missing_ok=True)
            raise WeightsError(f"shared memory cannot be written: {error}") from error


class SharedMemoryShelf:
    """A job's folder as clients have it (`shelf.Shelf`).

    Args:
        job: The run.
    """

    look_every_s = 0.002
    may_hang = False

    def __init__(self, job: str) -> None:
        self._folder = job_folder(job)
        self._marker_path = f"{self._folder}/{_MARKER}"
        self._seen: tuple[tuple[int, int, int], bytes] | None = None

    def marker(self) -> bytes | None:
        """See `Shelf.marker`."""
        path = self._marker_path
        try:
            status = os.stat(path)
            identity = status.st_ino, status.st_mtime_ns, status.st_size
            if self._seen is None or self._seen[0] != identity:
                if not is_own_folder(self._folder):
                    raise WeightsError(f"{self._folder} is not a folder of this user alone")
                self._seen = identity, _read_bounded(path, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            if self._folder.is_dir():
                return None
            raise UnreachableError(
                f"no broadcaster of this job runs on this machine: {self._folder} is missing (shared memory reaches "
                "one machine only: where the learner runs on another, set weights.transport to arrow_flight)"
            ) from None
        return self._seen[1]

    def arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        """See `Shelf.arrays`."""
        return mapped_arrays(f"{self._folder}/{name}", manifest)

    def message(self, name: str, most_bytes: int) -> bytes:
        """See `Shelf.message`."""
        try:
            return _read_bounded(f"{self._folder}/{name}", most_bytes)
        except FileNotFoundError as error:
            raise WeightsError(f"the delta {name} of weights is gone") from error


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _read_bounded(path: str, most_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > most_bytes:
            raise WeightsError(f"{path} has {nbytes} bytes, at most {most_bytes} are read")
        parts: list[bytes] = []
        while nbytes > 0 and (part := os.read(descriptor, nbytes)):
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)

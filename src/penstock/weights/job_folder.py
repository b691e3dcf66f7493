"""The folder in this machine's memory that one job's broadcaster owns, and how it gets one that nobody else has.

Its broadcaster holds a lock in it for as long as it lives, and the system gives that back however it dies: so there is
never doubt who is dead. Memory of the dead is freed by the next run of this user on the machine, whatever it trains and
however it moves its weights, and by ``penstock doctor --clean``.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.types import WeightsError
from penstock.weights.segments import memory_folder

_LOCK = "broadcaster.lock"
_LOOK_EVERY_S = 0.02


def job_folder(job: str) -> Path:
    """Where a job's segments lie; the same on both sides."""
    digest = hashlib.blake2b(job.encode(), digest_size=12).hexdigest()
    return memory_folder() / f"{_prefix()}{digest}"


class OwnedFolder:
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
        time.sleep(_LOOK_EVERY_S)


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

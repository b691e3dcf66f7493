"""What a run does while its disk is full: logs wait in memory, in their order; what must be on the disk is tried again.

Beyond ``replay.store.full_disk_s`` the run fails, naming the path.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from penstock.replay.ledger import DiskSpace
from penstock.rundir.storage import is_full_disk
from penstock.types import RunFailed

_Result = TypeVar("_Result")


class RetriedWrites:
    """Writes one after the other; what finds no room is kept until there is. Thread-safe.

    Args:
        limit_s: So long a full disk is waited for.
    """

    def __init__(self, limit_s: float) -> None:
        self._space = DiskSpace(limit_s)
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._failed = False

    def do(self, write: Callable[[], object]) -> None:
        """Writes, behind all that waits.

        Raises:
            OSError: it failed for another reason than a full disk.
            RunFailed: the disk has been full for too long; told once, what follows is written where it can be.
        """
        with self._lock:
            self._waiting.append(write)
            if self._space.retry_in_s == 0:
                self._go_on()

    def describe(self) -> str:
        """In words, how long there has been no room; empty where there is."""
        return self._space.describe()

    def finish(self) -> int:
        """Tries once more; returns how many found no room."""
        with self._lock:
            self._go_on()
            return len(self._waiting)

    def _go_on(self) -> None:
        while self._waiting:
            write = self._waiting.popleft()
            try:
                write()
            except OSError as error:
                if is_full_disk(error):
                    self._waiting.appendleft(write)
                self._note(error)
                return
            self._space.note_written()

    def _note(self, error: OSError) -> None:
        try:
            self._space.note(error)
        except RunFailed:
            if not self._failed:
                self._failed = True
                raise


def when_there_is_room(write: Callable[[], _Result], limit_s: float, wait: Callable[[float, str], object]) -> _Result:
    """Writes, as often as it takes.

    Args:
        write: Leaves nothing behind that its next call stumbles over.
        limit_s: So long a full disk is waited for.
        wait: Is given the seconds until the next try, and why, in words; may raise to give up.

    Raises:
        OSError: it failed for another reason than a full disk.
        RunFailed: the disk has been full for too long.
    """
    space = DiskSpace(limit_s)
    while True:
        try:
            return write()
        except OSError as error:
            space.note(error)
        wait(space.retry_in_s, space.describe())

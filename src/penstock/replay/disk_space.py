"""A disk that is full: what could not be written is kept, and tried again until there is room, within a limit."""

import threading
import time
from collections.abc import Callable

from penstock.rundir.storage import is_full_disk
from penstock.types import RunFailed

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class DiskSpace:
    """Says when a write that found no room may be tried again. Thread-safe.

    Args:
        limit_s: So long a full disk is waited for; 0 makes it an error at once.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._retry_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._reason = ""

    def note(self, error: OSError) -> None:
        """A write failed; to be called where the error is handled.

        Raises:
            OSError: the error itself, where it says something else than that there is no room.
            RunFailed: there has been none for longer than the limit.
        """
        if not is_full_disk(error) or self._limit_s <= 0:
            raise error
        with self._lock:
            now = self._clock()
            self._since = now if self._since is None else self._since
            self._retry_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._reason = str(error)
            if now - self._since > self._limit_s:
                raise RunFailed(
                    f"{error}: there has been no room for {now - self._since:.0f} s (replay.store.full_disk_s = "
                    f"{self._limit_s:g}): make room and resume the run"
                ) from error

    def note_written(self) -> None:
        """A write succeeded."""
        if self._since is not None:
            with self._lock:
                self._since, self._retry_at, self._pause_s = None, 0.0, _FIRST_PAUSE_S

    @property
    def retry_in_s(self) -> float:
        """Seconds until a write may be tried again; 0 now."""
        return max(0.0, self._retry_at - self._clock()) if self._since is not None else 0.0

    def describe(self) -> str:
        """In words, how long there has been no room, and where; empty where there is."""
        since = self._since
        return "" if since is None else f"no room on the disk for {self._clock() - since:.0f} s: {self._reason}"

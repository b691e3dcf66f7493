"""Ending the process of one incarnation, and knowing when it is gone.

Nobody is replaced before that is known: two processes that both think they are the learner would write the same files.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from penstock.overseer.distributed.launcher import Handle
from penstock.types import RunFailed, UnreachableError

_Found = TypeVar("_Found")

Background = Callable[[Callable[[], None]], Future[None]]
"""Runs a function that may wait, elsewhere."""

ATTEMPT_S = 10.0
"""Longest single attempt to end a process."""


def in_background(function: Callable[[], _Found]) -> Future[_Found]:
    """Runs a function in a daemon thread of its own, so that one that hangs keeps no process from ending."""
    future: Future[_Found] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # handed to whoever reads the future
            future.set_exception(error)

    threading.Thread(target=run, name="overseer-background", daemon=True).start()
    return future


class Ending:
    """Repeats the attempt to end a process until it is gone.

    Args:
        handle: Whose process.
        limit_s: How long all attempts may take together (``overseer.stop_timeout_s``).
        background: Where the attempts wait.
        now_s: When this began.
    """

    def __init__(self, handle: Handle, limit_s: float, background: Background, now_s: float) -> None:
        self._handle = handle
        self._limit_s = limit_s
        self._background = background
        self._begun_at = now_s
        self._told = False
        self._failed = ""
        self._attempt = self._begin()

    @property
    def gone(self) -> bool:
        """Whether the process is known to be gone."""
        return self._attempt.done() and self._attempt.exception() is None

    def poll(self, now_s: float, on_failure: Callable[[str], None]) -> bool:
        """Whether the process is gone; begins another attempt where the last one failed.

        Args:
            now_s: On the clock of the beginning.
            on_failure: Is told why an attempt failed.

        Raises:
            RunFailed: it could not be shown to be gone within the limit; raised once.
        """
        if self._attempt.done():
            error = self._attempt.exception()
            if error is None:
                return True
            if not isinstance(error, UnreachableError):
                raise error
            self._failed = str(error)
            on_failure(self._failed)
            self._attempt = self._begin()
        if now_s - self._begun_at > self._limit_s and not self._told:
            self._told = True
            raise RunFailed(
                f"{self._handle.identity} could not be shown to be dead within {self._limit_s:g} s "
                f"(overseer.stop_timeout_s), so it is not replaced: "
                f"{self._failed or 'the attempt has not returned'}; end its process by hand, then resume"
            )
        return False

    def _begin(self) -> "Future[None]":
        return self._background(lambda: self._handle.kill(min(ATTEMPT_S, self._limit_s)))

"""Ending the process of one incarnation, and of all: each stops by itself, its last messages are taken, it is ended.

Nobody is replaced before the end of its process is known: two processes that both think they are the learner would
write the same files.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from penstock.overseer.launch.launcher import Handle
from penstock.overseer.supervisor.messages import Membership, Report
from penstock.types import RunFailed, UnreachableError

Background = Callable[[Callable[[], None]], Future[None]]
"""Runs a function that may wait, elsewhere."""

ATTEMPT_S = 10.0
"""Longest single attempt to end a process."""


class Termination:
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


STOP_SHARE, HEAR_SHARE = 0.5, 0.25
"""Of the whole limit, for the components' own stopping and for their last messages; the rest is for ending them."""


def stop_all(
    handles: Sequence[tuple[Handle, int]],
    view: Membership,
    hear: Callable[[Report], None],
    tell: Callable[[str, str], None],
    background: Background,
    timeout_s: float,
) -> list[str]:
    """Ends everybody within the limit, side by side.

    Args:
        handles: Whom, and the number of the last message of each that was logged.
        view: The newest.
        hear: Takes the last reports, in this thread.
        tell: Is told who did not stop by itself or was not heard out, and why.
        background: Where calls wait.
        timeout_s: For all together.

    Returns:
        Those whose end could not be established.
    """
    deadline, order = time.monotonic() + timeout_s, [handle for handle, _ in handles]
    stop_s = timeout_s * STOP_SHARE

    def stopping(handle: Handle) -> "Future[None]":
        return background(lambda: handle.call("stop", stop_s, timeout_s=stop_s))

    _settle(order, [stopping(handle) for handle in order], stop_s, tell)
    answers = [handle.beat(view, acknowledged) for handle, acknowledged in handles]
    try:
        for answer in _settle(order, answers, timeout_s * HEAR_SHARE, tell):
            if answer is not None:
                hear(answer.result())
    finally:  # whatever the log says to it, nobody is left behind
        left = _end_all(order, max(0.1, deadline - time.monotonic()), background, tell)
    return left


def _end_all(
    order: Sequence[Handle], limit_s: float, background: Background, tell: Callable[[str, str], None]
) -> list[str]:
    def ending(handle: Handle) -> "Future[None]":
        return background(lambda: handle.kill(limit_s))

    ended = _settle(order, [ending(handle) for handle in order], limit_s, tell)
    return [str(handle.identity) for handle, gone in zip(order, ended, strict=True) if gone is None]


def _settle(
    order: Sequence[Handle], futures: "Sequence[Future[Any]]", limit_s: float, tell: Callable[[str, str], None]
) -> "list[Future[Any] | None]":
    """Those that succeeded within the limit; None in place of the others."""
    wait(futures, limit_s)
    settled: list[Future[Any] | None] = []
    for handle, future in zip(order, futures, strict=True):
        error = future.exception() if future.done() else TimeoutError(f"no answer within {limit_s:g} s")
        if error is not None:
            tell(str(handle.identity), str(error))
        settled.append(future if error is None else None)
    return settled

"""How all components of a run end: each stops by itself, is heard out, and is then ended."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from penstock.overseer.distributed.ending import Background
from penstock.overseer.distributed.launcher import Handle
from penstock.overseer.distributed.records import Report, View

STOP_SHARE, HEAR_SHARE = 0.5, 0.25
"""Of the whole limit, for the components' own stopping and for their last messages; the rest is for ending them."""


def stop_all(
    handles: Sequence[tuple[Handle, int]],
    view: View,
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

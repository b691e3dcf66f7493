"""Calls that may hang, such as reads of a network's file system: each is made in a thread that is left behind in time.

Nothing ends a read that hangs. A few of them may; then no other begins before one of them is over.
"""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from penstock.types import UnreachableError

MOST_LEFT_BEHIND = 4
"""So many calls may hang at once."""

_Result = TypeVar("_Result")


class BoundedCalls:
    """Makes calls for one thread at a time; `close` comes from another."""

    def __init__(self) -> None:
        self._closed: Future[None] = Future()
        self._hanging: list[tuple[str, Future[Any]]] = []

    def __call__(self, what: str, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """Calls a function and returns its result, or raises what it raised.

        Args:
            what: In words, for the error.
            function: May go on after the limit, in its thread; then its result is thrown away.
            timeout_s: The limit.

        Raises:
            UnreachableError: it is not over in time, or too many before it still hang, or this was closed.
        """
        self._hanging = [(name, call) for name, call in self._hanging if not call.done()]
        if len(self._hanging) >= MOST_LEFT_BEHIND:
            first, _ = self._hanging[0]
            raise UnreachableError(f"{what} did not begin: {len(self._hanging)} before it hang, {first} first")
        call: Future[_Result] = Future()
        threading.Thread(target=_run, args=(call, function), name="weights-read", daemon=True).start()
        either: list[Future[Any]] = [call, self._closed]
        wait(either, timeout_s, FIRST_COMPLETED)
        if call.done():
            return call.result()
        self._hanging.append((what, call))
        if self._closed.done():
            raise UnreachableError(f"{what} was given up: the reader was closed")
        raise UnreachableError(f"{what} was not over within {timeout_s:.3g} s")

    def close(self) -> None:
        """Ends the wait for a call that runs. May be called twice."""
        if not self._closed.done():
            self._closed.set_result(None)


def _run(call: Future[_Result], function: Callable[[], _Result]) -> None:
    try:
        call.set_result(function())
    except BaseException as error:  # whatever it is, the caller has it
        call.set_exception(error)

"""How long a component worked, and how long it waited for others."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from typing_extensions import TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Activity:
    """Seconds of work and of waiting since the first `begin`; any number of pieces of work may overlap.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._running = 0
        self._seconds = {True: 0.0, False: 0.0}

    def begin(self) -> None:
        """From now on it is counted."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, it works."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a piece of work that was begun waits for others."""
        self._change(-1)
        try:
            yield
        finally:
            self._change(1)

    @property
    def working(self) -> bool:
        """Whether it works at this moment, and does not wait for others."""
        with self._lock:
            return self._running > 0

    def read(self) -> tuple[float, float]:
        """Busy and idle seconds."""
        with self._lock:
            self._settle()
            return self._seconds[True], self._seconds[False]

    def _change(self, by: int) -> None:
        with self._lock:
            self._settle()
            self._running += by

    def _settle(self) -> None:
        if self._since is None:
            return
        now = self._clock()
        self._seconds[self._running > 0] += now - self._since
        self._since = now


class Handling:
    """Calls that a component handles for others; each is work while it lasts. Not for calls that wait by design.

    Args:
        activity: The component's.

    Attributes:
        under_way: So many are being handled.
        done: So many were, whatever came of them.
    """

    def __init__(self, activity: Activity) -> None:
        self.under_way = self.done = 0
        self._activity = activity
        self._lock = threading.Lock()

    def of(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        """The method, with its calls counted."""

        @functools.wraps(method)
        def handled(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.one():
                return method(*args, **kwargs)

        return handled

    @contextmanager
    def one(self) -> Iterator[None]:
        """Inside, one is handled."""
        with self._lock:
            self.under_way += 1
        try:
            with self._activity.busy():
                yield
        finally:
            with self._lock:
                self.under_way, self.done = self.under_way - 1, self.done + 1

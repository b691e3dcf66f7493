"""The lock that the parts of one buffer share, with what ends every wait in it."""

import threading
from collections.abc import Callable

from penstock.types import PenstockError, Stopped

RECHECK_S = 1.0
"""Longest sleep of who waits for news before asking the clocks (stragglers, staleness, a full disk) again."""


class NotifyingCondition(threading.Condition):
    """A re-entrant condition that others can listen to without waiting in it, and that can be ended for good.

    Attributes:
        on_notify: Called at every `notify_all`, with the lock held; it must return at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_notify: Callable[[], None] = _ignore
        self._closed = False
        self._failure: PenstockError | None = None

    def notify_all(self) -> None:
        """Wakes all that wait, and calls `on_notify`."""
        super().notify_all()
        self.on_notify()

    @property
    def is_over(self) -> bool:
        """Whether `raise_if_over` would raise."""
        return self._closed or self._failure is not None

    def raise_if_over(self) -> None:
        """Ends whoever asks.

        Raises:
            Stopped: after `close`.
            PenstockError: after `end_with`, what that was given.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Stopped("the replay buffer is closed")

    def end_with(self, failure: PenstockError) -> None:
        """Every wait ends with this error, now and later; the first one stays."""
        with self:
            self._failure = self._failure or failure
            self.notify_all()

    def close(self) -> None:
        """Ends every wait, now and later, with `Stopped`."""
        with self:
            self._closed = True
            self.notify_all()


def _ignore() -> None:
    """Nobody listens."""

"""One epoll over file descriptors, each with what to call when it is readable.

Descriptors are closed only after the events at hand: a number that is closed and given out again within one round would
get the other's event.
"""

import os
import select
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class DescriptorWatch(Generic[T]):
    """Readable descriptors and their handlers, which give a T or None."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], T | None]] = {}
        self._retired: list[int] = []

    def add(self, fd: int, handler: Callable[[], T | None]) -> None:
        """Calls `handler` whenever `fd` is readable."""
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def drop(self, fd: int) -> None:
        """Watches `fd` no more; one that is not watched is fine."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def retire(self, fds: Iterable[int]) -> None:
        """Watches these no more, and closes them at the next `close_retired`."""
        for fd in fds:
            self.drop(fd)
            self._retired.append(fd)

    def close_retired(self) -> None:
        """Closes what was retired; not while events of one round are being handled."""
        for fd in self._retired:
            os.close(fd)
        self._retired.clear()

    def wait(self, timeout_s: float, found: list[T]) -> bool:
        """Waits for events and calls their handlers.

        Args:
            timeout_s: Longest wait.
            found: What handlers gave is appended.

        Returns:
            Whether a handler gave nothing: something other than a T has happened.
        """
        handlers, other = self._handlers, False
        for fd, _ in self._epoll.poll(timeout_s):
            handler = handlers.get(fd)
            result = None if handler is None else handler()
            if result is None:
                other = True
            else:
                found.append(result)
        return other

    def close(self) -> None:
        """Closes what was retired, and the epoll."""
        self.close_retired()
        self._epoll.close()

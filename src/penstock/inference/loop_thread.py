"""An event loop in a thread of its own, for callers that are threads themselves."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.types import NoProgressError, Stopped

LAST_TURNS = 3
"""Turns of the loop after which transports that were closed have let go of their sockets."""

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines until closed.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._finishing: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Starts a coroutine; its future is cancelled when the thread is closed.

        Raises:
            Stopped: it is closed.
        """
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise Stopped(f"the {self._name} was closed")

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine that is never cancelled: closing waits for it. For the loop's own thread."""
        task = self._loop.create_task(coroutine)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def call(self, function: Callable[[], object]) -> None:
        """Has the loop call a function soon; does nothing once closed."""
        with self._closing:
            if not self._closed:
                self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Cancels what runs, runs a last coroutine, waits for what is to be finished, and ends the thread.

        May be called again.

        Raises:
            NoProgressError: it did not end in time.
        """
        with self._closing:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise NoProgressError(f"the {self._name} did not end within {timeout_s:g} s")

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            others = asyncio.all_tasks() - {asyncio.current_task()} - self._finishing
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()
            await asyncio.gather(*self._finishing)
            await self._loop.shutdown_asyncgens()
            for _ in range(LAST_TURNS):
                await asyncio.sleep(0)
        finally:
            self._loop.stop()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

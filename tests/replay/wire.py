"""Calls to a service of this process, as a network would carry them: some are lost, some of their answers are."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from penstock.types import UnreachableError


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any, timeout_s: float = 280.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Wire:
    """Implements `Caller`.

    Args:
        service: Whose methods are called; it may be replaced, or be None: dead.
        loop: Runs its coroutines.
        fault: Asked at every call: "request" loses it, "answer" its answer, anything else nothing.
    """

    def __init__(self, service: Any, loop: Loop, fault: Callable[[str], str | None] = lambda method: None) -> None:
        self.service, self.loop, self.fault = service, loop, fault
        self.calls: list[str] = []

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append(method)
        fault = self.fault(method)
        if self.service is None or fault == "request":
            raise UnreachableError("the request was lost")
        answer = getattr(self.service, method)(*args)
        if inspect.iscoroutine(answer):
            answer = self.loop.run(answer)
        if fault == "answer":
            raise UnreachableError("the answer was lost")
        return answer

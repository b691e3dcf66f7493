"""A component for the tests of hosts and launchers. Its module is importable in any process of a test."""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus, Membership
from penstock.types import CheckpointError, SupersededVersionError


class PlainComponent:
    """Answers, fails, waits, logs and calls others, as it is told."""

    def __init__(self, surroundings: ComponentContext, settings: Mapping[str, Any]) -> None:
        self.surroundings = surroundings
        self.settings = settings
        self.state = "starting"
        self.views: list[Membership] = []
        self.gate = threading.Event()
        self.stopped = False

    def start(self) -> None:
        self.state = "running"

    def look(self, view: Membership) -> None:
        self.views.append(view)

    def condition(self) -> ComponentStatus:
        if self.settings.get("condition_fails"):
            raise ValueError("no condition")
        return ComponentStatus(self.state, "resting", progress=1.0, address={"pid": os.getpid()})  # type: ignore[arg-type]

    def drain(self) -> None:
        self.state = "drained"

    def stop(self, timeout_s: float) -> None:
        self.stopped = True
        self.gate.set()

    # --- for others ----------------------------------------------------------------------------------------------

    def add(self, a: int, b: int) -> int:
        return a + b

    def where(self) -> tuple[int, str]:
        return os.getpid(), str(self.surroundings.identity)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def view_numbers(self) -> list[int]:
        return [view.number for view in self.views]

    def fail(self, kind: str) -> None:
        if kind == "checkpoint":
            raise CheckpointError("no such checkpoint")
        if kind == "version":
            raise SupersededVersionError("version 3 is gone", newest=(1, 5))
        raise KeyError(kind)

    def wait_in_thread(self) -> str:
        return "opened" if self.gate.wait(30) else "never"

    async def wait_in_loop(self) -> str:
        for _ in range(3000):
            if self.gate.is_set():
                return "opened"
            await asyncio.sleep(0.01)
        return "never"

    def open(self) -> None:
        self.gate.set()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def ask(self, name: str, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        return self.surroundings.caller(name).call(method, *args, timeout_s=timeout_s)

    def report(self, step: int) -> None:
        self.surroundings.event("noted", step, what="something")
        self.surroundings.metrics(step, {"plain/number": 2.5})

    def speak(self, words: str) -> None:
        logging.getLogger("plain").warning("logged %s", words)
        print(f"printed {words}")
        print(f"complained {words}", file=sys.stderr)
        os.write(1, f"written {words}\n".encode())

    async def echo(self, content: bytes) -> bytes:
        return content


def make(surroundings: ComponentContext, settings: Mapping[str, Any]) -> PlainComponent:
    """The factory."""
    if settings.get("fails"):
        raise CheckpointError("nothing to start from")
    return PlainComponent(surroundings, settings)

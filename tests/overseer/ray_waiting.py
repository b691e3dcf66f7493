"""Bounded waits of the tests with Ray."""

import time
from collections.abc import Callable
from typing import Any

from penstock.overseer.distributed.records import Report, View


def running(handle: Any, view: View | None = None, timeout_s: float = 60.0) -> Report:
    """Beats until the component is made; one beat when it is already."""
    deadline = time.monotonic() + timeout_s
    while True:
        report = handle.beat(view or View(), 0).result(max(0.1, deadline - time.monotonic()))
        if report.condition.state != "starting":
            return report
        time.sleep(0.01)


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)

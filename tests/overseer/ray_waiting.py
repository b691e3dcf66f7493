"""Bounded waits of the tests with Ray."""

import time
from typing import Any

from penstock.overseer.supervisor.messages import Membership, Report


def running(handle: Any, view: Membership | None = None) -> Report:
    """Beats until the component is made; one beat when it is already."""
    deadline = time.monotonic() + 60.0
    while True:
        report = handle.beat(view or Membership(), 0).result(max(0.1, deadline - time.monotonic()))
        if report.condition.state != "starting":
            return report
        time.sleep(0.01)

"""The bounded wait of tests, for what another thread or process says by nothing but its state."""

import time
from collections.abc import Callable

WAIT_S = 280.0


def wait_until(holds: Callable[[], object], what: str = "it", timeout_s: float = WAIT_S) -> None:
    """Waits until something holds.

    Raises:
        AssertionError: not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.002)

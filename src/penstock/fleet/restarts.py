"""When a simulator process that failed is started again, and when it is given up.

Pure arithmetic over failures and their times; no clock of its own. A wait that doubles with every failure in a row
(a life that answered an action ends the row), a limit of such rows, a cap for the whole life of a process slot, and a
limit per minute.
Replacements at `restart_interval_s` are no failures and are not counted here.
"""

from collections import deque
from dataclasses import dataclass

from penstock.fleet.config import SimulatorLimits

_RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The process is given up.

    Attributes:
        reason: Which limit was passed, its value, and what can be done.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """The process is started again.

    Attributes:
        delay_s: After so long.
    """

    delay_s: float


class RestartRecord:
    """Failures of one process slot.

    Args:
        limits: Back-off, cap and rate.

    Attributes:
        restarts: Restarts that were granted so far.
    """

    def __init__(self, limits: SimulatorLimits) -> None:
        self._limits = limits
        self._in_row = 0
        self._recent: deque[float] = deque()
        self.restarts = 0

    def answered(self) -> None:
        """An action was answered: the next failure begins a new row."""
        self._in_row = 0

    def failed(self, now_s: float) -> RestartAfter | Quarantine:
        """Counts a failure and says what follows.

        Args:
            now_s: Monotonic time.
        """
        limits = self._limits
        if limits.max_restarts is not None and self.restarts >= limits.max_restarts:
            return Quarantine(
                f"it failed after fleet.limits.max_restarts = {limits.max_restarts} restarts: raise that if it is few"
            )
        if limits.max_failures_in_row is not None and self._in_row + 1 >= limits.max_failures_in_row:
            return Quarantine(
                f"it failed fleet.limits.max_failures_in_row = {limits.max_failures_in_row} times, and answered no "
                "action in between: raise that if it is few"
            )
        while self._recent and self._recent[0] <= now_s - _RATE_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= limits.restarts_per_minute:
            return Quarantine(
                f"it failed more often than fleet.limits.restarts_per_minute = {limits.restarts_per_minute}: raise "
                "that if it is few"
            )
        self._recent.append(now_s)
        self._in_row += 1
        self.restarts += 1
        return RestartAfter(min(limits.max_backoff_s, limits.backoff_s * 2.0 ** min(self._in_row - 1, 60)))

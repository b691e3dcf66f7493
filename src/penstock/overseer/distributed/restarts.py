"""How often, and after what wait, one component may be restarted."""

from collections import deque

from penstock.overseer.config import OverseerConfig


class RestartBudget:
    """Counts the deaths of one component within a sliding window.

    Args:
        config: `max_restarts` within `restart_window_s`; waits from `backoff_s`, doubling up to `max_backoff_s`.
    """

    def __init__(self, config: OverseerConfig) -> None:
        self._config = config
        self._deaths: deque[float] = deque()

    def charge(self, now_s: float) -> float | None:
        """Counts a death.

        Args:
            now_s: Of any monotonic clock; never less than before.

        Returns:
            Seconds to wait before the restart; None where no further restart is allowed.
        """
        self._deaths.append(now_s)
        count = self.used(now_s)
        if count > self._config.max_restarts:
            return None
        doublings = min(count - 1, 64)  # beyond that every wait is the longest
        return min(self._config.backoff_s * 2.0**doublings, self._config.max_backoff_s)

    def used(self, now_s: float) -> int:
        """Deaths within the window that ends now."""
        while self._deaths and now_s - self._deaths[0] > self._config.restart_window_s:
            self._deaths.popleft()
        return len(self._deaths)

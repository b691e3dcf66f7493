"""How often, and after what wait, one component may be restarted; and how many may die while nothing is learned."""

from collections import deque

from penstock.overseer.config import OverseerConfig
from penstock.types import RunFailed

MOST_DEATHS = 5
"""Times ``overseer.max_restarts``: so many components may die without one new version of the policy."""


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


class DeathToll:
    """Counts the deaths of all components since the last new version of the policy.

    Args:
        max_restarts: See `OverseerConfig`.
    """

    def __init__(self, max_restarts: int) -> None:
        self._limit = MOST_DEATHS * max(1, max_restarts)
        self._deaths = 0

    def count(self, reason: str) -> None:
        """A run in which things die and nothing is learned ends, however slowly they die.

        Raises:
            RunFailed: too many died since the last new version.
        """
        self._deaths += 1
        if self._deaths > self._limit:
            self._deaths = 0  # the end of the run takes a few more
            raise RunFailed(
                f"{self._limit + 1} components died or were ended without one new version of the policy; the last: "
                f"{reason} ({MOST_DEATHS} × overseer.max_restarts)"
            )

    def forget(self) -> None:
        """There is a new version."""
        self._deaths = 0

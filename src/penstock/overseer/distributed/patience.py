"""Time as those are judged by it who owe an answer."""

from collections.abc import Callable


class Patience:
    """A clock that only runs while it is looked at.

    When the overseer itself stood still, stopped by a signal or suspended with its machine, everybody seems to have
    been silent for as long; so a single tick adds `most_s` at most.

    Args:
        clock: Monotonic seconds.
        most_s: Longest time between two ticks that counts.
    """

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        self._clock = clock
        self._most_s = most_s
        self._read_at = clock()
        self.now_s = 0.0

    def tick(self) -> None:
        """Brings `now_s` up to date."""
        read = self._clock()
        self.now_s += min(max(0.0, read - self._read_at), self._most_s)
        self._read_at = read

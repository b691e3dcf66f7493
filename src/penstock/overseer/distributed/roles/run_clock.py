"""The clock that the ages of rollouts are measured by: one for the whole run, whatever the machines' clocks do.

The replay buffer keeps it. It begins at the time of day and then goes on steadily, so that a jump of the machine's
clock makes nothing old. Rollout workers stamp what they finish by the same clock: they ask for it now and then, and go
on steadily in between. Without that, a worker on a machine whose clock is hours behind would deliver nothing but stale
rollouts.
"""

import threading
import time
from collections.abc import Callable

from penstock.types import Caller, UnreachableError

ASK_S = 5.0
"""Seconds between two questions."""
LOOK_S = 0.25
"""So soon another replay buffer's clock is asked for, and one that did not answer is asked again."""
CALL_S = 5.0


class SteadyClock:
    """Unix seconds as they were when it was made, and from then on by a clock that never jumps.

    Args:
        wall: Unix seconds.
        steady: Monotonic seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._offset = wall() - steady()

    def now(self) -> float:
        """Unix seconds."""
        return self._offset + self._steady()


class RunClock:
    """The replay buffer's clock, as another process knows it. Thread-safe.

    Args:
        replay: Answers `now`.
        wall: What the clock begins with, until the first answer; Unix seconds.
        steady: Monotonic seconds.
    """

    def __init__(
        self,
        replay: Caller,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replay = replay
        self._steady = steady
        self._offset = wall() - steady()

    def now(self) -> float:
        """Unix seconds."""
        return self._offset + self._steady()

    def ask(self) -> bool:
        """Sets the clock by the buffer's, to within the time that the answer takes; false where none came."""
        asked = self._steady()
        try:
            answer = float(self._replay.call("now", timeout_s=CALL_S))
        except UnreachableError:
            return False
        self._offset = answer - (asked + self._steady()) / 2
        return True

    def follow(self, whose: Callable[[], object], stopping: threading.Event) -> None:
        """Asks now and then, until it is told to stop.

        Args:
            whose: The living replay buffer; another one is asked at once.
            stopping: Tells.
        """
        asked: object = None
        due = 0.0
        while not stopping.wait(LOOK_S if due else 0.0):
            living = whose()
            if living != asked or self._steady() >= due:
                asked = living if self.ask() else None
                due = self._steady() + ASK_S

"""Back-pressure of an open buffer: a delivery waits for room, for a limited time, instead of having others evicted.

Waits are in the buffer's own condition, and are told of every batch, every version and the end. Not covered: who gets
the room first; those who wait all look, and each takes one group's worth.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.types import NoProgressError

_NAP_S = 1.0
"""Longest sleep before the clock is asked whether something has grown stale; news wake it."""


@dataclass(slots=True)
class Room:
    """Counts who waits, and for how long they have. All of it under the buffer's lock.

    Attributes:
        most: Rollouts that may wait for their first batch; None means any number.
        timeout_s: Longest wait of one delivery.
        clock: Monotonic seconds.
    """

    most: int | None
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    _since: dict[object, float] = field(default_factory=dict[object, float])
    _ended_s: float = 0.0

    def wait(self, changed: threading.Condition, waiting: Callable[[], int], describe: Callable[[], str]) -> None:
        """Returns when fewer than `most` rollouts wait.

        Args:
            changed: Held; told whenever `waiting` may have fallen.
            waiting: How many wait now; raises where the buffer is over.
            describe: Says in words what the learner does, for the error.

        Raises:
            NoProgressError: at the timeout.
        """
        if self.most is None or waiting() < self.most:
            return
        token, started = object(), self.clock()
        self._since[token] = started
        try:
            while (count := waiting()) >= self.most:
                left_s = started + self.timeout_s - self.clock()
                if left_s <= 0:
                    raise NoProgressError(
                        f"a delivery waited {self.timeout_s:g} s (replay.max_waiting_s): {count} rollouts wait for "
                        f"their first batch, as many as may (replay.max_waiting = {self.most}), and the learner takes "
                        f"none; {describe()}"
                    )
                changed.wait(min(left_s, _NAP_S))
        finally:
            self._ended_s += self.clock() - self._since.pop(token)

    def metrics(self) -> dict[str, float]:
        """``replay/blocked_senders`` now, and ``replay/blocked_s`` so far, theirs included; none without a limit."""
        if self.most is None:
            return {}
        now = self.clock()
        waited_s = self._ended_s + sum(now - since for since in self._since.values())
        return {"replay/blocked_senders": float(len(self._since)), "replay/blocked_s": waited_s}

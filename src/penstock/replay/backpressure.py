"""How writers wait for room: bounded, named, and counted."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from penstock.types import NoProgressError


class Backpressure:
    """Counts waiting writers and ends waits that last too long. Thread-safe; never waits itself.

    Args:
        place: Where the rollouts go, in words.
        timeout_s: Longest wait.
        clock: Monotonic seconds.
    """

    def __init__(self, place: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}
        self._ended_s = 0.0
        self._last_read: float | None = None

    def note_reader(self) -> None:
        """The reader asked for something."""
        self._last_read = self._clock()

    @contextmanager
    def blocked(self, writer_id: str, full: str) -> Generator[Callable[[], float], None, None]:
        """A writer waits inside. Gives a function that says how many seconds are left.

        Args:
            writer_id: Who waits.
            full: What is full, in words.

        Raises:
            NoProgressError: by that function, when none is left.
        """
        token, started = object(), self._clock()
        with self._lock:
            self._since[token] = started

        def left_s() -> float:
            left = started + self._timeout_s - self._clock()
            if left <= 0:
                raise NoProgressError(self._message(writer_id, full))
            return left

        try:
            yield left_s
        finally:
            with self._lock:
                self._ended_s += self._clock() - self._since.pop(token)

    def metrics(self) -> dict[str, float]:
        """Writers that wait, and seconds waited so far, theirs included."""
        with self._lock:
            now = self._clock()
            waiting_s = sum(now - since for since in self._since.values())
            return {
                "rollout_storage/blocked_writers": float(len(self._since)),
                "rollout_storage/blocked_s": self._ended_s + waiting_s,
            }

    def _message(self, writer_id: str, full: str) -> str:
        read = "no reader has asked yet" if self._last_read is None else _ago(self._clock() - self._last_read)
        return (
            f"{writer_id} waited {self._timeout_s:g} s (rollout.storage.write_timeout_s) to hand rollouts over: {full} "
            f"and nobody takes them out of {self._place}; in this process {read}. See that the learner's rollout "
            "receiver runs and reads the same place"
        )


def _ago(seconds: float) -> str:
    return f"the reader last asked {seconds:.0f} s ago"

"""Counts what an engine does; read by other threads at any time."""

import threading
import time
from collections import deque

RECENT_S = 10.0
"""The rate is over dispatches of the last so many seconds."""


class Meter:
    """Totals, and the recent rate of generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = {"tokens_total": 0.0, "prefill_tokens_total": 0.0, "prompts_total": 0.0}
        self._totals |= {"responses_total": 0.0, "dispatches_total": 0.0, "weight_swaps_total": 0.0}
        self._busy_s = 0.0
        self._recent: deque[tuple[float, float, int]] = deque()

    def add(self, **amounts: int) -> None:
        """Adds to totals by name, without their ``_total``."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[f"{name}_total"] += amount

    def add_dispatch(self, started: float, tokens: int) -> None:
        """One dispatch, from ``time.monotonic()`` at its start until now."""
        now = time.monotonic()
        self.add(dispatches=1, tokens=tokens)
        with self._lock:
            self._busy_s += now - started
            self._recent.append((started, now, tokens))
            self._forget(now)

    @property
    def busy_s(self) -> float:
        """Seconds in which dispatches ran, since the start."""
        with self._lock:
            return self._busy_s

    def read(self) -> dict[str, float]:
        """Totals, and ``tokens_per_s``: recent tokens over the time in which dispatches ran."""
        with self._lock:
            self._forget(time.monotonic())
            busy_s = sum(ended - started for started, ended, _ in self._recent)
            tokens = sum(count for _, _, count in self._recent)
            return {**self._totals, "tokens_per_s": tokens / busy_s if busy_s > 0 else 0.0}

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][1] < now - RECENT_S:
            self._recent.popleft()

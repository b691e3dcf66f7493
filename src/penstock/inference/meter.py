"""What an engine counts and measures, for other threads to read: totals, the recent rate, and waits of responses."""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.inference.sequence import Response

RECENT_S = 10.0
"""The rate is over dispatches of the last so many seconds,"""
LEAST_DISPATCHES = 4
"""and over at least so many, however long ago: one of a slow model may take longer, and so may a pause."""


LATENCIES = ("queue_s", "first_token_s", "between_tokens_s", "whole_s")
"""Seconds of a response: until it has a slot, until its first tokens, between two tokens, and until its end."""
LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(slots=True)
class LatencyHistogram:
    """How often something took how long.

    Attributes:
        counts: By upper bound, `LATENCY_BOUNDS_S` and then everything longer; not cumulative.
        total_s: Sum of all, in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """It took so long, so many times."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += times
        self.total_s += seconds * times


class ThroughputMeter:
    """Totals, the recent rate of generation, and how long responses wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = {"tokens_total": 0.0, "prefill_tokens_total": 0.0, "prompts_total": 0.0}
        self._totals |= {"responses_total": 0.0, "dispatches_total": 0.0, "weight_swaps_total": 0.0}
        self._totals |= {"prefix_hits_total": 0.0, "prefix_tokens_total": 0.0, "scored_tokens_total": 0.0}
        self._latencies = {name: LatencyHistogram() for name in LATENCIES}
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

    def add_waits(self, arrivals: Sequence[Response]) -> None:
        """These have their slots now."""
        now = time.monotonic()
        with self._lock:
            for response in arrivals:
                response.placed_s = now
                self._latencies["queue_s"].add(now - response.pending.submitted_s)

    def add_tokens(self, running: Sequence[tuple[int, Response]], count: np.ndarray) -> None:
        """A dispatch gave each slot so many tokens, which are told all at once."""
        now = time.monotonic()
        with self._lock:
            for slot, response in running:
                self._add_tokens(response, int(count[slot]), now)

    def _add_tokens(self, response: Response, count: int, now: float) -> None:
        began = response.pending.submitted_s
        if response.told_s is None:
            self._latencies["first_token_s"].add(now - began)
        else:
            self._latencies["between_tokens_s"].add((now - response.told_s) / count, count)
        response.told_s = now
        if response.finish_reason is not None:
            self._latencies["whole_s"].add(now - began)

    def latencies(self) -> dict[str, LatencyHistogram]:
        """By the names of `LATENCIES`."""
        with self._lock:
            return {name: LatencyHistogram([*each.counts], each.total_s) for name, each in self._latencies.items()}

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
        while len(self._recent) > LEAST_DISPATCHES and self._recent[0][1] < now - RECENT_S:
            self._recent.popleft()

"""One set of numbers for metrics.jsonl from the numbers of many components."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from penstock.overseer.distributed.records import Identity, Report

MEANS = frozenset({"inference/kv_used"})
LARGEST = ("_s", "/lag", "_lag", "mib_per_s")
"""Names with these endings are times and the like: the slowest component's counts."""


def merge(reports: Iterable[Report]) -> dict[str, float]:
    """Sums over components; the largest of times and lags; the mean of shares."""
    found: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.condition.metrics.items():
            found[name].append(value)
    return {name: _merged(name, values) for name, values in found.items()}


def _merged(name: str, values: list[float]) -> float:
    if name in MEANS:
        return sum(values) / len(values)
    return max(values) if name.endswith(LARGEST) and not name.endswith("tokens_per_s") else sum(values)


class IdleShares:
    """How idle each role was lately.

    Args:
        window_s: Shares are over at least so long: reports come only now and then.
        clock: Monotonic seconds.
    """

    def __init__(self, window_s: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._since = clock()
        self._seen: dict[Identity, tuple[float, float]] = {}
        self._shares: dict[str, float] = {}

    def take(self, reports: Iterable[Report]) -> dict[str, float]:
        """Role → idle share of its components' time since the window began; those of the last window before its end."""
        now = self._clock()
        if now - self._since < self._window_s:
            return self._shares
        self._since = now
        busy: dict[str, float] = defaultdict(float)
        idle: dict[str, float] = defaultdict(float)
        for report in reports:
            identity, condition = report.identity, report.condition
            before = self._seen.get(identity, (0.0, 0.0))
            self._seen[identity] = (condition.busy_s, condition.idle_s)
            busy[identity.role] += condition.busy_s - before[0]
            idle[identity.role] += condition.idle_s - before[1]
        self._shares = {role: idle[role] / (busy[role] + idle[role]) for role in busy if busy[role] + idle[role] > 0}
        return self._shares

"""One set of numbers for metrics.jsonl from the numbers of many components."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from penstock.overseer.distributed.records import Report

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
    """How idle each role was since the last look."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def take(self, reports: Mapping[str, Report]) -> dict[str, float]:
        """Role → idle share of the time since the last call, over all its components that have any."""
        busy: dict[str, float] = defaultdict(float)
        idle: dict[str, float] = defaultdict(float)
        for report in reports.values():
            key, condition = str(report.identity), report.condition
            before = self._seen.get(key, (0.0, 0.0))
            self._seen[key] = (condition.busy_s, condition.idle_s)
            busy[report.identity.role] += condition.busy_s - before[0]
            idle[report.identity.role] += condition.idle_s - before[1]
        return {role: idle[role] / (busy[role] + idle[role]) for role in busy if busy[role] + idle[role] > 0}

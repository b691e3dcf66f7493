"""One set of numbers for metrics.jsonl from the numbers of many components."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from penstock.overseer.distributed.records import Identity, Report

MEANS = frozenset({"inference/kv_used"})
LARGEST = ("_s", "/lag", "_lag", "mib_per_s")
"""Names with these endings are times and the like: the slowest component's counts."""
LAG = "weights/lag"
"""Of each component, under its name, beside the largest."""


def merge(reports: Iterable[Report]) -> dict[str, float]:
    """Sums over components; the largest of times and lags, and each lag; the mean of shares."""
    found: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        metrics = report.condition.metrics
        for name, value in metrics.items():
            found[name].append(value)
        if LAG in metrics:
            found[f"{LAG}/{report.identity.name}"].append(metrics[LAG])
    return {name: _merged(name, values) for name, values in found.items()}


def _merged(name: str, values: list[float]) -> float:
    if name in MEANS:
        return sum(values) / len(values)
    return max(values) if name.endswith(LARGEST) and not name.endswith("tokens_per_s") else sum(values)


class IdleShares:
    """How idle each role, and each component, was lately.

    Args:
        window_s: Shares are over at least so long: reports come only now and then.
        clock: Monotonic seconds.

    Attributes:
        of_roles: Role → idle share of its components' time in the last whole window.
        of_components: Component → idle share of its own.
    """

    def __init__(self, window_s: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.of_roles: dict[str, float] = {}
        self.of_components: dict[str, float] = {}
        self._window_s = window_s
        self._clock = clock
        self._since = clock()
        self._seen: dict[Identity, tuple[float, float]] = {}

    def look(self, reports: Iterable[Report]) -> None:
        """Where the window is over, shares are those since it began."""
        now = self._clock()
        if now - self._since < self._window_s:
            return
        self._since = now
        roles: dict[str, list[tuple[float, float]]] = defaultdict(list)
        components: dict[str, list[tuple[float, float]]] = {}
        for report in reports:
            identity, condition = report.identity, report.condition
            busy_s, idle_s = self._seen.get(identity, (0.0, 0.0))
            self._seen[identity] = (condition.busy_s, condition.idle_s)
            spent = (condition.busy_s - busy_s, condition.idle_s - idle_s)
            roles[identity.role].append(spent)
            components[identity.name] = [spent]
        self.of_roles, self.of_components = _shares(roles), _shares(components)


def _shares(spent: Mapping[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Name → idle share, of (busy, idle) seconds; nothing where no time was spent."""
    whole = {name: (sum(busy for busy, _ in times), sum(idle for _, idle in times)) for name, times in spent.items()}
    return {name: idle / (busy + idle) for name, (busy, idle) in whole.items() if busy + idle > 0}

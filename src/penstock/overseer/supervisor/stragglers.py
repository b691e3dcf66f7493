"""Which components are slow by a factor over their peers.

The rate of a component is its progress by its seconds of work, over a sliding window: seconds in which it owed none,
and seconds in which it says that it waited for others, do not count, so a starved worker is not called slow. What it
finished meanwhile does count: a group is finished just after the work on it, when nothing may be owed any more. One
that works without any progress has the rate zero. Compared are components of one role and one peer group, each with the
median of the others.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from penstock.overseer.supervisor.messages import ComponentStatus, Identity

WINDOW_S = 60.0
"""Length of the window."""
LEAST_WORK_S = 20.0
"""Who worked for less within the window is not judged."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A verdict.

    Attributes:
        identity: Of whom.
        rate: Its progress per second of work.
        median: That of its peers.
    """

    identity: Identity
    rate: float
    median: float


@dataclass(slots=True)
class _Track:
    peers: Hashable
    progress: float | None = None  # as it was last told
    working: tuple[float, float] | None = None  # time and idle seconds of the last report; None: it owed no progress
    steps: deque[tuple[float, float, float]] = field(default_factory=deque)  # time, work seconds, progress


class Stragglers:
    """Watches all components.

    Args:
        factor: How much slower than the median of its peers is too slow.
        window_s: Over which rates are taken.
        least_work_s: Work within the window that a verdict needs.
    """

    def __init__(self, factor: float, window_s: float = WINDOW_S, least_work_s: float = LEAST_WORK_S) -> None:
        self._factor = factor
        self._window_s = window_s
        self._least_work_s = least_work_s
        self._tracks: dict[Identity, _Track] = {}
        self._told: set[Identity] = set()

    def observe(self, identity: Identity, peer_group: str, condition: ComponentStatus, now_s: float) -> None:
        """Takes a report."""
        track = self._tracks.setdefault(identity, _Track((identity.role, peer_group)))
        if condition.progress is None:
            track.working = None
            return
        if track.progress is not None:
            then_s, idle_s = track.working or (now_s, condition.idle_s)
            work_s = max(0.0, now_s - then_s - max(0.0, condition.idle_s - idle_s))
            track.steps.append((now_s, work_s, condition.progress - track.progress))
        track.progress, track.working = condition.progress, (now_s, condition.idle_s)

    def forget(self, identity: Identity) -> None:
        """It does not live any more."""
        self._tracks.pop(identity, None)
        self._told.discard(identity)

    def rates(self, now_s: float) -> dict[Identity, float]:
        """Progress per second of work, of those who can be judged."""
        found: dict[Identity, float] = {}
        for identity, track in self._tracks.items():
            while track.steps and now_s - track.steps[0][0] > self._window_s:
                track.steps.popleft()
            work_s = sum(work for _, work, _ in track.steps)
            if work_s >= self._least_work_s:
                found[identity] = sum(done for _, _, done in track.steps) / work_s
        return found

    def newly_slow(self, now_s: float) -> list[Straggler]:
        """Who became too slow; told once, and again only after it was as fast as the others."""
        rates, slow = self.rates(now_s), dict[Identity, Straggler]()
        of_peers: dict[Hashable, list[float]] = defaultdict(list)
        for identity in sorted(rates, key=lambda identity: rates[identity]):
            of_peers[self._tracks[identity].peers].append(rates[identity])
        for identity, rate in rates.items():
            peers = of_peers[self._tracks[identity].peers]
            if len(peers) > 1 and rate * self._factor < (usual := _median_without(peers, rate)):
                slow[identity] = Straggler(identity, rate, usual)
        new = [verdict for identity, verdict in slow.items() if identity not in self._told]
        self._told = (self._told - rates.keys()) | slow.keys()
        return new


def _median_without(ascending: Sequence[float], value: float) -> float:
    """Median of all but one that equals `value`; at least one other is there."""
    left_out, count = bisect_left(ascending, value), len(ascending) - 1
    low, high = ((rank if rank < left_out else rank + 1) for rank in ((count - 1) // 2, count // 2))
    return (ascending[low] + ascending[high]) / 2

"""Processor seconds of processes, latencies, and what they come to per worker."""

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of a process so far, all its threads; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def machine_seconds() -> tuple[float, float]:
    """(busy, all) processor seconds of the machine since its start, all cores."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS_PER_S, sum(ticks) / TICKS_PER_S


def descendants(pid: int) -> dict[int, str]:
    """Process → name, of all that a process started and those started."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # it ended just now
            parents[int(folder.name)] = int(rest.split()[1]), name
    found: dict[int, str] = {}
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above][0]
        if above == pid and child != pid:
            found[child] = parents[child][1]
    return found


def percentile(seconds: Sequence[float], share: float) -> float:
    """That share of them is at most so long; 0 where there are none."""
    return float(np.quantile(np.asarray(seconds), share)) if len(seconds) else 0.0


@dataclass
class Window:
    """What was measured in one window of time with so many workers.

    Attributes:
        workers: How many.
        seconds: The window's length.
        latencies_s: Kind of message → seconds of each that was answered.
        cpu_s: Process by role → its processor seconds.
        machine_share: Busy share of all the machine's cores, whoever used them.
        groups: That replay took in.
        depth: Groups that waited for replay's receiver at the window's end.
        full: Deliveries that were told to come again.
        deaths: Components that were given up.
        beats_due: Heartbeats that should have been made.
        speed: How much faster than measured the engines were.
    """

    workers: int
    seconds: float
    latencies_s: Mapping[str, Sequence[float]]
    cpu_s: Mapping[str, float]
    machine_share: float = 0.0
    groups: int = 0
    depth: float = 0.0
    full: int = 0
    deaths: float = 0.0
    beats_due: float = 0.0
    speed: float = 1.0

    def rate(self, kind: str) -> float:
        """Messages of a kind per second."""
        return len(self.latencies_s.get(kind, ())) / self.seconds

    @property
    def messages_per_s(self) -> float:
        """Of all kinds."""
        return sum(len(found) for found in self.latencies_s.values()) / self.seconds

    def cores(self, role: str) -> float:
        """Cores that a role kept busy."""
        return self.cpu_s.get(role, 0.0) / self.seconds

    def p(self, kind: str, share: float) -> float:
        """Seconds that this share of a kind's messages took at most."""
        return percentile(self.latencies_s.get(kind, ()), share)

    def cost(self, roles: Iterable[str]) -> float:
        """Processor seconds of these roles per worker and second."""
        return sum(self.cpu_s.get(role, 0.0) for role in roles) / (self.workers * self.seconds)

    @property
    def beats_made(self) -> float:
        """Share of the heartbeats that were due."""
        return len(self.latencies_s.get("heartbeat", ())) / self.beats_due if self.beats_due else 1.0


def median_of(windows: Sequence[Window], value: str, *arguments: object) -> float:
    """Median over windows of a property or of what a method returns."""
    found: list[Any] = [getattr(window, value) for window in windows]
    return statistics.median(float(one(*arguments)) if arguments else float(one) for one in found)


def marginal(smaller: tuple[int, float], larger: tuple[int, float]) -> float:
    """Cost of one more worker between two numbers of workers.

    Args:
        smaller: Number of workers, and what one of them cost.
        larger: Likewise.
    """
    (few, cost), (many, their_cost) = smaller, larger
    return (many * their_cost - few * cost) / (many - few)


@dataclass(frozen=True)
class Limits:
    """What counts as broken.

    Attributes:
        deliver_p99_s: Longest time that 99% of the deliveries may take.
        beats_made: Least share of the heartbeats that were due.
        groups_made: Least share of the groups that the engines' pace would give.
        depth_share: Most groups that wait for replay's receiver, per worker.
    """

    deliver_p99_s: float = 1.0
    beats_made: float = 0.8
    groups_made: float = 0.8
    depth_share: float = 1.0


def broken(window: Window, expected_groups_per_s: float, limits: Limits = Limits()) -> list[str]:
    """Which limits were crossed, in words; empty where none was."""
    found: list[str] = []
    if (late := window.p("deliver", 0.99)) > limits.deliver_p99_s:
        found.append(f"p99 of deliver is {late:.2f} s (limit {limits.deliver_p99_s:g} s)")
    if window.deaths:
        found.append(f"{window.deaths:.0f} components were given up")
    if window.beats_made < limits.beats_made:
        found.append(f"{window.beats_made:.0%} of the heartbeats that were due (limit {limits.beats_made:.0%})")
    expected = expected_groups_per_s * window.seconds
    if window.groups < limits.groups_made * expected - 2 * expected**0.5:  # less than that is no chance
        share = window.groups / expected
        found.append(f"{share:.0%} of the groups that the engines would give (limit {limits.groups_made:.0%})")
    if window.depth > limits.depth_share * window.workers:
        found.append(f"{window.depth:.0f} groups wait for the buffer (limit {limits.depth_share:g} per worker)")
    return found


def saturated(window: Window, cores: int) -> str:
    """What has no time left, in words."""
    full = [f"{role} ({window.cores(role):.2f} cores)" for role in window.cpu_s if window.cores(role) >= 0.85]
    if window.machine_share >= 0.9:
        full.append(f"the machine ({window.machine_share:.0%} of {cores} cores)")
    return ", ".join(full) or "nothing is fully busy: the limit is in waiting"


@dataclass
class Books:
    """Whether everything that was delivered is accounted for, once.

    Attributes:
        delivered: Groups that replay took, as its workers know.
        trained: Rollouts by how often the learner got them.
        ledger: Replay's own counts.
    """

    delivered: set[str]
    trained: Mapping[str, int]
    ledger: Mapping[str, int]
    group_size: int
    faults: list[str] = field(default_factory=list)

    def check(self) -> list[str]:
        """What does not fit, in words; empty where everything does."""
        ledger, faults = self.ledger, list[str]()
        states = {name: count for name, count in ledger.items() if name != "started"}
        if sum(states.values()) != ledger["started"]:
            faults.append(f"the ledger does not close: {dict(ledger)}")
        if twice := [rollout for rollout, count in self.trained.items() if count > 1]:
            faults.append(f"{len(twice)} rollouts were trained twice, such as {twice[0]}")
        if strange := {rollout.rpartition("/")[0] for rollout in self.trained} - self.delivered:
            faults.append(f"{len(strange)} groups were trained that nobody delivered, such as {min(strange)}")
        if len(self.trained) != states["trained"]:
            faults.append(f"the learner trained on {len(self.trained)} rollouts, the ledger has {states['trained']}")
        if (lost := len(self.delivered) * self.group_size - states["trained"] - states["waiting"]) != 0:
            faults.append(f"{lost} delivered rollouts are neither trained nor waiting: {dict(ledger)}")
        return faults

"""What can be seen of a run from beside it: who is up, how many updates were made, what the overseer told."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.load import INFERENCE_SERVERS, ROLLOUT_WORKERS, Run
from penstock.overseer.supervisor.messages import Report
from penstock.rundir import read_events

POLL_S = 0.05
COMPONENTS = (
    "learner-0", "replay-0", "curriculum-0", "evaluator-0",
    *(f"rollout-{index}" for index in range(ROLLOUT_WORKERS)),
    *(f"inference-{index}" for index in range(INFERENCE_SERVERS)),
)  # fmt: skip
TOLD = ("component_death", "component_up", "rewind")
"""Events of which every one is recorded; of others only how many there were."""


class RunEnded(Exception):
    """The run is over, or failed, while it should go on."""


@dataclass
class Effect:
    """What was seen of one fault. Times are seconds since the fault was lifted (a signal: since it was sent).

    Attributes:
        number: Of the fault.
        kind: Of the fault.
        target: What it was done to.
        at_s: When, since the run was wired.
        lasted_s: How long it was there; 0 for a signal.
        did: What was done, in words.
        struck: Whether it was seen to do what it is meant to.
        up_s: Until every component ran; None: not within the limit.
        update_s: Until another update was made, then or later; None: not within the limit.
        before: What the overseer told in the calm before: deaths there are no fault's.
        paused_s: The longest time without an update from the fault to the end of the recovery.
        updates_before: That had been made.
        updates_during: That were made while it lasted.
        events: What the overseer told meanwhile.
        counted: How many events of every other kind there were.
    """

    number: int
    kind: str
    target: str
    at_s: float
    lasted_s: float = 0.0
    did: str = ""
    struck: bool = True
    up_s: float | None = None
    update_s: float | None = None
    paused_s: float = 0.0
    before: list[str] = field(default_factory=list)
    updates_before: int = 0
    updates_during: int = 0
    events: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def recovered(self) -> bool:
        """Whether all was well within the limit."""
        return self.update_s is not None

    def record(self) -> dict[str, Any]:
        """For the file."""
        return {**asdict(self), "recovered": self.recovered}


class Watch:
    """Looks at a run. One thread uses it.

    Args:
        run: Which.

    Attributes:
        pause_s: The longest time without an update, among those that `wait` saw since `forget_pauses`.
    """

    def __init__(self, run: Run) -> None:
        self.pause_s = 0.0
        self._run = run
        self._events_seen = 0
        self._updates = run.updates
        self._updated_at = time.monotonic()

    def forget_pauses(self) -> None:
        """From now on."""
        self._updates, self._updated_at, self.pause_s = self._run.updates, time.monotonic(), 0.0

    def _look_for_updates(self) -> None:
        now = time.monotonic()
        if self._run.updates != self._updates:
            self._updates, self._updated_at = self._run.updates, now
        self.pause_s = max(self.pause_s, now - self._updated_at)

    def report(self, name: str) -> Report | None:
        """The newest of a component's living incarnation."""
        return self._run.supervisor.reports.get(name)

    def incarnation(self, name: str) -> int:
        """The newest that answered; -1 where none does at present."""
        report = self.report(name)
        return -1 if report is None else report.identity.incarnation

    def all_up(self) -> bool:
        """Whether every component runs, the learner trains and every server holds weights of this learner."""
        reports = {name: self.report(name) for name in COMPONENTS}
        states = {name: report.condition.state for name, report in reports.items() if report is not None}
        learner = reports["learner-0"]
        if len(states) < len(COMPONENTS) or set(states.values()) != {"running"} or learner is None:
            return False
        wanted = learner.condition.address.get("weights", {}).get("incarnation")
        servers = [report for report in reports.values() if report is not None and report.identity.role == "inference"]
        held = {report.condition.address.get("weights") for report in servers}
        return bool(learner.condition.facts.get("training")) and held == {wanted}

    def wait(self, until: Callable[[], bool], limit_s: float) -> float | None:
        """Waits; returns how long that took, or None where the limit was reached.

        Raises:
            RunEnded: meanwhile.
        """
        started = time.monotonic()
        while not until():
            self._look_for_updates()
            if self._run.over:
                raise RunEnded
            if time.monotonic() - started > limit_s:
                return None
            time.sleep(POLL_S)
        return time.monotonic() - started

    def count(self, kind: str) -> int:
        """How many events of a kind the overseer ever told."""
        return sum(event["event"] == kind for event in read_events(self._run.directory.events_path))

    def new_events(self) -> tuple[list[str], dict[str, int]]:
        """What the overseer told since the last call: what matters in words, and counts of all else."""
        events = read_events(self._run.directory.events_path)
        new, self._events_seen = events[self._events_seen :], len(events)
        told = [in_words(event) for event in new if event["event"] in TOLD]
        return told, dict(Counter(str(event["event"]) for event in new if event["event"] not in TOLD))


def in_words(event: dict[str, Any]) -> str:
    """One line of the event log, short."""
    said = " ".join(str(event[key]) for key in ("component", "incarnation", "checkpoint", "reason") if key in event)
    return f"{event['event']} {said}"[:200]

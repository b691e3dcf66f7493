"""Where the steps of a fleet are: every step that a simulator took is in exactly one place.

In the words of the run's ledger, `acting`, `buffered` and `waiting` are in flight; the other places are final. What was
sent is the replay buffer's from there on (`sent` steps become waiting, trained, stale or evicted there; `sent_faults`
travel in the same fragments and are never trained on). Accounts of several workers, and of their earlier lives, add up.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Numbers of steps.

    Attributes:
        started: Actions decided, each of which a simulator took or lost.
        acting: Their results are not known yet.
        buffered: In fragments that are not complete.
        waiting: In complete ones that the replay buffer does not have yet.
        sent: Trainable steps that the replay buffer has.
        sent_faults: Steps that it has, marked as faults.
        stale: Cut off before sending, by versions that lie too far back, or of an older lineage.
        dropped: In fragments that were lost to a full queue (`full_queue: drop_oldest`).
        abandoned: In flight when their worker ended.
    """

    started: int = 0
    acting: int = 0
    buffered: int = 0
    waiting: int = 0
    sent: int = 0
    sent_faults: int = 0
    stale: int = 0
    dropped: int = 0
    abandoned: int = 0

    @classmethod
    def total(cls, accounts: "Iterable[StepAccount]") -> Self:
        """Their sum."""
        given = list(accounts)
        return cls(**{field.name: sum(getattr(account, field.name) for account in given) for field in fields(cls)})

    @property
    def in_flight(self) -> int:
        """Steps whose place will still change."""
        return self.acting + self.buffered + self.waiting

    @property
    def closes(self) -> bool:
        """Whether the places add up to what was started."""
        final = self.sent + self.sent_faults + self.stale + self.dropped + self.abandoned
        return self.started == self.in_flight + final and min(self.to_values().values()) >= 0

    def with_delivered(self, sent: int, sent_faults: int) -> "StepAccount":
        """The same, where the replay buffer has got more than the worker has told so far.

        Such steps waited or were buffered, or were given up because the worker did not live to see them arrive; those
        that it never told of at all are started with that. Steps that acted act still, or others of their slots do.

        Args:
            sent: Trainable steps that the buffer got from this life.
            sent_faults: Steps that it got, marked as faults.
        """
        places = self.to_values()
        places["sent"], places["sent_faults"] = max(sent, self.sent), max(sent_faults, self.sent_faults)
        untold = places["sent"] + places["sent_faults"] - self.sent - self.sent_faults
        for place in ("waiting", "buffered", "abandoned"):
            found = min(untold, places[place])
            places[place] -= found
            untold -= found
        places["started"] += untold
        return StepAccount(**places)

    def ended(self) -> "StepAccount":
        """The account of a worker that is no more: what was in flight is abandoned."""
        return StepAccount(
            started=self.started, sent=self.sent, sent_faults=self.sent_faults, stale=self.stale, dropped=self.dropped,
            abandoned=self.abandoned + self.in_flight,
        )  # fmt: skip

    def to_values(self) -> dict[str, int]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def metrics(self) -> dict[str, float]:
        """``fleet/steps_<place>``."""
        return {f"fleet/steps_{name}": float(value) for name, value in self.to_values().items()}


class StepBooks:
    """The account of one life of a worker, kept by those through whose hands its steps go. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = StepAccount().to_values()

    def add(self, **steps: int) -> None:
        """So many more steps in each of these places; a negative number takes them away."""
        with self._lock:
            for place, count in steps.items():
                self._steps[place] += count

    def settle(self, steps: int, place: Literal["sent", "sent_faults", "stale", "dropped", "abandoned"]) -> None:
        """So many waiting steps found their place; none, where `abandon` came first."""
        with self._lock:
            steps = min(steps, self._steps["waiting"])
            self._steps["waiting"] -= steps
            self._steps[place] += steps

    def abandon(self) -> None:
        """Every step that waits is given up."""
        with self._lock:
            self._steps["abandoned"] += self._steps["waiting"]
            self._steps["waiting"] = 0

    def account(self) -> StepAccount:
        """Where the steps are at this moment."""
        with self._lock:
            return StepAccount(**self._steps)

"""The curriculum as a service: it is told a numbered log, and answers with probabilities and what changed.

It keeps nothing that the log's owner could not tell it again: one that was started anew asks for a base state. The same
log makes the same state, whenever and however often its parts arrive.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.curriculum.config import CurriculumConfig
from penstock.curriculum.curriculum import Curriculum
from penstock.curriculum.events import CurriculumEvent
from penstock.curriculum.updates import CurriculumBase, CurriculumUpdate, make_curriculum
from penstock.types import SupersededError


@dataclass(frozen=True, slots=True)
class CurriculumAnswer:
    """How the curriculum stands.

    Attributes:
        applied: Number of the last update that is part of it; None where a base is needed first.
        probabilities: Of the lessons that may be sampled, in the configuration's order.
        events: What changed, with the number of the update that did it, for the numbers that were asked about.
        metrics: ``curriculum/…``.
        lessons: Each lesson's status in words.
        complete: Whether every lesson has graduated.
    """

    applied: int | None
    probabilities: dict[str, float] = field(default_factory=dict[str, float])
    events: tuple[tuple[int, CurriculumEvent], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    lessons: dict[str, str] = field(default_factory=dict[str, str])
    complete: bool = False


class CurriculumService:
    """Applies a log. Thread-safe.

    Args:
        config: The lessons.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._lineage = -1
        self._applied = 0
        self._curriculum: Curriculum | None = None
        self._events: list[tuple[int, CurriculumEvent]] = []

    def apply(
        self, lineage: int, first_number: int, updates: Sequence[CurriculumUpdate], base: CurriculumBase | None = None
    ) -> CurriculumAnswer:
        """Takes updates in; those that were applied before change nothing.

        Args:
            lineage: Of the run; a newer one begins with a base.
            first_number: Of the first update; the answer's events begin with it.
            updates: In order, without gaps.
            base: Begin anew from here; `first_number` follows it.

        Raises:
            SupersededError: the log is of an older lineage.
        """
        with self._lock:
            if lineage < self._lineage:
                raise SupersededError(f"the log is of lineage {lineage}, and the run's is {self._lineage}")
            if base is not None:
                self._lineage, self._applied = lineage, base.number
                self._curriculum, self._events = make_curriculum(self._config, base), []
            curriculum = self._curriculum
            if curriculum is None or lineage != self._lineage or first_number > self._applied + 1:
                return CurriculumAnswer(None)
            self._events = [(number, event) for number, event in self._events if number >= first_number]
            for number, update in enumerate(updates, start=first_number):
                if number > self._applied:
                    self._events += [(number, event) for event in update.apply(curriculum)]
                    self._applied = number
            return CurriculumAnswer(
                self._applied,
                curriculum.probabilities(),
                tuple(self._events),
                curriculum.metrics(),
                curriculum.describe(),
                curriculum.complete,
            )

    def metrics(self) -> dict[str, float]:
        """``curriculum/…`` numbers; none before the first base."""
        with self._lock:
            return {} if self._curriculum is None else self._curriculum.metrics()

    def status(self) -> dict[str, Any]:
        """For status.json."""
        with self._lock:
            lessons = {} if self._curriculum is None else self._curriculum.describe()
            return {"lineage": self._lineage, "applied": self._applied, "lessons": lessons}

    @property
    def progress(self) -> float:
        """Updates applied."""
        return float(self._applied)

"""Which group comes next: lessons by the curriculum, examples by a counter per lesson, seeds by name.

The draw of ticket number k depends on the run's seed, k, and the curriculum's probabilities at that moment; a
ticket's seed depends on its lesson and index alone. So a resumed run that draws the same lesson again draws
the same group.
"""

from collections.abc import Mapping
from typing import Any

from penstock.types import CheckpointError, LessonChooser, Ticket, fold


def ticket_id(lesson_id: str, lineage: int, index: int) -> str:
    """``<lesson>-<lineage>-<index>``."""
    return f"{lesson_id}-{lineage}-{index}"


def parse_ticket_id(name: str) -> tuple[str, int, int]:
    """(lesson, lineage, index) of a ticket id.

    Raises:
        CheckpointError: it is not one.
    """
    parts = name.rsplit("-", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise CheckpointError(f"{name!r} is not a ticket id: it must be <lesson>-<lineage>-<index>")
    return parts[0], int(parts[1]), int(parts[2])


class TicketSampler:
    """Draws tickets in a sequence that the checkpoint can continue.

    Args:
        run_seed: Every seed derives from it.
        lineage: Part of each id.
        chooser: Draws lessons.
    """

    def __init__(self, run_seed: int, lineage: int, chooser: LessonChooser) -> None:
        self._run_seed = run_seed
        self._lineage = lineage
        self._chooser = chooser
        self._draws = 0
        self._next_index: dict[str, int] = {}

    def draw(self) -> tuple[str, int]:
        """The lesson and index of the next ticket."""
        lesson_id = self._chooser.sample_lesson(fold(self._run_seed, "lesson", self._draws))
        self._draws += 1
        index = self._next_index.get(lesson_id, 0)
        self._next_index[lesson_id] = index + 1
        return lesson_id, index

    def ticket(self, lesson_id: str, index: int, admitted_step: int, deadline_step: int) -> Ticket:
        """The ticket for one group of a lesson, in this lineage."""
        return Ticket(
            ticket_id=ticket_id(lesson_id, self._lineage, index),
            lesson_id=lesson_id,
            index=index,
            seed=fold(self._run_seed, lesson_id, index),
            deadline_step=deadline_step,
            admitted_step=admitted_step,
        )

    def was_drawn(self, lesson_id: str, index: int) -> bool:
        """Whether that group's ticket has been drawn already."""
        return index < self._next_index.get(lesson_id, 0)

    def state(self) -> dict[str, Any]:
        """The counters, JSON-serialisable."""
        return {"draws": self._draws, "next_index": dict(self._next_index)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes `state` back."""
        self._draws = int(state["draws"])
        self._next_index = {str(lesson): int(index) for lesson, index in state["next_index"].items()}

"""What happens to lessons, for the event log, and when they are to be evaluated."""

from dataclasses import dataclass
from typing import Literal

EventKind = Literal["unlocked", "graduated", "regressed", "completed", "added", "removed"]


@dataclass(frozen=True, slots=True)
class CurriculumEvent:
    """Something that happened to a lesson, for the event log.

    Attributes:
        kind: `completed` is the curriculum's own, named by the lesson that graduated last; `added` and `removed` are
            differences between a restored state and the configuration.
        lesson_id: The lesson.
        reason: One clause with the numbers behind it.
    """

    kind: EventKind
    lesson_id: str
    reason: str


def evaluation_due(frequency: int, last_step: int, step: int) -> bool:
    """Whether a multiple of the frequency was passed, hit or not, since the last evaluation.

    Args:
        frequency: In steps; 0 never.
        last_step: Step of the last evaluation, 0 before the first.
        step: The step now.
    """
    return frequency > 0 and step // frequency > last_step // frequency

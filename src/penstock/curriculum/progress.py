"""What the curriculum remembers of one lesson, and its JSON form inside a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from penstock.curriculum.results import GroupResult
from penstock.types import CheckpointError

LessonStatus = Literal["locked", "active", "graduated"]
SMOOTHING = 0.1
"""Weight of a new group in the smoothed success rate."""


@dataclass(slots=True)
class LessonProgress:
    """One lesson's record. Changed by `Curriculum` under its lock.

    Attributes:
        status: Whether it may be sampled.
        success: Smoothed success rate s of training groups; None before the first.
        rollouts: Training rollouts so far.
        groups: Training groups so far.
        succeeded: Whether any training rollout ever succeeded.
        results: Mean rewards of the last training groups, oldest first; as many as the plateau looks at.
        evaluation: Success rate of the last full evaluation, in whatever status; None before the first.
        evaluation_step: At which step that was.
        qualification: Success rate of the last full evaluation since the lesson became active: what it may graduate
            by. None before one.
        graduation_level: Evaluation success rate at which it graduated; None while it has not.
    """

    status: LessonStatus = "locked"
    success: float | None = None
    rollouts: int = 0
    groups: int = 0
    succeeded: bool = False
    results: list[float] = field(default_factory=list[float])
    evaluation: float | None = None
    evaluation_step: int | None = None
    qualification: float | None = None
    graduation_level: float | None = None

    def add_group(self, result: GroupResult, window: int) -> None:
        """Takes one training group in; keeps the last `window` results."""
        before = self.success
        self.success = result.success_rate if before is None else before + SMOOTHING * (result.success_rate - before)
        self.rollouts += result.rollouts
        self.groups += 1
        self.succeeded = self.succeeded or result.success_rate > 0
        self.results = [*self.results, result.reward_mean][-window:]

    def graduate(self, level: float) -> None:
        """Leaves the lesson to rehearsal."""
        self.status = "graduated"
        self.graduation_level = level

    def regress(self) -> None:
        """Makes a graduated lesson active again; it needs a new plateau and a new evaluation to graduate."""
        self.status = "active"
        self.graduation_level = None
        self.qualification = None
        self.results = []

    def state(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], lesson_id: str) -> "LessonProgress":
        """Reads the JSON form.

        Raises:
            CheckpointError: it has other fields.
        """
        names = {f.name for f in fields(cls)}
        if odd := ", ".join(sorted(state.keys() ^ names)):
            raise CheckpointError(f"curriculum state of lesson {lesson_id!r}: unexpected or missing fields: {odd}")
        values: dict[str, Any] = {**state, "results": list(state["results"])}
        return cls(**values)

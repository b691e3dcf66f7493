"""The curriculum's log: every result since a base state, numbered; the curriculum is a pure function of it.

Not thread-safe; `RemoteCurriculum` guards it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.curriculum.config import CurriculumConfig
from penstock.curriculum.curriculum import Curriculum
from penstock.curriculum.events import CurriculumEvent
from penstock.types import RolloutBatchStats


@dataclass(frozen=True, slots=True)
class CurriculumUpdate:
    """One result.

    Attributes:
        stats: Of one lesson.
        evaluation_step: The version that was evaluated; None for training groups.
    """

    stats: RolloutBatchStats
    evaluation_step: int | None = None

    def apply(self, curriculum: Curriculum) -> tuple[CurriculumEvent, ...]:
        """Tells a curriculum; returns what changed."""
        if self.evaluation_step is None:
            return curriculum.update_training(self.stats)
        return curriculum.update_evaluation(self.stats, self.evaluation_step)


@dataclass(frozen=True, slots=True)
class CurriculumBase:
    """A state to begin from.

    Attributes:
        number: Of the last update that is part of it; 0 where none is.
        state: Of `Curriculum`; None is the state of a new one.
    """

    number: int
    state: Mapping[str, Any] | None


class CurriculumLog:
    """A base state and the updates since, numbered from 1 in each life of the run.

    Args:
        config: The lessons.
        state: The checkpoint's; None for a new run.
    """

    def __init__(self, config: CurriculumConfig, state: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._updates: list[CurriculumUpdate] = []
        self.base = CurriculumBase(0, state)

    @property
    def number(self) -> int:
        """Of the newest update."""
        return self.base.number + len(self._updates)

    def append(self, update: CurriculumUpdate) -> int:
        """Takes an update; what the curriculum does not look at is left out. Returns its number."""
        self._updates.append(replace(update, stats=replace(update.stats, prompts=(), metrics={})))
        return self.number

    def since(self, number: int) -> Sequence[CurriculumUpdate]:
        """The updates after that number, which is the base's or a later one."""
        return tuple(self._updates[number - self.base.number :])

    def fold(self, number: int) -> dict[str, Any]:
        """The present state of a curriculum that was told everything; the log is shortened.

        Args:
            number: Updates up to here become part of the base: nobody needs them one by one any more.
        """
        curriculum = make_curriculum(self._config, self.base)
        done = number - self.base.number
        for update in self._updates[:done]:
            update.apply(curriculum)
        self.base, self._updates = CurriculumBase(number, curriculum.state()), self._updates[done:]
        for update in self._updates:
            update.apply(curriculum)
        return curriculum.state()


def make_curriculum(config: CurriculumConfig, base: CurriculumBase) -> Curriculum:
    """A curriculum in a base state."""
    curriculum = Curriculum(config)
    if base.state is not None:
        curriculum.restore(base.state)
    return curriculum

"""Which lesson next, from recorded results: unlocking, graduation, regression, and sampling probabilities.

Training groups move the smoothed success rate; full evaluations decide on graduation and regression and are kept
apart. Micro evaluations never come here. `Curriculum`'s methods may be called from several threads. Decisions depend on
the order of updates alone, never on time.

`CurriculumLog` numbers every result since a base state: the curriculum is a pure function of it. It is not thread-safe;
`RemoteCurriculum` guards it.

Not covered: when to evaluate (`evaluation_due` says it, the caller keeps the step).
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from penstock.curriculum.config import CurriculumConfig, LessonConfig
from penstock.curriculum.progress import (
    CurriculumEvent,
    LessonProgress,
    LessonStatus,
    choose,
    group_results,
    is_plateaued,
    lesson_probabilities,
    lesson_weight,
    success_rate,
)
from penstock.types import CheckpointError, PenstockError, RolloutBatchStats, fold, generator

logger = logging.getLogger(__name__)


class Curriculum:
    """Chooses lessons and keeps their records. Implements `LessonChooser` and `Checkpointable`.

    Args:
        config: The lessons, their dependencies and the limits by which they unlock and graduate.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self._lock = threading.RLock()
        self._progress = {lesson_id: LessonProgress() for lesson_id in config.lessons}
        self.restored_events: tuple[CurriculumEvent, ...] = ()
        self._unlock()

    def sample_lesson(self, seed: int) -> str:
        """A lesson by the current probabilities; the seed alone decides between them."""
        return choose(self.probabilities(), generator(fold(seed, "sample_lesson")))

    def probabilities(self) -> dict[str, float]:
        """Sampling probability of each lesson that may be sampled, in the configuration's order; they sum to 1."""
        with self._lock:
            active = {
                lesson_id: lesson_weight(progress.success, progress.rollouts)
                for lesson_id, progress in self._progress.items()
                if progress.status == "active"
            }
            graduated = self._in("graduated")
        config = self.config
        found = lesson_probabilities(active, graduated, config.minimum_sample_probability, config.rehearsal_probability)
        return {lesson_id: found[lesson_id] for lesson_id in config.lessons if lesson_id in found}

    def update_training(self, stats: RolloutBatchStats) -> tuple[CurriculumEvent, ...]:
        """Takes training groups in, filtered ones too; usually one.

        Args:
            stats: Its `success_rate` and `reward_mean` count as those of each of its groups; without rollouts nothing
                happens.

        Returns:
            What changed.

        Raises:
            PenstockError: the lesson is unknown.
        """
        with self._lock:
            lesson, progress = self._of(stats.lesson_id)
            if stats.rollouts == 0:
                return ()
            for result in group_results(stats, lesson.success_threshold):
                progress.add_group(*result, lesson.plateau_window)
            return (*self._graduate(stats.lesson_id), *self._unlock())

    def update_evaluation(self, stats: RolloutBatchStats, step: int) -> tuple[CurriculumEvent, ...]:
        """Takes a full evaluation in; one without rollouts changes nothing.

        Returns:
            What changed.

        Raises:
            PenstockError: the lesson is unknown.
        """
        with self._lock:
            lesson, progress = self._of(stats.lesson_id)
            if stats.rollouts == 0:
                return ()
            success = success_rate(stats, lesson.success_threshold)
            progress.evaluation, progress.evaluation_step = success, step
            level = progress.graduation_level
            if level is not None and success < lesson.regression_ratio * level:
                progress.regress()
                reason = f"evaluation success {success:.3g} under {lesson.regression_ratio:.3g} of {level:.3g}"
                return (CurriculumEvent("regressed", stats.lesson_id, reason),)
            if progress.status == "active":
                progress.qualification = success
            return (*self._graduate(stats.lesson_id), *self._unlock())

    @property
    def active(self) -> tuple[str, ...]:
        """Lessons that are practised."""
        return self._in("active")

    @property
    def graduated(self) -> tuple[str, ...]:
        """Lessons that are only rehearsed."""
        return self._in("graduated")

    @property
    def locked(self) -> tuple[str, ...]:
        """Lessons that wait for others."""
        return self._in("locked")

    @property
    def complete(self) -> bool:
        """Whether every lesson has graduated; `config.when_complete` says what follows."""
        return len(self.graduated) == len(self.config.lessons)

    def progress(self, lesson_id: str) -> LessonProgress:
        """A copy of a lesson's record.

        Raises:
            PenstockError: the lesson is unknown.
        """
        with self._lock:
            return LessonProgress.from_state(self._of(lesson_id)[1].state(), lesson_id)

    def describe(self) -> dict[str, str]:
        """Each lesson's status and sampling probability in words, such as ``active 65%``."""
        with self._lock:
            probabilities = self.probabilities()
            return {
                lesson_id: progress.status
                if progress.status == "locked"
                else f"{progress.status} {probabilities[lesson_id]:.0%}"
                for lesson_id, progress in self._progress.items()
            }

    def metrics(self) -> dict[str, float]:
        """``curriculum/…``: counts by status, and per lesson its probability, rollouts and, once known, success."""
        with self._lock:
            probabilities = self.probabilities()
            found = {f"curriculum/{status}": float(len(self._in(status))) for status in _STATUSES}
            for lesson_id, progress in self._progress.items():
                found[f"curriculum/{lesson_id}/probability"] = probabilities.get(lesson_id, 0.0)
                found[f"curriculum/{lesson_id}/rollouts"] = float(progress.rollouts)
                if progress.success is not None:
                    found[f"curriculum/{lesson_id}/success"] = progress.success
            return found

    def state(self) -> dict[str, Any]:
        """The progress of every lesson, for a checkpoint: plain values by lesson id."""
        with self._lock:
            return {"lessons": {lesson_id: progress.state() for lesson_id, progress in self._progress.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes a state back.

        Lessons added to or removed from the configuration since are merged, logged, and listed in `restored_events`.

        Raises:
            CheckpointError: the state is not one of a curriculum.
        """
        saved = state.get("lessons")
        if not isinstance(saved, Mapping):
            raise CheckpointError("curriculum state has no 'lessons': the checkpoint is damaged")
        lessons = cast(Mapping[str, Mapping[str, Any]], saved)
        with self._lock:
            self._progress = {
                lesson_id: LessonProgress.from_state(lessons[lesson_id], lesson_id)
                if lesson_id in lessons
                else LessonProgress()
                for lesson_id in self.config.lessons
            }
            merged = [CurriculumEvent("added", i, "not in the checkpoint") for i in self._progress if i not in lessons]
            merged += [
                CurriculumEvent("removed", i, "only in the checkpoint") for i in lessons if i not in self._progress
            ]
            for event in merged:
                logger.warning("curriculum: lesson %r was %s: %s", event.lesson_id, event.kind, event.reason)
            self.restored_events = (*merged, *self._unlock())

    def _in(self, status: LessonStatus) -> tuple[str, ...]:
        with self._lock:
            return tuple(lesson_id for lesson_id, p in self._progress.items() if p.status == status)

    def _of(self, lesson_id: str) -> tuple[LessonConfig, LessonProgress]:
        if lesson_id not in self._progress:
            raise PenstockError(f"lesson {lesson_id!r} is unknown: there are {', '.join(self._progress)}")
        return self.config.lessons[lesson_id], self._progress[lesson_id]

    def _unlock(self) -> list[CurriculumEvent]:
        ready = [
            lesson_id
            for lesson_id, progress in self._progress.items()
            if progress.status == "locked" and self._is_ready(lesson_id)
        ]
        for lesson_id in ready:
            self._progress[lesson_id].status = "active"
        return [CurriculumEvent("unlocked", lesson_id, self._why_unlocked(lesson_id)) for lesson_id in ready]

    def _is_ready(self, lesson_id: str) -> bool:
        lesson, progress = self._of(lesson_id)
        if (progress.evaluation or 0.0) < lesson.start_threshold:
            return False
        return all(self._is_reached(d.dependency_id, d.reward_threshold) for d in lesson.dependencies)

    def _is_reached(self, dependency_id: str, threshold: float) -> bool:
        lesson, progress = self._of(dependency_id)
        if not progress.succeeded or (progress.success or 0.0) < threshold:
            return False
        return not lesson.require_plateau or self._is_plateaued(dependency_id)

    def _is_plateaued(self, lesson_id: str) -> bool:
        lesson, progress = self._of(lesson_id)
        return is_plateaued(progress.results, lesson.plateau_window, lesson.plateau_threshold)

    def _why_unlocked(self, lesson_id: str) -> str:
        dependencies = self.config.lessons[lesson_id].dependencies
        reached = [f"{d.dependency_id} at {self._progress[d.dependency_id].success:.3g}" for d in dependencies]
        return ", ".join(reached) or "no dependencies"

    def _graduate(self, lesson_id: str) -> list[CurriculumEvent]:
        lesson, progress = self._of(lesson_id)
        level = progress.qualification
        if progress.status != "active" or level is None or level < lesson.stop_threshold:
            return []
        if not self._is_plateaued(lesson_id):
            return []
        progress.graduate(level)
        events = [CurriculumEvent("graduated", lesson_id, f"evaluation success {level:.3g}, plateaued")]
        if self.complete:
            events.append(CurriculumEvent("completed", lesson_id, "every lesson has graduated"))
        return events


_STATUSES: tuple[LessonStatus, ...] = ("active", "graduated", "locked")


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
        config: The lessons, their dependencies and the limits by which they unlock and graduate.
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

"""A curriculum without a model: what it would do with lessons that are learned as given curves say.

The real `Curriculum` chooses the lessons, hears of every group and every evaluation, and unlocks, graduates and brings
back; only the answers are drawn. A lesson's success probability depends on its own practice alone: no lesson teaches
another, and nothing is forgotten. So it tries thresholds and frequencies, and predicts no run.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.curriculum.config import CurriculumConfig, LessonConfig
from penstock.curriculum.curriculum import Curriculum
from penstock.curriculum.progress import CurriculumEvent, LessonStatus, evaluation_due
from penstock.types import ConfigError, RolloutBatchStats, fold, generator

_CURVE = re.compile(r"([0-9.eE+-]+?)(?:\.\.([0-9.eE+-]+)(?:/([0-9.eE+]+))?)?")


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Success probability after n rollouts of a lesson: end − (end − start) · exp(−n / rollouts).

    Attributes:
        start: Before any.
        end: What it comes to.
        rollouts: After so many, 63% of the way is gone.

    Raises:
        ConfigError: a probability is not between 0 and 1, or `rollouts` is not positive.
    """

    start: float = 0.1
    end: float = 0.95
    rollouts: float = 2000.0

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"a learning curve's {name} is {getattr(self, name)}: it must lie between 0 and 1")
        if not 0 < self.rollouts < math.inf:
            raise ConfigError(f"a learning curve's rollouts are {self.rollouts}: they must be more than 0")

    @classmethod
    def parse(cls, text: str) -> "LearningCurve":
        """Reads ``0.3`` (constant), ``0.1..0.9`` or ``0.1..0.9/2000``.

        Raises:
            ConfigError: it is none of these.
        """
        found = _CURVE.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            start, end, rollouts = found.groups()
            whole = cls(float(start), float(start if end is None else end))
            return whole if rollouts is None else cls(whole.start, whole.end, float(rollouts))
        except ValueError:
            raise ConfigError(f"{text!r} is no learning curve: write 0.3, 0.1..0.9 or 0.1..0.9/2000") from None

    def success(self, practised: int) -> float:
        """Probability of success after so many rollouts."""
        return self.end - (self.end - self.start) * math.exp(-practised / self.rollouts)


@dataclass(frozen=True, slots=True)
class SimulatedLesson:
    """One lesson at one step.

    Attributes:
        status: Whether it is practised.
        probability: With which the next group is of it.
        success: The smoothed success rate that the curriculum goes by; None before the first group.
        true_success: What the learning curve says.
        rollouts: So many were practised.
    """

    status: LessonStatus
    probability: float
    success: float | None
    true_success: float
    rollouts: int

    def __str__(self) -> str:
        if self.status == "locked":
            return "locked"
        shown = "  –" if self.success is None else f"{self.success:.2f}"
        return f"{self.probability:4.0%} {shown}{' graduated' if self.status == 'graduated' else ''}"


@dataclass(slots=True)
class SimulatedCurriculum:
    """What a curriculum did.

    Attributes:
        steps: The step → every lesson then, in the configuration's order.
        events: (step, what happened), in order.
    """

    steps: dict[int, dict[str, SimulatedLesson]] = field(default_factory=dict[int, dict[str, SimulatedLesson]])
    events: list[tuple[int, CurriculumEvent]] = field(default_factory=list[tuple[int, CurriculumEvent]])

    @property
    def complete_at(self) -> int | None:
        """The step at which every lesson had graduated; None where that never was."""
        return next((step for step, event in self.events if event.kind == "completed"), None)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        lines = [
            {"step": step, "lessons": {name: asdict(lesson) for name, lesson in lessons.items()}}
            for step, lessons in self.steps.items()
        ]
        events = [{"step": step, **asdict(event)} for step, event in self.events]
        return {"steps": lines, "events": events, "complete_at": self.complete_at}

    def print(self, console: Console) -> None:
        """Prints a table of steps and lessons, and what happened when."""
        table = Table("step", *next(iter(self.steps.values())), caption="probability of the next group, success so far")
        for step, lessons in self.steps.items():
            table.add_row(str(step), *map(str, lessons.values()))
        console.print(table)
        for step, event in self.events:
            console.print(f"step {step}: {event.lesson_id} {event.kind}, {event.reason}", highlight=False)
        end = "never" if self.complete_at is None else f"at step {self.complete_at}"
        console.print(f"every lesson has graduated: {end}", highlight=False)


@dataclass(slots=True)
class _Pupil:
    """A lesson as it is learned: along its curve, by so many rollouts that were practised."""

    lesson: LessonConfig
    curve: LearningCurve
    practised: int = 0

    @property
    def success(self) -> float:
        return self.curve.success(self.practised)

    def answers(self, groups: int, size: int, seed: int) -> RolloutBatchStats:
        """So many groups of so many rollouts as it stands."""
        threshold = self.lesson.success_threshold
        won = generator(seed).random(groups * size) < self.success
        rewards = np.where(won, max(1.0, threshold), min(0.0, threshold - 1.0))
        solved = float(won.reshape(groups, size).any(axis=1).mean())
        return RolloutBatchStats(
            self.lesson.lesson_id, groups, len(won), float(rewards.mean()), float(won.mean()), solved, 0.0, 0.0,
            tuple(rewards.tolist()),
        )  # fmt: skip


def simulate_curriculum(
    config: CurriculumConfig,
    curves: Mapping[str, LearningCurve],
    steps: int,
    groups_per_step: int,
    seed: int = 0,
    every: int = 1,
) -> SimulatedCurriculum:
    """Takes a curriculum through a run's steps; it ends early where `when_complete` says so.

    Args:
        config: The lessons, their thresholds and how they are evaluated.
        curves: How each lesson is learned; those not named have the default curve.
        steps: Number of updates.
        groups_per_step: Groups of one update.
        seed: Of lessons and answers.
        every: Steps between two that are recorded; the first and the last always are.

    Raises:
        ConfigError: a curve is of no lesson, or a number is too small.
    """
    _check_arguments(
        config, curves, {"steps": (steps, 0), "groups_per_step": (groups_per_step, 1), "every": (every, 1)}
    )
    curriculum, result = Curriculum(config), SimulatedCurriculum()
    pupils = {name: _Pupil(lesson, curves.get(name, LearningCurve())) for name, lesson in config.lessons.items()}

    def note(step: int, events: Iterable[CurriculumEvent]) -> None:
        result.events.extend((step, event) for event in events)

    step = evaluated = 0
    result.steps[step] = _lessons_now(curriculum, pupils)
    while step < steps and not (config.when_complete == "stop" and curriculum.complete):
        for group in range(step * groups_per_step, (step + 1) * groups_per_step):
            lesson_id = curriculum.sample_lesson(fold(seed, "lesson", group))
            pupil = pupils[lesson_id]
            size = pupil.lesson.sampling_params.n_generations_per_prompt
            note(step, curriculum.update_training(pupil.answers(1, size, fold(seed, lesson_id, "train", group))))
            pupil.practised += size
        step += 1
        if evaluation_due(config.eval_frequency, evaluated, step):
            evaluated = step
            for lesson_id, pupil in pupils.items():
                answers = pupil.answers(config.eval_n_examples, 1, fold(seed, lesson_id, "eval", step))
                note(step, curriculum.update_evaluation(answers, step))
        if step % every == 0:
            result.steps[step] = _lessons_now(curriculum, pupils)
    result.steps[step] = _lessons_now(curriculum, pupils)
    return result


def _check_arguments(
    config: CurriculumConfig, curves: Mapping[str, LearningCurve], numbers: Mapping[str, tuple[int, int]]
) -> None:
    """Refuses curves of no lesson, and numbers, each with the least that it may be."""
    unknown = sorted(curves.keys() - config.lessons.keys())
    if unknown:
        raise ConfigError(f"lesson {unknown[0]!r} is not in the recipe: its lessons are {', '.join(config.lessons)}")
    for name, (value, least) in numbers.items():
        if value < least:
            raise ConfigError(f"{name} is {value}: it must be at least {least}")


def _lessons_now(curriculum: Curriculum, pupils: Mapping[str, _Pupil]) -> dict[str, SimulatedLesson]:
    probabilities = curriculum.probabilities()
    found: dict[str, SimulatedLesson] = {}
    for lesson_id, pupil in pupils.items():
        known, probability = curriculum.progress(lesson_id), probabilities.get(lesson_id, 0.0)
        found[lesson_id] = SimulatedLesson(known.status, probability, known.success, pupil.success, pupil.practised)
    return found

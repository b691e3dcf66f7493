"""What a run shows while it goes on: one record, written by the overseer, drawn by `penstock.overseer.terminal`.

Of every number its newest value and its history in bounded memory; of the last updates how fast they came, and from
that how long the rest will take. A line is made of each update for an output that is no terminal.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.overseer.metrics import UpdateTimes
from penstock.types import CompiledProgram

LONG_COMPILATION_S = 1.0
"""Without a terminal, programs that took less are not shown."""
SAMPLES_SHOWN = 3
MOST_POINTS = 1024
"""Of a history; beyond, neighbours are averaged."""
TRUNCATED = "rollout/truncated_fraction"
"""Of all lessons, weighted by their groups."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation to show.

    Attributes:
        turns: Role and text of each.
        reward: Of its episode.
        lesson_id: Its lesson, with what it was played for where that is no training.
    """

    turns: tuple[tuple[str, str], ...]
    reward: float
    lesson_id: str

    @classmethod
    def of(cls, conversation: Mapping[str, Any]) -> Self:
        """Of one as `penstock.tracking.conversation_of` makes it."""
        turns = tuple((str(turn["role"]), str(turn["content"])) for turn in conversation["turns"])
        mode = " (eval)" if conversation.get("mode") == "eval" else ""
        return cls(turns, float(conversation["reward"]), f"{conversation['lesson_id']}{mode}")


@dataclass(frozen=True, slots=True)
class ShownMetric:
    """A number beside the score.

    Attributes:
        name: In metrics.jsonl.
        label: What the view calls it.
        form: How it is written, as of `str.format`.
        in_lines: Whether it stands in the line of each update, too.
    """

    name: str
    label: str
    form: str
    in_lines: bool = True


@dataclass(frozen=True, slots=True)
class ViewLabels:
    """What the view calls things.

    Attributes:
        score: What a policy is scored by.
        score_form: How it is written.
        unit: Of the pace.
        experience: What the ledger counts.
        task: What `Progress.lessons` names.
        update: What an update of the learner is called beside the pace.
        held_out: The metric of an evaluation that is shown, after ``eval/<lesson>/``.
        held_out_label: What it is called.
        metrics: What is shown beside the score, the most important first.
    """

    score: str = "reward"
    score_form: str = ".3f"
    unit: str = "tok/s"
    experience: str = "rollouts"
    task: str = "lesson"
    update: str = "step"
    held_out: str = "reward_mean"
    held_out_label: str = "held-out"
    metrics: tuple[ShownMetric, ...] = (
        ShownMetric("train/zero_variance_groups", "zero variance", "{:.0%}"),
        ShownMetric(TRUNCATED, "truncated", "{:.0%}"),
        ShownMetric("train/response_tokens", "response", "{:,.0f} tokens"),
        ShownMetric("train/entropy", "entropy", "{:.3g}"),
        ShownMetric("train/grad_norm", "grad norm", "{:.3g}"),
        ShownMetric("train/loss", "loss", "{:.3g}", in_lines=False),
    )


LANGUAGE_LABELS = ViewLabels()
CONTROL_LABELS = ViewLabels(
    "return",
    ".1f",
    "steps/s",
    "fragments",
    "task",
    "update",
    "return_mean",
    "evaluated",
    (
        ShownMetric("train/explained_variance", "explained variance", "{:.2f}"),
        ShownMetric("train/entropy", "entropy", "{:.3g}"),
        ShownMetric("train/approx_kl", "KL", "{:.2g}"),
        ShownMetric("train/grad_norm", "grad norm", "{:.3g}", in_lines=False),
        ShownMetric("train/loss", "loss", "{:.3g}", in_lines=False),
    ),
)


class Series:
    """A history in bounded memory: where it grows too long, neighbours are averaged, over its whole length.

    Attributes:
        last: The newest value; None before the first.
    """

    def __init__(self) -> None:
        self.last: float | None = None
        self._points: list[float] = []
        self._newest: list[float] = []  # of the next point
        self._width = 1  # values in a point

    def add(self, value: float) -> None:
        """One more; what is not finite is left out."""
        if not math.isfinite(value):
            return
        self.last = value
        self._newest.append(value)
        if len(self._newest) < self._width:
            return
        self._points.append(sum(self._newest) / self._width)
        self._newest = []
        if len(self._points) >= MOST_POINTS:
            old = self._points
            self._points = [(left + right) / 2 for left, right in zip(old[::2], old[1::2], strict=True)]
            self._width *= 2

    def extend(self, values: Iterable[float]) -> None:
        """Several more."""
        for value in values:
            self.add(value)

    def points(self) -> list[float]:
        """The oldest first; each the mean of as many values, the last perhaps of fewer."""
        newest = list(self._newest)
        return [*self._points, sum(newest) / len(newest)] if newest else list(self._points)


@dataclass(slots=True)
class Progress:
    """What the view shows. Written by the overseer, read by the view.

    Attributes:
        title: Recipe and run directory.
        steps: Updates in all.
        staleness_budget: The most updates that a batch's tokens may be old.
        phase: What is going on, in words.
        step: Updates done.
        score: Mean training reward of each update so far; of a fleet, mean return of the newest episodes.
        reward: The same per lesson, or task, at the last update.
        history: By name, each of the wording's metrics that was told.
        held_out: By lesson or task, step and mean score of each evaluation, the oldest first; those on problems that
            are kept for reports by ``<lesson> (report)``, for the two are no points of one curve.
        units_per_s: Generated tokens per second, lately; of a fleet, steps of its simulators. None: not known yet.
        staleness: Mean age of the last batch's tokens in updates; None where it is of no version of the policy.
        ledger: Rollouts per state.
        lessons: Lesson → state and probability, as the curriculum words it; of a fleet, task → its simulators.
        samples: The newest conversations.
        notes: The newest events, newest last.
        noted: Events so far.
        lines: One per phase, update, evaluation, and program that took long to compile, for an output that is no
            terminal; printed and taken out.
        compiling: By component, the newest of its programs, until the last is compiled.
        no_signal: That the last updates had nothing to learn from, in words; empty where they had.
        stretches: The same of the last such stretches of the run, each as of its end.
        goal: What ended the training before its last step, in words; empty where nothing did.
        started: Monotonic seconds at the start.
        wording: What things are called.
        times: Of the last updates.
    """

    title: str
    steps: int
    staleness_budget: int
    phase: str = "starting"
    step: int = 0
    score: Series = field(default_factory=Series)
    reward: dict[str, float] = field(default_factory=dict)
    history: dict[str, Series] = field(default_factory=dict)
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    units_per_s: float | None = None
    staleness: float | None = 0.0
    ledger: dict[str, int] = field(default_factory=dict)
    lessons: dict[str, str] = field(default_factory=dict)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_SHOWN))
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=2))
    noted: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    compiling: dict[str, CompiledProgram] = field(default_factory=dict)
    no_signal: str = ""
    stretches: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    goal: str = ""
    started: float = field(default_factory=time.monotonic)
    wording: ViewLabels = LANGUAGE_LABELS
    times: UpdateTimes = field(default_factory=UpdateTimes)

    # --- what is told ----------------------------------------------------------------------------------------------

    def begin_phase(self, words: str) -> None:
        """The run comes to another phase; updates speak for that of training."""
        if words not in (self.phase, "training"):
            self._say(words)
        self.phase = words

    def note(self, words: str, at_once: bool = False) -> None:
        """Shows an event; without a terminal, too, where it is to be shown `at_once` and not with the next ones."""
        self.notes.append(words)
        if at_once:
            self._say(words)
        else:
            self.noted += 1

    def note_compiled(self, program: CompiledProgram, component: str) -> None:
        """Shows how far a component has compiled."""
        self.compiling[component] = program
        if program.number == program.of:
            del self.compiling[component]
        if program.seconds >= LONG_COMPILATION_S:
            self._say(
                f"{component} compiled {program.number} of {program.of} programs: {program.name} "
                f"({program.seconds:.1f} s)"
            )

    def note_update(
        self,
        step: int,
        score: float | None,
        staleness: float | None,
        metrics: Mapping[str, float],
        at: float | None = None,
    ) -> None:
        """One update.

        Args:
            step: The version reached.
            score: See `score`; None where there is no new one.
            staleness: See `staleness`.
            metrics: The update's, by their names in metrics.jsonl.
            at: Monotonic seconds; now by default.
        """
        self.step, self.staleness = step, staleness
        if score is not None:
            self.score.add(score)
        for shown in self.wording.metrics:
            if shown.name in metrics:
                self.history.setdefault(shown.name, Series()).add(metrics[shown.name])
        self.times.note(at)
        self._say(self.update_words())

    def note_rollouts(self, metrics: Mapping[str, float]) -> None:
        """Takes rewards and truncated answers by lesson from ``rollout/<lesson>/…`` metrics."""
        found: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            if name.startswith("rollout/"):
                lesson_id, _, kind = name.removeprefix("rollout/").rpartition("/")
                found.setdefault(lesson_id, {})[kind] = value
        self.reward |= {lesson: values["reward_mean"] for lesson, values in found.items() if "reward_mean" in values}
        known = [
            (v["groups"], v["truncated_fraction"])
            for v in found.values()
            if {"groups", "truncated_fraction"} <= v.keys()
        ]
        if groups := sum(count for count, _ in known):
            share = sum(count * share for count, share in known) / groups
            self.history.setdefault(TRUNCATED, Series()).add(share)

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the scores of an evaluation of version `step`, if there are some.

        They are ``eval/<lesson>/…`` metrics, or ``eval_report/<lesson>/…`` of problems that are kept for reports.
        """
        ending, pools = f"/{self.wording.held_out}", {"eval": "", "eval_report": " (report)"}
        found = {
            f"{rest.removesuffix(ending)}{pools[pool]}": value
            for (pool, _, rest), value in ((name.partition("/"), value) for name, value in metrics.items())
            if pool in pools and rest.endswith(ending)
        }
        for lesson_id, value in found.items():
            self.held_out.setdefault(lesson_id, []).append((step, value))
        if found:
            words = self.wording
            scores = ", ".join(f"{name} {value:{words.score_form}}" for name, value in found.items())
            self._say(f"{words.held_out_label} {words.score} at step {step}: {scores}")

    def note_signal(self, words: str) -> bool:
        """Shows that the last updates had nothing to learn from, or, where there are no words, that they had.

        Returns:
            Whether that begins to be shown.
        """
        begins = bool(words) and not self.no_signal
        if begins:
            self.stretches.append(words)
            self._say(words)
        elif words:
            self.stretches[-1] = words
        self.no_signal = words
        return begins

    def _say(self, words: str) -> None:
        self.lines.append(f"[{self.elapsed}] {words}")

    # --- what is asked ---------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the start; hours, where there are some."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    @property
    def left(self) -> str:
        """How long the updates that are left will likely take, rounded; empty where that cannot be told yet."""
        return "" if self._left_s is None else range_text(*self._left_s)

    @property
    def _left_s(self) -> tuple[float, float] | None:
        return None if self.goal else self.times.left_s(self.steps - self.step)

    @property
    def pace(self) -> str:
        """Of generation; empty where it is not known, and while programs are compiled before the first update."""
        if self.units_per_s is None or (self.compiling and not len(self.times)):
            return ""
        # Never «0» where there is some: a model, or its simulators, may be slow.
        speed = f"{self.units_per_s:,.0f}" if self.units_per_s >= 10 else f"{self.units_per_s:.2g}"
        return f"{speed} {self.wording.unit}"

    def told(self, in_lines: bool = False) -> list[tuple[ShownMetric, Series]]:
        """The metrics that are known, the most important first.

        Args:
            in_lines: Only those that stand in lines.
        """
        shown = [metric for metric in self.wording.metrics if metric.in_lines or not in_lines]
        return [(metric, self.history[metric.name]) for metric in shown if metric.name in self.history]

    def update_words(self) -> str:
        """The present update in one line."""
        return f"step {self.step}/{self.steps}  {self._numbers()}"

    def _numbers(self) -> str:
        words = self.wording
        score = "–" if self.score.last is None else format(self.score.last, words.score_form)
        parts = [f"{words.score} {score}"]
        parts += [f"{metric.label} {metric.form.format(series.last)}" for metric, series in self.told(in_lines=True)]
        age = "" if self.staleness is None else f"staleness {self.staleness:.2f}"
        parts += [self.pace, age, f"ETA {left}" if (left := self.left) else ""]
        return "  ".join(filter(None, parts))

    def status(self) -> dict[str, Any]:
        """For status.json: the numbers as the view has them now."""
        left_s = self._left_s
        return {
            "score": self.score.last,
            "metrics": {metric.name: series.last for metric, series in self.told()},
            "held_out": {lesson: {"step": told[-1][0], "score": told[-1][1]} for lesson, told in self.held_out.items()},
            "units_per_s": self.units_per_s,
            "step_s": self.times.mean_s,
            "left_s": None if left_s is None else list(left_s),
            "words": self._numbers() if len(self.times) else "",
            "no_signal": self.no_signal,
        }


def range_text(least_s: float, most_s: float) -> str:
    """A forecast, no finer than it deserves: ``25–35 s``, ``~12 min``, ``50 min–1.5 h``."""
    (least, unit), (most, most_unit) = _rounded(least_s), _rounded(most_s)
    if (least, unit) == (most, most_unit):
        return f"~{least} {unit}"
    return f"{least}–{most} {unit}" if unit == most_unit else f"{least} {unit}–{most} {most_unit}"


def _rounded(seconds: float) -> tuple[str, str]:
    """Seconds in fives, minutes whole, hours in halves, days whole."""
    if seconds < 57.5:
        return f"{max(5, 5 * round(seconds / 5))}", "s"
    if seconds < 59.5 * 60:
        return f"{max(1, round(seconds / 60))}", "min"
    if seconds < 47.75 * 3600:
        return f"{max(1.0, round(seconds / 1800) / 2):g}", "h"
    return f"{round(seconds / 86400)}", "days"

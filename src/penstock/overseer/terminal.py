"""What a run shows its user: the live view, several times a second, and the summary at its end.

The view reads a `Progress` record that the overseer fills; it decides nothing. Where the output is no terminal
(a pipe, a log file), one plain line per update is printed instead. The summary has the score before and after, on what
the policy was not trained on, and where to look next.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.overseer.lasting_output import lasting
from penstock.overseer.results import reward_interval
from penstock.rundir.commands import command_line
from penstock.types import CompiledProgram, RolloutBatchStats

SPARKS = "▁▂▃▄▅▆▇█"
NOTE_EVERY_S = 10.0
"""Without a terminal, events are shown so far apart."""

LONG_COMPILATION_S = 1.0
"""Without a terminal, programs that took less are not shown."""

SPARKLINE_WIDTH = 60
SAMPLES_SHOWN = 3


@dataclass(slots=True)
class Sample:
    """One conversation to show: the prompt's text, the answer's text, and its reward."""

    prompt: str
    answer: str
    reward: float
    lesson_id: str


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
    """

    score: str = "reward"
    score_form: str = ".3f"
    unit: str = "tok/s"
    experience: str = "rollouts"
    task: str = "lesson"
    update: str = "step"


LANGUAGE_LABELS = ViewLabels()
CONTROL_LABELS = ViewLabels("return", ".1f", "steps/s", "fragments", "task", "update")


@dataclass(slots=True)
class Progress:
    """What the view shows. Written by the overseer, read by the view.

    Attributes:
        title: Recipe and run directory.
        phase: What is going on, in words.
        step: Updates done.
        steps: Updates in all.
        rewards: Mean training reward of each update so far; of a fleet, mean return of the newest episodes.
        reward: The same per lesson, or task, at the last update.
        units_per_s: Generated tokens per second, lately; of a fleet, steps of its simulators. None: not known yet.
        step_s: Seconds per update, lately.
        staleness: Mean age of the last batch's tokens in updates.
        staleness_budget: The most it may be.
        ledger: Rollouts per state.
        lessons: Lesson → state and probability, as the curriculum words it; of a fleet, task → its simulators.
        samples: The newest conversations.
        notes: The newest events, newest last.
        noted: Events so far.
        lines: One per update, and per program that took long to compile, for an output that is no terminal; printed
            and taken out.
        compiling: By component, the newest of its programs, until the last is compiled.
        started: Monotonic seconds at the start.
        wording: What things are called.
    """

    title: str
    steps: int
    staleness_budget: int
    phase: str = "starting"
    step: int = 0
    rewards: list[float] = field(default_factory=list)
    reward: dict[str, float] = field(default_factory=dict)
    units_per_s: float | None = 0.0
    step_s: float = 0.0
    staleness: float = 0.0
    ledger: dict[str, int] = field(default_factory=dict)
    lessons: dict[str, str] = field(default_factory=dict)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_SHOWN))
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=2))
    noted: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    compiling: dict[str, CompiledProgram] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    wording: ViewLabels = LANGUAGE_LABELS

    def note(self, words: str) -> None:
        """Shows an event."""
        self.notes.append(words)
        self.noted += 1

    def note_compiled(self, program: CompiledProgram, component: str) -> None:
        """Shows how far a component has compiled."""
        self.compiling[component] = program
        if program.number == program.of:
            del self.compiling[component]
        if program.seconds >= LONG_COMPILATION_S:
            self.lines.append(
                f"[{_elapsed(self)}] {component} compiled {program.number} of {program.of} programs: {program.name} "
                f"({program.seconds:.1f} s)"
            )


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draws values as a row of block characters over their own range; more of them than `width` are averaged.

    Values that are not finite are left out.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in zip(edges, edges[1:], strict=False)]
    floor, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[round((mean - floor) / span * (len(SPARKS) - 1))] for mean in means)


class TerminalView:
    """Draws a `Progress` until closed; a context manager.

    Args:
        progress: What to draw.
        console: Where; standard output by default.
        quiet: Draw nothing at all.
    """

    def __init__(self, progress: Progress, console: Console | None = None, quiet: bool = False) -> None:
        self._progress = progress
        self._console = console or Console(file=lasting(sys.stdout), force_jupyter=False)  # as lines there
        self._quiet = quiet
        self._live = (
            Live(get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True)
            if self._console.is_terminal and not quiet
            else None
        )
        self._phase_printed, self._notes_printed, self._note_due = "", 0, 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self) -> None:
        """Prints what is new where the output is no terminal; a terminal redraws itself."""
        if self._quiet or self._live is not None:
            return
        progress = self._progress
        while progress.lines:
            self._console.print(progress.lines.popleft(), highlight=False, markup=False)
        if progress.phase != self._phase_printed and progress.phase != "training":
            self._phase_printed = progress.phase
            self._console.print(f"[{_elapsed(progress)}] {progress.phase}", highlight=False, markup=False)
        if progress.noted > self._notes_printed and time.monotonic() >= self._note_due:
            self._print_note()

    def _print_note(self) -> None:
        """The newest event, and how many there were since the last time; seldom, since thousands may come."""
        progress = self._progress
        others = progress.noted - self._notes_printed - 1
        self._notes_printed, self._note_due = progress.noted, time.monotonic() + NOTE_EVERY_S
        more = f" ({others:,} more since)" if others else ""
        self._console.print(
            f"[{_elapsed(progress)}] {progress.notes[-1]}{more}", highlight=False, markup=False, soft_wrap=True
        )

    def render(self) -> RenderableType:
        """The whole view as one renderable."""
        progress = self._progress
        rows: list[RenderableType] = [_headline(progress), _numbers(progress)]
        if progress.compiling:
            rows.append(_compiling(progress))
        if len(progress.lessons) > 1:
            rows.append(_lessons(progress))
        rows.extend(_sample(sample) for sample in list(progress.samples))
        rows.extend(Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in progress.notes)
        return Panel(Group(*rows), title=progress.title, title_align="left", border_style="cyan")


def _elapsed(progress: Progress) -> str:
    seconds = int(time.monotonic() - progress.started)
    return f"{seconds // 60}:{seconds % 60:02d}"


def step_line(progress: Progress) -> str:
    """The present update in one line."""
    words = progress.wording
    score = format(progress.rewards[-1], words.score_form) if progress.rewards else "–"
    return (
        f"[{_elapsed(progress)}] step {progress.step}/{progress.steps}  {words.score} {score}  "
        f"{_speed(progress.units_per_s)} {words.unit}  staleness {progress.staleness:.2f}"
    )


def _speed(units_per_s: float | None) -> str:
    """Never «0» where there is some: simulators may be slow."""
    if units_per_s is None:
        return "–"
    return f"{units_per_s:,.0f}" if units_per_s >= 10 else f"{units_per_s:.2g}"


def _headline(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=max(progress.steps, 1), completed=progress.step)
    grid.add_row(
        Text(f"step {progress.step}/{progress.steps}", style="bold"),
        bar,
        Text(f"{progress.phase}  {_elapsed(progress)}"),
    )
    return grid


def _numbers(progress: Progress) -> RenderableType:
    grid, words = Table.grid(padding=(0, 1)), progress.wording
    score = format(progress.rewards[-1], words.score_form) if progress.rewards else "–"
    grid.add_row(words.score, Text(score, style="bold green"), Text(sparkline(progress.rewards), style="green"))
    pace = f"{_speed(progress.units_per_s)} {words.unit}   {progress.step_s:.2f} s/{words.update}"
    grid.add_row("pace", "", Text(pace))
    staleness = f"{progress.staleness:.2f} of at most {progress.staleness_budget} updates"
    grid.add_row("staleness", "", Text(staleness))
    if progress.ledger.get("started"):
        counts = "  ".join(f"{state} {count:,}" for state, count in progress.ledger.items() if count)
        grid.add_row(words.experience, "", Text(counts, style="dim"))
    return grid


def _compiling(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None, 2):
        grid.add_column(ratio=ratio, no_wrap=True)
    for component, program in sorted(progress.compiling.copy().items()):
        bar = ProgressBar(total=program.of, completed=program.number)
        grid.add_row(component, bar, f"{program.number}/{program.of} compiled", Text(program.name, overflow="ellipsis"))
    return grid


def _lessons(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    words = progress.wording
    for lesson_id, state in progress.lessons.items():
        reward = progress.reward.get(lesson_id)
        score = "" if reward is None else format(reward, words.score_form)
        grid.add_row(words.task, Text(lesson_id, style="bold"), state, score)
    return grid


def _sample(sample: Sample) -> RenderableType:
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append(f"{sample.reward:5.2f} ", style="bold green" if sample.reward >= 0.5 else "bold red")
    text.append(f"{' '.join(sample.prompt.split())} ", style="dim")
    text.append(f"→ {' '.join(sample.answer.split())}")
    return text


Results = Mapping[str, RolloutBatchStats]


@dataclass(frozen=True, slots=True, repr=False)
class RunSummary:
    """The outcome of `penstock.train`.

    Attributes:
        run_dir: The run directory.
        step: The version reached.
        steps: The version asked for.
        complete: Whether the run reached its goal; otherwise it was interrupted and can be resumed.
        elapsed_s: Wall seconds, start-up included.
        training_s: Seconds from the first admitted group to the last update.
        untrained: Held-out results of the model as initialised or loaded, by lesson.
        before: Held-out results at the start of reinforcement learning: after a warm start, if there was one.
        after: Held-out results of the last version, on the same prompts; empty where the run was interrupted.
        lessons: Each lesson's status at the end.
        failed_groups: Groups whose environment or reward function failed; of a control policy, simulators' failures.
        last_failure: What the last of them said.
        kind: Of policy: a control policy's results are mean returns by task, and their "prompts" are episodes.
        metrics: The last update's line of metrics.jsonl; empty where this life of the run made none.
    """

    run_dir: Path
    step: int
    steps: int
    complete: bool
    elapsed_s: float
    training_s: float
    untrained: Results = field(default_factory=dict)
    before: Results = field(default_factory=dict)
    after: Results = field(default_factory=dict)
    lessons: Mapping[str, str] = field(default_factory=dict)
    failed_groups: int = 0
    last_failure: str = ""
    kind: Literal["language", "control"] = "language"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def __repr__(self) -> str:
        state = "finished" if self.complete else "stopped"
        means = [
            f"{name} {_mean_of(self.untrained, name)} → {stats.reward_mean:.3f}" for name, stats in self.after.items()
        ]
        return f"RunSummary({', '.join([f'{state} at step {self.step}/{self.steps}', *means, str(self.run_dir)])})"


def _mean_of(results: Results, name: str) -> str:
    return f"{results[name].reward_mean:.3f}" if name in results else "–"


def interval_text(stats: RolloutBatchStats) -> str:
    """Mean reward with its 95% interval, where there is one."""
    if stats.failure:
        return "failed"
    if not stats.rollouts:
        return "–"
    low, high = reward_interval(stats.rewards, stats.prompts)
    return f"{stats.reward_mean:.3f} [{low:.3f}, {high:.3f}]"


def print_summary(summary: RunSummary, console: Console) -> None:
    """Prints the summary and the next commands to try."""
    if summary.after:
        of = "Reward on held-out prompts" if summary.kind == "language" else "Return of episodes"
        console.print(f"{of}, mean and 95% interval")
        console.print(_table(summary))
    if summary.failed_groups:
        what = "groups failed" if summary.kind == "language" else "failures of simulators"
        console.print(f"{summary.failed_groups} {what}; the last: {summary.last_failure}", style="yellow")
    state = "finished" if summary.complete else "stopped"
    console.print(
        f"{state} at step {summary.step}/{summary.steps} after {summary.elapsed_s:.0f} s "
        f"({summary.training_s:.0f} s of training)"
    )
    console.print(f"run directory  {summary.run_dir}", soft_wrap=True, highlight=False)
    for command in _next_commands(summary):
        console.print(f"  {command}", soft_wrap=True, highlight=False, style="cyan")


def _table(summary: RunSummary) -> Table:
    table = Table()
    language = summary.kind == "language"
    table.add_column("lesson" if language else "task")
    for lesson_id in summary.after:
        table.add_column(lesson_id)
    stages = {"untrained": summary.untrained, "warm start": summary.before, "trained": summary.after}
    if summary.untrained == summary.before:
        del stages["warm start"]
    for stage, results in stages.items():
        known = {lesson_id: interval_text(stats) for lesson_id, stats in results.items()}
        table.add_row(stage, *(known.get(lesson_id, "–") for lesson_id in summary.after))  # a resume may add lessons
    if language:
        counts = [f"{len(set(stats.prompts))} different, {stats.groups} in all" for stats in summary.after.values()]
    else:
        counts = [str(stats.groups) for stats in summary.after.values()]
    table.add_row("prompts" if language else "episodes", *counts)
    table.add_row("status", *(summary.lessons.get(lesson_id, "") for lesson_id in summary.after))
    return table


def _next_commands(summary: RunSummary) -> list[str]:
    checkpoint = summary.run_dir / "checkpoints" / f"step-{summary.step}"
    if not checkpoint.is_dir():
        return []  # interrupted before the first checkpoint
    commands = [command_line("eval", checkpoint)]
    if summary.kind == "language":
        commands = [command_line("rollouts", summary.run_dir), *commands, command_line("serve", checkpoint)]
    if not summary.complete:
        commands.insert(0, command_line("train", "--resume", summary.run_dir))
    return commands

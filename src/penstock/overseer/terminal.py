"""What a run shows its user: the live view, several times a second, and the summary at its end.

The view reads a `Progress` record that the overseer fills; it decides nothing but what there is room for: with more
height more rows appear, the most important first, then whole conversations. Every row is one line that is cut at the
width, so nothing overflows, and what others wrote is made safe before. Where the output is no terminal (a pipe, a log
file), one plain line per update is printed instead. The summary has the score before and after, on what the policy was
not trained on, and where to look next.
"""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.overseer.progress import Progress, Sample, Series
from penstock.rundir.commands import command_line
from penstock.text.lasting_output import lasting
from penstock.text.safe_text import printable
from penstock.types import RolloutBatchStats
from penstock.types.errors import shortened
from penstock.types.intervals import mean_interval, number_text, reward_interval

SPARKS = "▁▂▃▄▅▆▇█"
NOTE_EVERY_S = 10.0
"""Without a terminal, events are shown so far apart."""
SAMPLES_EVERY_S = 2.0
"""Conversations stay for so long, to be read."""

SPARKLINE_WIDTH = 60
FRAME_COLUMNS, FRAME_LINES = 4, 4
"""What the frame takes; of lines one above, one below, and two that stay free."""
LABEL_WIDTH, VALUE_WIDTH, ROLE_WIDTH = 14, 10, 11
LEAST_SPARKLINE = 8
CONVERSATION_LINES = 14
"""Where so many are left for conversations, every number gets a line of its own, with its history."""
MOST_LESSONS = 6
MOST_WARNING_LINES = 4


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draws values as a row of block characters over their own range; more of them than `width` are averaged.

    Values that are not finite are left out.
    """
    means = _averaged(values, width)
    if not means:
        return ""
    floor, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[round((mean - floor) / span * (len(SPARKS) - 1))] for mean in means)


def _averaged(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: each the mean of neighbours."""
    values = [value for value in values if math.isfinite(value)]
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    return [sum(values[start:stop]) / (stop - start) for start, stop in zip(edges, edges[1:], strict=False)]


class TerminalView:
    """Draws a `Progress` until closed; a context manager.

    Args:
        progress: What to draw.
        console: Where; standard output by default.
        quiet: Draw nothing at all.
    """

    def __init__(self, progress: Progress, console: Console | None = None, quiet: bool = False) -> None:
        self._progress = progress
        lines = Console(file=lasting(sys.stdout), force_jupyter=False, markup=False, emoji=False)  # as such in Jupyter
        self._console = console or lines
        self._quiet = quiet
        self._notes_printed, self._note_due = 0, 0.0
        self._samples: list[Sample] = []
        self._samples_due = 0.0
        self._live = (  # which draws at once
            Live(get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True)
            if self._console.is_terminal and not quiet
            else None
        )

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
            self._print(progress.lines.popleft())
        if progress.noted > self._notes_printed and time.monotonic() >= self._note_due:
            self._print_note()

    def _print_note(self) -> None:
        """The newest event, and how many there were since the last time; seldom, since thousands may come."""
        progress = self._progress
        others = progress.noted - self._notes_printed - 1
        self._notes_printed, self._note_due = progress.noted, time.monotonic() + NOTE_EVERY_S
        more = f" ({others:,} more since)" if others else ""
        self._print(f"[{progress.elapsed}] {progress.notes[-1]}{more}")

    def _print(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)

    def render(self) -> RenderableType:
        """The whole view as one renderable, no higher and no wider than the console."""
        size = self._console.size
        view = _View(self._progress, self._samples_now(), max(size.width - FRAME_COLUMNS, 1))
        lines = view.lines(size.height - FRAME_LINES)
        title = Text(printable(self._progress.title))
        return Panel(Group(*lines), title=title, title_align="left", border_style="cyan")

    def _samples_now(self) -> list[Sample]:
        """The newest first."""
        if time.monotonic() >= self._samples_due or not self._samples:
            self._samples = list(self._progress.samples)[::-1]
            self._samples_due = time.monotonic() + SAMPLES_EVERY_S
        return self._samples


class Row(NamedTuple):
    """Some lines of the view that belong together.

    Attributes:
        rank: The smaller, the sooner there is room for it.
        lines: Each is cut where the view is not wide enough.
    """

    rank: int
    lines: list[Text]


BESIDE_CONVERSATIONS = 20
"""Rows of this rank and above leave a line to each conversation."""


class _View:
    """What is drawn at one moment.

    Args:
        progress: What it shows.
        samples: Conversations, the newest first.
        width: Columns between the sides of the frame.
    """

    def __init__(self, progress: Progress, samples: Sequence[Sample], width: int) -> None:
        self._progress = progress
        self._samples = samples
        self._width = width

    def lines(self, height: int) -> list[Text]:
        """At most `height` of them, but one at least."""
        left = max(height, 1)
        rows = self._rows(dense=False)
        if sum(len(row.lines) for row in rows) + CONVERSATION_LINES > left:
            rows = self._rows(dense=True)
        chosen: list[Row] = []
        for row in sorted(rows, key=lambda row: row.rank):
            kept_free = len(self._samples) if row.rank >= BESIDE_CONVERSATIONS else 0
            if len(row.lines) + kept_free <= left:
                chosen.append(row)
                left -= len(row.lines)
        lines = [line for row in rows if row in chosen for line in row.lines]
        lines += self._conversations(left)
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines

    # --- rows ------------------------------------------------------------------------------------------------------

    def _rows(self, dense: bool) -> list[Row]:
        """In the order in which they stand.

        Args:
            dense: Several numbers in a line, without their histories.
        """
        progress, words = self._progress, self._progress.wording
        told = progress.told()
        if dense:
            numbers = [f"{metric.label} {metric.form.format(series.last)}" for metric, series in told]
            rows = [Row(7 + place, [line]) for place, line in enumerate(self._flowing("training", numbers))]
        else:
            rows = [Row(7, [self._number(metric.label, metric.form, series)]) for metric, series in told]
        warning = _wrapped(printable(progress.no_signal), self._width) if progress.no_signal else []
        ledger = [f"{state} {count:,}" for state, count in progress.ledger.items() if count]
        rows = [
            Row(0, [self._headline()]),
            Row(1, [self._number(words.score, f"{{:{words.score_form}}}", progress.score, "bold green")]),
            Row(2, [self._labelled("pace", self._pace())]),
            Row(3, [Text(line, style="bold yellow") for line in warning[:MOST_WARNING_LINES]]),
            Row(4, self._compiling()),
            Row(6, self._held_out()),
            *rows,
            Row(20, [self._labelled("staleness", self._staleness())]),
            Row(21, self._flowing(words.experience, ledger, "dim") if progress.ledger.get("started") else []),
            Row(22, self._lessons()),
            Row(5, [Text(printable(" ".join(note.split())), style="yellow") for note in list(progress.notes)]),
        ]
        return [row for row in rows if row.lines]

    def _headline(self) -> Text:
        progress = self._progress
        done, right = f"step {progress.step}/{progress.steps}", f"{printable(progress.phase)}  {progress.elapsed}"
        line = Text.assemble((done, "bold"))
        if (room := self._width - cell_len(done) - cell_len(right) - 4) > 0:
            line.append("  ").append_text(_bar(progress.step, progress.steps, room))
        return line.append(f"  {right}")

    def _pace(self) -> str:
        progress = self._progress
        mean_s, left = progress.times.mean_s, progress.left
        each = "" if mean_s is None else f"{mean_s:.2f} s/{progress.wording.update}"
        return "   ".join(filter(None, [progress.pace, f"ETA {left}" if left else "", each])) or "–"

    def _staleness(self) -> str:
        if self._progress.staleness is None:
            return "unknown: stored rollouts"
        return f"{self._progress.staleness:.2f} of at most {self._progress.staleness_budget} updates"

    def _labelled(self, label: str, text: str, style: str = "") -> Text:
        return Text.assemble(f"{printable(label):{LABEL_WIDTH}} ", (printable(text), style))

    def _number(self, label: str, form: str, series: Series, style: str = "") -> Text:
        """Its newest value; where there is room its history, and the scale of that."""
        value = "–" if series.last is None else form.format(series.last)
        line = Text.assemble(f"{label:{LABEL_WIDTH}} ", (f"{value:<{VALUE_WIDTH}}", style))
        values, number = series.points(), form[: form.index("}") + 1]  # without the unit
        if len(values) < 2:
            return line
        widest = max(len(number.format(value)) for value in (min(values), max(values)))
        room = self._width - line.cell_len - 2 * widest - 6
        if room < LEAST_SPARKLINE:
            return line
        means = _averaged(values, min(room, SPARKLINE_WIDTH))
        line.append(f" {sparkline(means)}", "green")
        scale = dict.fromkeys([number.format(min(means)), number.format(max(means))])
        return line.append(f"  {' … '.join(scale)}", "dim")

    def _held_out(self) -> list[Text]:
        """Of each lesson the newest score, and the first."""
        progress, form = self._progress, self._progress.wording.score_form
        parts, steps = list[str](), set[int]()
        for lesson_id, told in progress.held_out.copy().items():
            (first, before), (last, now) = told[0], told[-1]
            parts.append(f"{lesson_id} " + (f"{before:{form}} → " if last > first else "") + f"{now:{form}}")
            steps.add(last)
        if parts:
            parts[-1] += f" (step {max(steps)})"
        return self._flowing(progress.wording.held_out_label, parts)

    def _flowing(self, label: str, parts: Iterable[str], style: str = "") -> list[Text]:
        """As many parts in a line as it has room for, beside a label."""
        lines: list[str] = []
        for part in map(printable, parts):
            if lines and cell_len(lines[-1]) + 3 + cell_len(part) <= self._width - LABEL_WIDTH - 1:
                lines[-1] += f"   {part}"
            else:
                lines.append(part)
        return [self._labelled("" if place else label, line, style) for place, line in enumerate(lines)]

    def _compiling(self) -> list[Text]:
        lines: list[Text] = []
        for component, program in sorted(self._progress.compiling.copy().items()):
            line = self._labelled(component, "").append_text(_bar(program.number, program.of, self._width // 4))
            lines.append(line.append(f"  {program.number}/{program.of} compiled  {printable(program.name)}"))
        return lines

    def _lessons(self) -> list[Text]:
        progress, words = self._progress, self._progress.wording
        if len(progress.lessons) < 2:
            return []
        lines: list[Text] = []
        for lesson_id, state in list(progress.lessons.items())[:MOST_LESSONS]:
            reward = progress.reward.get(lesson_id)
            score = "" if reward is None else f"  {reward:{words.score_form}}"
            line = Text.assemble(f"{words.task:{LABEL_WIDTH}} ", (printable(lesson_id), "bold"))
            lines.append(line.append(f"  {printable(state)}{score}"))
        if (others := len(progress.lessons) - MOST_LESSONS) > 0:
            lines.append(self._labelled("", f"… {others} more", "dim"))
        return lines

    # --- conversations ---------------------------------------------------------------------------------------------

    def _conversations(self, height: int) -> list[Text]:
        """The newest first: each in a line, or as a whole where there is room; the newest in part, where it is not."""
        shown = self._samples[: max(height, 0)]
        left = height - len(shown)
        lines: list[Text] = []
        for place, sample in enumerate(shown):
            whole = self._conversation(sample, height)
            if len(whole) - 1 <= left:
                lines += whole
                left -= len(whole) - 1
            elif place == 0 and left >= 4:
                lines += _without_middle(whole, left + 1)
                left = 0
            else:
                lines.append(self._in_a_line(sample))
        return lines

    def _conversation(self, sample: Sample, height: int) -> list[Text]:
        """All of it; of a turn that is longer than the whole view its beginning and its end."""
        lines = [_reward(sample).append(f" {printable(sample.lesson_id)}", "dim")]
        width, most_chars = max(self._width - ROLE_WIDTH, 1), 2 * max(height, 1) * self._width + 200
        for role, content in sample.turns:
            label, style = f"{printable(role)[: ROLE_WIDTH - 1]:{ROLE_WIDTH}}", "" if role == "assistant" else "dim"
            text = printable(shortened(content.strip(), most_chars), newlines=True)
            for line in text.split("\n"):
                for part in _wrapped(line, width):
                    lines.append(Text.assemble((label, "dim"), (part, style)))
                    label = " " * ROLE_WIDTH
        return lines

    def _in_a_line(self, sample: Sample) -> Text:
        asked, answered = (
            printable(" ".join(" ".join(text for role, text in sample.turns if role in roles).split()))
            for roles in (("user",), ("assistant", "tool"))
        )
        line = _reward(sample)
        room = self._width - line.cell_len - 4
        if cell_len(asked) + cell_len(answered) > room:
            asked = set_cell_size(asked, max(room // 3, 1)).rstrip() + "…" if cell_len(asked) > room // 3 else asked
        return line.append(f"{asked} ", "dim").append(f"→ {answered}")


def _bar(done: int, of: int, width: int) -> Text:
    filled = min(width, width * done // max(of, 1))
    return Text.assemble(("━" * filled, "cyan"), ("━" * (width - filled), "bright_black"))


def _reward(sample: Sample) -> Text:
    return Text.assemble((f"{sample.reward:5.2f} ", "bold green" if sample.reward >= 0.5 else "bold red"))


def _wrapped(line: str, width: int) -> list[str]:
    """A line in pieces of at most `width` columns, broken between words where that is possible."""
    pieces = [""]
    for place, word in enumerate(line.split(" ")):
        joined = f"{pieces[-1]} {word}" if place else word
        if cell_len(joined) <= width:
            pieces[-1] = joined
        else:
            pieces += chop_cells(word, width) or [""]
    return pieces if pieces[0] or len(pieces) == 1 else pieces[1:]


def _without_middle(lines: list[Text], count: int) -> list[Text]:
    """The first and the last of them, `count` in all, with a line that says how many are left out."""
    head = (count - 1) // 2
    tail = count - 1 - head
    left_out = len(lines) - head - tail
    return [*lines[:head], Text(f"{'':{ROLE_WIDTH}}… {left_out:,} more lines …", style="dim"), *lines[-tail:]]


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
        no_signal: Of the last stretches of updates from which nothing was learned, how long and what would help.
        goal: What ended the training before its last step, in words; empty where nothing did.
        metrics: The last update's line of metrics.jsonl; empty where this life of the run made none.
        warm_start: Whether the run began with one.
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
    no_signal: tuple[str, ...] = ()
    goal: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    warm_start: bool = False

    def __repr__(self) -> str:
        state = "finished" if self.complete else "stopped"
        means = [f"{name} {_mean_of(self.untrained, name)} → {_mean_of(self.after, name)}" for name in self.after]
        return f"RunSummary({', '.join([f'{state} at step {self.step}/{self.steps}', *means, str(self.run_dir)])})"


def _mean_of(results: Results, name: str) -> str:
    return number_text(results[name].reward_mean) if name in results else "–"


def interval_text(stats: RolloutBatchStats, returns: bool = False) -> str:
    """Mean reward with its 95% interval, where there is one; of returns, whose bounds nobody knows, Student's t."""
    if stats.failure:
        return "failed"
    if not stats.rollouts:
        return "–"
    interval = (mean_interval if returns else reward_interval)(stats.rewards, stats.prompts)
    return f"{number_text(stats.reward_mean)} {interval}"


def print_summary(summary: RunSummary, console: Console) -> None:
    """Prints the summary and the next commands to try."""
    if summary.after:
        of = "Reward on held-out prompts" if summary.kind == "language" else "Return of episodes"
        console.print(f"{of}, mean and 95% interval")
        console.print(_table(summary))
    if summary.failed_groups:
        what = "groups failed" if summary.kind == "language" else "failures of simulators"
        told = f"{summary.failed_groups} {what}; the last: {summary.last_failure}"
        console.print(Text(printable(told), style="yellow"))
    if unchecked := int(summary.metrics.get("train/parity_unchecked", 0)):
        told = f"engine and learner not compared: {unchecked} versions and engines (train/parity_unchecked)"
        console.print(Text(told, style="yellow"))
    for stretch in summary.no_signal:
        console.print(Text(printable(stretch), style="yellow"), soft_wrap=True)
    state = "finished" if summary.complete else "stopped"
    console.print(
        f"{state} at step {summary.step}/{summary.steps} after {summary.elapsed_s:.0f} s "
        f"({summary.training_s:.0f} s of training){f': {summary.goal}' if summary.goal else ''}",
        soft_wrap=True,
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
    if not summary.warm_start:
        del stages["warm start"]
    for stage, results in stages.items():
        if not results:
            continue  # curriculum.eval_before: false
        known = {lesson_id: interval_text(stats, not language) for lesson_id, stats in results.items()}
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

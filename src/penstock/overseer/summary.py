"""What a run says at its end: its score before and after, on what it was not trained on, and where to look next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from penstock.overseer.statistics import reward_interval
from penstock.types import RolloutBatchStats

Results = Mapping[str, RolloutBatchStats]


@dataclass(frozen=True, slots=True)
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
    commands = [f"penstock eval {checkpoint}"]
    if summary.kind == "language":
        commands = [f"penstock rollouts {summary.run_dir}", *commands, f"penstock serve {checkpoint}"]
    if not summary.complete:
        commands.insert(0, f"penstock train --resume {summary.run_dir}")
    return commands

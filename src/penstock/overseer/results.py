"""Evaluation results as plain values, for checkpoints and between processes, and where their numbers are logged."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.overseer.launch.launcher import ComponentContext
from penstock.rundir.commands import command_line
from penstock.types import RolloutBatchStats, RunFailed

Results = dict[str, RolloutBatchStats]
"""By lesson."""
CALL_S = 30.0
"""Longest wait for the learner's answer."""


def require_results(results: Results, run_dir: Path) -> None:
    """Of the last evaluation, without which nobody knows what a run has come to.

    Raises:
        RunFailed: of a lesson or task there are none.
    """
    failed = {name: stats.failure for name, stats in results.items() if stats.failure}
    if failed:
        reason = next(iter(failed.values()))
        raise RunFailed(
            f"the last evaluation of {', '.join(failed)} has no result: {reason}; the trained policy is the newest in "
            f"{run_dir / 'checkpoints'}, and {command_line('train', '--resume', run_dir)} evaluates it again"
        )


def write_results(results: Mapping[str, Results]) -> dict[str, dict[str, Any]]:
    """By when, then by lesson."""
    return {when: write_stats(by_lesson) for when, by_lesson in results.items()}


def read_results(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Results]:
    """What `write_results` wrote."""
    return {when: read_stats(by_lesson) for when, by_lesson in state.items()}


def write_stats(results: Results) -> dict[str, Any]:
    """By lesson."""
    return {lesson_id: asdict(stats) for lesson_id, stats in results.items()}


def read_stats(rows: Mapping[str, Any]) -> Results:
    """What `write_stats` wrote."""
    return {
        lesson_id: RolloutBatchStats(**{**row, "rewards": tuple(row["rewards"]), "prompts": tuple(row["prompts"])})
        for lesson_id, row in rows.items()
    }


class EvaluationLog:
    """Logs the numbers of evaluations; the learner hears of those by which it chooses the best checkpoint, if any.

    Args:
        ctx: Of the component that evaluates.
        metric: ``overseer.keep_best``.
    """

    def __init__(self, ctx: ComponentContext, metric: str | None) -> None:
        self._ctx, self._learner = ctx, ctx.caller("learner-0")
        self._metric = metric

    def begin(self, step: int) -> None:
        """An evaluation of that version begins.

        Raises:
            UnreachableError: the learner did not answer.
        """
        if self._metric is not None:
            self._learner.call("expect_evaluation", step, timeout_s=CALL_S)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics, of which the learner hears before: where it cannot, nothing is logged.

        Raises:
            UnreachableError: the learner did not answer.
        """
        if self._metric is not None and any(name.startswith("eval/") for name in values):
            self._learner.call("note_evaluation", step, values.get(self._metric), timeout_s=CALL_S)
        self._ctx.metrics(step, values)

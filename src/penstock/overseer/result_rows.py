"""Evaluation results as plain values, for checkpoints and on the way between processes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.types import RolloutBatchStats, RunFailed

Results = dict[str, RolloutBatchStats]
"""By lesson."""


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
            f"{run_dir / 'checkpoints'}, and penstock train --resume {run_dir} evaluates it again"
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

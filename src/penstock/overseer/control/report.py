"""What an offline evaluation of a control policy found: per task the mean return with its 95% interval."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.overseer.evaluation_report import Estimate
from penstock.overseer.results import mean_interval
from penstock.types import RolloutBatchStats


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The evaluation of one task.

    Attributes:
        task: Which.
        episodes: Number of episodes; all independent draws.
        return_mean: Mean of the episodes' sums of raw rewards; Student's t interval.
        lowest: Lowest return.
        highest: Highest.
        length_mean: Mean steps of an episode.
    """

    task: str
    episodes: int
    return_mean: Estimate
    lowest: float
    highest: float
    length_mean: float

    @classmethod
    def of(cls, stats: RolloutBatchStats) -> "TaskReport":
        """From what `play_episodes` gives."""
        return cls(
            task=stats.lesson_id,
            episodes=stats.groups,
            return_mean=Estimate.of(stats.reward_mean, mean_interval(stats.rewards)),
            lowest=min(stats.rewards, default=math.nan),
            highest=max(stats.rewards, default=math.nan),
            length_mean=stats.response_tokens,
        )


@dataclass(frozen=True, slots=True)
class FleetEvaluationReport:
    """The outcome of evaluating a control policy.

    Attributes:
        checkpoint: The model directory.
        tasks: By name, in the recipe's order.
        deterministic: Whether actions were the most probable ones, not sampled.
        seconds: Wall seconds, the simulators' start included, without films.
        videos: Films that were made.
    """

    checkpoint: Path
    tasks: Mapping[str, TaskReport]
    deterministic: bool
    seconds: float
    videos: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data; a number that is not finite is None."""
        return {
            "checkpoint": str(self.checkpoint),
            "deterministic": self.deterministic,
            "seconds": self.seconds,
            "tasks": {name: _plain(asdict(report)) for name, report in self.tasks.items()},
            "videos": [str(path) for path in self.videos],
        }

    def print(self, console: Console) -> None:
        """Prints a table."""
        how = "the most probable actions" if self.deterministic else "sampled actions"
        title = f"{self.checkpoint}: {how}, estimates with 95% intervals"
        console.print(title, soft_wrap=True, highlight=False)
        console.print(self._table())

    def print_films(self, console: Console) -> None:
        """Prints where the films are."""
        for path in self.videos:
            console.print(f"video  {path}", soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        table, reports = Table(), list(self.tasks.values())
        for column in ("task", *(report.task for report in reports)):
            table.add_column(column)
        table.add_row("episodes", *(str(report.episodes) for report in reports))
        table.add_row("mean return", *(str(report.return_mean) for report in reports))
        table.add_row("range", *(f"{report.lowest:g} … {report.highest:g}" for report in reports))
        table.add_row("steps", *(f"{report.length_mean:.1f}" for report in reports))
        return table


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

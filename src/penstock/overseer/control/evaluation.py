"""Offline evaluation of a control policy: a fleet of its own, no learner, no worker threads.

Simulators' seeds are those of the run's own evaluations: two checkpoints play the same episodes. The report has each
task's mean return with its 95% interval.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.fleet.space_check import same_form
from penstock.model.control import load_control_policy
from penstock.overseer.control.evaluator import play_episodes
from penstock.overseer.control.policies import make_evaluation_runner
from penstock.overseer.control.simulators import evaluation_fleet, open_evaluation_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.evaluation_report import Estimate
from penstock.overseer.results import mean_interval
from penstock.types import CheckpointError, ConfigError, RolloutBatchStats


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


def evaluate_fleet(
    checkpoint: Path | str,
    config: FleetRunConfig,
    tasks: Sequence[str] | None = None,
    episodes: int | None = None,
    video_dir: Path | None = None,
    on_report: Callable[[FleetEvaluationReport], object] | None = None,
) -> FleetEvaluationReport:
    """Plays a recipe's tasks with a checkpoint's policy.

    Args:
        checkpoint: A run's ``checkpoints/step-<n>``, or its ``model/``.
        config: The recipe; its model section gives way to the checkpoint.
        tasks: Which tasks; all by default.
        episodes: Per task; by default as the recipe says.
        video_dir: Film one more episode of each task into this folder; what fails there is told on standard error.
        on_report: Told of the report before anything is filmed.

    Raises:
        ConfigError: an unknown task, a simulator that cannot be made, a policy that was made for other spaces, or films
            that cannot be written.
        RunFailed: every simulator of a task was given up.
        NoProgressError: the episodes were not over in time.
        CheckpointError: there is no control policy.
    """
    config = _chosen(config, tasks)
    model_dir = control_model_directory(checkpoint)
    policy = load_control_policy(model_dir)
    if video_dir is not None:
        from penstock.overseer.control.video import film_path

        for task in config.fleet.tasks:
            film_path(video_dir, task)  # sees that it can be written
    started = time.perf_counter()
    fleet = evaluation_fleet(config)
    pool = open_evaluation_pool(config)
    try:
        if not same_form(pool.spaces, policy.spaces):
            raise ConfigError(
                f"{model_dir} holds a policy for other observations or actions than {', '.join(fleet.tasks)} have: "
                "give the recipe that it was trained with"
            )
        runner = make_evaluation_runner(policy, config)
        wanted = episodes or config.evaluation.episodes
        results = play_episodes(pool, runner, fleet, wanted, threading.Event())
    finally:
        pool.close()
    reports = {task: TaskReport.of(stats) for task, stats in results.items()}
    seconds = time.perf_counter() - started
    report = FleetEvaluationReport(model_dir, reports, config.evaluation.deterministic, seconds)
    if on_report is not None:
        on_report(report)
    if video_dir is None:
        return report
    from penstock.overseer.control.video import film_episodes

    return replace(report, videos=film_episodes(policy, config, video_dir))


def control_model_directory(checkpoint: Path | str) -> Path:
    """Where a control policy lies: the directory itself, or ``model/`` inside a training checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(checkpoint)
    found = next((path for path in (root, root / "model") if (path / "config.json").is_file()), None)
    if found is None:
        raise CheckpointError(f"{checkpoint} holds no config.json, nor does its model/: give a checkpoint directory")
    return found


def _chosen(config: FleetRunConfig, tasks: Sequence[str] | None) -> FleetRunConfig:
    known = config.fleet.tasks
    unknown = [task for task in tasks or [] if task not in known]
    if unknown:
        raise ConfigError(f"task {unknown[0]!r} is not in the recipe: its tasks are {', '.join(known)}")
    if not tasks:
        return config
    fleet = config.fleet.model_copy(update={"tasks": {task: known[task] for task in tasks}})
    return config.model_copy(update={"fleet": fleet})

"""Offline evaluation of a control policy: a fleet of its own, no learner, no worker threads; and its films.

Simulators' seeds are those of the run's own evaluations: two checkpoints play the same episodes. The report has each
task's mean return with its 95% interval.

`penstock eval --video` films one episode of each task, with the policy's value and the reward written below it. The
simulator has a process of its own, with the fleet's deadlines and restarts: one that hangs is killed, one that dies
takes nothing along. A simulator must know before an episode begins that it is to draw it, so its second one is filmed;
one that a fault cuts is thrown away, and the next is filmed. A film that fails is told, and ends nothing else: what was
evaluated before stands. Needs the extra ``gym`` (PyAV, Pillow). Not covered: films of training episodes
(`penstock.fleet.video`).
"""

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.fleet import JaxPolicyRunner, RecordingPool, RolloutWorker, SimulatorPool
from penstock.fleet.config import FleetConfig
from penstock.fleet.evaluation import SLOW_S
from penstock.fleet.steps import StepBatch
from penstock.fleet.video import MOST_WAITING_BYTES, VideoWriter, require_film_packages
from penstock.model.control import ControlPolicy, control_model_directory, load_control_policy
from penstock.overseer.control.evaluator import play_episodes
from penstock.overseer.control.policies import make_evaluation_runner
from penstock.overseer.control.simulators import (
    EVALUATOR_ID,
    OnEvent,
    evaluation_fleet,
    open_evaluation_pool,
    start_pool,
)
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.evaluation_report import Estimate, chosen_of, plain
from penstock.overseer.run_log import failure_in_words
from penstock.rundir.storage import check_place
from penstock.types import (
    ConfigError,
    NoProgressError,
    PenstockError,
    RolloutBatchStats,
    RunFailed,
    fold,
)
from penstock.types.intervals import mean_interval


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
            "tasks": {name: plain(asdict(report)) for name, report in self.tasks.items()},
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
            that cannot be written, or too many episodes.
        RunFailed: every simulator of a task was given up.
        NoProgressError: the episodes were not over in time.
        CheckpointError: there is no control policy.
    """
    if episodes is not None and episodes > MOST_EPISODES:
        raise ConfigError(f"n is {episodes}: at most {MOST_EPISODES:,} episodes of a task are played; give fewer")
    chosen = {name: config.fleet.tasks[name] for name in chosen_of(tasks, config.fleet.tasks, "task")}
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"tasks": chosen})})
    model_dir = control_model_directory(checkpoint)
    policy = load_control_policy(model_dir, config.model.module, config.model.kwargs)
    if video_dir is not None:
        for task in config.fleet.tasks:
            film_path(video_dir, task)  # sees that it can be written
    started = time.perf_counter()
    fleet = evaluation_fleet(config)
    pool = open_evaluation_pool(config, _failures_told())
    try:
        if not pool.spaces.same_form(policy.spaces):
            raise ConfigError(
                f"{model_dir} holds a policy for other observations or actions than {', '.join(fleet.tasks)} have "
                f"({pool.spaces.differences(policy.spaces)}): give the recipe that it was trained with"
            )
        runner = make_evaluation_runner(policy, config)
        wanted = episodes or config.evaluation.episodes
        results = play_episodes(pool, runner, fleet, wanted, threading.Event(), on_slow=_tell)
    finally:
        pool.close()
    reports = {task: TaskReport.of(stats) for task, stats in results.items()}
    seconds = time.perf_counter() - started
    report = FleetEvaluationReport(model_dir, reports, config.evaluation.deterministic, seconds)
    if on_report is not None:
        on_report(report)
    if video_dir is None:
        return report
    return replace(report, videos=film_episodes(policy, config, video_dir))


MOST_EPISODES = 1_000_000
FILM_S = 3600.0
"""For one film; deadlines of simulators are shorter, and end what hangs."""
MOST_CUT = 3
"""Episodes of a task that may be cut before its film is given up."""
POLL_S = 0.2


def film_episodes(
    policy: ControlPolicy, config: FleetRunConfig, folder: Path, tell: Callable[[str], object] | None = None
) -> tuple[Path, ...]:
    """Films one episode per task into ``<folder>/<task>.mp4``.

    Args:
        policy: With weights.
        config: Tasks and limits.
        folder: Made where it is missing.
        tell: Told in a line how far a film is, at its beginning and where it takes long, and of each that failed;
            standard error by default.

    Returns:
        The films that were made.
    """
    films: list[Path] = []
    tell = tell or _tell
    for task in config.fleet.tasks:
        try:
            films.append(_film(policy, config, task, film_path(folder, task), tell))
        except Exception as error:  # whatever it is: what was evaluated must not be lost by it
            reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            tell(f"--video: task {task!r} was not filmed: {' '.join(reason.split())}")
    return tuple(films)


def film_path(folder: Path, task: str) -> Path:
    """Where a task's film is to appear.

    Raises:
        ConfigError: there is a file already, it cannot be written, or a package that films need is missing.
    """
    require_film_packages("--video")
    path = folder / (re.sub(r"[^\w.-]", "_", task) + ".mp4")
    if path.exists():
        raise ConfigError(f"{path} exists already and is not overwritten: choose another folder")
    check_place(path, "--video")
    return path


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


FAILURE_EVERY_S = 10.0
"""Simulators' failures are told no more often: thousands may come."""


def _failures_told() -> OnEvent:
    due_s = -math.inf

    def tell(kind: str, fields: Mapping[str, Any]) -> None:
        nonlocal due_s
        words = failure_in_words(kind, fields)
        if words and time.monotonic() >= due_s:
            due_s = time.monotonic() + FAILURE_EVERY_S
            _tell(words)

    return tell


def _film(policy: ControlPolicy, config: FleetRunConfig, task: str, path: Path, tell: Callable[[str], object]) -> Path:
    fleet = _film_fleet(config.fleet, task)
    take = _EpisodeRecorder(path)
    writer = VideoWriter(path.parent, path.stem, fleet.video.fps, take.on_event)
    pool = SimulatorPool(fleet, "film", fold(config.seed, "simulators", EVALUATOR_ID))
    filmed = RecordingPool(pool, fleet.video, path.parent, path.stem, take.on_event, writer)
    runner = JaxPolicyRunner(
        policy, 1, 1, fold(config.seed, "actions", "film"), deterministic=config.evaluation.deterministic
    )
    try:
        start_pool(pool, fleet)
        worker = RolloutWorker(filmed, runner, fleet, partial(_note, take, filmed))
        began, told_s = time.monotonic(), 0.0
        while not take.over:
            spent_s = time.monotonic() - began
            if spent_s > FILM_S:
                raise NoProgressError(f"no episode was over within {FILM_S:g} s")
            if spent_s >= told_s:
                tell(f"--video: task {task!r}: {take.in_words}")
                told_s = max(SLOW_S, 2 * told_s)
            if writer.waiting_bytes > MOST_WAITING_BYTES // 2:  # nothing is dropped: the simulator waits
                time.sleep(POLL_S / 10)
                continue
            worker.run_once(POLL_S)
    finally:
        filmed.close()
    return path


def _film_fleet(fleet: FleetConfig, task: str) -> FleetConfig:
    changes = {
        "tasks": {task: fleet.tasks[task]}, "workers": 1, "envs_per_worker": 1, "envs_per_process": 1,
        "parts_per_process": 1,
        "batch_size": 1, "decorrelate_steps": 0, "video": fleet.video.model_copy(update={"every_episodes": 1}),
        "limits": fleet.limits.model_copy(update={"restart_interval_s": None}),
    }  # fmt: skip
    return fleet.model_copy(update=changes)


def _note(take: "_EpisodeRecorder", filmed: RecordingPool, batch: StepBatch) -> None:
    take.note(batch)
    filmed.note(batch)


class _EpisodeRecorder:
    """Keeps the first film of a whole episode; hears of the others, and of what fails.

    Args:
        path: Where it is to appear.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = 0  # episodes
        self._steps = 0  # of the one that goes on
        self._cut: set[int] = set()  # their numbers
        self._kept = False
        self._failure = ""

    @property
    def over(self) -> bool:
        """Whether the film is there.

        Raises:
            RunFailed: there will be none.
        """
        if self._failure:
            raise RunFailed(self._failure)
        if len(self._cut) >= MOST_CUT and not self._kept:
            raise RunFailed(f"faults cut {MOST_CUT} episodes")
        return self._kept

    @property
    def in_words(self) -> str:
        """How far it is."""
        return f"step {self._steps:,} of episode {self._ended + 1}; the first whole one after episode 1 is filmed"

    def note(self, batch: StepBatch) -> None:
        """Before the film's writer can hear of the same batch."""
        self._steps += 1
        if not (batch.first & batch.acted).any():
            return
        if np.any(batch.faults):
            self._cut.add(self._ended)
        self._ended, self._steps = self._ended + 1, 0

    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Of the writer, in its thread, and of the pool that is filmed."""
        if kind == "film_failed":
            self._failure = str(fields["reason"])
        elif kind == "film_written":
            film = Path(fields["path"])
            number = re.search(r"_episode(\d+)_return", film.name)
            if self._kept or (number is not None and int(number[1]) in self._cut):
                film.unlink()
            else:
                film.rename(self._path)
                self._kept = True

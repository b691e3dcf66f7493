"""Films one episode of each task for `penstock eval --video`, with the policy's value and the reward written below it.

The simulator has a process of its own, with the fleet's deadlines and restarts: one that hangs is killed, one that dies
takes nothing along. A simulator must know before an episode begins that it is to draw it, so its second one is filmed;
one that a fault cuts is thrown away, and the next is filmed. A film that fails is told, and ends nothing else: what was
evaluated before stands. Needs the extra ``gym`` (PyAV, Pillow). Not covered: films of training episodes
(`penstock.fleet.video`).
"""

import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.fleet import JaxPolicyRunner, RecordingPool, RolloutWorker, SimulatorPool
from penstock.fleet.config import FleetConfig
from penstock.fleet.steps import StepBatch
from penstock.fleet.video import MOST_WAITING_BYTES, VideoWriter, require_film_packages
from penstock.model.control import ControlPolicy
from penstock.overseer.control.simulators import EVALUATOR_ID, start_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.rundir.storage import check_place
from penstock.types import ConfigError, NoProgressError, PenstockError, RunFailed, fold

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
        tell: Told of each film that failed, in a line; standard error by default.

    Returns:
        The films that were made.
    """
    films: list[Path] = []
    for task in config.fleet.tasks:
        try:
            films.append(_film(policy, config, task, film_path(folder, task)))
        except Exception as error:  # whatever it is: what was evaluated must not be lost by it
            reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            (tell or _tell)(f"--video: task {task!r} was not filmed: {' '.join(reason.split())}")
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


def _film(policy: ControlPolicy, config: FleetRunConfig, task: str, path: Path) -> Path:
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
        deadline = time.monotonic() + FILM_S
        while not take.over:
            if time.monotonic() > deadline:
                raise NoProgressError(f"no episode was over within {FILM_S:g} s")
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

    def note(self, batch: StepBatch) -> None:
        """Before the film's writer can hear of the same batch."""
        if not (batch.first & batch.acted).any():
            return
        if np.any(batch.faults):
            self._cut.add(self._ended)
        self._ended += 1

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

"""Which simulators a fleet run starts: those of its workers, those of its evaluations, and one of each task to look at.

Workers' names hold the life of the run, so that no two of them ever reset a simulator with the same seed; those of
evaluations do not, so that every version plays the same episodes. Only workers' simulators are filmed.
"""

import socket
from collections.abc import Mapping
from typing import Any

from penstock.fleet import RecordingPool, SimulatorPool
from penstock.fleet.config import FleetConfig
from penstock.fleet.policy import OnEvent
from penstock.fleet.video import require_film_packages
from penstock.overseer.control_config import FleetRunConfig
from penstock.rundir import RunDirectory
from penstock.types import ConfigError, RunFailed, Spaces, fold

EVALUATOR_ID = "evaluator-0"

PROBE_FAILURES = 5
"""Starts in a row that may fail before a run is refused; 3 s pass between them, as back-off is by default."""


def worker_pool(
    config: FleetRunConfig, number: int, lineage: int, incarnation: int, on_event: OnEvent
) -> SimulatorPool:
    """The simulators of one life of a rollout worker; not started."""
    seed = fold(config.seed, "simulators", lineage, incarnation)
    return SimulatorPool(config.fleet, f"fleet-{number}", seed, on_event, number)


def require_films(config: FleetRunConfig) -> None:
    """Sees that films can be made on this machine, where the run wants some.

    Raises:
        ConfigError: packages are missing.
    """
    if config.fleet.video.every_episodes:
        require_film_packages(f"fleet.video.every_episodes = {config.fleet.video.every_episodes}")


def filmed_pool(
    pool: SimulatorPool, config: FleetRunConfig, directory: RunDirectory, name: str, on_event: OnEvent
) -> RecordingPool | None:
    """The pool with a camera, where films are wanted; `name` is the worker's life, and begins the films' names.

    Raises:
        ConfigError: packages are missing, or the run directory is not on this machine.
    """
    every = config.fleet.video.every_episodes
    if not every:
        return None
    if not directory.config_path.is_file():
        raise ConfigError(
            f"fleet.video.every_episodes is {every}, and {socket.gethostname()} does not have the run directory "
            f"{directory.path}: films would be lost there; set it to 0, or share the directory among the machines"
        )
    require_films(config)
    return RecordingPool(pool, config.fleet.video, directory.videos, name, on_event)


def evaluation_fleet(config: FleetRunConfig) -> FleetConfig:
    """The fleet of an evaluation: one worker, no more simulators than there are episodes to play.

    No process is replaced meanwhile: that would cut the episodes of the simulators that share it with one that ended.
    """
    fleet, evaluation = config.fleet, config.evaluation
    tasks = {name: task.model_copy(update={"share": 1.0}) for name, task in fleet.tasks.items()}
    wanted = min(evaluation.simulators, evaluation.episodes * len(tasks))
    each = max(1, min(fleet.envs_per_process, wanted // len(tasks)))
    changes = {
        "tasks": tasks,
        "workers": 1,
        "envs_per_worker": max(len(tasks), wanted // each) * each,
        "envs_per_process": each,
        "parts_per_process": 1,
        "batch_size": None,
        "decorrelate_steps": 0,
        "limits": fleet.limits.model_copy(update={"restart_interval_s": None}),
        "video": fleet.video.model_copy(update={"every_episodes": 0}),
    }
    return fleet.model_copy(update=changes)


def open_evaluation_pool(config: FleetRunConfig, on_event: OnEvent) -> SimulatorPool:
    """The simulators of an evaluation, started; each begins its first episode.

    Raises:
        ConfigError: a simulator cannot be made as configured.
        RunFailed: those of a task failed for good.
        NoProgressError: it took too long.
    """
    seed = fold(config.seed, "simulators", EVALUATOR_ID)
    pool = SimulatorPool(evaluation_fleet(config), EVALUATOR_ID, seed, on_event)
    try:
        start_pool(pool, config.fleet)
    except BaseException:
        pool.close()
        raise
    return pool


def start_pool(pool: SimulatorPool, fleet: FleetConfig) -> None:
    """Starts a pool within the time that its limits give to making and resetting simulators.

    Raises:
        ConfigError: a simulator cannot be made as configured, or tasks have different spaces.
        RunFailed: those of a task failed for good.
        NoProgressError: it took too long.
    """
    pool.start(fleet.limits.spawn_timeout_s + fleet.limits.reset_timeout_s)


def probe_spaces(config: FleetRunConfig) -> Spaces:
    """What the policy sees and does: one simulator of each task is made, asked, and ended.

    A start that fails is tried again as in the run, but not as often: after `PROBE_FAILURES` in a row it is bad input.

    Raises:
        ConfigError: a simulator cannot be made, or tasks differ in their spaces; names the task.
    """
    fleet = config.fleet
    most = min(PROBE_FAILURES, fleet.limits.max_failures_in_row or PROBE_FAILURES)
    changes = {
        "workers": 1, "envs_per_worker": len(fleet.tasks), "envs_per_process": 1, "parts_per_process": 1,
        "batch_size": None,
        "limits": fleet.limits.model_copy(update={"max_failures_in_row": most}),
    }  # fmt: skip
    failures: list[str] = []

    def note(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "simulator_failed":
            failures.append(f"task {fields['task']!r}: {fields['reason']}")

    pool = SimulatorPool(fleet.model_copy(update=changes), "probe", fold(config.seed, "probe"), note)
    try:
        start_pool(pool, fleet)
        return pool.spaces
    except RunFailed as error:
        last = failures[-1] if failures else str(error)
        raise ConfigError(f"fleet.tasks: no simulator could be made in {most} attempts; the last: {last}") from error
    finally:
        pool.close()

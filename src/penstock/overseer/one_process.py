"""Opens a run whose components are threads of this process, whatever it trains; `many_processes` is its counterpart."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock.overseer.config import RunConfig
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_local import FleetStart
from penstock.overseer.local import Start
from penstock.overseer.overseer import RunConductor
from penstock.overseer.run_log import RunLog
from penstock.overseer.run_opening import (
    Damages,
    check_goal,
    create_run,
    existing_run,
    open_log,
    oversee,
    resume_point,
)
from penstock.overseer.supervision import Crew
from penstock.overseer.terminal import Progress
from penstock.rundir import RunDirectory

StartT = TypeVar("StartT", Start, FleetStart)


def run_in_this_process(
    config: RunConfig | FleetRunConfig,
    run_dir: Path | str | None,
    resume: bool,
    recipe: str,
    quiet: bool,
    progress: Progress,
    begin: Callable[[], StartT],
    go_on: Callable[[int, Path], StartT],
    make_conductor: Callable[[RunDirectory, Crew, RunLog, StartT], RunConductor],
) -> tuple[RunDirectory, RunConductor]:
    """Runs it to its end.

    Args:
        config: The run's.
        run_dir: As of `penstock.train`.
        resume: Likewise.
        recipe: Likewise.
        quiet: Likewise.
        progress: What the view shows.
        begin: Makes what a new run starts from; whatever can be wrong with it is told before anything is written.
        go_on: What a run starts from that goes on, by its new lineage and the checkpoint.
        make_conductor: From directory, crew, log and start.

    Raises:
        ConfigError: bad input; nothing was written.
    """
    fresh = None if resume else begin()
    directory = existing_run(run_dir) if fresh is None else create_run(config, run_dir, recipe)
    with directory.locked():
        damages, path = Damages(), None
        if fresh is None:
            lineage, path = resume_point(directory, damages)
            check_goal(config.steps, path)
            start = replace(begin(), lineage=lineage) if path is None else go_on(lineage, path)
        else:
            start = fresh
        log = open_log(config, directory, progress, damages if resume else None, path)
        crew = Crew()
        conductor = make_conductor(directory, crew, log, start)
        oversee(conductor, crew, log, config, directory, quiet)
    return directory, conductor

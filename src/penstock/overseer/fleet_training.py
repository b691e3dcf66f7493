"""Starts the training of a control policy.

Everything that bad input can break (a simulator that cannot be made, a network that does not fit its spaces) is tried
before the run directory is made, so that a mistake costs nothing and leaves nothing behind.
"""

from pathlib import Path

from penstock.learner import load_checkpoint
from penstock.overseer.fleet_conductor import FleetConductor
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_local import FleetStart
from penstock.overseer.fleet_policies import make_policy
from penstock.overseer.fleet_resume import check_resume
from penstock.overseer.fleet_simulators import probe_spaces, require_films
from penstock.overseer.one_process import run_in_this_process
from penstock.overseer.overseer import RunConductor
from penstock.overseer.terminal import FLEET_WORDING, Progress
from penstock.rundir import RunDirectory

Outcome = tuple[RunDirectory, RunConductor]
"""Where it was written, and who led it."""


def run_fleet(config: FleetRunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool) -> Outcome:
    """Runs it to its end, in one process or in many.

    Raises:
        ConfigError: bad input; nothing was written.
    """
    run = run_fleet_in_many_processes if config.runtime == "ray" else run_fleet_in_one_process
    return run(config, run_dir, resume, recipe, quiet)


def run_fleet_in_many_processes(
    config: FleetRunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> Outcome:
    """Components in processes of their own, under Ray."""
    require_films(config)
    from penstock.overseer.distributed.fleet_conductor import DistributedFleetConductor
    from penstock.overseer.distributed.fleet_plan import FleetPlan
    from penstock.overseer.many_processes import run_under_ray

    spaces = probe_spaces(config)
    make_policy(config, spaces)
    return run_under_ray(
        config,
        run_dir,
        resume,
        recipe,
        quiet,
        {"weights.host": config.weights.host} if config.weights.transport == "arrow_flight" else {},
        _progress(config, recipe),
        lambda settings, states, launcher, log: DistributedFleetConductor(
            FleetPlan(settings, spaces, states), launcher, log
        ),
        lambda checkpoint: check_resume(config, spaces, checkpoint),
    )


def run_fleet_in_one_process(
    config: FleetRunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> Outcome:
    """Learner and rollout workers are threads of this process."""
    spaces = probe_spaces(config)

    def go_on(lineage: int, path: Path) -> FleetStart:
        check_resume(config, spaces, path)
        checkpoint = load_checkpoint(path)
        return FleetStart(checkpoint.policy, spaces, lineage, checkpoint)

    return run_in_this_process(
        config,
        run_dir,
        resume,
        recipe,
        quiet,
        _progress(config, recipe),
        lambda: FleetStart(make_policy(config, spaces), spaces),
        go_on,
        lambda directory, crew, log, start: FleetConductor(config, directory, crew, log, start),
    )


def _progress(config: FleetRunConfig, recipe: str) -> Progress:
    title, budget = f"penstock · {recipe}", config.replay.max_staleness
    return Progress(title, config.steps, budget, wording=FLEET_WORDING)

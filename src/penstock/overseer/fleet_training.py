"""Starts the training of a control policy in one process.

Everything that bad input can break (a simulator that cannot be made, a network that does not fit its spaces) is tried
before the run directory is made, so that a mistake costs nothing and leaves nothing behind.
"""

from pathlib import Path

from penstock.learner import load_checkpoint
from penstock.overseer.control.kind import ControlKind
from penstock.overseer.fleet_conductor import FleetConductor
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_local import FleetStart
from penstock.overseer.fleet_policies import make_policy
from penstock.overseer.fleet_resume import check_resume
from penstock.overseer.one_process import run_in_this_process
from penstock.overseer.overseer import RunConductor
from penstock.rundir import RunDirectory

Outcome = tuple[RunDirectory, RunConductor]
"""Where it was written, and who led it."""


def run_fleet_in_one_process(
    kind: ControlKind, config: FleetRunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> Outcome:
    """Learner and rollout workers are threads of this process."""
    spaces = kind.spaces

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
        kind.progress(config, recipe),
        lambda: FleetStart(make_policy(config, spaces), spaces),
        go_on,
        lambda directory, crew, log, start: FleetConductor(config, directory, crew, log, start),
    )

"""Starts the training of a control policy.

Everything that bad input can break (a simulator that cannot be made, a network that does not fit its spaces) is tried
before the run directory is made, so that a mistake costs nothing and leaves nothing behind.
"""

from pathlib import Path

from penstock.fleet.space_agreement import same_form
from penstock.learner import load_checkpoint
from penstock.overseer.fleet_conductor import FleetConductor
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_local import FleetStart
from penstock.overseer.fleet_policies import make_policy
from penstock.overseer.fleet_simulators import probe_spaces
from penstock.overseer.overseer import RunConductor
from penstock.overseer.run_opening import Damages, create_run, existing_run, open_log, oversee, resume_point
from penstock.overseer.supervision import Crew
from penstock.overseer.terminal import FLEET_WORDING, Progress
from penstock.rundir import RunDirectory
from penstock.types import ConfigError, Spaces


def run_fleet(
    config: FleetRunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> tuple[RunDirectory, RunConductor]:
    """Runs it to its end, with learner and rollout workers as threads of this process.

    Raises:
        ConfigError: bad input; nothing was written.
    """
    if config.runtime != "local":
        raise ConfigError(
            f"runtime is {config.runtime}: learner and workers of a fleet share one process as yet; set runtime: local"
        )
    spaces = probe_spaces(config)
    fresh = None if resume else FleetStart(make_policy(config, spaces), spaces)
    directory = existing_run(run_dir) if fresh is None else create_run(config, run_dir, recipe)
    with directory.locked():
        damages = Damages()
        start = _resumed(directory, damages, spaces) if fresh is None else fresh
        log, crew = open_log(config, directory, _progress(config, recipe), damages if resume else None), Crew()
        conductor = FleetConductor(config, directory, crew, log, start)
        oversee(conductor, crew, log, config, directory, quiet)
    return directory, conductor


def _progress(config: FleetRunConfig, recipe: str) -> Progress:
    title, budget = f"penstock · {recipe}", config.replay.max_staleness
    return Progress(title, config.steps, budget, wording=FLEET_WORDING)


def _resumed(directory: RunDirectory, damages: Damages, spaces: Spaces) -> FleetStart:
    lineage, path = resume_point(directory, damages)
    checkpoint = load_checkpoint(path)
    if not same_form(spaces, checkpoint.policy.spaces):
        raise ConfigError(
            f"fleet.tasks: {path} holds a policy for other observations or actions than these simulators have: resume "
            "with the tasks that it was trained on"
        )
    return FleetStart(checkpoint.policy, spaces, lineage, checkpoint)

"""`penstock.train`: from a validated config to a finished run directory, whatever kind of policy it trains."""

import time
from pathlib import Path

from penstock.overseer.config import RunConfig
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.overseer import RunConductor
from penstock.overseer.summary import RunSummary
from penstock.rundir import RunDirectory


def train(
    config: RunConfig | FleetRunConfig,
    run_dir: Path | str | None = None,
    resume: bool = False,
    recipe: str = "run",
    quiet: bool = False,
) -> RunSummary:
    """Trains a policy.

    Args:
        config: What to run.
        run_dir: Where to write; by default ``runs/<recipe>-<time>``. It must not exist, unless `resume`.
        resume: Go on from the newest checkpoint in `run_dir`.
        recipe: The recipe's name or path, for messages and the default directory.
        quiet: Print nothing while it runs.

    Returns:
        The outcome; an interrupted run returns too, with `complete` false.

    Raises:
        ConfigError: bad input; nothing was written.
        RunFailed: the run ended without reaching its goal; events.jsonl has the story.
    """
    started = time.monotonic()
    directory, conductor = _run(config, run_dir, resume, recipe, quiet)
    return RunSummary(
        directory.path,
        conductor.step,
        config.steps,
        conductor.complete,
        time.monotonic() - started,
        conductor.training_s,
        lessons=conductor.lessons,
        failed_groups=conductor.failed_groups,
        last_failure=conductor.last_failure,
        kind="control" if isinstance(config, FleetRunConfig) else "language",
        **conductor.results,
    )


def _run(
    config: RunConfig | FleetRunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> tuple[RunDirectory, RunConductor]:
    """Only what one kind of run needs is loaded."""
    if isinstance(config, FleetRunConfig):
        from penstock.overseer.fleet_training import run_fleet

        return run_fleet(config, run_dir, resume, recipe, quiet)
    from penstock.overseer.language_training import run_in_many_processes, run_in_one_process

    run = run_in_many_processes if config.runtime == "ray" else run_in_one_process
    return run(config, run_dir, resume, recipe, quiet)

"""`penstock.train`: from a validated config to a finished run directory, whatever kind of policy it trains."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.overseer.config import RunConfig
from penstock.overseer.overseer import RunConductor
from penstock.overseer.summary import RunSummary
from penstock.rundir import RunDirectory

if TYPE_CHECKING:
    from penstock.overseer.fleet_config import FleetRunConfig


def train(
    config: "RunConfig | FleetRunConfig",
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
        kind="language" if isinstance(config, RunConfig) else "control",
        **conductor.results,
    )


def _run(
    config: "RunConfig | FleetRunConfig", run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> tuple[RunDirectory, RunConductor]:
    """Only what one kind of run needs is loaded."""
    run_locally: Callable[..., tuple[RunDirectory, RunConductor]]
    if isinstance(config, RunConfig):
        from penstock.overseer.language.kind import LanguageKind
        from penstock.overseer.language_training import run_in_one_process

        kind, run_locally = LanguageKind(), run_in_one_process
    else:
        from penstock.overseer.control.kind import ControlKind
        from penstock.overseer.fleet_training import run_fleet_in_one_process

        kind = ControlKind.of(config)
        run_locally = partial(run_fleet_in_one_process, kind)
    if config.runtime == "ray":
        from penstock.overseer.many_processes import run_under_ray

        return run_under_ray(kind, config, run_dir, resume, recipe, quiet)
    return run_locally(config, run_dir, resume, recipe, quiet)

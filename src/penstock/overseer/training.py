"""`penstock.train`: from a validated config to a finished run directory, whatever kind of policy it trains."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.overseer.config import RunConfig
from penstock.overseer.kind import PolicyKind
from penstock.overseer.opening import open_run
from penstock.overseer.terminal import RunSummary

if TYPE_CHECKING:
    from penstock.overseer.control_config import FleetRunConfig


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
    directory, run = open_run(_kind(config), config, run_dir, resume, recipe, quiet)
    return RunSummary(
        directory.path,
        run.step,
        config.steps,
        run.complete,
        time.monotonic() - started,
        run.training_s,
        lessons=run.lessons,
        failed_groups=run.failed_groups,
        last_failure=run.last_failure,
        kind="language" if isinstance(config, RunConfig) else "control",
        **run.results,
    )


def _kind(config: Any) -> PolicyKind:
    """Only what one kind of run needs is loaded."""
    if isinstance(config, RunConfig):
        from penstock.overseer.language.kind import LanguageKind

        return LanguageKind.of(config)
    from penstock.overseer.control.kind import ControlKind

    return ControlKind.of(config)

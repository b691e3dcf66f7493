"""`penstock.train`: from a validated config to a finished run directory.

Everything that bad input can break (model, tokenizer, environments) is loaded before the run directory is made, so
that a mistake costs nothing and leaves nothing behind.
"""

import time
from pathlib import Path

from penstock.environments import Environment, load_environment
from penstock.learner import latest_checkpoint
from penstock.model.language import load_policy
from penstock.overseer.conductor import Conductor
from penstock.overseer.config import RunConfig
from penstock.overseer.overseer import Overseer
from penstock.overseer.run_log import RunLog
from penstock.overseer.summary import RunSummary
from penstock.overseer.supervision import Crew
from penstock.overseer.terminal import Progress, TerminalView
from penstock.rundir import RunDirectory
from penstock.types import RunDirectoryError


def train(
    config: RunConfig,
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
    environments = _load_environments(config)
    decoder, tokenizer = load_policy(config.model, config.seed)
    directory, checkpoint = _open_directory(config, run_dir, resume, recipe)
    lineage = directory.next_lineage() if resume else 0
    progress = Progress(f"penstock · {recipe}", config.steps, config.replay.staleness_budget)
    log = RunLog(directory, config, progress)
    crew = Crew()
    conductor = Conductor(config, directory, crew, log, (decoder, tokenizer), environments, checkpoint, lineage)
    try:
        Overseer(conductor, crew, directory, log, TerminalView(progress, quiet=quiet), config.overseer).run()
    finally:
        log.close()
    return conductor.summary(time.monotonic() - started)


def _load_environments(config: RunConfig) -> dict[str, Environment]:
    return {name: load_environment(lesson.environment.spec) for name, lesson in config.curriculum.lessons.items()}


def _open_directory(
    config: RunConfig, run_dir: Path | str | None, resume: bool, recipe: str
) -> tuple[RunDirectory, Path | None]:
    if not resume:
        name = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        return RunDirectory.create(Path(run_dir or Path("runs") / name), config.dump()), None
    if run_dir is None:
        raise RunDirectoryError("resume needs the run directory to go on with: pass run_dir")
    directory = RunDirectory.open_existing(Path(run_dir))
    checkpoint = latest_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{directory.path} has no checkpoint to resume from: it ended before its first one; start it again"
        )
    return directory, checkpoint

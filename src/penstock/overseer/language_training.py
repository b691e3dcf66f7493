"""Starts the training of a language policy in one process.

Everything that bad input can break (model, tokenizer, environments) is loaded before the run directory is made, so
that a mistake costs nothing and leaves nothing behind.
"""

from pathlib import Path

from penstock.environments import Environment, load_environment
from penstock.learner import load_checkpoint
from penstock.model.language import load_policy
from penstock.overseer.conductor import Conductor
from penstock.overseer.config import RunConfig
from penstock.overseer.kept_model import check_language_resume
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.local import Start
from penstock.overseer.one_process import run_in_this_process
from penstock.overseer.overseer import RunConductor
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer

Outcome = tuple[RunDirectory, RunConductor]
"""Where it was written, and who led it."""


def run_in_one_process(
    config: RunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> Outcome:
    """Threads of this process."""
    environments = _load_environments(config)

    def go_on(lineage: int, path: Path) -> Start:
        check_language_resume(config, path)
        checkpoint = load_checkpoint(path)
        return Start(checkpoint.decoder, Tokenizer.load(path / "model"), lineage, checkpoint)

    return run_in_this_process(
        config,
        run_dir,
        resume,
        recipe,
        quiet,
        LanguageKind().progress(config, recipe),
        lambda: _fresh(config),
        go_on,
        lambda directory, crew, log, start: Conductor(config, directory, crew, log, start, environments),
    )


def _load_environments(config: RunConfig) -> dict[str, Environment]:
    return {name: load_environment(lesson.environment.spec) for name, lesson in config.curriculum.lessons.items()}


def _fresh(config: RunConfig) -> Start:
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    return Start(load_policy(config.model, config.seed, tokenizer), tokenizer)

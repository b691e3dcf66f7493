"""Starts the training of a language policy, in one process or in many.

Everything that bad input can break (model, tokenizer, environments) is loaded before the run directory is made, so
that a mistake costs nothing and leaves nothing behind.
"""

from pathlib import Path

from penstock.environments import Environment, load_environment
from penstock.learner import load_checkpoint
from penstock.model.language import load_policy
from penstock.overseer.conductor import Conductor
from penstock.overseer.config import RunConfig
from penstock.overseer.local import Start
from penstock.overseer.overseer import RunConductor
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
from penstock.text import Tokenizer

Outcome = tuple[RunDirectory, RunConductor]
"""Where it was written, and who led it."""


def run_in_one_process(
    config: RunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> Outcome:
    """Threads of this process."""
    environments = _load_environments(config)
    fresh = None if resume else _fresh(config)
    directory = existing_run(run_dir) if fresh is None else create_run(config, run_dir, recipe)
    with directory.locked():
        damages = Damages()
        start = _resumed(config.steps, directory, damages) if fresh is None else fresh
        step = 0 if start.checkpoint is None else start.checkpoint.step
        log = open_log(config, directory, _progress(config, recipe), damages if resume else None, step)
        crew = Crew()
        conductor = Conductor(config, directory, crew, log, start, environments)
        oversee(conductor, crew, log, config, directory, quiet)
    return directory, conductor


def run_in_many_processes(
    config: RunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> Outcome:
    """Components in processes of their own, under Ray."""
    from penstock.overseer.distributed.conductor import DistributedConductor
    from penstock.overseer.distributed.plan import Plan
    from penstock.overseer.many_processes import run_under_ray
    from penstock.overseer.plan import model_shape

    for environment in _load_environments(config).values():  # every worker makes its own
        environment.close()
    model_shape(config.model)
    Tokenizer.load(config.model.tokenizer_path)
    return run_under_ray(
        config,
        run_dir,
        resume,
        recipe,
        quiet,
        {"inference.host": config.inference.host, "weights.host": config.weights.host},
        _progress(config, recipe),
        lambda settings, states, launcher, log: DistributedConductor(Plan(settings, states), launcher, log),
    )


def _progress(config: RunConfig, recipe: str) -> Progress:
    return Progress(f"penstock · {recipe}", config.steps, config.replay.staleness_budget)


def _load_environments(config: RunConfig) -> dict[str, Environment]:
    return {name: load_environment(lesson.environment.spec) for name, lesson in config.curriculum.lessons.items()}


def _fresh(config: RunConfig) -> Start:
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    return Start(load_policy(config.model, config.seed, tokenizer), tokenizer)


def _resumed(steps: int, directory: RunDirectory, damages: Damages) -> Start:
    lineage, path = resume_point(directory, damages)
    check_goal(steps, path)
    checkpoint = load_checkpoint(path)
    return Start(checkpoint.decoder, Tokenizer.load(path / "model"), lineage, checkpoint)

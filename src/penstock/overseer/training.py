"""`penstock.train`: from a validated config to a finished run directory.

Everything that bad input can break (model, tokenizer, environments) is loaded before the run directory is made, so
that a mistake costs nothing and leaves nothing behind.
"""

import secrets
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.environments import Environment, load_environment
from penstock.inference.config import is_loopback
from penstock.learner import load_checkpoint, newest_good_checkpoint, read_states
from penstock.model.language import load_policy
from penstock.overseer.conductor import Conductor
from penstock.overseer.config import RunConfig
from penstock.overseer.local import Start
from penstock.overseer.overseer import Overseer, RunConductor
from penstock.overseer.run_log import RunLog
from penstock.overseer.summary import RunSummary
from penstock.overseer.supervision import Crew
from penstock.overseer.terminal import Progress, TerminalView
from penstock.replay import Lineages, salvage_logs
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer
from penstock.types import ConfigError, RunDirectoryError


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
    run = _run_in_many_processes if config.runtime == "ray" else _run_in_one_process
    directory, conductor = run(config, run_dir, resume, recipe, quiet)
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
        **conductor.results,
    )


if TYPE_CHECKING:
    from penstock.overseer.ray import RayLauncher

_Outcome = tuple[RunDirectory, RunConductor]


def _run_in_one_process(
    config: RunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> _Outcome:
    environments = _load_environments(config)
    fresh = None if resume else _fresh(config)
    directory = _existing(run_dir) if fresh is None else _create(config, run_dir, recipe)
    with directory.locked():
        damages = _Damages()
        start = _resumed(directory, damages) if fresh is None else fresh
        log, crew = _open_log(config, directory, recipe, damages if resume else None), Crew()
        conductor = Conductor(config, directory, crew, log, start, environments)
        _oversee(conductor, crew, log, config, directory, quiet)
    return directory, conductor


def _run_in_many_processes(
    config: RunConfig, run_dir: Path | str | None, resume: bool, recipe: str, quiet: bool
) -> _Outcome:
    from penstock.overseer.distributed.conductor import DistributedConductor
    from penstock.overseer.distributed.plan import Plan
    from penstock.overseer.distributed.roles.settings import Settings
    from penstock.overseer.plan import model_shape
    from penstock.overseer.ray import RayLauncher

    for environment in _load_environments(config).values():  # every worker makes its own
        environment.close()
    model_shape(config.model)
    Tokenizer.load(config.model.tokenizer_path)
    directory = _existing(run_dir) if resume else _create(config, run_dir, recipe)
    with directory.locked():
        damages = _Damages()
        lineage, checkpoint = _resume_point(directory, damages) if resume else (0, None)
        states = None if checkpoint is None else read_states(checkpoint)
        try:
            launcher = RayLauncher(config.ray, directory.path.resolve().name, directory.path)
            _check_addresses(config, launcher)
        except ConfigError:
            if not resume:
                shutil.rmtree(directory.path)  # nothing of a run is in it
            raise
        try:
            log, crew = _open_log(config, directory, recipe, damages if resume else None), Crew()
            settings = Settings(config, directory, secrets.token_hex(32), lineage, checkpoint)
            conductor = DistributedConductor(Plan(settings, states), launcher, log)
        except BaseException:
            launcher.close(config.overseer.stop_timeout_s)
            raise
        _oversee(conductor, crew, log, config, directory, quiet)
    return directory, conductor


def _check_addresses(config: RunConfig, launcher: "RayLauncher") -> None:
    """Servers that only their own machine can reach are of no use to others."""
    machines = launcher.machines
    hosts = {"inference.host": config.inference.host, "weights.host": config.weights.host}
    for name, host in hosts.items():
        if machines > 1 and is_loopback(host):
            launcher.close(config.overseer.stop_timeout_s)
            raise ConfigError(
                f"{name} is {host}, which no other machine can reach, and the cluster has {machines}: set it to "
                "0.0.0.0 (the run's servers ask for a token that it makes itself; docs/security.md)"
            )


class _Damages(list[tuple[str, str]]):
    """Where damaged files lie now, and what is wrong with them: told before there is a log to tell."""

    def add(self, place: str, reason: str) -> None:
        """One more."""
        self.append((place, reason))


def _open_log(config: RunConfig, directory: RunDirectory, recipe: str, resumed: _Damages | None) -> RunLog:
    log = RunLog(directory, config, Progress(f"penstock · {recipe}", config.steps, config.replay.staleness_budget))
    if resumed is not None:
        _record_changes(directory, config, log)
        for place, reason in resumed:
            log.damage(place, reason)
    return log


def _oversee(
    conductor: RunConductor, crew: Crew, log: RunLog, config: RunConfig, directory: RunDirectory, quiet: bool
) -> None:
    try:
        Overseer(conductor, crew, directory, log, TerminalView(log.progress, quiet=quiet), config.overseer).run()
    except Exception as error:
        error.add_note(f"the story is in {directory.events_path}")
        raise
    finally:
        log.close()


def _resume_point(directory: RunDirectory, damages: _Damages) -> tuple[int, Path]:
    """The lineage to begin, and the newest checkpoint that is whole.

    The run is locked, so that no other process makes a newer one meanwhile.
    """
    path = newest_good_checkpoint(directory.checkpoints, damages.add)
    if path is None:
        raise RunDirectoryError(
            f"{directory.path} has no checkpoint: the run ended before its first; start it anew"
            + "".join(f"; {place} is damaged: {reason}" for place, reason in damages)
        )
    salvage_logs(directory, damages.add)
    # A life that went back to its very beginning has a number, but no fork.
    newest = max(Lineages(directory.lineages_path).newest, int(read_states(path)["run"]["lineage"]))
    return newest + 1, path


def _load_environments(config: RunConfig) -> dict[str, Environment]:
    return {name: load_environment(lesson.environment.spec) for name, lesson in config.curriculum.lessons.items()}


def _fresh(config: RunConfig) -> Start:
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    return Start(load_policy(config.model, config.seed, tokenizer), tokenizer)


def _create(config: RunConfig, run_dir: Path | str | None, recipe: str) -> RunDirectory:
    name = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return RunDirectory.create(run_dir or Path("runs") / name, config.dump() | {"versions": _versions()})


def _record_changes(directory: RunDirectory, config: RunConfig, log: RunLog) -> None:
    """Puts what differs from the recorded config into the event log, and the new config in its place."""
    url = directory.read_config().get("replay", {}).get("store", {}).get("url")
    if url != config.replay.store.url:
        raise ConfigError(
            f"replay.store.url is {config.replay.store.url}, but the rollouts of {directory.path} are at "
            f"{url or 'its own folder'}: leave it out, a run stays where it began"
        )
    old, new = _flat(directory.read_config()), _flat(config.dump() | {"versions": _versions()})
    changes = {key: [old.get(key), new.get(key)] for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    log.event("resume", changes=changes)
    directory.write_config(config.dump() | {"versions": _versions()})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("penstock", "jax", "jaxlib", "equinox", "optax", "numpy", "pyarrow")}


def _existing(run_dir: Path | str | None) -> RunDirectory:
    if run_dir is None:
        raise RunDirectoryError("resume needs the run directory to go on with: pass run_dir")
    return RunDirectory.open_existing(run_dir)


def _resumed(directory: RunDirectory, damages: _Damages) -> Start:
    lineage, path = _resume_point(directory, damages)
    checkpoint = load_checkpoint(path)
    return Start(checkpoint.decoder, Tokenizer.load(path / "model"), lineage, checkpoint)

"""Opens a run whose components are in processes of their own, under Ray, whatever it trains."""

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.inference.config import is_loopback
from penstock.learner import read_states
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.kind import PolicyKind
from penstock.overseer.ray import RayLauncher
from penstock.overseer.run import Run
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
from penstock.rundir import RunDirectory
from penstock.types import ConfigError

_LEAST_TOKEN = 16  # characters


def run_under_ray(
    kind: PolicyKind,
    config: Any,
    run_dir: Path | str | None,
    resume: bool,
    recipe: str,
    quiet: bool,
) -> tuple[RunDirectory, Run]:
    """Runs it to its end.

    Args:
        kind: What it trains.
        config: The run's.
        run_dir: As of `penstock.train`, like what follows.
        resume: Whether it goes on.
        recipe: Its name or path.
        quiet: Whether nothing is printed.

    Raises:
        ConfigError: bad input; nothing was written.
    """
    kind.check(config)
    token = run_token()
    progress = kind.progress(config, recipe)
    directory = existing_run(run_dir) if resume else create_run(config, run_dir, recipe)
    with directory.locked():
        damages = Damages()
        lineage, checkpoint = resume_point(directory, damages) if resume else (0, None)
        check_goal(config.steps, checkpoint)
        if checkpoint is not None:
            kind.check_resume(config, checkpoint)
        states = None if checkpoint is None else read_states(checkpoint)
        try:
            launcher = _joined(config, directory, kind.hosts(config))
        except ConfigError:
            if not resume:
                shutil.rmtree(directory.path)  # nothing of a run is in it
            raise
        try:
            log = open_log(config, directory, progress, damages if resume else None, checkpoint)
            settings = Settings(config, directory, token, lineage, checkpoint)
            run = Run(kind, settings, states, launcher, log)
        except BaseException:
            launcher.close(config.overseer.stop_timeout_s)
            raise
        crew = Crew()
        crew.start("cluster", launcher.watch)
        oversee(run, crew, log, config, directory, quiet)
    return directory, run


def run_token() -> str:
    """What the run's servers ask for: `PENSTOCK_TOKEN` of the environment, or else a new secret that nobody else has.

    Raises:
        ConfigError: the environment's is too short.
    """
    given = os.environ.get("PENSTOCK_TOKEN")
    if given is None:
        return secrets.token_hex(32)
    if len(given) < _LEAST_TOKEN:
        raise ConfigError(
            f"PENSTOCK_TOKEN has {len(given)} characters, and a run's token has at least {_LEAST_TOKEN}: set a longer "
            "one, or unset it for one that the run makes itself"
        )
    return given


def _joined(config: Any, directory: RunDirectory, hosts: Mapping[str, str]) -> RayLauncher:
    """A launcher on the cluster of the config, whose machines reach one another."""
    launcher = RayLauncher(config.ray, directory.path.resolve().name, directory.path)
    try:
        _check_reach(launcher.machines, config.weights.transport, hosts)
    except ConfigError:
        launcher.close(config.overseer.stop_timeout_s)
        raise
    return launcher


def _check_reach(machines: int, transport: str, hosts: Mapping[str, str]) -> None:
    """Memory and servers that only their own machine can reach are of no use to others."""
    if machines < 2:
        return
    if transport == "shared_memory":
        raise ConfigError(
            f"weights.transport is shared_memory, which no other machine can reach, and the cluster has {machines}: "
            "set it to arrow_flight, with weights.host=0.0.0.0, or to checkpoint, with a folder that all reach"
        )
    for name, host in hosts.items():
        if is_loopback(host) and (name != "weights.host" or transport == "arrow_flight"):
            raise ConfigError(
                f"{name} is {host}, which no other machine can reach, and the cluster has {machines}: set it to "
                "0.0.0.0 (the run's servers ask for a token that it makes itself; docs/security.md)"
            )

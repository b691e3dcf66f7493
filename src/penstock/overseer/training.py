"""`penstock.train`: from a validated config to a finished run directory, whatever kind of policy it trains.

Opens the directory, the log and the checkpoint to go on from, and has the run overseen.
"""

import difflib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from penstock.learner import newest_good_checkpoint, read_states
from penstock.overseer.component import Settings
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import differences, load_config, load_recorded_config
from penstock.overseer.kind import PolicyKind
from penstock.overseer.launch.host import logged
from penstock.overseer.progress import Progress
from penstock.overseer.run import Run, step_of
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import Overseer, ThreadGroup
from penstock.overseer.supervisor.messages import Identity
from penstock.overseer.tasks import DirectTasks, SupervisedTasks
from penstock.overseer.terminal import RunSummary, TerminalView
from penstock.replay import FRAGMENTS, LANGUAGE, Lineages, repair_logs
from penstock.rundir import RunDirectory, read_events, read_json_lines
from penstock.rundir.store_urls import is_remote, local_root
from penstock.types import CheckpointError, ConfigError, PenstockError, RunDirectoryError
from penstock.types.addresses import is_loopback
from penstock.weights.shared_memory import free_abandoned

if TYPE_CHECKING:
    from penstock.overseer.control_config import FleetRunConfig
    from penstock.overseer.language.given import GivenEnvironment, GivenReward
    from penstock.overseer.ray import RayLauncher
    from penstock.overseer.update_loop import UpdateFeed


def train(
    config: "RunConfig | FleetRunConfig | str | Path | None" = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    recipe: str | None = None,
    quiet: bool = False,
    *,
    environment: "GivenEnvironment | Mapping[str, GivenEnvironment] | None" = None,
    reward: "GivenReward | Mapping[str, GivenReward] | None" = None,
    **overrides: Any,
) -> RunSummary:
    """Trains a policy, and shows how it goes: ``penstock.train("cats", steps=40)``.

    Ctrl-C (in a notebook: *interrupt the kernel*) ends the run at the next update with a checkpoint, and the summary is
    returned; a second one ends it at once with `KeyboardInterrupt`.

    Args:
        config: What to run: a recipe's name, a YAML path, or what `penstock.load_config` returned. None, with `resume`:
            what the run itself recorded.
        run_dir: Where to write; by default ``runs/<recipe>-<time>``. It must not exist, unless `resume`.
        resume: Go on from the newest checkpoint in `run_dir`.
        recipe: The recipe's name or path, for messages and the default directory.
        quiet: Print nothing while it runs.
        environment: An `Environment` or a class of them in place of the lesson's own; of several lessons, a mapping
            from their ids. It runs in this process (``isolation: none``, said at the start): one that hangs or ends the
            process takes the run along. The run closes it at its end. A config names it by ``object:…``, and to resume
            the run it must be given again.
        reward: A function, or several, as `reward` of the lesson's environment (`JsonlEnvironment` takes them), or a
            mapping likewise. Called in this process, from several threads, without a time limit. It takes the place of
            the lesson's `reward` and `reward_weights`, so each weighs 1.
        overrides: Further changes to the configuration, as of `penstock.load_config`: ``steps=40``,
            ``learner={"optimizer": {"learning_rate": 1e-3}}``, ``asynchronous=False``.

    Returns:
        The outcome: `run_dir`, the version reached, held-out results before and after, the last update's `metrics`. An
        interrupted run returns too, with `complete` false.

    Raises:
        ConfigError: bad input, in one line; nothing was written. Also for objects under ``runtime: ray``, and where a
            run that is resumed was given some, and they are not given again.
        RunDirectoryError: `run_dir` exists, or is no run to resume, or has trained and has no whole checkpoint left.
        CheckpointError: the checkpoint to resume from cannot be read.
        RunFailed: the run ended without reaching its goal; events.jsonl has the story. Other `PenstockError`: likewise,
            such as `NoProgressError` (nothing moved for ``overseer.no_progress_s``) and `MismatchError`.
        KeyboardInterrupt: a second stop request.
    """
    return request_run(config, run_dir, resume, recipe, quiet, environment, reward, overrides).run()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that was asked for, with all that bad input can break without its directory tried.

    Attributes:
        kind: What it trains.
        config: Validated.
        run_dir: As of `train`, like what follows.
        resume: Whether it goes on.
        recipe: Its name or path.
        quiet: Whether nothing is printed.
    """

    kind: PolicyKind
    config: "RunConfig | FleetRunConfig"
    run_dir: Path | str | None
    resume: bool
    recipe: str
    quiet: bool

    def run(self, feed: "UpdateFeed | None" = None) -> RunSummary:
        """Opens the run, and has it overseen to its end; `feed` is given each update."""
        started = time.monotonic()
        config = self.config
        directory, run = open_run(self, feed)
        failed, last_failure = run.failures
        return RunSummary(
            directory.path,
            run.step,
            config.steps,
            run.complete,
            time.monotonic() - started,
            run.training_s,
            lessons=run.lessons,
            failed_groups=failed,
            last_failure=last_failure,
            kind="language" if isinstance(config, RunConfig) else "control",
            no_signal=tuple(run.log.progress.stretches),
            goal=run.log.progress.goal,
            metrics=run.newest_metrics,
            warm_start=isinstance(config, RunConfig) and config.learner.warm_start is not None,
            **run.results,
        )


_ARGUMENTS = ("run_dir", "resume", "recipe", "quiet", "environment", "reward")
_ALIKE = 0.8  # as difflib counts it
_MEANT = {
    "async_": "asynchronous", "env": "environment", "output_dir": "run_dir", "resume_from_checkpoint": "resume",
    "reward_fn": "reward", "reward_funcs": "reward", "verbose": "quiet",
}  # fmt: skip
"""What a call may mean by other names."""


def request_run(
    config: "RunConfig | FleetRunConfig | str | Path | None",
    run_dir: Path | str | None,
    resume: bool,
    recipe: str | None,
    quiet: bool,
    environment: Any,
    reward: Any,
    overrides: Mapping[str, Any],
) -> RunRequest:
    """What `train` was called with, as a run that may begin.

    Raises:
        ConfigError: bad input.
    """
    for name in overrides.keys() - RunConfig.model_fields:
        alike = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=_ALIKE)
        if meant := _MEANT.get(name) or "".join(alike):
            raise ConfigError(f"unknown argument {name}: did you mean {meant}?")
    if not isinstance(run_dir, str | Path | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"run_dir is {run_dir!r:.60}: it must be a path; name other arguments, such as environment=…")
    named = "run" if isinstance(config, BaseModel) else str(config)
    if config is None:
        if not resume:
            raise ConfigError('config is missing: give a recipe\'s name, such as penstock.train("cats")')
        directory = _existing_run(run_dir)
        config, named = load_recorded_config(directory, overrides, trust=False)[0], str(directory.config_path)
    elif overrides or not isinstance(config, BaseModel):
        config = load_config(config, overrides)
    recipe = named if recipe is None else recipe
    objects = {"environment": environment, "reward": reward}
    if not isinstance(config, RunConfig):
        for argument, given in objects.items():
            if given is not None:
                raise ConfigError(
                    f"{argument} is for language policies, and {recipe} trains a control policy: name its simulators "
                    "in fleet.tasks"
                )
        from penstock.overseer.control.kind import ControlKind

        return RunRequest(ControlKind.of(config), config, run_dir, resume, recipe, quiet)
    if config.replay.from_rollouts is not None:
        for argument, given in objects.items():
            if given is not None:
                raise ConfigError(f"{argument} is given, but replay.from_rollouts has rewarded rollouts: leave it out")
        from penstock.overseer.language.offline import OfflineKind

        return RunRequest(OfflineKind(config), config, run_dir, resume, recipe, quiet)
    from penstock.overseer.language.given import take_objects
    from penstock.overseer.language.kind import LanguageKind  # only what one kind of run needs is loaded

    taken = take_objects(config, **objects)
    return RunRequest(LanguageKind.of(taken.config, taken), taken.config, run_dir, resume, recipe, quiet)


_LEAST_TOKEN = 16  # characters

PACKAGES = ("penstock", "jax", "jaxlib", "equinox", "optax", "numpy", "pyarrow", "gymnasium")
"""Whose versions are recorded."""


Damages = list[tuple[str, str]]
"""Where damaged files lie now, and what is wrong with them: told before there is a log to tell."""


def open_run(request: RunRequest, feed: "UpdateFeed | None" = None) -> tuple[RunDirectory, Run]:
    """Opens a run and has it overseen to its end.

    All that bad input can break is tried before the run directory is made, so that a mistake costs nothing and leaves
    nothing behind.

    Args:
        request: The run that was asked for.
        feed: Is given each update of a run in this process, and holds the next until it was looked at.

    Raises:
        ConfigError: bad input; nothing was written.
    """
    kind, resume = request.kind, request.resume
    config: Any = request.config
    local = config.runtime == "local"
    fresh = kind.begin(config) if local and not resume else None
    if not local:
        kind.check(config)
    token = secrets.token_hex(32) if local else run_token()  # locally that of a server that it launches
    directory = _existing_run(request.run_dir) if resume else create_run(config, request.run_dir, request.recipe)
    with directory.locked():
        lineage, checkpoint, damages = resume_point(directory) if resume else (0, None, None)
        check_goal(config.steps, checkpoint)
        progress = kind.progress(config, request.recipe)
        opened = partial(open_log, config, directory, progress, damages, checkpoint)
        crew = ThreadGroup()
        settings = Settings(config, directory, token, lineage, checkpoint)
        recorded = directory.read_config() if resume else None
        if local:
            if fresh is None:
                fresh = kind.begin(config) if checkpoint is None else kind.resume(config, checkpoint)
            log = opened()
            run = Run(kind, DirectTasks(kind, settings, fresh, crew, log), log, feed)
            fresh = None  # this frame lasts as long as the run, its first weights until the first update
        else:
            log, run = _under_ray(kind, settings, crew, opened, resume)
        try:
            oversee(run, crew, request.quiet)
        except (ConfigError, CheckpointError):
            if recorded is not None and log.step == step_of(checkpoint):  # no update was made with what is refused
                directory.write_config(recorded)
            raise
    return directory, run


def _under_ray(
    kind: PolicyKind, settings: Settings[Any], crew: ThreadGroup, opened: Callable[[], RunLog], resume: bool
) -> tuple[RunLog, Run]:
    config, directory, checkpoint = settings.config, settings.directory, settings.checkpoint
    if checkpoint is not None:
        kind.check_resume(config, checkpoint)
    states = None if checkpoint is None else read_states(checkpoint)
    try:
        launcher = _joined(kind, settings, states)
    except PenstockError:
        if not resume:
            shutil.rmtree(directory.path)  # nothing of a run is in it
        raise
    try:
        log = opened()
        run = Run(kind, SupervisedTasks(kind, settings, states, launcher, log), log)
    except BaseException:
        launcher.close(config.overseer.stop_timeout_s)
        raise
    crew.start("cluster", launcher.watch)
    return log, run


def open_log(
    config: "RunConfig | FleetRunConfig",
    directory: RunDirectory,
    progress: Progress,
    resumed: Damages | None,
    checkpoint: Path | None = None,
) -> RunLog:
    """The run's log; with `resumed`, what the config changed and what is damaged or missing stands in it already.

    Args:
        config: The run's.
        directory: Where it is written.
        progress: What the view shows.
        resumed: What was damaged, of a run that is resumed; None for a new one.
        checkpoint: What a run goes on from; its first events are of that version.

    Raises:
        ConfigError: a tracker cannot start; of a new run nothing is left behind.
    """
    try:
        log = RunLog(directory, config, progress)
    except ConfigError:
        if resumed is None:
            shutil.rmtree(directory.path)  # nothing of a run is in it
        raise
    log.step = progress.step = step_of(checkpoint)
    log.announce()
    if resumed is not None:
        _record_changes(directory, config, log)
        for place, reason in resumed:
            log.damage(place, reason)
        if checkpoint is None:
            log.event("started_anew", reason=f"{directory.path} ended before its first checkpoint")
        elif log.step and not is_remote(config.replay.store.url) and config.replay.store.max_bytes is None:
            _note_missing(directory, config, log)
        if log.step == config.steps:
            _note_finished(directory, log)
    return log


def _note_missing(directory: RunDirectory, config: "RunConfig | FleetRunConfig", log: RunLog) -> None:
    """Folders without a file although the run has trained: somebody deleted them."""
    folder = (LANGUAGE if isinstance(config, RunConfig) else FRAGMENTS).folder
    lost = {
        folder: "what was trained stays trained, but can no longer be looked at; what waited is generated anew",
        "batches": "which rollouts made which update can no longer be looked at",
    }
    if isinstance(config, RunConfig) and config.replay.from_rollouts is not None:
        del lost[folder]  # they are another run's
    for name, reason in lost.items():
        path = local_root(directory.path, config.replay.store.url) / name
        if next(path.glob("*.parquet"), None) is None:
            log.event("files_missing", path=str(path), reason=f"it is empty: {reason}")


def _note_finished(directory: RunDirectory, log: RunLog) -> None:
    """A run that has nothing left to do evaluates its last version once more."""
    last = next((e for e in reversed(read_events(directory.events_path)) if e["event"] == "evaluation"), None)
    if last is not None and (last["when"], last["step"]) == ("after", log.step) and None not in last["reward"].values():
        words = "all steps were made and the last version was evaluated: it is only evaluated again; more steps go on"
        log.event("evaluated_before", words=words)


def oversee(run: Run, crew: ThreadGroup, quiet: bool) -> None:
    """Runs it to its end; closes the log. Memory that killed runs left on this machine is freed before."""
    log, directory, local = run.log, run.tasks.settings.directory, run.config.runtime == "local"
    try:
        for found in free_abandoned():
            log.event("memory_freed", path=str(found.path), bytes=found.nbytes)
        with logged(directory.path / "logs" / "run.jsonl", run.tasks.settings.lineage) if local else nullcontext():
            Overseer(run, crew, TerminalView(log.progress, quiet=quiet)).run()
    except Exception as error:
        if directory.events_path.exists():
            error.add_note(f"the story is in {directory.events_path}")
        raise
    finally:
        log.close()


def resume_point(directory: RunDirectory) -> tuple[int, Path | None, Damages]:
    """The lineage to begin, the newest checkpoint that is whole (None: it ended before its first), and what is damaged.

    The run is locked, so that no other process makes a newer checkpoint meanwhile.

    Raises:
        RunDirectoryError: the run has trained, but none of its checkpoints is left.
    """
    damages: Damages = []

    def note(place: str, reason: str) -> None:
        damages.append((place, reason))

    path = newest_good_checkpoint(directory.checkpoints, note)
    if path is None and _has_trained(directory):
        raise RunDirectoryError(
            f"{directory.path} has no checkpoint that is whole, though it has trained: restore one from a copy, or "
            "start another run" + "".join(f"; {place} is damaged: {reason}" for place, reason in damages)
        )
    repair_logs(directory, note)
    lineages = [Lineages(directory.lineages_path).newest, *_lineages_of_tickets(directory)]
    if path is not None:
        lineages.append(int(read_states(path)["run"]["lineage"]))
    return max(lineages) + 1, path, damages


def _has_trained(directory: RunDirectory) -> bool:
    """Whether anything but a checkpoint says so; batches may lie elsewhere, or be deleted."""
    kept = any(directory.checkpoints.glob("damaged-*")) or any(directory.batches.iterdir())
    return kept or any(row.get("step") for row in read_json_lines(directory.metrics_path))


def _lineages_of_tickets(directory: RunDirectory) -> set[int]:
    """Of lives that began anew, or ended before their first checkpoint: nothing else may name them."""
    return {int(row.get("lineage", 0)) for row in read_json_lines(directory.tickets_path)}


def check_goal(steps: int, checkpoint: Path | None) -> None:
    """Whether a run that goes on from a checkpoint has anywhere to go.

    Raises:
        ConfigError: the checkpoint is beyond the goal.
    """
    if steps < (reached := step_of(checkpoint)):
        raise ConfigError(f"steps is {steps}, and {checkpoint} is at {reached} already: give at least that many")


def create_run(config: "RunConfig | FleetRunConfig", run_dir: Path | str | None, recipe: str) -> RunDirectory:
    """The directory of a new run; without `run_dir` one that nobody else has, however many runs begin at a time."""
    private = config.overseer.private
    path = run_dir or _unused(Path("runs") / f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}", private)
    return RunDirectory.create(path, config.dump() | {"versions": _versions()}, private)


def _unused(path: Path, private: bool) -> Path:
    """The path, or with a number behind it the first that does not exist; the folder is made."""
    number, free = 1, path
    while True:
        try:
            free.mkdir(0o700 if private else 0o777, parents=True)
            return free
        except OSError:
            if not os.path.lexists(free):
                return free  # whoever makes a run of it says why that cannot be
        number += 1
        free = path.with_name(f"{path.name}-{number}")


def check_resume(config: "RunConfig | FleetRunConfig", run_dir: Path | str | None) -> Path | None:
    """Refuses what going on with a run would refuse of its configuration, and leaves the run as it is.

    Returns:
        The checkpoint that it would go on from; None where it has none yet.

    Raises:
        ConfigError: as where the run would go on.
        CheckpointError: the checkpoint to go on from cannot be read, or holds another kind of policy.
        RunDirectoryError: there is no run.
    """
    directory = _existing_run(run_dir)
    checkpoint = newest_good_checkpoint(directory.checkpoints)
    check_goal(config.steps, checkpoint)
    if checkpoint is not None:
        asked = request_run(
            config, run_dir, resume=True, recipe=None, quiet=True, environment=None, reward=None, overrides={}
        )
        asked.kind.check_resume(config, checkpoint)
    _changes(directory, config)
    return checkpoint


def _changes(directory: RunDirectory, config: "RunConfig | FleetRunConfig") -> dict[str, Any]:
    """What differs from the recorded config, by key.

    Raises:
        ConfigError: a resumed run cannot have that.
    """
    url = directory.read_config().get("replay", {}).get("store", {}).get("url")
    if url != config.replay.store.url:
        raise ConfigError(
            f"replay.store.url is {config.replay.store.url}, but the rollouts of {directory.path} are at "
            f"{url or 'its own folder'}: leave it out, a run stays where it began"
        )
    changes = differences(directory.read_config(), config.dump() | {"versions": _versions()})
    for key in ("model.path", "model.initial_checkpoint"):  # a checkpoint needs neither, so that nothing else looks
        before, now = changes.get(key, (None, None))
        if now is not None and not Path(now).is_dir():
            raise ConfigError(f"{key} is {now}: there is no such directory; leave it as it was ({before})")
    return changes


def _record_changes(directory: RunDirectory, config: "RunConfig | FleetRunConfig", log: RunLog) -> None:
    """Puts what differs from the recorded config into the event log, and the new config in its place."""
    log.event("resume", changes=_changes(directory, config))
    if config.overseer.private:
        directory.make_private()
    directory.write_config(config.dump() | {"versions": _versions()})


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def _existing_run(run_dir: Path | str | None) -> RunDirectory:
    """The directory of a run to go on with."""
    if run_dir is None:
        raise RunDirectoryError("resume needs the run directory to go on with: pass run_dir")
    return RunDirectory.open_existing(run_dir)


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


def _joined(kind: PolicyKind, settings: Settings[Any], states: Mapping[str, Any] | None) -> "RayLauncher":
    """A launcher on the cluster of the config, whose machines reach one another and have room for all components."""
    from penstock.overseer.ray import RayLauncher  # an extra, which takes a moment to load

    config, directory = settings.config, settings.directory
    launcher = RayLauncher(config.ray, directory.path.resolve().name, directory.path)
    try:
        _check_reach(launcher.machines, config)
        specs = kind.components(settings, states)
        launcher.check_room([(Identity(spec.role, spec.index, 0), spec.resources) for spec in specs], [])
    except PenstockError:
        launcher.close(config.overseer.stop_timeout_s)
        raise
    return launcher


def _check_reach(machines: int, config: "RunConfig | FleetRunConfig") -> None:
    """Memory and servers that only their own machine can reach are of no use to others."""
    transport = config.weights.transport
    if machines < 2:
        return
    if transport == "shared_memory":
        raise ConfigError(
            f"weights.transport is shared_memory, which no other machine can reach, and the cluster has {machines}: "
            "set it to arrow_flight, with weights.host=0.0.0.0, or to checkpoint, with a folder that all reach"
        )
    hosts = {"inference.host": config.inference.host} if isinstance(config, RunConfig) else {}
    if transport == "arrow_flight":
        hosts["weights.host"] = config.weights.host
    for name, host in hosts.items():
        if is_loopback(host):
            raise ConfigError(
                f"{name} is {host}, which no other machine can reach, and the cluster has {machines}: set it to "
                "0.0.0.0 (the run's servers ask for a token that it makes itself; docs/security.md)"
            )

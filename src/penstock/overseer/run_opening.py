"""Opens a run, whatever it trains: its directory, its log, the checkpoint to go on from; and has it overseen."""

import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.learner import newest_good_checkpoint, read_states
from penstock.learner.checkpoint_files import read_state
from penstock.overseer.config import RunConfig
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.overseer import Overseer, RunConductor
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import Crew
from penstock.overseer.terminal import Progress, TerminalView
from penstock.replay import FRAGMENTS, LANGUAGE, Lineages, salvage_logs
from penstock.rundir import RunDirectory, read_json_lines
from penstock.types import ConfigError, RunDirectoryError
from penstock.weights.shared_memory import free_abandoned

PACKAGES = ("penstock", "jax", "jaxlib", "equinox", "optax", "numpy", "pyarrow", "gymnasium")
"""Whose versions are recorded."""


class Damages(list[tuple[str, str]]):
    """Where damaged files lie now, and what is wrong with them: told before there is a log to tell."""

    def add(self, place: str, reason: str) -> None:
        """One more."""
        self.append((place, reason))


def open_log(
    config: RunConfig | FleetRunConfig,
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
    """
    log = RunLog(directory, config, progress)
    log.step = progress.step = step_of(checkpoint)
    if resumed is not None:
        _record_changes(directory, config, log)
        for place, reason in resumed:
            log.damage(place, reason)
        if checkpoint is None:
            log.event("started_anew", reason=f"{directory.path} ended before its first checkpoint")
        elif log.step and config.replay.store.url is None and config.replay.store.max_bytes is None:
            _note_missing(directory, config, log)
    return log


def _note_missing(directory: RunDirectory, config: RunConfig | FleetRunConfig, log: RunLog) -> None:
    """Folders without a file although the run has trained: somebody deleted them."""
    folder = (FRAGMENTS if isinstance(config, FleetRunConfig) else LANGUAGE).folder
    lost = {
        folder: "what was trained stays trained, but can no longer be looked at; what waited is generated anew",
        "batches": "which rollouts made which update can no longer be looked at",
    }
    for name, reason in lost.items():
        path = directory.path / name
        if next(path.glob("*.parquet"), None) is None:
            log.event("files_missing", path=str(path), reason=f"it is empty: {reason}")


def oversee(
    conductor: RunConductor,
    crew: Crew,
    log: RunLog,
    config: RunConfig | FleetRunConfig,
    directory: RunDirectory,
    quiet: bool,
) -> None:
    """Runs it to its end; closes the log. Memory that killed runs left on this machine is freed before."""
    try:
        for found in free_abandoned():
            log.event("memory_freed", path=str(found.path), bytes=found.nbytes)
        Overseer(conductor, crew, directory, log, TerminalView(log.progress, quiet=quiet), config.overseer).run()
    except Exception as error:
        if directory.events_path.exists():
            error.add_note(f"the story is in {directory.events_path}")
        raise
    finally:
        log.close()


def resume_point(directory: RunDirectory, damages: Damages) -> tuple[int, Path | None]:
    """The lineage to begin, and the newest checkpoint that is whole; None where the run ended before its first.

    The run is locked, so that no other process makes a newer one meanwhile.

    Raises:
        RunDirectoryError: the run has trained, but none of its checkpoints is left.
    """
    path = newest_good_checkpoint(directory.checkpoints, damages.add)
    if path is None and (any(directory.checkpoints.glob("damaged-*")) or any(directory.batches.iterdir())):
        raise RunDirectoryError(
            f"{directory.path} has no checkpoint that is whole, though it has trained: restore one from a copy, or "
            "start another run" + "".join(f"; {place} is damaged: {reason}" for place, reason in damages)
        )
    salvage_logs(directory, damages.add)
    lineages = [Lineages(directory.lineages_path).newest, *_lineages_of_tickets(directory)]
    if path is not None:
        lineages.append(int(read_states(path)["run"]["lineage"]))
    return max(lineages) + 1, path


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


def step_of(checkpoint: Path | None) -> int:
    """The version that a checkpoint, as `resume_point` gave it, holds; 0 for a run that begins."""
    return 0 if checkpoint is None else int(read_state(checkpoint)["step"])


def create_run(config: RunConfig | FleetRunConfig, run_dir: Path | str | None, recipe: str) -> RunDirectory:
    """The directory of a new run."""
    name = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    resolved = config.dump() | {"versions": _versions()}
    return RunDirectory.create(run_dir or Path("runs") / name, resolved, config.overseer.private)


def _record_changes(directory: RunDirectory, config: RunConfig | FleetRunConfig, log: RunLog) -> None:
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
    if config.overseer.private:
        directory.make_private()
    directory.write_config(config.dump() | {"versions": _versions()})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def existing_run(run_dir: Path | str | None) -> RunDirectory:
    """The directory of a run to go on with."""
    if run_dir is None:
        raise RunDirectoryError("resume needs the run directory to go on with: pass run_dir")
    return RunDirectory.open_existing(run_dir)

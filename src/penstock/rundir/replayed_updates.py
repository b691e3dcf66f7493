"""What `penstock replay` found of an update: in the user's cache, a JSON file for each, and nothing in the run.

The dashboard's page of the update shows it. A replay takes the place of an older one with the same changes, and of one
update the newest `MOST_KEPT` are kept. Whoever deletes such a file can have it made again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.rundir.directory import RunDirectory
from penstock.rundir.logs import to_json
from penstock.rundir.storage import write_atomically
from penstock.types import RunDirectoryError

MOST_KEPT = 12
HEADLINE = ("train/loss", "train/grad_norm")
"""Numbers of an update that are shown first."""


@dataclass(frozen=True, slots=True)
class KeptReplay:
    """One update that was made again.

    Attributes:
        time: When that was; Unix seconds.
        checkpoint: Where the replay began, `step-N`.
        stored: What metrics.jsonl has, by name; None where it has no number.
        recomputed: The same names.
        different: Names of those that are not the same, bit for bit.
        weights_equal: Whether parameters and optimiser state are those of the version's checkpoint; None: there is
            none, or the update was changed.
        changes: What was set, `KEY=VALUE`; empty for an update as it was.
        dropped: Ids of the rollouts that were left out.
        notes: What of the machine is not as the run had it.
    """

    time: float
    checkpoint: str
    stored: Mapping[str, float | None]
    recomputed: Mapping[str, float | None]
    different: tuple[str, ...]
    weights_equal: bool | None = None
    changes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def replays_path(directory: RunDirectory, batch_id: str) -> Path:
    """Where the replays of the update that trained on a batch are kept, or would be."""
    return directory.cached("replays", batch_id, "json")


def write_replay(directory: RunDirectory, batch_id: str, replay: KeptReplay) -> Path:
    """Adds what was found of the update that trained on a batch; returns where it is.

    Raises:
        OSError: the cache cannot be written.
    """
    path = replays_path(directory, batch_id)
    try:
        known = read_replays(directory, batch_id)
    except RunDirectoryError:  # half a file of before: it is replaced
        known = []
    others = [one for one in known if (one.changes, one.dropped) != (replay.changes, replay.dropped)]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, to_json([asdict(one) for one in [replay, *others][:MOST_KEPT]]) + "\n", durable=False)
    return path


def read_replays(directory: RunDirectory, batch_id: str) -> list[KeptReplay]:
    """What was found of the update that trained on a batch, the newest first; empty where it was never made again.

    Raises:
        RunDirectoryError: the file is damaged, or of another version.
    """
    path = replays_path(directory, batch_id)
    try:
        return [_replay(entry) for entry in json.loads(path.read_text())] if path.is_file() else []
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error}): delete it, penstock replay makes it again"
        ) from error


def _replay(entry: dict[str, Any]) -> KeptReplay:
    lists: dict[str, Any] = {name: tuple(entry.pop(name)) for name in ("different", "changes", "dropped", "notes")}
    return KeptReplay(**entry, **lists)

"""What forward passes say of an update's tokens, and its gradients of its rollouts.

Of tokens these are log-probabilities under the update's weights and the newest, and entropies.

No run stores that, since it follows from checkpoints and batch files, and would take half their bytes again or more.
`penstock why` computes it and writes a Parquet file into the user's cache, one for each update, named by a digest of
the run and the batch; the dashboard colours tokens by it. Whoever deletes such a file can have it made again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.directory import RunDirectory
from penstock.rundir.parquet import (
    PAIRS,
    arrays_from_column,
    list_column,
    pairs_column,
    read_parquet,
    table_of,
    versioned,
    write_parquet,
)
from penstock.types import RunDirectoryError

_PLAIN, _ARRAYS = ("rollout_id", "newest_step"), ("logprobs", "entropies", "newest_logprobs")
RESCORED_SCHEMA = versioned(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("newest_step", pa.int32(), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("entropies", pa.list_(pa.float32()), nullable=False),
        pa.field("newest_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("numbers", PAIRS, nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class RescoredRollout:
    """Numbers of one rollout's prompt and response, end to end, as far as the update had them; NaN where not trained.

    Attributes:
        rollout_id: The rollout.
        newest_step: Which version's weights were the run's newest checkpoint when it was computed.
        logprobs: float32 [n], under the weights that the update began with.
        entropies: float32 [n], in nats, of what each token was drawn from under the same.
        newest_logprobs: float32 [n], under the weights of version `newest_step`.
        numbers: What the rollout did to the update, by the names of ``penstock why --json`` (`moved`, `along`, …);
            empty in older files.
    """

    rollout_id: str
    newest_step: int
    logprobs: np.ndarray
    entropies: np.ndarray
    newest_logprobs: np.ndarray
    numbers: tuple[tuple[str, float], ...] = ()


def rescored_path(directory: RunDirectory, batch_id: str) -> Path:
    """Where the numbers of a batch are kept, or would be."""
    return directory.cached("tokens", batch_id, "parquet")


def write_rescored(directory: RunDirectory, batch_id: str, rollouts: Sequence[RescoredRollout]) -> Path:
    """Writes what was computed of a batch, in place of what was there; returns where.

    Raises:
        OSError: the cache cannot be written.
    """
    path = rescored_path(directory, batch_id)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    values: dict[str, Any] = {
        field.name: [getattr(one, field.name) for one in rollouts] for field in fields(RescoredRollout)
    }
    for name in _ARRAYS:
        values[name] = list_column(values[name], pa.float32())
    values["numbers"] = pairs_column(values["numbers"])
    write_parquet(path, table_of(values, RESCORED_SCHEMA))
    return path


def read_rescored(directory: RunDirectory, batch_id: str) -> dict[str, RescoredRollout]:
    """By rollout, what was computed of a batch; empty where nothing was.

    Raises:
        RunDirectoryError: the file is damaged.
    """
    path = rescored_path(directory, batch_id)
    if not path.is_file():
        return {}
    table = read_parquet(path)
    if missing := [name for name in (*_PLAIN, *_ARRAYS) if name not in table.column_names]:
        raise RunDirectoryError(f"{path} has no column {missing[0]}: delete it, penstock why makes it again")
    plain = [table.column(name).to_pylist() for name in _PLAIN]
    arrays = [arrays_from_column(table.column(name), np.float32) for name in _ARRAYS]
    has_numbers = "numbers" in table.column_names
    numbers = map(tuple, table.column("numbers").to_pylist()) if has_numbers else [()] * table.num_rows
    rows = zip(*plain, *arrays, numbers, strict=True)
    return {row[0]: RescoredRollout(*row) for row in rows}  # pyright: ignore[reportArgumentType]

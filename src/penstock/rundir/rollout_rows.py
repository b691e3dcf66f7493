"""The rows of ``rollouts/part-<uuid>.parquet``: one per rollout; docs/formats.md describes every column.

A row is immutable once written: advantages stand in the rows of batches, fates in the fate log. `stored_rollouts` makes
records of rows, `original_form` reads rows of version 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.columns import (
    METADATA_COLUMNS,
    columns_of,
    conformed,
    flattened,
    list_column,
    metadata_values,
    nested_column,
    offsets_of,
    shared_column,
)
from penstock.rundir.original_form import upgraded
from penstock.rundir.parquet import read_parquet, schema_version, versioned, write_parquet
from penstock.rundir.stored_rollouts import ROLLOUT_ARRAYS, records_from_batch
from penstock.types import AnyRollout, Decoding, RolloutRecord

_TURN = pa.struct([("role", pa.string()), ("content", pa.string()), ("start", pa.int32()), ("stop", pa.int32())])
_DECODING = pa.struct([field.with_nullable(True) for field in columns_of(Decoding)])

ROLLOUT_SCHEMA = versioned(
    [
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("group_key", pa.string(), nullable=False),
        pa.field("lesson_id", pa.string(), nullable=False),
        pa.field("env_name", pa.string(), nullable=False),
        pa.field("env_example_id", pa.string(), nullable=False),
        *METADATA_COLUMNS,
        pa.field("newest_weight_step", pa.int32(), nullable=False),
        pa.field("oldest_weight_step", pa.int32()),
        pa.field("episode_reward", pa.float64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("token_rewards", pa.list_(pa.float32()), nullable=False),
        pa.field("response_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("response_weight_steps", pa.list_(pa.int32())),
        pa.field("turns", pa.list_(_TURN), nullable=False),
        pa.field("decoding", _DECODING, nullable=False),
        pa.field("timings", pa.map_(pa.string(), pa.float64()), nullable=False),
    ]
)


def write_records(path: Path, records: Sequence[RolloutRecord], compression: str = "zstd") -> None:
    """Writes a rollout file, durably and whole.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    write_parquet(path, table_from_records(records), compression)


def read_records(path: Path) -> list[RolloutRecord]:
    """Reads a rollout file of any version up to the present one.

    Raises:
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is missing or not a Parquet file.
        InvalidRolloutError: a row is no rollout.
    """
    return records_from_table(read_parquet(path), path.stem)


def table_from_records(records: Sequence[RolloutRecord]) -> pa.Table:
    """Rows of the present schema version.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    rollouts = [record.rollout for record in records]
    metadata = metadata_values(rollouts, "rollout")
    arrays = {name: [getattr(rollout, name) for rollout in rollouts] for name in ROLLOUT_ARRAYS}
    lists = {name: list_column(values, ROLLOUT_SCHEMA.field(name).type.value_type) for name, values in arrays.items()}
    values: dict[str, Any] = {
        **metadata,
        "rollout_id": [rollout.rollout_id for rollout in rollouts],
        "group_id": [record.group_id for record in records],
        "group_key": [record.group_key for record in records],
        "lesson_id": [rollout.lesson_id for rollout in rollouts],
        "env_name": [rollout.env_name for rollout in rollouts],
        "env_example_id": [rollout.env_example_id for rollout in rollouts],
        "newest_weight_step": _newest_weight_steps(rollouts, metadata["weight_step"], arrays, lists),
        "oldest_weight_step": [rollout.oldest_weight_step for rollout in rollouts],
        "episode_reward": [float(rollout.episode_reward) for rollout in rollouts],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "turns": _turns_column(rollouts),
        "decoding": shared_column([rollout.decoding for rollout in rollouts], _decoding_column),
        "timings": _timings_column(records),
        **lists,
    }
    columns = [
        value if isinstance(value := values[field.name], pa.Array) else pa.array(value, field.type)
        for field in ROLLOUT_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)


def records_from_table(table: pa.Table, name: str = "part") -> list[RolloutRecord]:
    """The records of a table, in its order; arrays are read-only views of it.

    Args:
        table: As read by `penstock.rundir.read_parquet`.
        name: Names the table in errors, and the rows of version 0, which have no ids of their own.

    Raises:
        RunDirectoryError: a column is missing, or of a type that does not fit.
        InvalidRolloutError: a row is no rollout; the message names row and field.
    """
    if schema_version(table.schema) == 0:
        table = upgraded(table, ROLLOUT_SCHEMA, name)
    elif not table.schema.equals(ROLLOUT_SCHEMA):
        table = conformed(table, ROLLOUT_SCHEMA, name, "rollouts", flags_as_bytes="response_mask")
    return [record for batch in table.to_batches() for record in records_from_batch(batch, name)]


def _newest_weight_steps(
    rollouts: Sequence[AnyRollout],
    oldest: Sequence[int],
    arrays: dict[str, list[Any]],
    lists: dict[str, pa.ListArray],
) -> np.ndarray:
    """`Rollout.newest_weight_step` of all rows at once."""
    newest = np.array(oldest, np.int32)
    steps = lists["response_weight_steps"]
    if steps.null_count:
        return np.array([rollout.newest_weight_step for rollout in rollouts], np.int32)
    flat = steps.values.to_numpy()
    if not flat.size:
        return newest
    masks = np.concatenate(arrays["response_mask"])
    if not masks.all():
        flat = np.where(masks, flat, np.iinfo(np.int32).min)
    starts = steps.offsets.to_numpy()
    filled = np.flatnonzero(np.diff(starts))
    newest[filled] = np.maximum(newest[filled], np.maximum.reduceat(flat, starts[:-1][filled]))
    return newest


def _turns_column(rollouts: Sequence[AnyRollout]) -> pa.Array:
    lists = [rollout.turns for rollout in rollouts]
    turns = flattened(lists)
    values = (
        [turn.role for turn in turns],
        [turn.content for turn in turns],
        [turn.start for turn in turns],
        [turn.stop for turn in turns],
    )
    columns = [pa.array(value, field.type) for value, field in zip(values, _TURN, strict=True)]
    return nested_column(lists, pa.StructArray.from_arrays(columns, fields=list(_TURN)))


def _decoding_column(decodings: Sequence[Decoding]) -> pa.Array:
    columns = [pa.array([getattr(one, field.name) for one in decodings], field.type) for field in _DECODING]
    return pa.StructArray.from_arrays(columns, fields=list(_DECODING))


def _timings_column(records: Sequence[RolloutRecord]) -> pa.Array:
    timings = [record.timings for record in records]
    stages = pa.array(flattened(timings), pa.string())
    seconds = pa.array(flattened(timing.values() for timing in timings), pa.float64())
    return pa.MapArray.from_arrays(offsets_of(list(map(len, timings))), stages, seconds)

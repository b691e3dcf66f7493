"""The rows of ``rollouts/part-<uuid>.parquet``: one per rollout; docs/formats.md describes every column.

A row is immutable once written: advantages stand in the rows of batches, fates in the fate log. `stored_rollouts` makes
records of rows, `original_form` reads rows of version 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.columns import columns_of, flattened, list_column, nested_column, offsets_of, shared_column
from penstock.rundir.original_form import upgraded
from penstock.rundir.parquet import read_parquet, schema_version, versioned, write_parquet
from penstock.rundir.stored_rollouts import ROLLOUT_ARRAYS, records_from_batch
from penstock.types import (
    AnyRollout,
    Decoding,
    InvalidRolloutError,
    RolloutMetadata,
    RolloutRecord,
    RunDirectoryError,
)

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
        pa.field("worker_id", pa.string(), nullable=False),
        pa.field("timestamp", pa.float64(), nullable=False),
        pa.field("lineage", pa.int32(), nullable=False),
        pa.field("weight_step", pa.int32(), nullable=False),
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
    stamps = [_metadata_of(rollout) for rollout in rollouts]
    arrays = {name: [getattr(rollout, name) for rollout in rollouts] for name in ROLLOUT_ARRAYS}
    lists = {name: list_column(values, ROLLOUT_SCHEMA.field(name).type.value_type) for name, values in arrays.items()}
    values: dict[str, Any] = {
        "schema_version": [stamp.schema_version for stamp in stamps],
        "rollout_id": [rollout.rollout_id for rollout in rollouts],
        "group_id": [record.group_id for record in records],
        "group_key": [record.group_key for record in records],
        "lesson_id": [rollout.lesson_id for rollout in rollouts],
        "env_name": [rollout.env_name for rollout in rollouts],
        "env_example_id": [rollout.env_example_id for rollout in rollouts],
        "worker_id": [stamp.worker_id for stamp in stamps],
        "timestamp": [stamp.timestamp for stamp in stamps],
        "lineage": [stamp.lineage for stamp in stamps],
        "weight_step": [stamp.weight_step for stamp in stamps],
        "newest_weight_step": _newest_weight_steps(rollouts, stamps, arrays, lists),
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
        table = _conformed(table, name)
    return [record for batch in table.to_batches() for record in records_from_batch(batch, name)]


def _metadata_of(rollout: AnyRollout) -> RolloutMetadata:
    if rollout.metadata is None:
        raise InvalidRolloutError(f"rollout {rollout.rollout_id!r} has no metadata: it cannot be stored")
    return rollout.metadata


def _newest_weight_steps(
    rollouts: Sequence[AnyRollout],
    stamps: Sequence[RolloutMetadata],
    arrays: dict[str, list[Any]],
    lists: dict[str, pa.ListArray],
) -> np.ndarray:
    """`Rollout.newest_weight_step` of all rows at once."""
    newest = np.array([stamp.weight_step for stamp in stamps], np.int32)
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


def _conformed(table: pa.Table, name: str) -> pa.Table:
    """The columns of the schema, whatever their order and widths; flags may have a byte each, as in messages."""
    columns: list[pa.ChunkedArray] = []
    for field in ROLLOUT_SCHEMA:
        if field.name not in table.column_names:
            raise RunDirectoryError(f"{name} has no column {field.name}: it holds no rollouts")
        column = table.column(field.name)
        flags = field.name == "response_mask" and column.type == pa.list_(pa.uint8())
        try:
            columns.append(column if flags else column.cast(field.type))
        except pa.ArrowException as error:
            raise RunDirectoryError(
                f"{name}: column {field.name} is {column.type}, it must be {field.type}: {error}"
            ) from error
    return pa.Table.from_arrays(columns, names=ROLLOUT_SCHEMA.names)

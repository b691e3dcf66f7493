"""The rows of ``fragments/part-<uuid>.parquet``: one per fragment; docs/run_directory.md describes every column.

What every simulator has (rewards, flags, log-probabilities, values, versions) stands in plain lists. What differs from
one to the next (observations, actions, recurrent state) is a list of leaves, each an array's bytes in C order with its
name, dtype and shape, so that all runs have one schema. A row is immutable once written. Rows of batches name
fragments and hold none of their numbers: `penstock.replay` keeps a fragment as long as a batch that names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa

from penstock.rundir.parquet import (
    LEAVES,
    METADATA_COLUMNS,
    PAIRS,
    arrays_from_column,
    conformed,
    leaves_column,
    leaves_from_column,
    list_column,
    metadata_from_columns,
    metadata_values,
    pairs_column,
    pairs_from_column,
    schema_version,
    table_of,
    versioned,
)
from penstock.types import (
    FRAGMENT_SCHEMA_VERSION,
    InvalidRolloutError,
    RolloutMetadata,
    RolloutRecord,
    RunDirectoryError,
    SampleFragment,
    TrainingExample,
)

_ARRAYS: dict[str, type] = {
    field.name: field.metadata["dtype"] for field in fields(SampleFragment) if "dtype" in field.metadata
}
_LEAF_COLUMNS = [name for name, hint in get_type_hints(SampleFragment).items() if hint == Mapping[str, np.ndarray]]
_OBSERVED = ("observations", "final_observations")
_NAMED = ("task", "env_name", "group_id", "slot")

FRAGMENT_SCHEMA = versioned(
    [
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("group_key", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("env_name", pa.string(), nullable=False),
        pa.field("slot", pa.int32(), nullable=False),
        *METADATA_COLUMNS,
        pa.field("newest_weight_step", pa.int32(), nullable=False),
        pa.field("steps", pa.int32(), nullable=False),
        pa.field("trainable_steps", pa.int32(), nullable=False),
        pa.field("episode_reward", pa.float64(), nullable=False),
        pa.field("complete", pa.bool_(), nullable=False),
        *(
            pa.field(name, pa.list_(pa.from_numpy_dtype(np.dtype(dtype))), nullable=False)
            for name, dtype in _ARRAYS.items()
        ),
        *(pa.field(name, LEAVES, nullable=name in _OBSERVED) for name in _LEAF_COLUMNS),
        pa.field("timings", PAIRS, nullable=False),
    ]
)

FRAGMENT_USE_SCHEMA = versioned(
    [
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("batch_id", pa.string(), nullable=False),
        pa.field("lineage", pa.int32(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("rollout_ids", pa.list_(pa.string()), nullable=False),
    ]
)


def table_from_fragments(records: Sequence[RolloutRecord[SampleFragment]], observations: bool = True) -> pa.Table:
    """Rows of the present schema version.

    Args:
        records: Fragments with metadata.
        observations: Store these too; without them a fragment can be looked at, but not be trained again.

    Raises:
        InvalidRolloutError: a fragment has no metadata, or an array of Python objects.
    """
    fragments = [record.rollout for record in records]
    values: dict[str, Any] = {
        **metadata_values(fragments, "fragment"),
        "rollout_id": [fragment.rollout_id for fragment in fragments],
        "group_id": [record.group_id for record in records],
        "group_key": [record.group_key for record in records],
        "task": [fragment.task for fragment in fragments],
        "env_name": [fragment.env_name for fragment in fragments],
        "slot": [fragment.slot for fragment in fragments],
        "newest_weight_step": [fragment.newest_weight_step for fragment in fragments],
        "steps": [fragment.length for fragment in fragments],
        "trainable_steps": [fragment.trainable_steps for fragment in fragments],
        "episode_reward": [fragment.episode_reward for fragment in fragments],
        "complete": [observations] * len(fragments),
        "timings": pairs_column([fragment.timings.items() for fragment in fragments]),
    }
    for name in _ARRAYS:
        arrays = [np.asarray(getattr(fragment, name), _ARRAYS[name]) for fragment in fragments]
        values[name] = list_column(arrays, FRAGMENT_SCHEMA.field(name).type.value_type)
    for name in _LEAF_COLUMNS:
        stored = observations or name not in _OBSERVED
        values[name] = leaves_column([getattr(fragment, name) if stored else None for fragment in fragments])
    return table_of(values, FRAGMENT_SCHEMA)


def fragments_from_table(table: pa.Table, name: str = "part") -> list[RolloutRecord[SampleFragment]]:
    """The records of a table, in its order; arrays are read-only views of it.

    Fragments that were stored without observations have no observation leaves.

    Args:
        table: As read by `penstock.rundir.read_parquet`.
        name: Names the table in errors.

    Raises:
        RunDirectoryError: a column is missing, or of a type that does not fit.
        InvalidRolloutError: a row is no fragment, or lacks a value; the message names the field, and the row if it can.
    """
    if schema_version(table.schema) == 0:
        raise RunDirectoryError(f"{name} has no schema version: it holds no fragments")
    if not table.schema.equals(FRAGMENT_SCHEMA):
        table = conformed(table, FRAGMENT_SCHEMA, name, "fragments")
    for field, column in zip(FRAGMENT_SCHEMA, table.columns, strict=True):
        if column.null_count and not field.nullable:
            raise InvalidRolloutError(
                f"{name}: column {field.name} has {column.null_count} nulls where none may be: write its rows again "
                "with a value in each"
            )
    return [record for batch in table.to_batches() for record in _records(batch, name)]


def table_from_uses(examples: Sequence[TrainingExample], batch_id: str, step: int, lineage: int) -> pa.Table:
    """Rows of a batch: which fragments update `step` trains on, in order.

    Args:
        examples: In batch order, one fragment each.
        batch_id: Name of the batch.
        step: The update; it starts from weight version (`lineage`, `step`).
        lineage: Of the run when the batch was made.
    """
    ids = [example.rollout_ids[0] for example in examples]
    values: dict[str, list[Any]] = {
        "schema_version": [FRAGMENT_SCHEMA_VERSION] * len(ids),
        "batch_id": [batch_id] * len(ids),
        "lineage": [lineage] * len(ids),
        "step": [step] * len(ids),
        "group_id": [rollout_id.rpartition("/")[0] for rollout_id in ids],
        "rollout_id": ids,
        "rollout_ids": [example.rollout_ids for example in examples],
    }
    return table_of(values, FRAGMENT_USE_SCHEMA)


def uses_from_table(table: pa.Table, name: str = "batch") -> list[str]:
    """The ids of the fragments that a batch trains on, in its order.

    Args:
        table: As read by `penstock.rundir.read_parquet`.
        name: Names the table in errors.

    Raises:
        RunDirectoryError: it is no batch of fragments.
    """
    missing = [column for column in FRAGMENT_USE_SCHEMA.names if column not in table.column_names]
    if missing:
        raise RunDirectoryError(f"{name} has no column {missing[0]}: it is no batch of fragments")
    return [str(rollout_id) for rollout_id in table.column("rollout_id").to_pylist()]


def _records(batch: pa.RecordBatch, name: str) -> list[RolloutRecord[SampleFragment]]:
    try:
        columns: dict[str, list[Any]] = {
            field: arrays_from_column(batch.column(field), dtype) for field, dtype in _ARRAYS.items()
        }
        columns |= {field: leaves_from_column(batch.column(field)) for field in _LEAF_COLUMNS}
        stamps = metadata_from_columns(batch)
        columns |= {field: batch.column(field).to_pylist() for field in _NAMED}
        columns["timings"] = list(map(dict, pairs_from_column(batch.column("timings"))))
    except (ValueError, TypeError) as error:
        raise InvalidRolloutError(f"{name} holds no fragments: {error}") from error
    keys = batch.column("group_key").to_pylist()
    return [
        RolloutRecord(_fragment(columns, stamp, row, name), columns["group_id"][row], group_key=keys[row])
        for row, stamp in enumerate(stamps)
    ]


def _fragment(columns: Mapping[str, list[Any]], stamp: RolloutMetadata, row: int, name: str) -> SampleFragment:
    fields = {field: values[row] for field, values in columns.items()}
    try:
        return SampleFragment(**fields, metadata=stamp)
    except (InvalidRolloutError, AttributeError, TypeError) as error:  # an array that is null has no length
        raise InvalidRolloutError(f"{name}, row {row}: {error}") from error

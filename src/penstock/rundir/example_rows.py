"""The rows of ``batches/batch_<uuid>_<time>.parquet``: the `RLExample` of one update, self-contained.

With the checkpoint before it such a file re-runs its update without inference. docs/run_directory.md describes
every column. Joined to the rollouts by `rollout_id`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.parquet import (
    arrays_from_column,
    list_column,
    read_parquet,
    table_of,
    versioned,
    write_parquet,
)
from penstock.types import RLExample, RunDirectoryError
from penstock.types.rollouts import SCHEMA_VERSION

EXAMPLE_SCHEMA = versioned(
    [
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("batch_id", pa.string(), nullable=False),
        pa.field("lineage", pa.int32(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group_id", pa.string()),
        pa.field("rollout_id", pa.string()),
        pa.field("rollout_ids", pa.list_(pa.string()), nullable=False),
        pa.field("rollout_advantage", pa.float32()),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("segment_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("position_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("advantage", pa.list_(pa.float32()), nullable=False),
        pa.field("generator_log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("reference_log_probs", pa.list_(pa.float32())),
        pa.field("temperature", pa.list_(pa.float32()), nullable=False),
        pa.field("weight_steps", pa.list_(pa.int32()), nullable=False),
    ]
)

_ARRAYS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "segment_ids": np.int32,
    "position_ids": np.int32,
    "advantage": np.float32,
    "generator_log_probs": np.float32,
    "reference_log_probs": np.float32,
    "temperature": np.float32,
    "weight_steps": np.int32,
}


def write_examples(path: Path, examples: Sequence[RLExample], batch_id: str, step: int, lineage: int) -> None:
    """Writes a batch file, durably and whole; see `table_from_examples`."""
    write_parquet(path, table_from_examples(examples, batch_id, step, lineage))


def read_examples(path: Path) -> list[RLExample]:
    """Reads a batch file.

    Raises:
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is missing or not a Parquet file.
    """
    return examples_from_table(read_parquet(path), path.stem)


def table_from_examples(examples: Sequence[RLExample], batch_id: str, step: int, lineage: int) -> pa.Table:
    """Rows of the present schema version.

    Args:
        examples: In batch order.
        batch_id: Name of the batch.
        step: The update; it starts from weight version (`lineage`, `step`).
        lineage: Of the run when the batch was made.
    """
    only = [example.rollout_ids[0] if len(example.rollout_ids) == 1 else None for example in examples]
    values: dict[str, Any] = {
        "schema_version": [SCHEMA_VERSION] * len(examples),
        "batch_id": [batch_id] * len(examples),
        "lineage": [lineage] * len(examples),
        "step": [step] * len(examples),
        "group_id": [None if rollout_id is None else rollout_id.rpartition("/")[0] for rollout_id in only],
        "rollout_id": only,
        "rollout_ids": [example.rollout_ids for example in examples],
        "rollout_advantage": [
            None if rollout_id is None else _first_advantage(example)
            for rollout_id, example in zip(only, examples, strict=True)
        ],
    }
    for name in _ARRAYS:
        arrays = [getattr(example, name) for example in examples]
        values[name] = list_column(arrays, EXAMPLE_SCHEMA.field(name).type.value_type)
    return table_of(values, EXAMPLE_SCHEMA)


def examples_from_table(table: pa.Table, name: str = "batch") -> list[RLExample]:
    """The examples of a batch file, in its order; arrays are read-only views of the table.

    Args:
        table: As read by `penstock.rundir.read_parquet`.
        name: Names the table in errors.

    Raises:
        RunDirectoryError: a column is missing, or holds something else.
        InvalidRolloutError: arrays of a row disagree.
    """
    for column in (*_ARRAYS, "rollout_ids"):
        if column not in table.column_names:
            raise RunDirectoryError(f"{name} has no column {column}: it holds no training examples")
    try:
        arrays = {key: arrays_from_column(table.column(key), dtype) for key, dtype in _ARRAYS.items()}
    except (ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{name} holds no training examples: {error}") from error
    ids = table.column("rollout_ids").to_pylist()
    return [
        RLExample(
            **{key: values[row] for key, values in arrays.items()},  # pyright: ignore[reportArgumentType]
            rollout_ids=tuple(ids[row]),
        )
        for row in range(table.num_rows)
    ]


def _first_advantage(example: RLExample) -> float | None:
    first = example.first_sampled
    return None if first is None else float(example.advantage[first])

"""The rows of ``batches/batch_<uuid>_<time>.parquet``: the `RLExample` of one update, self-contained.

With the checkpoint before it such a file re-runs its update without inference. docs/formats.md describes
every column. Joined to the rollouts by `rollout_id`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.columns import arrays_from_column, list_column
from penstock.rundir.parquet import read_parquet, versioned, write_parquet
from penstock.types import RLExample
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


def write_examples(
    path: Path, examples: Sequence[RLExample], batch_id: str, step: int, lineage: int, compression: str = "zstd"
) -> None:
    """Writes a batch file, durably and whole; see `table_from_examples`."""
    write_parquet(path, table_from_examples(examples, batch_id, step, lineage), compression)


def read_examples(path: Path) -> list[RLExample]:
    """Reads a batch file.

    Raises:
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is missing or not a Parquet file.
    """
    return examples_from_table(read_parquet(path))


def table_from_examples(examples: Sequence[RLExample], batch_id: str, step: int, lineage: int) -> pa.Table:
    """Rows of the present schema version.

    Args:
        examples: In batch order.
        batch_id: Name of the batch.
        step: The update; it starts from weight version (`lineage`, `step`).
        lineage: Of the run when the batch was made.
    """
    rows = [_scalars(example, batch_id, step, lineage) for example in examples]
    columns = [
        list_column([getattr(example, field.name) for example in examples], field.type.value_type)
        if field.name in _ARRAYS
        else pa.array([row[field.name] for row in rows], field.type)
        for field in EXAMPLE_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=EXAMPLE_SCHEMA)


def examples_from_table(table: pa.Table) -> list[RLExample]:
    """The examples of a batch file, in its order; arrays are read-only views of the table."""
    arrays = {key: arrays_from_column(table.column(key), dtype) for key, dtype in _ARRAYS.items()}
    ids = table.column("rollout_ids").to_pylist()
    return [
        RLExample(
            **{key: values[row] for key, values in arrays.items()},  # pyright: ignore[reportArgumentType]
            rollout_ids=tuple(ids[row]),
        )
        for row in range(table.num_rows)
    ]


def _scalars(example: RLExample, batch_id: str, step: int, lineage: int) -> dict[str, Any]:
    only = example.rollout_ids[0] if len(example.rollout_ids) == 1 else None
    advantages = example.advantage[example.loss_mask]
    return {
        "schema_version": SCHEMA_VERSION,
        "batch_id": batch_id,
        "lineage": lineage,
        "step": step,
        "group_id": None if only is None else only.rpartition("/")[0],
        "rollout_id": only,
        "rollout_ids": list(example.rollout_ids),
        "rollout_advantage": float(advantages[0]) if only is not None and len(advantages) else None,
    }

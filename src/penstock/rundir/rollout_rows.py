"""The rows of ``rollouts/part-<uuid>.parquet``: one per rollout; docs/formats.md describes every column.

A row is immutable once written: advantages stand in the rows of batches, fates in the fate log. Rows of the
original form (schema version 0: metadata on the batch only, no response mask, no versions per token, no ids) are
read with the same defaults that `Rollout` gives.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.columns import arrays_from_column, list_column
from penstock.rundir.parquet import read_parquet, schema_version, versioned, write_parquet
from penstock.types import Decoding, InvalidRolloutError, Rollout, RolloutMetadata, RolloutRecord, Turn

BATCH_METADATA_KEY = b"penstock.batch_metadata"
"""In version 0: a JSON object in the file's key-value metadata, for all its rows."""

_TURN = pa.struct([("role", pa.string()), ("content", pa.string()), ("start", pa.int32()), ("stop", pa.int32())])
_DECODING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("max_output_tokens", pa.int32()),
        ("stop_token_ids", pa.list_(pa.int32())),
        ("stop_strings", pa.list_(pa.string())),
    ]
)

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

_ARRAYS = {
    "prompt_tokens": np.int32,
    "response_tokens": np.int32,
    "response_logprobs": np.float32,
    "token_rewards": np.float32,
    "response_mask": np.bool_,
    "response_weight_steps": np.int32,
}


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
    """
    return records_from_table(read_parquet(path), path.stem)


def table_from_records(records: Sequence[RolloutRecord]) -> pa.Table:
    """Rows of the present schema version.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    rows = [_scalars(record) for record in records]
    columns: list[pa.Array] = []
    for field in ROLLOUT_SCHEMA:
        if field.name in _ARRAYS:
            arrays = [getattr(record.rollout, field.name) for record in records]
            columns.append(list_column(arrays, field.type.value_type))
        else:
            columns.append(pa.array([row[field.name] for row in rows], field.type))
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)


def records_from_table(table: pa.Table, name: str = "part") -> list[RolloutRecord]:
    """The records of a table, in its order; arrays are read-only views of it.

    Args:
        table: As read by `penstock.rundir.read_parquet`.
        name: Names the rows of version 0, which have no ids of their own.
    """
    if schema_version(table.schema) == 0:
        table = _upgraded(table, name)
    arrays = {key: arrays_from_column(table.column(key), dtype) for key, dtype in _ARRAYS.items()}
    rows = table.drop_columns(list(_ARRAYS)).to_pylist()
    return [_record(row, {key: values[index] for key, values in arrays.items()}) for index, row in enumerate(rows)]


def _scalars(record: RolloutRecord) -> dict[str, Any]:
    rollout = record.rollout
    metadata = rollout.metadata
    if metadata is None:
        raise InvalidRolloutError(f"rollout {rollout.rollout_id!r} has no metadata: it cannot be stored")
    decoding = rollout.decoding
    return {
        "schema_version": metadata.schema_version,
        "rollout_id": rollout.rollout_id,
        "group_id": record.group_id,
        "group_key": record.group_key,
        "lesson_id": rollout.lesson_id,
        "env_name": rollout.env_name,
        "env_example_id": rollout.env_example_id,
        "worker_id": metadata.worker_id,
        "timestamp": metadata.timestamp,
        "lineage": metadata.lineage,
        "weight_step": metadata.weight_step,
        "newest_weight_step": rollout.newest_weight_step,
        "oldest_weight_step": rollout.oldest_weight_step,
        "episode_reward": float(rollout.episode_reward),
        "finish_reason": rollout.finish_reason,
        "turns": [
            {"role": turn.role, "content": turn.content, "start": turn.start, "stop": turn.stop}
            for turn in rollout.turns
        ],
        "decoding": {
            "temperature": float(decoding.temperature),
            "top_k": decoding.top_k,
            "top_p": decoding.top_p,
            "max_output_tokens": decoding.max_output_tokens,
            "stop_token_ids": list(decoding.stop_token_ids),
            "stop_strings": list(decoding.stop_strings),
        },
        "timings": list(record.timings.items()),
    }


def _record(row: dict[str, Any], arrays: dict[str, np.ndarray | None]) -> RolloutRecord:
    decoding = row["decoding"]
    rollout = Rollout(
        env_name=row["env_name"],
        env_example_id=row["env_example_id"],
        episode_reward=row["episode_reward"],
        metadata=RolloutMetadata(
            row["worker_id"], row["timestamp"], row["weight_step"], row["lineage"], row["schema_version"]
        ),
        rollout_id=row["rollout_id"],
        lesson_id=row["lesson_id"],
        oldest_weight_step=row["oldest_weight_step"],
        turns=tuple(Turn(**turn) for turn in row["turns"]),
        decoding=Decoding(**decoding | {key: tuple(decoding[key]) for key in ("stop_token_ids", "stop_strings")}),
        finish_reason=row["finish_reason"],
        **arrays,  # pyright: ignore[reportArgumentType]  # None only where the schema allows null
    )
    return RolloutRecord(rollout, row["group_id"], dict(row["timings"]), row["group_key"])


def _upgraded(table: pa.Table, name: str) -> pa.Table:
    """A table of version 0 with the columns that it lacks."""
    stamp = json.loads((table.schema.metadata or {}).get(BATCH_METADATA_KEY, b"{}"))
    step = int(stamp.get("weight_step", 0))
    examples = [str(example) for example in table.column("env_example_id").to_pylist()]
    groups = [f"{name}-{example}" for example in examples]
    lengths = [len(tokens) for tokens in table.column("response_tokens").to_pylist()]
    decoding = {"temperature": 1.0, "max_output_tokens": 512, "stop_token_ids": [], "stop_strings": []}
    rows = len(examples)
    defaults: dict[str, list[Any]] = {
        "schema_version": [0] * rows,
        "rollout_id": [f"{group}/{row}" for row, group in enumerate(groups)],
        "group_id": groups,
        "group_key": [
            f"{environment}:{example}"
            for environment, example in zip(table.column("env_name").to_pylist(), examples, strict=True)
        ],
        "lesson_id": [""] * rows,
        "env_example_id": examples,
        "worker_id": [str(stamp.get("worker_id", ""))] * rows,
        "timestamp": [float(stamp.get("timestamp", 0.0))] * rows,
        "lineage": [0] * rows,
        "weight_step": [step] * rows,
        "newest_weight_step": [step] * rows,
        "oldest_weight_step": [None] * rows,
        "finish_reason": ["stop"] * rows,
        "response_mask": [[True] * length for length in lengths],
        "response_weight_steps": [None] * rows,
        "turns": [[]] * rows,
        "decoding": [decoding] * rows,
        "timings": [[]] * rows,
    }
    present = set(table.column_names) - {"env_example_id"}
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in present
        else pa.array(defaults[field.name], field.type)
        for field in ROLLOUT_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)

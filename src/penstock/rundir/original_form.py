"""Rollout rows of the original form, which carried no schema version: metadata on the batch only, no ids, no mask.

They get the defaults that `penstock.types.Rollout` gives, a lineage of 0, and ids made from the file's name.
"""

import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from penstock.types import Decoding, RolloutMetadata, RunDirectoryError

BATCH_METADATA_KEY = b"penstock.batch_metadata"
"""A JSON object in the file's key-value metadata, for all its rows."""

_COLUMNS = (
    "env_name", "env_example_id", "prompt_tokens", "response_tokens", "response_logprobs", "token_rewards",
    "episode_reward",
)  # fmt: skip


def upgraded(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """A table of version 0 with the columns that it lacks.

    Args:
        table: As read.
        schema: Of the present version.
        name: Of the file; ids are made from it.

    Raises:
        RunDirectoryError: it lacks a column that the original form had, or its metadata is not what that had.
    """
    lacking = [column for column in _COLUMNS if column not in table.column_names]
    if lacking:
        raise RunDirectoryError(f"{name} has no schema version and no column {lacking[0]}: it holds no rollouts")
    metadata = _batch_metadata(table, name)
    examples = [str(example) for example in table.column("env_example_id").to_pylist()]
    groups = [f"{name}-{example}" for example in examples]
    lengths = [len(tokens) for tokens in table.column("response_tokens").to_pylist()]
    rows = len(examples)
    defaults: dict[str, list[Any]] = {
        **{key: [value] * rows for key, value in asdict(metadata).items()},
        "rollout_id": [f"{group}/{row}" for row, group in enumerate(groups)],
        "group_id": groups,
        "group_key": [
            f"{environment}:{example}"
            for environment, example in zip(table.column("env_name").to_pylist(), examples, strict=True)
        ],
        "lesson_id": [""] * rows,
        "env_example_id": examples,
        "newest_weight_step": [metadata.weight_step] * rows,
        "oldest_weight_step": [None] * rows,
        "finish_reason": ["stop"] * rows,
        "response_mask": [[True] * length for length in lengths],
        "response_weight_steps": [None] * rows,
        "turns": [[]] * rows,
        "decoding": [asdict(Decoding())] * rows,
        "timings": [[]] * rows,
    }
    present = set(table.column_names) - {"env_example_id"}
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in present
        else pa.array(defaults[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _batch_metadata(table: pa.Table, name: str) -> RolloutMetadata:
    """That of all rows."""
    text = (table.schema.metadata or {}).get(BATCH_METADATA_KEY, b"{}")
    try:
        stamp = json.loads(text)
        if not isinstance(stamp, dict):
            raise TypeError(f"a {type(stamp).__name__} is no object")
        worker_id, timestamp = str(stamp.get("worker_id", "")), float(stamp.get("timestamp", 0.0))
        return RolloutMetadata(worker_id, timestamp, int(stamp.get("weight_step", 0)), schema_version=0)
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(
            f"{name}: {BATCH_METADATA_KEY.decode()} is {text!r}, which is not a JSON object of "
            f"worker_id, timestamp and weight_step: {error}"
        ) from error

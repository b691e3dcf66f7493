"""The rows of ``rollouts/part-<uuid>.parquet``, one per rollout, and back; every column is in docs/run_directory.md.

A row is immutable once written: advantages stand in the rows of batches, fates in the fate log.

A rollout's own constructor checks it, which takes longer than reading it. Rows that Penstock wrote were checked when
they were made, so on reading the same is checked for all rows of a column at once; if anything is wrong, the rows are
made one by one through the constructor, which names the field. Nothing is accepted that the constructor refuses.

Rows of the original form, version 0, carried no schema version: metadata on the batch only, no ids, no mask. They get
the defaults that `penstock.types.Rollout` gives, a lineage of 0, and ids made from the file's name, their example, and
their environment where two have an example of that id.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.parquet import (
    METADATA_COLUMNS,
    PAIRS,
    arrays_from_column,
    columns_of,
    conformed,
    fields_from_columns,
    flat_values,
    flattened,
    list_column,
    metadata_from_columns,
    metadata_values,
    nested_column,
    pairs_column,
    pairs_from_column,
    read_parquet,
    schema_version,
    shared_column,
    slices,
    table_of,
    text_column,
    values_from_column,
    versioned,
    write_parquet,
)
from penstock.types import (
    AnyRollout,
    Decoding,
    InvalidRolloutError,
    Rollout,
    RolloutMetadata,
    RolloutRecord,
    RunDirectoryError,
    Turn,
)
from penstock.types.rollouts import ONE_SAMPLE

ROLLOUT_ARRAYS: Mapping[str, type] = {
    "prompt_tokens": np.int32,
    "response_tokens": np.int32,
    "response_logprobs": np.float32,
    "token_rewards": np.float32,
    "response_mask": np.bool_,
    "response_weight_steps": np.int32,
}
"""Columns that are arrays of a `Rollout`, by their element types there."""

_PER_TOKEN = [name for name in ROLLOUT_ARRAYS if name not in ("prompt_tokens", "response_tokens")]
_REWARD_TOLERANCE = 1e-4
"""As in `Rollout`."""


def records_from_batch(batch: pa.RecordBatch, name: str) -> Iterator[RolloutRecord]:
    """The records of a batch of rows of the present schema version.

    Args:
        batch: Its columns.
        name: Of the file, for errors.

    Raises:
        InvalidRolloutError: a row is no rollout; the message names row and field.
    """
    try:
        sound = _is_sound(batch)
        fields = _rollout_fields(batch)
    except ValueError as error:
        raise InvalidRolloutError(f"{name} holds no rollouts: {error}") from error
    groups = values_from_column(batch.column("group_id"))
    keys = values_from_column(batch.column("group_key"))
    for row, (group_id, key, *values) in enumerate(zip(groups, keys, *fields, strict=True)):
        rollout = _trusted(values) if sound else _checked(values, f"{name}, row {row}")
        yield RolloutRecord(rollout, group_id, key)


def _rollout_fields(batch: pa.RecordBatch) -> list[list[Any]]:
    """The fields of `Rollout`, in the order of their definition, each for all rows."""
    plain = {
        field: values_from_column(batch.column(field))
        for field in (
            "env_name", "env_example_id", "episode_reward", "rollout_id", "lesson_id", "oldest_weight_step",
            "finish_reason",
        )
    }  # fmt: skip
    arrays = {field: arrays_from_column(batch.column(field), dtype) for field, dtype in ROLLOUT_ARRAYS.items()}
    made = {
        "metadata": metadata_from_columns(batch),
        "turns": _turns(batch),
        "decoding": _decodings(batch),
        "sample_starts": _sample_starts(batch),
        "rewards_by_function": pairs_from_column(batch.column("rewards_by_function")),
        "timings": list(map(dict, pairs_from_column(batch.column("timings")))),
    }
    by_name = {**plain, **arrays, **made}
    return [by_name[field] for field in Rollout.__match_args__]


def _trusted(values: list[Any]) -> Rollout:
    """A rollout of values that were checked already."""
    rollout = object.__new__(Rollout)
    for slot, value in zip(_SLOTS, values, strict=True):
        slot(rollout, value)
    return rollout


_SLOTS = [getattr(Rollout, field).__set__ for field in Rollout.__match_args__]


def _checked(values: list[Any], where: str) -> Rollout:
    try:
        return Rollout(*values)
    except InvalidRolloutError as error:
        raise InvalidRolloutError(f"{where}: {error}") from error


def _is_sound(batch: pa.RecordBatch) -> bool:
    """Whether every row passes what `Rollout` checks, decided column by column."""
    if batch.num_rows == 0:
        return True
    columns = {field: batch.column(field) for field in ROLLOUT_ARRAYS}
    prompts, responses = columns["prompt_tokens"], columns["response_tokens"]
    lengths = _lengths(responses)
    agree = all(_is_as_long(columns[field], lengths) for field in _PER_TOKEN)
    if any(columns[field].null_count for field in ROLLOUT_ARRAYS if field != "response_weight_steps") or not agree:
        return False
    rewards = flat_values(columns["token_rewards"], np.float32)
    totals = batch.column("episode_reward").to_numpy(zero_copy_only=False)
    return bool(
        _lengths(prompts).all()
        and set(_sample_starts(batch)) == {ONE_SAMPLE}
        and all(_least(column) >= 0 for column in (prompts, responses))
        and np.isfinite(flat_values(columns["response_logprobs"], np.float32)).all()
        and np.isfinite(rewards).all()
        and np.isfinite(totals).all()
        and _rewards_agree(rewards, columns["token_rewards"].offsets.to_numpy(), totals)
    )


def _lengths(lists: pa.ListArray) -> np.ndarray:
    return np.diff(lists.offsets.to_numpy())


def _is_as_long(lists: pa.ListArray, lengths: np.ndarray) -> bool:
    differs = _lengths(lists) != lengths
    if lists.null_count:
        differs &= lists.is_valid().to_numpy(zero_copy_only=False)
    return not differs.any()


def _least(tokens: pa.ListArray) -> int:
    return int(flat_values(tokens, np.int32).min(initial=0))


def _rewards_agree(rewards: np.ndarray, offsets: np.ndarray, totals: np.ndarray) -> bool:
    filled = np.flatnonzero(np.diff(offsets))  # an empty response has nowhere to put its reward
    if not len(filled):
        return True
    starts = offsets[:-1][filled]
    sums = np.add.reduceat(rewards[: offsets[-1]], starts, dtype=np.float64)
    limits = _REWARD_TOLERANCE * np.maximum(1.0, np.abs(totals[filled]))
    return bool((np.abs(sums - totals[filled]) <= limits).all())


def _turns(batch: pa.RecordBatch) -> list[tuple[Turn, ...]]:
    lists = batch.column("turns")
    structs = lists.values
    fields = [values_from_column(structs.field(field)) for field in ("role", "content", "start", "stop")]
    timings = pairs_from_column(structs.field("timings"))
    return list(map(tuple, slices(list(map(Turn, *fields, timings)), lists.offsets)))


def _sample_starts(batch: pa.RecordBatch) -> list[tuple[int, ...]]:
    column = batch.column("sample_starts")
    values, offsets = flat_values(column, np.int32), column.offsets.to_numpy()
    if not column.null_count and (np.diff(offsets) == 1).all() and not values[offsets[0] : offsets[-1]].any():
        return [ONE_SAMPLE] * batch.num_rows
    return [ONE_SAMPLE if starts is None else tuple(starts) for starts in column.to_pylist()]


def _decodings(batch: pa.RecordBatch) -> list[Decoding]:
    fields = fields_from_columns(Decoding, batch.column("decoding").field)
    known: dict[tuple[Any, ...], Decoding] = {}
    return [known[row] if row in known else known.setdefault(row, Decoding(*row)) for row in zip(*fields, strict=True)]


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
    environments = [str(environment) for environment in table.column("env_name").to_pylist()]
    shared = {example for example, count in Counter(e for e, _ in {*zip(examples, environments, strict=True)}).items()
              if count > 1}  # fmt: skip
    groups = [
        f"{name}-{environment}-{example}" if example in shared else f"{name}-{example}"
        for environment, example in zip(environments, examples, strict=True)
    ]
    lengths = [len(tokens) for tokens in table.column("response_tokens").to_pylist()]
    rows = len(examples)
    defaults: dict[str, list[Any]] = {
        **{key: [value] * rows for key, value in asdict(metadata).items()},
        "rollout_id": [f"{group}/{row}" for row, group in enumerate(groups)],
        "group_id": groups,
        "group_key": [f"{environment}:{example}" for environment, example in zip(environments, examples, strict=True)],
        "lesson_id": [""] * rows,
        "env_example_id": examples,
        "newest_weight_step": [metadata.weight_step] * rows,
        "oldest_weight_step": [None] * rows,
        "finish_reason": ["stop"] * rows,
        "response_mask": [[True] * length for length in lengths],
        "response_weight_steps": [None] * rows,
        "sample_starts": [ONE_SAMPLE] * rows,
        "turns": [[]] * rows,
        "decoding": [asdict(Decoding())] * rows,
        "timings": [[]] * rows,
        "rewards_by_function": [[]] * rows,
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


_TURN = pa.struct(
    [("role", pa.string()), ("content", pa.string()), ("start", pa.int32()), ("stop", pa.int32()), ("timings", PAIRS)]
)
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
        pa.field("sample_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("turns", pa.list_(_TURN), nullable=False),
        pa.field("decoding", _DECODING, nullable=False),
        pa.field("timings", PAIRS, nullable=False),
        pa.field("rewards_by_function", PAIRS, nullable=False),
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
        "group_key": text_column([record.group_key for record in records]),
        "lesson_id": [rollout.lesson_id for rollout in rollouts],
        "env_name": [rollout.env_name for rollout in rollouts],
        "env_example_id": text_column([rollout.env_example_id for rollout in rollouts]),
        "newest_weight_step": _newest_weight_steps(rollouts, metadata["weight_step"], arrays, lists),
        "oldest_weight_step": [rollout.oldest_weight_step for rollout in rollouts],
        "episode_reward": [float(rollout.episode_reward) for rollout in rollouts],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "sample_starts": [rollout.sample_starts for rollout in rollouts],
        "turns": _turns_column(rollouts),
        "decoding": shared_column([rollout.decoding for rollout in rollouts], _decoding_column),
        "timings": pairs_column([rollout.timings.items() for rollout in rollouts]),
        "rewards_by_function": pairs_column([rollout.rewards_by_function for rollout in rollouts]),
        **lists,
    }
    return table_of(values, ROLLOUT_SCHEMA)


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
        text_column([turn.content for turn in turns]),
        [turn.start for turn in turns],
        [turn.stop for turn in turns],
    )
    columns = [
        value if isinstance(value, pa.Array) else pa.array(value, field.type)
        for value, field in zip(values, _TURN, strict=False)
    ]
    columns.append(pairs_column([turn.timings for turn in turns]))
    return nested_column(lists, pa.StructArray.from_arrays(columns, fields=list(_TURN)))


def _decoding_column(decodings: Sequence[Decoding]) -> pa.Array:
    columns = [pa.array([getattr(one, field.name) for one in decodings], field.type) for field in _DECODING]
    return pa.StructArray.from_arrays(columns, fields=list(_DECODING))

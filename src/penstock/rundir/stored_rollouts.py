"""Rollout records of the rows of a table, made without a look at each row where the columns are sound as a whole.

A rollout's own constructor checks it, which takes longer than reading it. Rows that Penstock wrote were checked when
they were made, so here the same is checked for all rows of a column at once; if anything is wrong, the rows are made
one by one through the constructor, which names the field. Nothing is accepted that the constructor refuses.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.columns import (
    arrays_from_column,
    fields_from_columns,
    flat_values,
    metadata_from_columns,
    slices,
    values_from_column,
)
from penstock.types import Decoding, InvalidRolloutError, Rollout, RolloutRecord, Turn

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
    for row, (group_id, key, timings, *values) in enumerate(zip(groups, keys, _timings(batch), *fields, strict=True)):
        rollout = _trusted(values) if sound else _checked(values, f"{name}, row {row}")
        yield RolloutRecord(rollout, group_id, timings, key)


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
    made = {"metadata": metadata_from_columns(batch), "turns": _turns(batch), "decoding": _decodings(batch)}
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
    return list(map(tuple, slices(list(map(Turn, *fields)), lists.offsets)))


def _decodings(batch: pa.RecordBatch) -> list[Decoding]:
    fields = fields_from_columns(Decoding, batch.column("decoding").field)
    known: dict[tuple[Any, ...], Decoding] = {}
    return [known[row] if row in known else known.setdefault(row, Decoding(*row)) for row in zip(*fields, strict=True)]


def _timings(batch: pa.RecordBatch) -> list[dict[str, float]]:
    maps = batch.column("timings")
    pairs = list(zip(values_from_column(maps.keys), values_from_column(maps.items), strict=True))
    return list(map(dict, slices(pairs, maps.offsets)))

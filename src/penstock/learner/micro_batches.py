"""A batch of examples as micro-batches of one fixed shape, ready for the compiled functions.

Rows keep the packed layout for the model's body; what the head and the loss need is gathered to the front, so that
positions without a loss cost no head: entry k of the per-token arrays belongs to the token at `positions[k]`.
All sizes are fixed by the configuration; only `count` varies, and it is data. Host side, NumPy only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from penstock.batch import PackedBatch, Placement, pack, place, stack, trainable_tokens
from penstock.learner.aggregation import sequence_weights
from penstock.learner.config import LossConfig
from penstock.types import RLExample


class MicroBatch(NamedTuple):
    """R rows of S positions, and their K = R·S per-token entries, of which the first `count` are real.

    NumPy arrays as they are made here, device arrays inside the compiled functions that take them.

    Attributes:
        tokens: Packed rows.
        position_ids: Position within each sequence.
        segment_ids: 1, 2, …, 0 for padding.
        positions: Flat index (row · S + position) of the entry's token; never a sequence's first.
        labels: The token there.
        temperature: The rollout's.
        advantage: The rollout's.
        behaviour_logprobs: As the engine recorded them.
        loss_weight: The sequence's weight in the optimiser step; 0 where not real.
        same_version: Whether the whole sequence was sampled under the learner's present version.
        count: Number of real entries.
    """

    tokens: Int32[Array, "rows pos"]
    position_ids: Int32[Array, "rows pos"]
    segment_ids: Int32[Array, "rows pos"]
    positions: Int32[Array, " k"]
    labels: Int32[Array, " k"]
    temperature: Float32[Array, " k"]
    advantage: Float32[Array, " k"]
    behaviour_logprobs: Float32[Array, " k"]
    loss_weight: Float32[Array, " k"]
    same_version: Bool[Array, " k"]
    count: Int32[Array, ""]


class Plan(NamedTuple):
    """All micro-batches of one step, and where each example lies in their rows, end to end."""

    micro_batches: list[MicroBatch]
    placements: list[Placement]


def plan_update(
    examples: Sequence[RLExample], loss: LossConfig, row_length: int, micro_rows: int, version_step: int
) -> Plan:
    """Micro-batches of a training step: the entries are the tokens under the loss mask.

    Args:
        examples: Unpacked.
        loss: Decides the aggregation.
        row_length: S.
        micro_rows: R.
        version_step: The learner's version.
    """
    sampled = [trainable_tokens(example) for example in examples]
    weights = sequence_weights(sampled, loss.aggregation, loss.max_tokens or row_length)
    same = [bool((e.weight_steps[e.loss_mask] == version_step).all()) for e in examples]
    return _plan(examples, weights, same, row_length, micro_rows, every_token=False)


def plan_scoring(examples: Sequence[RLExample], row_length: int, micro_rows: int) -> Plan:
    """Micro-batches for log-probabilities alone: the entries are all tokens but each sequence's first."""
    nothing = np.zeros(len(examples), np.float32)
    return _plan(examples, nothing, [False] * len(examples), row_length, micro_rows, every_token=True)


def empty_micro_batch(row_length: int, micro_rows: int) -> MicroBatch:
    """All padding: the shapes that every micro-batch has."""
    rows: Any = np.zeros((micro_rows, row_length), np.int32)
    whole: Any = np.zeros(rows.size, np.int32)
    real: Any = np.zeros(rows.size, np.float32)
    nowhere: Any = np.zeros(rows.size, np.bool_)
    none: Any = np.array(0, np.int32)
    return MicroBatch(rows, rows, rows, whole, whole, real + 1, real, real, real, nowhere, none)


def _plan(
    examples: Sequence[RLExample],
    weights: Float32[np.ndarray, " examples"],
    same_version: Sequence[bool],
    row_length: int,
    micro_rows: int,
    every_token: bool,
) -> Plan:
    placements = place([len(example.tokens) for example in examples], row_length)
    rows = pack(examples, row_length)
    weight_rows = np.zeros((len(rows), row_length), np.float32)
    same_rows = np.zeros((len(rows), row_length), np.bool_)
    for placement, weight, same in zip(placements, weights, same_version, strict=True):
        weight_rows[placement.row, placement.start : placement.stop] = weight
        same_rows[placement.row, placement.start : placement.stop] = same
    micro_batches = []
    for first in range(0, len(rows), micro_rows):
        chosen = slice(first, first + micro_rows)
        packed = stack(rows[chosen], micro_rows)
        wanted = (packed.position_ids > 0) if every_token else packed.loss_mask
        micro_batches.append(_gather(packed, wanted, weight_rows[chosen], same_rows[chosen]))
    return Plan(micro_batches, placements)


def _gather(
    packed: PackedBatch,
    wanted: Bool[np.ndarray, "rows pos"],
    weights: Float32[np.ndarray, "real_rows pos"],
    same_version: Bool[np.ndarray, "real_rows pos"],
) -> MicroBatch:
    positions = np.flatnonzero(wanted).astype(np.int32)

    def front(values: np.ndarray, padding: float = 0.0) -> Any:
        entries = np.full(wanted.size, padding, values.dtype)
        entries[: len(positions)] = values.ravel()[positions]
        return entries

    rows: dict[str, Any] = {name: getattr(packed, name) for name in ("tokens", "position_ids", "segment_ids")}
    count: Any = np.array(len(positions), np.int32)
    return MicroBatch(
        **rows,
        positions=front(np.arange(wanted.size, dtype=np.int32)),
        labels=front(packed.tokens),
        temperature=front(packed.temperature, 1.0),
        advantage=front(packed.advantage),
        behaviour_logprobs=front(packed.generator_log_probs),
        loss_weight=front(weights),
        same_version=front(same_version),
        count=count,
    )

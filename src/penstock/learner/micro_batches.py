"""Micro-batches of fixed shapes, packed on the host from the sequences of an update.

Rows keep the packed layout for the model's body; what the head and the loss need is gathered to the front, so that
positions without a loss cost no head: entry k of the per-token arrays belongs to the token at `positions[k]`.
All sizes are fixed by the configuration; only `count` varies, and it is data.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Int64

from penstock.batch import PackedBatch, Placement, RowShape, pack, place, shapes_for, stack, trainable_tokens, unpack
from penstock.batch.examples import sample_spans_of, samples_of
from penstock.learner.config import LossConfig
from penstock.learner.critic import ValueTargets
from penstock.learner.losses import sequence_weights
from penstock.model.language import Segments
from penstock.types import RLExample


class MicroBatch(NamedTuple):
    """R rows of S positions, and their K = R·S per-token entries, of which the first `count` are real.

    NumPy arrays as it is made here, device arrays inside the compiled functions that take it. They are few, because
    each argument of a compiled function costs a transfer, and a wait for the interpreter where other threads are busy.

    Attributes:
        integers: [5, rows, pos]: `tokens`, `position_ids`, ids of the segments, `positions` and `labels`.
        reals: [9, k]: all other entries.
        places: [2, rows, segments]: where segments start and how long they are.
    """

    integers: Int32[Array, "5 rows pos"]
    reals: Float32[Array, "9 k"]
    places: Int32[Array, "2 rows segments"]

    @property
    def tokens(self) -> Int32[Any, "rows pos"]:
        """Packed rows."""
        return self.integers[0]

    @property
    def position_ids(self) -> Int32[Any, "rows pos"]:
        """Position within each sequence."""
        return self.integers[1]

    @property
    def segments(self) -> Segments:
        """Where the sequences lie; there is room for so many as `RowShape.room` says."""
        return Segments(self.integers[2], self.places[0], self.places[1])

    @property
    def positions(self) -> Int32[Any, " k"]:
        """Flat index (row · S + position) of the entry's token; never a sequence's first, and 0 where not real."""
        return self.integers[3].reshape(-1)

    @property
    def labels(self) -> Int32[Any, " k"]:
        """The token there."""
        return self.integers[4].reshape(-1)

    @property
    def count(self) -> Int32[Any, ""]:
        """Number of real entries."""
        return (self.positions > 0).sum(dtype=np.int32)

    @property
    def temperature(self) -> Float32[Any, " k"]:
        """The rollout's; 1 where not real."""
        return self.reals[0]

    @property
    def advantage(self) -> Float32[Any, " k"]:
        """The rollout's."""
        return self.reals[1]

    @property
    def behaviour_logprobs(self) -> Float32[Any, " k"]:
        """As the engine recorded them."""
        return self.reals[2]

    @property
    def reference_logprobs(self) -> Float32[Any, " k"]:
        """Under the reference of a KL; 0 where there is none."""
        return self.reals[3]

    @property
    def loss_weight(self) -> Float32[Any, " k"]:
        """The rollout's weight in the optimiser step; 0 where not real."""
        return self.reals[4]

    @property
    def same_version(self) -> Bool[Any, " k"]:
        """Whether the whole rollout was sampled under the learner's present version."""
        return self.reals[5] > 0

    @property
    def proximal_logprobs(self) -> Float32[Any, " k"]:
        """As of the update's beginning; 0 where the loss does not read them."""
        return self.reals[6]

    @property
    def values(self) -> Float32[Any, " k"]:
        """V of the state before the token, at the update's beginning; 0 without a value head."""
        return self.reals[7]

    @property
    def returns(self) -> Float32[Any, " k"]:
        """What V should be there; likewise."""
        return self.reals[8]


class Minibatch(NamedTuple):
    """What an optimiser step is made of.

    Attributes:
        examples: Its own.
        proximal: ℓ_p of each, of those that are computed; None where it is not read.
        targets: What a value head learns of each; None without one.
    """

    examples: Sequence[RLExample]
    proximal: Sequence[Float32[np.ndarray, " _"] | None] | None
    targets: Sequence[ValueTargets] | None

    def chosen(self, indices: Int64[np.ndarray, " n"]) -> "Minibatch":
        """These only."""
        proximal = None if self.proximal is None else [self.proximal[index] for index in indices]
        targets = None if self.targets is None else [self.targets[index] for index in indices]
        return Minibatch([self.examples[index] for index in indices], proximal, targets)


class UpdatePlan(NamedTuple):
    """All micro-batches of one step.

    Attributes:
        micro_batches: Of its rows.
        placements: Where each sample of the examples that have a place lies in these rows, end to end.
        samples: How many each of those examples has.
    """

    micro_batches: list[MicroBatch]
    placements: list[Placement]
    samples: list[int]


class PackedBeside:
    """Makes a plan while the device computes, as soon as it can be made, and puts its rows there.

    Args:
        make: The plan; None where it cannot be made yet.

    Attributes:
        plan: Once it is made.
    """

    def __init__(self, make: Callable[[], UpdatePlan | None]) -> None:
        self._make = make
        self.plan: UpdatePlan | None = None

    def try_to_make(self) -> None:
        """Makes it, unless it is made."""
        if self.plan is None and (made := self._make()) is not None:
            self.plan = made._replace(micro_batches=jax.device_put(made.micro_batches))


def plan_update(
    examples: Sequence[RLExample],
    loss: LossConfig,
    shapes: Sequence[RowShape],
    version_step: int,
    *,
    max_tokens: Sequence[int] | None = None,
    proximal_logprobs: Sequence[Float32[np.ndarray, " _"] | None] | None = None,
    value_targets: Sequence[ValueTargets] | None = None,
    left_out: Collection[str] = (),
    span: tuple[int, int] | None = None,
) -> UpdatePlan:
    """Micro-batches of an optimiser step: the entries are the tokens under the loss mask.

    Args:
        examples: All of the step's, not yet packed into rows.
        loss: Decides the aggregation.
        shapes: Of micro-batches, ascending by length.
        version_step: The learner's version.
        max_tokens: Of each example its denominator under ``constant`` aggregation; None: the loss's, or a row's.
        proximal_logprobs: ℓ_p of each example's tokens; None where the loss does not read them.
        value_targets: Of each example; None where there is no value head.
        left_out: Ids of rollouts that the loss's denominators count and no row holds; the placements are of the others.
            Where none is left there is no micro-batch.
        span: First and last + 1 of the positions whose loss counts, where it is not all of them.
    """
    sampled = [trainable_tokens(example) for example in examples]
    denominators = max_tokens or [loss.max_tokens or shapes[-1].length] * len(examples)
    weights = sequence_weights(sampled, loss.aggregation, denominators)
    same = [bool((e.weight_steps[e.loss_mask] == version_step).all()) for e in examples]
    proximal = [None] * len(examples) if proximal_logprobs is None else proximal_logprobs
    targets: Sequence[ValueTargets | None] = [None] * len(examples) if value_targets is None else value_targets
    if span is not None:
        inside = [np.isin(np.arange(len(example.tokens)), np.arange(*span)) for example in examples]
        weights = [each * weight for each, weight in zip(inside, weights, strict=True)]
    filled = [
        _Filling(weight, own, before, wanted and wanted.values, wanted and wanted.returns)
        for weight, own, before, wanted in zip(weights, same, proximal, targets, strict=True)
    ]
    kept = [index for index, example in enumerate(examples) if example.rollout_ids[0] not in left_out]
    chosen = [examples[index] for index in kept], [filled[index] for index in kept]
    return _plan(*chosen, shapes, every_token=False)


def has_advantage(example: RLExample) -> bool:
    """Whether any token under the loss has another advantage than zero."""
    return bool(example.advantage[example.loss_mask].any())


def plan_scoring(examples: Sequence[RLExample], shapes: Sequence[RowShape], every_token: bool = True) -> UpdatePlan:
    """Micro-batches for log-probabilities alone.

    Args:
        examples: Not yet packed into rows.
        shapes: Of micro-batches, ascending by length.
        every_token: The entries are all tokens but each sequence's first; else those under the loss mask.
    """
    return _plan(examples, [_Filling(0.0, False)] * len(examples), shapes, every_token)


def score_plan(plan: UpdatePlan, scoring: Callable[[MicroBatch], Any]) -> list[Float32[np.ndarray, " pos"]]:
    """What is scored at a plan's entries, aligned with the tokens of its examples; 0 elsewhere.

    Args:
        plan: From `plan_scoring`.
        scoring: Of a micro-batch, float32 [k].
    """
    scores = list[np.ndarray]()
    for micro_batch in plan.micro_batches:
        found = np.asarray(scoring(micro_batch))
        own = micro_batch._replace(integers=jax.device_get(micro_batch.integers))
        rows, count = np.zeros(own.tokens.shape, np.float32), int(own.count)
        rows.reshape(-1)[own.positions[:count]] = found[:count]
        scores.extend(rows)
    parts = iter(unpack(scores, plan.placements))
    return [np.concatenate([next(parts) for _ in range(count)]) for count in plan.samples]


def scored_lengths(*row_lengths: int) -> tuple[int, ...]:
    """Tokens of the rows in which sequences are scored, ascending: few lengths, all compiled before they are needed."""
    lengths, length = [], 64
    while length <= row_lengths[0] // 2:
        lengths.append(length)
        length *= 4
    return (*lengths, *row_lengths)


def empty_micro_batch(shape: RowShape) -> MicroBatch:
    """All padding: the arrays that every micro-batch of that shape has."""
    return _padding(Segments.of(np.zeros((shape.rows, shape.length), np.int32), shape.room(1)))


class _Filling(NamedTuple):
    """What the tokens of one example get in their row, by the names of `MicroBatch`, where these are the last reals."""

    loss_weight: float | np.ndarray
    same_version: bool
    proximal_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None

    def of_samples(self, example: RLExample) -> "list[_Filling]":
        """That of each of the example's samples."""
        spans = sample_spans_of(example)
        if len(spans) == 1:
            return [self]
        return [self._make(each[span] if isinstance(each, np.ndarray) else each for each in self) for span in spans]


def _plan(
    examples: Sequence[RLExample], filled: Sequence[_Filling], shapes: Sequence[RowShape], every_token: bool
) -> UpdatePlan:
    """The micro-batches of one shape after those of another; rows are counted with those that are all padding."""
    counts = [len(sample_spans_of(example)) for example in examples]
    filled = [part for each, example in zip(filled, examples, strict=True) for part in each.of_samples(example)]
    examples = [sample for example in examples for sample in samples_of(example)]
    found = shapes_for([len(example.tokens) for example in examples], shapes)
    micro_batches, placements, before = list[MicroBatch](), dict[int, Placement](), 0
    for number, shape in enumerate(shapes):
        chosen = [index for index, own in enumerate(found) if own == number]
        of_shape = _plan_shape([examples[i] for i in chosen], [filled[i] for i in chosen], shape, every_token)
        for index, placement in zip(chosen, of_shape.placements, strict=True):
            placements[index] = placement._replace(row=placement.row + before)
        micro_batches += of_shape.micro_batches
        before += shape.rows * len(of_shape.micro_batches)
    return UpdatePlan(micro_batches, [placements[index] for index in range(len(examples))], counts)


def _plan_shape(
    examples: Sequence[RLExample], filled: Sequence[_Filling], rows_shape: RowShape, every_token: bool
) -> UpdatePlan:
    row_length, micro_rows = rows_shape.length, rows_shape.rows
    placements = place([len(example.tokens) for example in examples], row_length)
    rows = pack(examples, row_length)
    beside = np.zeros((len(_Filling._fields), len(rows), row_length), np.float32)
    for placement, filling in zip(placements, filled, strict=True):
        for row_values, value in zip(beside, filling, strict=True):
            if value is not None:
                row_values[placement.row, placement.start : placement.stop] = value
    micro_batches, room = [], rows_shape.room(max((int(row.segment_ids.max()) for row in rows), default=1))
    for first in range(0, len(rows), micro_rows):
        chosen = slice(first, first + micro_rows)
        packed = stack(rows[chosen], micro_rows)
        wanted = (packed.position_ids > 0) if every_token else packed.loss_mask
        micro_batches.append(_gather(packed, wanted, beside[:, chosen], room))
    return UpdatePlan(micro_batches, placements, [1] * len(placements))


def _gather(
    packed: PackedBatch, wanted: Bool[np.ndarray, "rows pos"], beside: Float32[np.ndarray, "n real_rows pos"], room: int
) -> MicroBatch:
    made, positions = _padding(Segments.of(packed.segment_ids, room)), np.flatnonzero(wanted)
    integers, reals = np.asarray(made.integers), np.asarray(made.reals)
    integers[:2] = packed.tokens, packed.position_ids
    integers[3:].reshape(2, -1)[:, : len(positions)] = positions, packed.tokens.ravel()[positions]
    of_rows = packed.temperature, packed.advantage, packed.generator_log_probs, packed.reference_log_probs
    for entries, values in zip(reals, (*of_rows, *beside), strict=True):
        if values is not None:
            entries[: len(positions)] = values.ravel()[positions]
    return made


def _padding(segments: Segments) -> MicroBatch:
    """Without a token, in rows where sequences lie so."""
    ids, *places = map(np.asarray, segments)
    integers, reals = np.zeros((5, *ids.shape), np.int32), np.zeros((9, ids.size), np.float32)
    integers[2], reals[0] = ids, 1  # nothing is divided by a temperature of 0
    arrays: Any = integers, reals, np.stack(places)
    return MicroBatch(*arrays)

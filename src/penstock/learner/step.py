"""The compiled functions of an update, and the micro-batches of one fixed shape that they take.

Gradient of a micro-batch, added up; and log-probabilities alone (of `Learner.score`, and the proximal ones). A function
sees few shapes, those of `LearnerConfig.row_shapes`, and is compiled once for each; learners of equal configuration
share the compiled code. The loss of a step is a weighted sum over tokens with weights fixed beforehand
(`losses.sequence_weights`), so micro-batches simply add.

Rows keep the packed layout for the model's body; what the head and the loss need is gathered to the front, so that
positions without a loss cost no head: entry k of the per-token arrays belongs to the token at `positions[k]`.
All sizes are fixed by the configuration; only `count` varies, and it is data. Micro-batches are NumPy, on the host.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Int64, PyTree

from penstock.batch import PackedBatch, Placement, RowShape, pack, place, shapes_for, stack, trainable_tokens, unpack
from penstock.batch.examples import sample_spans_of, samples_of
from penstock.learner.config import LossConfig, ProximalSource
from penstock.learner.critic import ValueHead, ValueTargets, value_token_loss
from penstock.learner.head import HeadInputs, HeadOutputs, tiled_logprobs, tiled_loss
from penstock.learner.loss_terms import CriticConfig, KlConfig
from penstock.learner.losses import (
    LossInputs,
    TokenLoss,
    kl_estimate,
    kl_token_loss,
    own_token_loss,
    policy_token_loss,
    sequence_weights,
    supervised_token_loss,
)
from penstock.learner.optimizer import OptimizerState, join_frozen, split_frozen
from penstock.model.language import Decoder, Segments
from penstock.model.language.attention_choice import AttentionChoice, Platform, Remat, attention_kernel
from penstock.model.programs import light_compilation
from penstock.types import RLExample


class MicroBatch(NamedTuple):
    """R rows of S positions, and their K = R·S per-token entries, of which the first `count` are real.

    NumPy arrays as they are made here, device arrays inside the compiled functions that take them.

    Attributes:
        tokens: Packed rows.
        position_ids: Position within each sequence.
        segments: Where the sequences lie; there is room for so many as `RowShape.room` says.
        positions: Flat index (row · S + position) of the entry's token; never a sequence's first.
        labels: The token there.
        temperature: The rollout's.
        advantage: The rollout's.
        behaviour_logprobs: As the engine recorded them.
        proximal_logprobs: As of the update's beginning; 0 where the loss does not read them.
        reference_logprobs: Under the reference of a KL; 0 where there is none.
        values: V of the state before the token, at the update's beginning; 0 without a value head.
        returns: What V should be there; likewise.
        loss_weight: The rollout's weight in the optimiser step; 0 where not real.
        same_version: Whether the whole rollout was sampled under the learner's present version.
        count: Number of real entries.
    """

    tokens: Int32[Array, "rows pos"]
    position_ids: Int32[Array, "rows pos"]
    segments: Segments
    positions: Int32[Array, " k"]
    labels: Int32[Array, " k"]
    temperature: Float32[Array, " k"]
    advantage: Float32[Array, " k"]
    behaviour_logprobs: Float32[Array, " k"]
    proximal_logprobs: Float32[Array, " k"]
    reference_logprobs: Float32[Array, " k"]
    values: Float32[Array, " k"]
    returns: Float32[Array, " k"]
    loss_weight: Float32[Array, " k"]
    same_version: Bool[Array, " k"]
    count: Int32[Array, ""]


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


class PlannedStep(NamedTuple):
    """An optimiser step that is not applied yet; valid until the next is asked for.

    Attributes:
        decoder: Parameters before it.
        state: The optimiser's, before it.
        examples: What it trains on; with a value head, their advantages are over its values.
        gradients: Of the whole step.
        rate: Learning rate.
        gradient_of: Given a rollout's id, and first and last + 1 of its positions: the part of `gradients` that its
            tokens there made, with the step's own denominators; by a backward pass of its own.
    """

    decoder: Decoder
    state: OptimizerState
    examples: Sequence[RLExample]
    gradients: Any
    rate: float
    gradient_of: Callable[[str, int, int], Any]


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
        found, count = np.asarray(scoring(micro_batch)), int(micro_batch.count)
        rows = np.zeros(micro_batch.tokens.shape, np.float32)
        rows.reshape(-1)[np.asarray(micro_batch.positions)[:count]] = found[:count]
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
    rows: Any = np.zeros((shape.rows, shape.length), np.int32)
    whole: Any = np.zeros(rows.size, np.int32)
    real: Any = np.zeros(rows.size, np.float32)
    nowhere: Any = np.zeros(rows.size, np.bool_)
    none: Any = np.array(0, np.int32)
    of_entries: dict[str, Any] = dict.fromkeys(MicroBatch._fields[3:], real)
    fixed = {"labels": whole, "positions": whole, "temperature": real + 1, "same_version": nowhere, "count": none}
    return MicroBatch(rows, rows, Segments.of(rows, shape.room(1)), **(of_entries | fixed))


class _Filling(NamedTuple):
    """What the tokens of one example get in their row, by the names of `MicroBatch`."""

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
    dtypes = {"same_version": np.bool_}
    beside = {n: np.zeros((len(rows), row_length), dtypes.get(n, np.float32)) for n in _Filling._fields}
    for placement, filling in zip(placements, filled, strict=True):
        for row_values, value in zip(beside.values(), filling, strict=True):
            if value is not None:
                row_values[placement.row, placement.start : placement.stop] = value
    micro_batches, room = [], rows_shape.room(max((int(row.segment_ids.max()) for row in rows), default=1))
    for first in range(0, len(rows), micro_rows):
        chosen = slice(first, first + micro_rows)
        packed = stack(rows[chosen], micro_rows)
        wanted = (packed.position_ids > 0) if every_token else packed.loss_mask
        of_rows = {name: values[chosen] for name, values in beside.items()}
        micro_batches.append(_gather(packed, wanted, of_rows, room))
    return UpdatePlan(micro_batches, placements, [1] * len(placements))


def _gather(
    packed: PackedBatch, wanted: Bool[np.ndarray, "rows pos"], beside: Mapping[str, np.ndarray], room: int
) -> MicroBatch:
    positions = np.flatnonzero(wanted).astype(np.int32)

    def front(values: np.ndarray, padding: float = 0.0) -> Any:
        entries = np.full(wanted.size, padding, values.dtype)
        entries[: len(positions)] = values.ravel()[positions]
        return entries

    rows: dict[str, Any] = {name: getattr(packed, name) for name in ("tokens", "position_ids")}
    count: Any = np.array(len(positions), np.int32)
    reference = packed.reference_log_probs
    return MicroBatch(
        **rows,
        segments=Segments.of(packed.segment_ids, room),
        positions=front(np.arange(wanted.size, dtype=np.int32)),
        labels=front(packed.tokens),
        temperature=front(packed.temperature, 1.0),
        advantage=front(packed.advantage),
        behaviour_logprobs=front(packed.generator_log_probs),
        reference_logprobs=front(np.zeros(wanted.shape, np.float32) if reference is None else reference),
        count=count,
        **{name: front(values) for name, values in beside.items()},
    )


TokenLossFunction = Callable[[LossInputs], TokenLoss]
"""Of n tokens, to the loss of each."""


class ForwardOptions(NamedTuple):
    """How the forward pass trades memory for time, see `LearnerConfig`, and what it is compiled for."""

    remat: Remat
    head_tile_tokens: int
    attention: AttentionChoice = "auto"
    platform: Platform = "cpu"
    dtype: str = "float32"


_NO_KL, _NO_CRITIC = KlConfig(), CriticConfig()


class LossOptions(NamedTuple):
    """What a token's loss is made of.

    Attributes:
        token_loss: From inputs to the loss of each token.
        proximal: Where ℓ_p comes from.
        entropy_gradient: Whether the loss has a gradient through the entropies.
        reads_reference: Whether it is given the micro-batch's ℓ_ref.
        critic: Of the value head, where there is one.
        each_alone: Whether a token's loss depends on no other token's log-probability.
    """

    token_loss: TokenLossFunction
    proximal: ProximalSource = "current"
    entropy_gradient: bool = False
    reads_reference: bool = False
    critic: CriticConfig = _NO_CRITIC
    each_alone: bool = False


class LossSums(NamedTuple):
    """Sums over the loss tokens seen so far in a step.

    `stale_*` are over sequences of which another version than the learner's sampled a part; the KL terms are
    expm1(x) − x with x = ℓ_θ − ℓ_b, an unbiased and never negative estimate of KL(behaviour ‖ learner).
    `value_loss` is weighed like `loss`, of which it is a part; it is 0 without a value head.
    `reference_kl` is k3 of the micro-batch's ℓ_ref, and means nothing where there is no reference.
    """

    loss: Float32[Array, ""]
    tokens: Float32[Array, ""]
    clipped: Float32[Array, ""]
    bounded: Float32[Array, ""]
    ratio: Float32[Array, ""]
    entropy: Float32[Array, ""]
    stale_tokens: Float32[Array, ""]
    stale_kl: Float32[Array, ""]
    reference_kl: Float32[Array, ""]
    value_loss: Float32[Array, ""]
    value_clipped: Float32[Array, ""]


class GradientSums(NamedTuple):
    """Gradients, also of the value head, and sums over the micro-batches so far; donated from one to the next."""

    gradients: PyTree
    sums: LossSums
    critic: ValueHead | None = None


@cache
def policy_accumulator(
    loss: LossConfig,
    options: ForwardOptions,
    frozen: tuple[str, ...] = (),
    proximal: ProximalSource = "current",
    kl: KlConfig = _NO_KL,
    critic: CriticConfig = _NO_CRITIC,
) -> Any:
    """Compiled (decoder, so_far, micro_batch) -> so_far for the policy loss; `so_far` is donated.

    A value head is given by name, as ``critic``.
    """
    own = loss.load_module()
    token_loss = partial(policy_token_loss, loss) if own is None else partial(own_token_loss, own)
    reads_reference = kl.in_loss or (own is not None and kl.reference is not None)
    if kl.in_loss:
        token_loss = partial(kl_token_loss, kl, token_loss)
    entropy_gradient = own is not None or loss.entropy_coefficient > 0
    each_alone = loss.each_alone(proximal)
    made = LossOptions(token_loss, proximal, entropy_gradient, reads_reference, critic, each_alone)
    return _accumulator(made, options, frozen)


@cache
def supervised_accumulator(options: ForwardOptions, frozen: tuple[str, ...] = ()) -> Any:
    """The same for cross-entropy."""
    return _accumulator(LossOptions(supervised_token_loss, each_alone=True), options, frozen)


def _accumulator(loss: LossOptions, options: ForwardOptions, frozen: tuple[str, ...]) -> Any:
    light = light_compilation(options.platform, options.dtype)
    return jax.jit(partial(accumulate, loss, options, frozen=frozen), donate_argnums=1, compiler_options=light)


@cache
def scorer(options: ForwardOptions, of: Literal["logprobs", "entropy"] = "logprobs") -> Any:
    """Compiled (decoder, micro_batch) -> log-probabilities or entropies, float32 [k]."""

    def score(decoder: Decoder, batch: MicroBatch) -> Array:
        return getattr(head_outputs(decoder, batch, options), of)

    return jax.jit(score, compiler_options=light_compilation(options.platform, options.dtype))


@cache
def value_scorer(options: ForwardOptions) -> Any:
    """Compiled (decoder, value head, micro_batch) -> V of the state before each entry's token, float32 [k]."""

    def score(decoder: Decoder, head: ValueHead, batch: MicroBatch) -> Array:
        return head(entry_states(decoder, batch, options))

    return jax.jit(score)


@cache
def zeros_maker(frozen: tuple[str, ...] = ()) -> Any:
    """Compiled decoder -> what to start accumulating from; a value head is given by name, as ``critic``."""
    return jax.jit(partial(zeros, frozen=frozen))


def head_outputs(decoder: Decoder, batch: MicroBatch, options: ForwardOptions) -> HeadOutputs:
    """Log-probability and entropy at every entry of a micro-batch: body on rows, head on entries."""
    states = entry_states(decoder, batch, options)
    return tiled_logprobs(states, decoder.output_matrix, _asked(batch), options.head_tile_tokens)


def entry_states(decoder: Decoder, batch: MicroBatch, options: ForwardOptions) -> Array:
    """[k, hidden] of the states that predicted the entries' tokens; of padding entries, any state."""
    length, model = batch.tokens.shape[1], decoder.config
    kernel = attention_kernel(options.attention, options.platform, length, model.dtype, model.head_dim)
    hidden = decoder.hidden_states(batch.tokens, batch.position_ids, batch.segments, options.remat, kernel)
    return hidden.reshape(-1, hidden.shape[-1])[jnp.maximum(batch.positions - 1, 0)]


def _asked(batch: MicroBatch) -> HeadInputs:
    return HeadInputs(batch.labels, batch.temperature, batch.count)


def zeros(decoder: Decoder, frozen: Sequence[str] = (), critic: ValueHead | None = None) -> GradientSums:
    """Before the first micro-batch; arrays that are frozen have no gradient."""
    gradients = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), split_frozen(frozen, decoder)[0])
    sums = LossSums(*[jnp.zeros((), jnp.float32)] * len(LossSums._fields))
    return GradientSums(gradients, sums, jax.tree.map(jnp.zeros_like, critic))


def accumulate(
    loss: LossOptions,
    options: ForwardOptions,
    decoder: Decoder,
    so_far: GradientSums,
    batch: MicroBatch,
    frozen: Sequence[str] = (),
    critic: ValueHead | None = None,
) -> GradientSums:
    """Adds one micro-batch's gradients and sums; of arrays that are frozen there is none."""
    trained, rest = split_frozen(frozen, decoder)

    def loss_of(part: Decoder, head: ValueHead | None) -> tuple[Array, LossSums]:
        return _loss(loss, options, join_frozen(part, rest), head, batch)

    (gradients, of_head), sums = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(trained, critic)
    added = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), so_far.gradients, gradients)
    critics = jax.tree.map(jnp.add, so_far.critic, of_head)
    return GradientSums(added, jax.tree.map(jnp.add, so_far.sums, sums), critics)


def _loss(
    loss: LossOptions, options: ForwardOptions, decoder: Decoder, head: ValueHead | None, batch: MicroBatch
) -> tuple[Array, LossSums]:
    states, given = entry_states(decoder, batch, options), _given(loss, batch)
    matrix, asked, tile = decoder.output_matrix, _asked(batch), options.head_tile_tokens
    whole, entropy = (given, batch.loss_weight), loss.entropy_gradient
    if loss.each_alone:
        total, outputs = tiled_loss(states, matrix, asked, tile, partial(_weighted, loss), whole, entropy)
    else:
        outputs = tiled_logprobs(states, matrix, asked, tile, entropy)
        total = _weighted(loss, outputs, whole).sum()
    value_loss = value_clipped = jnp.zeros((), jnp.float32)
    if head is not None:
        of_values, clipped = value_token_loss(head(states), batch.values, batch.returns, loss.critic.clip)
        value_loss, value_clipped = _total(batch.loss_weight * of_values, given.real), _count(given.real & clipped)
        total = total + loss.critic.coefficient * value_loss
    sums = _sums(total, _terms(loss, outputs, given), outputs, batch, given.real)
    return total, jax.lax.stop_gradient(sums._replace(value_loss=value_loss, value_clipped=value_clipped))


def _given(loss: LossOptions, batch: MicroBatch) -> LossInputs:
    """What the loss is made of but for what the head says, which is 0 here."""
    row_length, real = batch.tokens.shape[1], jnp.arange(batch.labels.shape[0]) < batch.count
    segment, unknown = batch.segments.ids.reshape(-1)[batch.positions], jnp.zeros_like(batch.advantage)
    return LossInputs(
        unknown,
        batch.behaviour_logprobs,
        batch.behaviour_logprobs if loss.proximal == "behaviour" else batch.proximal_logprobs,
        batch.advantage,
        unknown,
        sequence=jnp.where(real, batch.positions // row_length * row_length + segment - 1, 0),
        real=real,
        reference_logprobs=batch.reference_logprobs if loss.reads_reference else None,
    )


def _terms(loss: LossOptions, outputs: HeadOutputs, given: LossInputs) -> TokenLoss:
    return loss.token_loss(given.of_head(outputs, loss.proximal == "current"))


def _weighted(loss: LossOptions, outputs: HeadOutputs, entries: tuple[LossInputs, Array]) -> Array:
    given, weight = entries
    return jnp.where(given.real, weight * _terms(loss, outputs, given).loss, 0.0)


def _sums(loss: Array, terms: TokenLoss, outputs: HeadOutputs, batch: MicroBatch, real: Array) -> LossSums:
    difference = outputs.logprobs - batch.behaviour_logprobs
    kl, stale = jnp.expm1(difference) - difference, real & ~batch.same_version
    return LossSums(
        loss=loss,
        tokens=_count(real),
        clipped=_count(real & terms.clipped),
        bounded=_count(real & terms.bounded),
        ratio=_total(jnp.exp(difference), real),
        entropy=_total(outputs.entropy, real),
        stale_tokens=_count(stale),
        stale_kl=_total(kl, stale),
        reference_kl=_total(kl_estimate("k3", outputs.logprobs, batch.reference_logprobs), real),
        value_loss=jnp.zeros((), jnp.float32),
        value_clipped=jnp.zeros((), jnp.float32),
    )


def _total(values: Array, where: Array) -> Array:
    """Sum where true; what is not real may hold anything, even NaN."""
    return jnp.sum(jnp.where(where, values, 0.0))


def _count(where: Array) -> Array:
    return jnp.sum(where, dtype=jnp.float32)

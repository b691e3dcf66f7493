"""The compiled functions of an update.

Gradient of a micro-batch, added up; and log-probabilities alone (of `Learner.score`, and the proximal ones). A function
sees few shapes, those of `LearnerConfig.row_shapes`, and is compiled once for each; learners of equal configuration
share the compiled code. The loss of a step is a weighted sum over tokens with weights fixed beforehand
(`losses.sequence_weights`), so micro-batches simply add.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, PyTree

from penstock.learner.config import LossConfig, ProximalSource
from penstock.learner.critic import ValueHead, value_token_loss
from penstock.learner.head import HeadInputs, HeadOutputs, tiled_logprobs, tiled_loss
from penstock.learner.loss_terms import CriticConfig, KlConfig
from penstock.learner.losses import (
    LossInputs,
    TokenLoss,
    kl_estimate,
    kl_token_loss,
    own_token_loss,
    policy_token_loss,
    supervised_token_loss,
)
from penstock.learner.micro_batches import MicroBatch
from penstock.learner.optimizer import OptimizerState, join_frozen, split_frozen
from penstock.model.language import Decoder
from penstock.model.language.attention_choice import AttentionChoice, Platform, Remat, attention_kernel
from penstock.model.programs import light_compilation
from penstock.types import RLExample


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
    """Sums over the loss tokens of a micro-batch, or a step; from the device they come as one array, in this order.

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
    """Gradients of the policy, and of a value head, over the micro-batches so far; donated from one to the next."""

    policy: PyTree
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
    """`accumulate` of the policy loss, compiled: decoder, so_far, micro_batch -> so_far, sums; `so_far` is donated.

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
    return GradientSums(gradients, jax.tree.map(jnp.zeros_like, critic))


def accumulate(
    loss: LossOptions,
    options: ForwardOptions,
    decoder: Decoder,
    so_far: GradientSums,
    batch: MicroBatch,
    frozen: Sequence[str] = (),
    critic: ValueHead | None = None,
) -> tuple[GradientSums, Float32[Array, " sums"]]:
    """With one micro-batch's gradients, of which arrays that are frozen have none; and the `LossSums` of it alone."""
    trained, rest = split_frozen(frozen, decoder)

    def loss_of(part: Decoder, head: ValueHead | None) -> tuple[Array, LossSums]:
        return _loss(loss, options, join_frozen(part, rest), head, batch)

    (gradients, of_head), sums = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(trained, critic)
    added = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), so_far.policy, gradients)
    return GradientSums(added, jax.tree.map(jnp.add, so_far.critic, of_head)), jnp.stack(sums)


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

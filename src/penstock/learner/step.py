"""The compiled functions of an update: gradient of a micro-batch, added up; and log-probabilities alone.

Every function sees one shape only, [micro_batch_rows, row_length], so it is compiled once; learners of equal
configuration share the compiled code. The loss of a step is a weighted sum over tokens with weights fixed beforehand
(`aggregation`), so micro-batches simply add.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, PyTree

from penstock.learner.config import LossConfig
from penstock.learner.logprobs import HeadInputs, HeadOutputs, tiled_logprobs
from penstock.learner.losses import TokenLoss, policy_token_loss, supervised_token_loss
from penstock.learner.micro_batches import MicroBatch
from penstock.model.language import Decoder

TokenLossFunction = Callable[[Array, Array, Array], TokenLoss]
"""(ℓ_θ, ℓ_b, advantage) -> per-token loss."""


class ForwardOptions(NamedTuple):
    """How the forward pass trades memory for time; see `LearnerConfig`."""

    remat: bool
    head_tile_tokens: int


class Sums(NamedTuple):
    """Sums over the loss tokens seen so far in a step; `mismatch_max` is a maximum.

    `same_*` are over sequences wholly sampled under the learner's version, `stale_*` over the others; the KL
    terms are expm1(x) − x with x = ℓ_θ − ℓ_b, an unbiased and never negative estimate of KL(behaviour ‖ learner).
    """

    loss: Float32[Array, ""]
    tokens: Float32[Array, ""]
    clipped: Float32[Array, ""]
    bounded: Float32[Array, ""]
    ratio: Float32[Array, ""]
    entropy: Float32[Array, ""]
    same_tokens: Float32[Array, ""]
    same_kl: Float32[Array, ""]
    stale_tokens: Float32[Array, ""]
    stale_kl: Float32[Array, ""]
    mismatch_max: Float32[Array, ""]


class Accumulated(NamedTuple):
    """Gradient and sums over the micro-batches so far; donated from one to the next."""

    gradients: PyTree
    sums: Sums


@cache
def policy_accumulator(loss: LossConfig, options: ForwardOptions) -> Any:
    """Compiled (decoder, so_far, micro_batch) -> so_far for the policy loss; `so_far` is donated."""
    return jax.jit(partial(accumulate, partial(policy_token_loss, loss), options), donate_argnums=1)


@cache
def supervised_accumulator(options: ForwardOptions) -> Any:
    """The same for cross-entropy."""
    return jax.jit(partial(accumulate, supervised_token_loss, options), donate_argnums=1)


@cache
def scorer(options: ForwardOptions) -> Any:
    """Compiled (decoder, micro_batch) -> log-probabilities, float32 [k]."""

    def score(decoder: Decoder, batch: MicroBatch) -> Array:
        return head_outputs(decoder, batch, options).logprobs

    return jax.jit(score)


@cache
def zeros_maker() -> Any:
    """Compiled decoder -> what to start accumulating from."""
    return jax.jit(zeros)


def head_outputs(decoder: Decoder, batch: MicroBatch, options: ForwardOptions) -> HeadOutputs:
    """Log-probability and entropy at every entry of a micro-batch: body on rows, head on entries."""
    hidden = decoder.hidden_states(batch.tokens, batch.position_ids, batch.segment_ids, options.remat)
    flat = hidden.reshape(-1, hidden.shape[-1])
    before = jnp.maximum(batch.positions - 1, 0)  # the state that predicted the token; padding entries have 0
    inputs = HeadInputs(batch.labels, batch.temperature, batch.count)
    return tiled_logprobs(flat[before], decoder.output_matrix, inputs, options.head_tile_tokens)


def zeros(decoder: Decoder) -> Accumulated:
    """Before the first micro-batch."""
    gradients = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), decoder)
    return Accumulated(gradients, Sums(*[jnp.zeros((), jnp.float32)] * len(Sums._fields)))


def accumulate(
    token_loss: TokenLossFunction,
    options: ForwardOptions,
    decoder: Decoder,
    so_far: Accumulated,
    batch: MicroBatch,
) -> Accumulated:
    """Adds one micro-batch's gradient and sums."""
    gradient_of = jax.grad(partial(_loss, token_loss, options), has_aux=True)
    gradients, sums = gradient_of(decoder, batch)
    added = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), so_far.gradients, gradients)
    totals = jax.tree.map(jnp.add, so_far.sums, sums)
    highest = jnp.maximum(so_far.sums.mismatch_max, sums.mismatch_max)
    return Accumulated(added, totals._replace(mismatch_max=highest))


def _loss(
    token_loss: TokenLossFunction, options: ForwardOptions, decoder: Decoder, batch: MicroBatch
) -> tuple[Array, Sums]:
    outputs = head_outputs(decoder, batch, options)
    terms = token_loss(outputs.logprobs, batch.behaviour_logprobs, batch.advantage)
    real = jnp.arange(batch.labels.shape[0]) < batch.count
    loss = _total(batch.loss_weight * terms.loss, real)
    return loss, jax.lax.stop_gradient(_sums(loss, terms, outputs, batch, real))


def _sums(loss: Array, terms: TokenLoss, outputs: HeadOutputs, batch: MicroBatch, real: Array) -> Sums:
    difference = outputs.logprobs - batch.behaviour_logprobs
    kl = jnp.expm1(difference) - difference
    same, stale = real & batch.same_version, real & ~batch.same_version
    return Sums(
        loss=loss,
        tokens=_count(real),
        clipped=_count(real & terms.clipped),
        bounded=_count(real & terms.bounded),
        ratio=_total(jnp.exp(difference), real),
        entropy=_total(outputs.entropy, real),
        same_tokens=_count(same),
        same_kl=_total(kl, same),
        stale_tokens=_count(stale),
        stale_kl=_total(kl, stale),
        mismatch_max=jnp.max(jnp.where(same, jnp.abs(difference), 0.0)),
    )


def _total(values: Array, where: Array) -> Array:
    """Sum where true; what is not real may hold anything, even NaN."""
    return jnp.sum(jnp.where(where, values, 0.0))


def _count(where: Array) -> Array:
    return jnp.sum(where, dtype=jnp.float32)

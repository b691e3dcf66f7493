"""One token per row from its logits: inverse-CDF sampling with one uniform number per row.

A uniform belongs to a (sample seed, position), so a draw never depends on neighbours or on the slot. The
cumulative sum is two-level (blocks of the vocabulary, then inside one block): sampling costs two passes over the
logits, against one random number per vocabulary entry for the Gumbel trick, which is half of a decode step on a
CPU. Top-k and top-p search their threshold by bisection on the bits of the probabilities: exact, and no sort. Min-p
has its threshold already: one comparison. On a CPU only rows that ask for truncation are truncated; elsewhere all are
where one asks, since a few large operations cost less there than many small ones.
Log-probabilities are of the distribution before truncation.

Not covered: penalties, logit bias.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

SIGNIFICANT_BITS = 30
"""A float32 in [0, 1] has zeros in its two highest bits."""

TRUNCATED_AT_ONCE = 4
"""Rows whose threshold is searched together: enough for a loop's overhead, few enough for a core's cache."""


def uniforms(seeds: UInt32[Array, "rows 2"], positions: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    """One number in [0, 1) per row from its seed and position alone: Threefry-2x32 in counter mode.

    Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405.
    """

    def draw(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    return jax.vmap(draw)(seeds, positions)


def sample(
    logits: Float32[Array, "rows vocab"],
    uniform: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    alternatives: int = 0,
    truncated: bool = True,
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"], tuple[Array, Array] | None]:
    """Draws a token per row, with its log-probability under softmax(logits / temperature).

    Args:
        logits: Scores of every token.
        uniform: From `uniforms`.
        temperature: 0 takes the most probable token; its log-probability is under softmax(logits).
        top_k: Only the k most probable tokens may be drawn; the vocabulary's size or more keeps all.
        top_p: Only the smallest set of the most probable tokens with at least this mass (of what min-p and top-k kept)
            may be drawn; 1 keeps all. For both, tokens tied with the last one kept are kept too.
        min_p: Only tokens at least this many times as probable as the most probable one may be drawn; 0 keeps all.
            Nguyen et al. 2024, https://arxiv.org/abs/2407.01082.
        alternatives: How many of the most probable tokens are told, too.
        truncated: Whether rows may ask for truncation at all; one that cannot compiles in two thirds of the time.

    Returns:
        Token ids, log-probabilities, and where any are asked for the alternatives: int32 and float32
        [alternatives, rows], the most probable first, equal to the last bit where they are the token drawn.
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    shifted = scaled - jnp.max(scaled, axis=1, keepdims=True)
    weights = _blocks(jnp.exp(shifted))
    sums = jnp.sum(weights, axis=2)
    whole = partial(draw, weights, sums, uniform)
    drawn = _drawn_truncated(weights, uniform, whole, top_k, top_p, min_p) if truncated else whole()
    greedy = temperature == 0
    tokens = lax.cond(jnp.any(greedy), lambda: jnp.where(greedy, _mode(shifted), drawn), lambda: drawn)
    chosen = jnp.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0]
    total = jnp.log(jnp.sum(sums, axis=1))
    logprobs = chosen - total
    return tokens, logprobs, most_probable(shifted, total, alternatives) if alternatives else None


def _drawn_truncated(
    weights: Float32[Array, "rows blocks width"],
    uniform: Float32[Array, " rows"],
    whole: Callable[[], Int32[Array, " rows"]],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """`draw` from what may be drawn, or `whole` where no row asks for truncation: then no weight is copied."""
    asked = (top_k < weights[0].size) | (top_p < 1.0) | (min_p > 0.0)

    def some() -> Int32[Array, " rows"]:
        kept: Any = lax.platform_dependent(
            weights, asked, top_k, top_p, min_p, cpu=truncate_some, default=lambda w, _, *of: truncate(w, *of)
        )
        return draw(kept, jnp.sum(kept, axis=2), uniform)

    return lax.cond(jnp.any(asked), some, whole)


def most_probable(
    scores: Float32[Array, "rows vocab"], total: Float32[Array, " rows"], count: int
) -> tuple[Int32[Array, "count rows"], Float32[Array, "count rows"]]:
    """The most probable tokens of each row, the first of those that are tied first, with scores − total."""
    best, tokens = lax.top_k(scores, count)
    return tokens.T, best.T - total


def draw(
    weights: Float32[Array, "rows blocks width"],
    sums: Float32[Array, "rows blocks"],
    uniform: Float32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """The entry at which the cumulative sum of a row's weights passes uniform · total; never one of weight 0.

    Args:
        weights: A row's weights, block by block.
        sums: Of each block.
        uniform: In [0, 1).
    """
    cumulative = jnp.cumsum(sums, axis=1)
    target = uniform * cumulative[:, -1]
    block = _first_beyond(cumulative, sums, target)
    chosen = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    before = jnp.take_along_axis(cumulative - sums, block[:, None], axis=1)[:, 0]
    within = _first_beyond(jnp.cumsum(chosen, axis=1), chosen, target - before)
    return block * weights.shape[2] + within


def _first_beyond(
    cumulative: Float32[Array, "rows n"], weights: Float32[Array, "rows n"], target: Float32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """First entry of positive weight whose cumulative sum exceeds the target.

    Rounding can leave none; then the last entry of positive weight is meant.
    """
    index = jnp.arange(weights.shape[1], dtype=jnp.int32)
    possible = weights > 0
    last = jnp.max(jnp.where(possible, index, 0), axis=1)
    beyond = possible & (cumulative > target[:, None])
    return jnp.minimum(jnp.min(jnp.where(beyond, index, weights.shape[1]), axis=1), last)


def truncate(
    weights: Float32[Array, "rows blocks width"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
) -> Float32[Array, "rows blocks width"]:
    """Sets to zero what min-p, then top-k, and then top-p among the rest, leave out: the order of vLLM.

    Top-k and top-p are searched for where any of these rows asks for them.
    """
    least = min_p[:, None, None] * jnp.max(weights, axis=(1, 2), keepdims=True)
    likely = jnp.where(weights >= least, weights, 0.0)
    bits = lax.bitcast_convert_type(likely, jnp.uint32)

    def by_count() -> Array:
        needed = top_k.astype(jnp.float32)
        return jnp.where(bits >= _threshold(bits, jnp.ones_like(likely), needed), likely, 0.0)

    kept = lax.cond(jnp.any(top_k < weights[0].size), by_count, lambda: likely)

    def by_mass() -> Array:
        mass = top_p * jnp.sum(kept, axis=(1, 2))
        return jnp.where((top_p < 1.0)[:, None, None] & (bits < _threshold(bits, kept, mass)), 0.0, kept)

    return lax.cond(jnp.any(top_p < 1.0), by_mass, lambda: kept)


def truncate_some(
    weights: Float32[Array, "rows blocks width"],
    asked: Bool[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
) -> Float32[Array, "rows blocks width"]:
    """`truncate` of the rows that ask for it, a few at once and what is left one by one; the others as they were."""
    order, count = jnp.argsort(~asked, stable=True), jnp.sum(asked, dtype=jnp.int32)
    size = min(TRUNCATED_AT_ONCE, weights.shape[0])
    whole = count // size

    def some(first: Array, kept: Array, size: int) -> Array:
        chosen = lax.dynamic_slice_in_dim(order, first, size)
        return kept.at[chosen].set(truncate(weights[chosen], top_k[chosen], top_p[chosen], min_p[chosen]))

    kept = lax.fori_loop(0, whole, lambda step, kept: some(step * size, kept, size), weights)
    return lax.fori_loop(whole * size, count, lambda row, kept: some(row, kept, 1), kept)


def _threshold(
    bits: UInt32[Array, "rows blocks width"],
    amounts: Float32[Array, "rows blocks width"],
    needed: Float32[Array, " rows"],
) -> UInt32[Array, "rows 1 1"]:
    """The greatest bit pattern b with Σ amounts[bits ≥ b] ≥ needed, bit by bit from the highest.

    Non-negative floats are ordered as their bit patterns are.
    """

    def enough(candidate: Array) -> Bool[Array, "rows 1 1"]:
        amount = jnp.sum(jnp.where(bits >= candidate, amounts, 0.0), axis=(1, 2), keepdims=True)
        return amount >= needed[:, None, None]

    def refine(i: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (SIGNIFICANT_BITS - 1 - i).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, threshold)

    return lax.fori_loop(0, SIGNIFICANT_BITS, refine, jnp.zeros((bits.shape[0], 1, 1), jnp.uint32))


def _mode(shifted: Float32[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """The first token whose logit is the greatest, which `shifted` makes 0; a minimum is quicker than arg-max."""
    vocab = shifted.shape[1]
    first = jnp.min(jnp.where(shifted >= 0, jnp.arange(vocab, dtype=jnp.int32), vocab), axis=1)
    return jnp.minimum(first, vocab - 1)


def _blocks(weights: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks width"]:
    """The vocabulary in blocks of about its square root, padded with zeros where that does not divide it."""
    rows, vocab = weights.shape
    width = block_width(vocab)
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % width)))
    return padded.reshape(rows, -1, width)


def block_width(vocab: int) -> int:
    """A divisor of the vocabulary's size near its square root; the root itself where there is none."""
    root = max(1, math.isqrt(vocab))
    near = [d for d in range(max(1, root // 4), 4 * root + 1) if vocab % d == 0]
    return min(near, key=lambda d: abs(math.log(d / root)), default=root)

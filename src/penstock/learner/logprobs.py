"""The output head without its memory: log-probabilities of given tokens, a tile of positions at a time.

A tile's scores over the vocabulary, [tile, vocab] float32, are made, reduced and forgotten; the backward pass makes
them again (hand-written, `jax.custom_vjp`). Only one float32 per position, log Σ exp, lives from one pass to the other.
The number of tiles is read at run time: positions that nobody asks about cost nothing, and a batch with more or fewer
of them needs no new compilation.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


class HeadInputs(NamedTuple):
    """What is asked of each position; K is their padded number.

    Attributes:
        labels: The token whose log-probability is wanted.
        temperature: Divides the scores; not 0.
        count: How many of the K are real; they come first.
    """

    labels: Int32[Array, " k"]
    temperature: Float32[Array, " k"]
    count: Int32[Array, ""]


class HeadOutputs(NamedTuple):
    """Per position; 0 beyond the tiles that hold real ones, and meaningless in the rest of the last.

    Attributes:
        logprobs: log softmax(scores / temperature) at the label.
        entropy: Of the same distribution; no gradient flows through it.
    """

    logprobs: Float32[Array, " k"]
    entropy: Float32[Array, " k"]


def tiled_logprobs(
    hidden: Float[Array, "k hidden"],
    matrix: Float[Array, "vocab hidden"],
    inputs: HeadInputs,
    tile: int,
) -> HeadOutputs:
    """Log-probabilities of labels, and entropies, differentiable in `hidden` and `matrix`.

    ℓ = z_label − log Σ_v exp z_v with z = hidden · matrixᵀ / temperature; ∂ℓ/∂z_v = [v = label] − softmax(z)_v.

    Args:
        hidden: States after the final norm, one row per position asked about.
        matrix: The output matrix.
        inputs: Labels, temperatures and count.
        tile: Positions per tile; memory is tile · vocab · 4 bytes, a few times over.
    """
    k = hidden.shape[0]
    padding = -k % min(tile, k)
    padded = HeadInputs(
        jnp.pad(inputs.labels, (0, padding)),
        jnp.pad(inputs.temperature, (0, padding), constant_values=1),
        inputs.count,
    )
    outputs = cast(HeadOutputs, _tiled(min(tile, k), jnp.pad(hidden, ((0, padding), (0, 0))), matrix, padded))
    return HeadOutputs(outputs.logprobs[:k], outputs.entropy[:k])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(tile: int, hidden: Array, matrix: Array, inputs: HeadInputs) -> HeadOutputs:
    return _forward(tile, hidden, matrix, inputs)[0]


def _scores(hidden: Array, matrix: Array, temperature: Array) -> Array:
    """z, float32 [tile, vocab]; divided after the product, as the engine does, so that both round alike."""
    scores = jnp.einsum("nh,vh->nv", hidden, matrix, preferred_element_type=jnp.float32)
    return scores / temperature[:, None]


def _forward(
    tile: int, hidden: Array, matrix: Array, inputs: HeadInputs
) -> tuple[HeadOutputs, tuple[Array, Array, HeadInputs, Array]]:
    def run(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        part = partial(_slice, index=index, tile=tile)
        scores = _scores(part(hidden), matrix, part(inputs.temperature))
        highest = scores.max(axis=-1)
        exponentials = jnp.exp(scores - highest[:, None])
        total = exponentials.sum(axis=-1)
        log_total = highest + jnp.log(total)
        label_score = jnp.take_along_axis(scores, part(inputs.labels)[:, None], axis=-1)[:, 0]
        entropy = log_total - (exponentials * scores).sum(axis=-1) / total
        start = index * tile
        return (
            _place(carry[0], label_score - log_total, start),
            _place(carry[1], entropy, start),
            _place(carry[2], log_total, start),
        )

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    logprobs, entropy, log_totals = jax.lax.fori_loop(0, _tile_count(inputs.count, tile), run, (zeros, zeros, zeros))
    return HeadOutputs(logprobs, entropy), (hidden, matrix, inputs, log_totals)


def _backward(
    tile: int, saved: tuple[Array, Array, HeadInputs, Array], cotangent: HeadOutputs
) -> tuple[Array, Array, None]:
    hidden, matrix, inputs, log_totals = saved
    tokens = jnp.arange(matrix.shape[0], dtype=jnp.int32)

    def run(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        part = partial(_slice, index=index, tile=tile)
        states, temperature = part(hidden), part(inputs.temperature)
        probabilities = jnp.exp(_scores(states, matrix, temperature) - part(log_totals)[:, None])
        is_label = part(inputs.labels)[:, None] == tokens[None]
        outer = part(cotangent.logprobs) / temperature
        gradient = ((is_label.astype(jnp.float32) - probabilities) * outer[:, None]).astype(hidden.dtype)
        to_hidden = jnp.einsum("nv,vh->nh", gradient, matrix, preferred_element_type=jnp.float32)
        to_matrix = jnp.einsum("nv,nh->vh", gradient, states, preferred_element_type=jnp.float32)
        return _place(carry[0], to_hidden.astype(hidden.dtype), index * tile), carry[1] + to_matrix

    start = (jnp.zeros_like(hidden), jnp.zeros(matrix.shape, jnp.float32))
    to_hidden, to_matrix = jax.lax.fori_loop(0, _tile_count(inputs.count, tile), run, start)
    return to_hidden, to_matrix.astype(matrix.dtype), None


def _tile_count(count: Array, tile: int) -> Array:
    return (count + tile - 1) // tile


def _slice(array: Array, index: Array, tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, index * tile, tile)


def _place(whole: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)


_tiled.defvjp(_forward, _backward)

"""The output head without its memory: log-probabilities and entropies, tile by tile.

A tile's scores over the vocabulary, [tile, vocab] float32, are made, reduced and forgotten (hand-written,
`jax.custom_vjp`). Where a token's loss depends on nothing but its own log-probability and entropy, the tile's part of
the gradient is made before they are forgotten, `tiled_loss`. Else the backward pass makes them again, `tiled_logprobs`:
only one float32 per position, log Σ exp, lives from one pass to the other, and the entropy. The number of tiles is read
at run time: positions that nobody asks about cost nothing, and a batch with more or fewer of them needs no new
compilation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from penstock.model.language.precision import product

_T = TypeVar("_T")


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
        entropy: Of the same distribution; it has a gradient where that was asked for.
    """

    logprobs: Float32[Array, " k"]
    entropy: Float32[Array, " k"]


def tiled_logprobs(
    hidden: Float[Array, "k hidden"],
    matrix: Float[Array, "vocab hidden"],
    inputs: HeadInputs,
    tile: int,
    entropy_gradient: bool = False,
) -> HeadOutputs:
    """Log-probabilities of labels, and entropies, differentiable in `hidden` and `matrix`.

    ℓ = z_label − log Σ_v exp z_v with z = hidden · matrixᵀ / temperature; ∂ℓ/∂z_v = [v = label] − p_v with
    p = softmax(z); ∂H/∂z_v = −p_v (log p_v + H).

    Args:
        hidden: States after the final norm, one row per position asked about.
        matrix: The output matrix.
        inputs: Labels, temperatures and count.
        tile: Positions per tile; memory is tile · vocab · 4 bytes, a few times over.
        entropy_gradient: Whether a gradient flows through the entropies; else it is 0.
    """
    k, tile = hidden.shape[0], min(tile, hidden.shape[0])
    hidden, inputs = _padded(tile, hidden), _padded_inputs(tile, inputs)
    outputs = cast(HeadOutputs, _tiled(_Tiles(tile, entropy_gradient), hidden, matrix, inputs))
    return HeadOutputs(outputs.logprobs[:k], outputs.entropy[:k])


def tiled_loss(
    hidden: Float[Array, "k hidden"],
    matrix: Float[Array, "vocab hidden"],
    inputs: HeadInputs,
    tile: int,
    loss_of: Callable[[HeadOutputs, Any], Float32[Array, " tile"]],
    entries: Any,
    entropy_gradient: bool = False,
) -> tuple[Float32[Array, ""], HeadOutputs]:
    """Sum of a loss to which each position gives by its own log-probability and entropy alone, and all of those.

    So the gradient is made where a tile's scores are, in the forward pass, and the backward pass only hands it on:
    three products of states and the matrix, where a loss that must see other positions first takes four.

    Args:
        hidden: As of `tiled_logprobs`, like all that is not below.
        matrix: The output matrix.
        inputs: Labels, temperatures and count.
        tile: Positions per tile.
        loss_of: What a tile's positions give, from its outputs and its part of `entries`; 0 for what is not real.
        entries: Arrays [k, …] in any tree; of padding zeros.
        entropy_gradient: Whether the gradient through the entropies counts.

    Returns:
        The sum, differentiable in `hidden` and `matrix`, and the outputs, through which no gradient flows.
    """
    k, tile = hidden.shape[0], min(tile, hidden.shape[0])
    hidden, inputs = _padded(tile, hidden), _padded_inputs(tile, inputs)
    entries = jax.tree.map(partial(_padded, tile), entries)
    summed = _summed(_Tiles(tile, entropy_gradient), loss_of, hidden, matrix, inputs, entries)
    total, outputs = cast(tuple[Array, HeadOutputs], summed)
    outputs = jax.lax.stop_gradient(outputs)
    return total, HeadOutputs(outputs.logprobs[:k], outputs.entropy[:k])


class _Tiles(NamedTuple):
    size: int
    entropy_gradient: bool


class _Scored(NamedTuple):
    """Of a tile; its largest score is subtracted in `exponentials` and their sums, `totals`."""

    outputs: HeadOutputs
    log_totals: Array
    scores: Array
    exponentials: Array
    totals: Array


def _padded(tile: int, values: Array) -> Array:
    return jnp.pad(values, ((0, -len(values) % tile), *((0, 0),) * (values.ndim - 1)))


def _padded_inputs(tile: int, inputs: HeadInputs) -> HeadInputs:
    temperature = jnp.pad(inputs.temperature, (0, -len(inputs.labels) % tile), constant_values=1)
    return HeadInputs(_padded(tile, inputs.labels), temperature, inputs.count)


def _scores(hidden: Array, matrix: Array, temperature: Array) -> Array:
    """z, float32 [tile, vocab]; divided after the product, as the engine does, so that both round alike."""
    return product("nh,vh->nv", hidden, matrix) / temperature[:, None]


def _scored(hidden: Array, matrix: Array, labels: Array, temperature: Array) -> _Scored:
    products = product("nh,vh->nv", hidden, matrix)
    scores = products / temperature[:, None]
    highest = scores.max(axis=-1)
    exponentials = jnp.exp(scores - highest[:, None])
    totals = exponentials.sum(axis=-1)
    log_totals = highest + jnp.log(totals)
    label_scores = jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]
    # By the products, which so outlive `exponentials`: in their place XLA would write those one by one on a CPU.
    entropy = log_totals - (exponentials * products).sum(axis=-1) / (totals * temperature)
    return _Scored(HeadOutputs(label_scores - log_totals, entropy), log_totals, scores, exponentials, totals)


class _Saved(NamedTuple):
    """For the backward pass."""

    hidden: Array
    matrix: Array
    inputs: HeadInputs
    log_totals: Array
    entropies: Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(how: _Tiles, hidden: Array, matrix: Array, inputs: HeadInputs) -> HeadOutputs:
    return _forward(how, hidden, matrix, inputs)[0]


def _forward(how: _Tiles, hidden: Array, matrix: Array, inputs: HeadInputs) -> tuple[HeadOutputs, _Saved]:
    tile = how.size

    def run(index: Array, carry: tuple[HeadOutputs, Array]) -> tuple[HeadOutputs, Array]:
        part = partial(_slice, index=index, tile=tile)
        scored = _scored(part(hidden), matrix, part(inputs.labels), part(inputs.temperature))
        new = (scored.outputs, scored.log_totals)
        return jax.tree.map(lambda whole, each: _place(whole, each, index * tile), carry, new)

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    nothing = HeadOutputs(zeros, zeros), zeros
    outputs, log_totals = jax.lax.fori_loop(0, _tile_count(inputs.count, tile), run, nothing)
    return outputs, _Saved(hidden, matrix, inputs, log_totals, outputs.entropy)


def _backward(how: _Tiles, saved: _Saved, cotangent: HeadOutputs) -> tuple[Array, Array, None]:
    return *_by_platform(partial(_gradients_again, how), saved, cotangent), None


def _gradients_again(how: _Tiles, across: bool, saved: _Saved, cotangent: HeadOutputs) -> tuple[Array, Array]:
    tile = how.size
    hidden, matrix, inputs, log_totals, entropies = saved

    def run(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        part = partial(_slice, index=index, tile=tile)
        states, temperature = part(hidden), part(inputs.temperature)
        logprobs = _scores(states, matrix, temperature) - part(log_totals)[:, None]
        probabilities = jnp.exp(logprobs)
        slopes = HeadOutputs(part(cotangent.logprobs) / temperature, part(cotangent.entropy) / temperature)
        to_scores = _to_scores(probabilities, part(inputs.labels), slopes.logprobs)
        if how.entropy_gradient:
            to_scores -= probabilities * (logprobs + part(entropies)[:, None]) * slopes.entropy[:, None]
        return _with_products(across, carry, to_scores, states, matrix, index * tile)

    none = _no_gradients(across, hidden, matrix)
    return _handed_on(across, jax.lax.fori_loop(0, _tile_count(inputs.count, tile), run, none), matrix)


_tiled.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(
    how: _Tiles, loss_of: Callable[..., Array], hidden: Array, matrix: Array, inputs: HeadInputs, entries: Any
) -> tuple[Array, HeadOutputs]:
    outputs = _forward(how, hidden, matrix, inputs)[0]
    return loss_of(outputs, entries).sum(), outputs


class _Made(NamedTuple):
    """By the tiles so far."""

    loss: Array
    outputs: HeadOutputs
    gradients: tuple[Array, Array]


def _summed_forward(
    how: _Tiles, loss_of: Callable[..., Array], hidden: Array, matrix: Array, inputs: HeadInputs, entries: Any
) -> tuple[tuple[Array, HeadOutputs], tuple[Array, Array]]:
    made = _by_platform(partial(_gradients_at_once, how, loss_of), hidden, matrix, inputs, entries)
    return (made.loss, made.outputs), made.gradients


def _gradients_at_once(
    how: _Tiles,
    loss_of: Callable[..., Array],
    across: bool,
    hidden: Array,
    matrix: Array,
    inputs: HeadInputs,
    entries: Any,
) -> _Made:
    tile = how.size

    def run(index: Array, made: _Made) -> _Made:
        part = partial(_slice, index=index, tile=tile)
        states, labels, temperature = part(hidden), part(inputs.labels), part(inputs.temperature)
        scored = _scored(states, matrix, labels, temperature)
        loss, slopes = jax.value_and_grad(lambda given: loss_of(given, jax.tree.map(part, entries)).sum())(
            scored.outputs
        )
        probabilities = scored.exponentials / scored.totals[:, None]
        to_scores = _to_scores(probabilities, labels, slopes.logprobs / temperature)
        if how.entropy_gradient:
            surprise = scored.scores - scored.log_totals[:, None] + scored.outputs.entropy[:, None]
            to_scores -= probabilities * surprise * (slopes.entropy / temperature)[:, None]
        return _Made(
            made.loss + loss,
            jax.tree.map(lambda whole, each: _place(whole, each, index * tile), made.outputs, scored.outputs),
            _with_products(across, made.gradients, to_scores, states, matrix, index * tile),
        )

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    nothing = _Made(jnp.zeros((), jnp.float32), HeadOutputs(zeros, zeros), _no_gradients(across, hidden, matrix))
    made = jax.lax.fori_loop(0, _tile_count(inputs.count, tile), run, nothing)
    return made._replace(gradients=_handed_on(across, made.gradients, matrix))


def _summed_backward(
    how: _Tiles, loss_of: Callable[..., Array], gradients: tuple[Array, Array], cotangent: tuple[Array, HeadOutputs]
) -> tuple[Array, Array, None, None]:
    to_hidden, to_matrix = jax.tree.map(lambda each: each * cotangent[0].astype(each.dtype), gradients)
    return to_hidden, to_matrix, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def _by_platform(loop: Callable[..., _T], *operands: Any) -> _T:
    """On CPUs the matrix's gradient is added up *across*, [hidden, vocab].

    XLA's products that sum over the first axis of both operands take up to twice as long there: so the smaller one, the
    states, is turned before, and the sum once, after the last tile.
    """
    return cast(_T, jax.lax.platform_dependent(*operands, cpu=partial(loop, True), default=partial(loop, False)))


def _no_gradients(across: bool, hidden: Array, matrix: Array) -> tuple[Array, Array]:
    return jnp.zeros_like(hidden), jnp.zeros(matrix.shape[::-1] if across else matrix.shape, jnp.float32)


def _handed_on(across: bool, gradients: tuple[Array, Array], matrix: Array) -> tuple[Array, Array]:
    return gradients[0], (gradients[1].T if across else gradients[1]).astype(matrix.dtype)


def _to_scores(probabilities: Array, labels: Array, slopes: Array) -> Array:
    """([v = label] − p) · slope, float32 [tile, vocab]."""
    is_label = labels[:, None] == jnp.arange(probabilities.shape[1], dtype=jnp.int32)[None]
    return (is_label.astype(jnp.float32) - probabilities) * slopes[:, None]


def _with_products(
    across: bool, gradients: tuple[Array, Array], to_scores: Array, states: Array, matrix: Array, start: Array
) -> tuple[Array, Array]:
    """With what a tile gives to the gradients of `hidden` and of the matrix."""
    gradient = to_scores.astype(states.dtype)
    to_hidden = product("nv,vh->nh", gradient, matrix).astype(states.dtype)
    if across:
        to_matrix = product("hn,nv->hv", jax.lax.optimization_barrier(states.T), gradient)
    else:
        to_matrix = product("nv,nh->vh", gradient, states)
    return _place(gradients[0], to_hidden, start), gradients[1] + to_matrix


def _tile_count(count: Array, tile: int) -> Array:
    return (count + tile - 1) // tile


def _slice(array: Array, index: Array, tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, index * tile, tile)


def _place(whole: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)

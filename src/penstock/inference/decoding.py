"""The programs that run on the device: prefill of prompts, and several decode steps in one dispatch.

Both compose `Layer.project` and `Layer.finish` with the cache, so that the equations are the learner's. Layers
are unrolled over unstacked weights: scanning stacked ones would copy every layer out of the stack at each step.

A prompt's last token is not prefilled but decoded: its step samples the first token of the response. So prefill
needs no output head, n samples of one prompt differ from their first own step on, and all sampling is in one
place. A row that stops inside a dispatch emits nothing more; the dispatch ends early when no row is left.
"""

import functools
import operator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32

from penstock.inference.cache import KVCache, append
from penstock.inference.rows import Emitted, Rows
from penstock.inference.sampling import sample, uniforms
from penstock.model.language import Decoder, Layer, grouped_attention, rotary_tables


class ServedWeights(eqx.Module):
    """A decoder's parameters as the engine uses them.

    Attributes:
        ends: A decoder of no layers: embedding, final norm and output matrix, shared with the published decoder.
        layers: One unstacked layer each.
        scores_via: Where the parameters are split over several devices: the placements that scores take one after
            the other, first as the output matrix lies (or XLA gathers the matrix), then whole. Empty on one device.
    """

    ends: Decoder
    layers: tuple[Layer, ...]
    scores_via: tuple[NamedSharding, ...] = eqx.field(static=True, default=())

    @classmethod
    def of(cls, decoder: Decoder) -> "ServedWeights":
        """Unstacks the layers, once per weight version."""
        layers, none = _unstack(decoder.layers, decoder.config.num_hidden_layers)
        return cls(eqx.tree_at(lambda d: d.layers, decoder, none), layers)

    def scores(self, x: Float[Array, "slots hidden"]) -> Float32[Array, "slots vocab"]:
        """Logits from the last layer's residual stream, whole on every device, where each of them then samples."""
        logits = self.ends.logits(self.ends.normalise(x))
        return functools.reduce(lax.with_sharding_constraint, self.scores_via, logits)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(stacked: Layer, depth: int) -> tuple[tuple[Layer, ...], Layer]:
    """The layers one by one, and a stack of none."""
    layers = tuple(jax.tree.map(operator.itemgetter(i), stacked) for i in range(depth))
    return layers, jax.tree.map(lambda array: array[:0], stacked)


class _Progress(NamedTuple):
    step: Int32[Array, ""]
    cache: KVCache
    tokens: Int32[Array, " slots"]
    emitted: Emitted
    live: Bool[Array, " slots"]


def decode(weights: ServedWeights, cache: KVCache, rows: Rows, steps: int) -> tuple[KVCache, Emitted]:
    """Runs up to `steps` decode steps for every live slot."""
    slots = rows.tokens.shape[0]

    def unfinished(progress: _Progress) -> Bool[Array, ""]:
        return (progress.step < steps) & jnp.any(progress.live)

    def advance(progress: _Progress) -> _Progress:
        positions = rows.positions + progress.emitted.count
        cache, logits = decode_step(weights, progress.cache, progress.tokens, positions, progress.live)
        noise = uniforms(rows.seeds, positions)
        tokens, logprobs = sample(logits, noise, **rows.sampling)
        return _record(progress, cache, rows, tokens, logprobs)

    nothing = Emitted(jnp.zeros((steps, slots), jnp.int32), jnp.zeros((steps, slots)), jnp.zeros(slots, jnp.int32))
    start = _Progress(jnp.int32(0), cache, rows.tokens, nothing, rows.budget > 0)
    end = lax.while_loop(unfinished, advance, start)
    return end.cache, end.emitted


def _record(
    progress: _Progress,
    cache: KVCache,
    rows: Rows,
    tokens: Int32[Array, " slots"],
    logprobs: Float32[Array, " slots"],
) -> _Progress:
    """Adds one step's tokens, and ends the rows that stop with them."""
    step, emitted = progress.step, progress.emitted
    count = emitted.count + progress.live
    stopped = jnp.any(tokens[:, None] == rows.stop_token_ids, axis=1)
    written = Emitted(emitted.tokens.at[step].set(tokens), emitted.logprobs.at[step].set(logprobs), count)
    return _Progress(step + 1, cache, tokens, written, progress.live & ~stopped & (count < rows.budget))


def decode_step(
    weights: ServedWeights,
    cache: KVCache,
    tokens: Int32[Array, " slots"],
    positions: Int32[Array, " slots"],
    live: Bool[Array, " slots"],
) -> tuple[KVCache, Float32[Array, "slots vocab"]]:
    """Adds one token per live slot to the cache and scores the next one."""
    ends = weights.ends
    cos, sin = rotary_tables(ends.config, positions)
    seen = (jnp.arange(cache.window) <= positions[:, None])[:, None, :]
    targets = jnp.where(live, positions, cache.window)  # beyond the window: a slot without a row writes nothing
    x = ends.embed(tokens)
    keys, values = [], []
    for layer, cached_keys, cached_values in zip(weights.layers, cache.keys, cache.values, strict=True):
        query, key, value = layer.project(x, cos, sin)
        keys.append(append(cached_keys, key, targets))
        values.append(append(cached_values, value, targets))
        attended = grouped_attention(query[:, None], keys[-1], values[-1], seen)
        x = layer.finish(x, attended[:, 0])
    return KVCache(tuple(keys), tuple(values)), weights.scores(x)


def prefill(weights: ServedWeights, tokens: Int32[Array, "rows length"]) -> KVCache:
    """Keys and values of padded prompts. Those at padding mean nothing; decoding overwrites before reading them."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    cos, sin = rotary_tables(weights.ends.config, positions)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    x: Float[Array, "rows length hidden"] = weights.ends.embed(tokens)
    keys, values = [], []
    for layer in weights.layers:
        query, key, value = layer.project(x, cos, sin)
        keys.append(key.transpose(0, 2, 1, 3))
        values.append(value.transpose(0, 2, 1, 3))
        x = layer.finish(x, grouped_attention(query, keys[-1], values[-1], causal))
    return KVCache(tuple(keys), tuple(values))

"""Attention over packed rows by blocks of queries and keys, in plain JAX: no array of length × length is ever made.

Online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867) and a backward pass that makes weights
again from the saved log-sum-exp (Dao 2023, https://arxiv.org/abs/2307.08691). A block of queries meets only blocks of
keys that hold something it may see: from where its earliest segment or its window begins, to its own; a block of
padding meets none. These bounds are data, so that one program does for every packing. Time is in proportion to the sum
over segments of length squared, memory to the sum of lengths. Query heads share their key head's arrays.

Blocks of all rows are taken one after the other, each large enough for a CPU's cores. A device that wants many at once
has kernels of its own (`penstock.model.language.attention`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from penstock.model.language.precision import product, rounded

BLOCK = 64
"""Queries, and keys, of a block. Of 32 to 256 the fastest for sequences up to 512 tokens on one core, forward and
backward; 128 is 5% faster for one of 4,096, and 1.5 times as slow for 64 of 64."""

_HIDDEN = -1e30
"""Score of a pair that is masked: finite, so that differences are no NaN."""


class _Shape(NamedTuple):
    """Blocks per row, positions of a block, and how many keys a query sees at most (None: all)."""

    blocks: int
    block: int
    window: int | None


def block_attention(
    query: Float[Array, "rows length heads head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    ids: Int[Array, "rows length"],
    starts: Int[Array, "rows segments"],
    window: int | None = None,
    block: int = BLOCK,
) -> Float[Array, "rows length heads head_dim"]:
    """softmax(q·k / sqrt(head_dim)) v over the keys of a query's segment up to it.

    Args:
        query: As `Layer.project` returns it; consecutive heads share a key head.
        key: In the layout of `query`, with as many heads as keys have.
        value: In the layout of `key`.
        ids: 1, 2, … per segment, 0 for padding; a segment's positions lie together.
        starts: Position where segment s begins, at s − 1.
        window: So many keys at most, the query's own among them; None: all.
        block: Positions of a block.

    Returns:
        Results; those at padding mean nothing, but are finite.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    shape = _Shape(-(-length // block), block, window)
    padding = shape.blocks * block - length
    query, key, value = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (query, key, value))
    ids = jnp.pad(ids, ((0, 0), (0, padding))).astype(jnp.int32)
    first = first_blocks(ids, starts, block, window)
    grouped = query.reshape(rows, shape.blocks, block, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 1, 3, 4, 2, 5).reshape(rows * shape.blocks, kv_heads, -1, head_dim)
    in_blocks = (x.reshape(-1, block, kv_heads, head_dim).transpose(0, 2, 1, 3) for x in (key, value))
    attended: Any = _attend(shape, grouped, *in_blocks, ids.reshape(-1, block), first.reshape(-1))
    attended = attended.reshape(rows, shape.blocks, kv_heads, heads // kv_heads, block, head_dim)
    return attended.transpose(0, 1, 4, 2, 3, 5).reshape(rows, -1, heads, head_dim)[:, :length]


def first_blocks(
    ids: Int[Array, "rows length"], starts: Int[Array, "rows segments"], block: int, window: int | None
) -> Int32[Array, "rows blocks"]:
    """Of each block of queries the first block of keys that it meets; of one of padding the block after it.

    Args:
        ids: As in `block_attention`, where `length` is a multiple of `block`.
        starts: As in `block_attention`.
        block: Positions of a block.
        window: As in `block_attention`.
    """
    length = ids.shape[1]
    begin = jnp.take_along_axis(starts.astype(jnp.int32), jnp.maximum(ids - 1, 0), axis=1)
    if window is not None:
        begin = jnp.maximum(begin, jnp.arange(length, dtype=jnp.int32) - window + 1)
    begin = jnp.where(ids > 0, begin, length).reshape(ids.shape[0], -1, block).min(axis=2) // block
    return jnp.minimum(begin, jnp.arange(length // block, dtype=jnp.int32) + 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    shape: _Shape,
    query: Float[Array, "items kv_heads group_block head_dim"],
    key: Float[Array, "items kv_heads block head_dim"],
    value: Float[Array, "items kv_heads block head_dim"],
    ids: Int32[Array, "items block"],
    first: Int32[Array, " items"],
) -> Array:
    """Over the blocks of all rows, end to end."""
    return _attend_forward(shape, query, key, value, ids, first)[0]


def _attend_forward(shape: _Shape, query: Array, key: Array, value: Array, ids: Array, first: Array) -> Any:
    def one(item: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        row, number = item - item % shape.blocks, item % shape.blocks
        own = query[item], ids[item]

        def meet(at: Array, sums: _Sums) -> _Sums:
            scores = _scores(own[0], key[row + at], _visible(shape, own[1], ids[row + at], number - at))
            return _added(sums, scores, value[row + at])

        sums = lax.fori_loop(first[item], number + 1, meet, _no_sums(own[0]))
        total = jnp.maximum(sums.total, jnp.finfo(jnp.float32).tiny)
        attended = rounded(sums.weighted / total[..., None], query.dtype)
        return results[0].at[item].set(attended), results[1].at[item].set(sums.largest + jnp.log(total))

    nothing = jnp.zeros_like(query), jnp.zeros(query.shape[:3], jnp.float32)
    attended, lse = lax.fori_loop(0, len(query), one, nothing)
    # Named where they are made, so that what keeps results of products does not compute them twice.
    attended, lse = checkpoint_name(attended, "attended"), checkpoint_name(lse, "attended")
    return attended, (query, key, value, ids, first, attended, lse)


def _attend_backward(shape: _Shape, saved: tuple[Array, ...], gradient: Array) -> Any:
    query, key, value, ids, first, attended, lse = saved
    # Of a softmax's backward pass: Σ over keys of weight · its gradient.
    drawn = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)

    def one(item: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        row, number = item - item % shape.blocks, item % shape.blocks
        own, of_own, scale = query[item], gradient[item], query.shape[-1] ** -0.5

        def meet(at: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            keys, values = key[row + at], value[row + at]
            scores = _scores(own, keys, _visible(shape, ids[item], ids[row + at], number - at))
            weights = jnp.exp(scores - lse[item][..., None])
            of_weights = product("hqd,hkd->hqk", of_own, values) - drawn[item][..., None]
            of_scores = rounded(weights * of_weights * scale, query.dtype)
            of_values = product("hqk,hqd->hkd", rounded(weights, value.dtype), of_own)
            to_query, to_key, to_value = sums
            to_key = to_key.at[row + at].add(product("hqk,hqd->hkd", of_scores, own))
            return (
                to_query + product("hqk,hkd->hqd", of_scores, keys), to_key, to_value.at[row + at].add(of_values)
            )  # fmt: skip

        none = jnp.zeros(own.shape, jnp.float32)
        to_query, to_key, to_value = lax.fori_loop(first[item], number + 1, meet, (none, *gradients[1:]))
        return gradients[0].at[item].set(rounded(to_query, query.dtype)), to_key, to_value

    nothing = jnp.zeros_like(query), jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    to_query, to_key, to_value = lax.fori_loop(0, len(query), one, nothing)
    return to_query, rounded(to_key, key.dtype), rounded(to_value, value.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


class _Sums(NamedTuple):
    """Of the keys met so far, for each query: largest score, Σ exp(score − largest), and Σ of that times values."""

    largest: Float32[Array, "kv_heads group_block"]
    total: Float32[Array, "kv_heads group_block"]
    weighted: Float32[Array, "kv_heads group_block head_dim"]


def _no_sums(query: Array) -> _Sums:
    none = jnp.zeros(query.shape, jnp.float32)
    return _Sums(jnp.full(query.shape[:2], _HIDDEN, jnp.float32), none[..., 0], none)


def _added(sums: _Sums, scores: Array, value: Array) -> _Sums:
    """With another block of keys; where a query sees none of them yet, what is added counts nothing later."""
    largest = jnp.maximum(sums.largest, scores.max(axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    faded = jnp.exp(sums.largest - largest)
    weighted = product("hqk,hkd->hqd", rounded(weights, value.dtype), value)
    total = sums.total * faded + weights.sum(axis=-1)
    return _Sums(largest, total, sums.weighted * faded[..., None] + weighted)


def _scores(query: Array, key: Array, visible: Bool[Array, "block block"]) -> Float32[Array, "kv_heads rows block"]:
    kv_heads, rows, head_dim = query.shape
    scores = product("hqd,hkd->hqk", query, key) * head_dim**-0.5
    grouped = scores.reshape(kv_heads, -1, *visible.shape)
    return jnp.where(visible, grouped, _HIDDEN).reshape(kv_heads, rows, -1)


def _visible(shape: _Shape, queries: Array, keys: Array, blocks_apart: Array) -> Bool[Array, "block block"]:
    """Who sees whom of two blocks, given their segment ids: the same segment, not later, inside the window."""
    position = jnp.arange(shape.block, dtype=jnp.int32)
    distance = position[:, None] - position + blocks_apart * shape.block
    same = (queries[:, None] == keys) & (distance >= 0)
    return same if shape.window is None else same & (distance < shape.window)

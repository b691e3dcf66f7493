"""Grouped-query attention.

Keys and values are laid out (batch, head, position, dim). That layout is the fast one on a CPU: both products are plain
batched matrix products over contiguous rows, and a cache needs no transposition.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from penstock.model.language.precision import product, rounded

MASKED = -1e30
"""Score of a forbidden pair: finite, so that a row without any allowed key gives no NaN."""


def packed_mask(segment_ids: Int[Array, "batch length"]) -> Bool[Array, "batch length length"]:
    """Who sees whom in packed rows: the same segment, not later in the row.

    Padding (segment 0) sees earlier padding and itself only, so every row of the mask allows something.
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & jnp.tril(jnp.ones(same.shape[1:], bool))


def grouped_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch queries heads head_dim"]:
    """softmax(q·k / sqrt(head_dim)) v, where consecutive query heads share a key head.

    Args:
        query: As `Layer.project` returns it.
        key: Keys by head, then position; entries the mask forbids may hold anything finite.
        value: Values in the layout of `key`.
        mask: True where a query may see a key, for every head.
    """
    batch, queries, heads, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    # The group's queries become rows of one product per key head: [batch, kv_heads, group * queries, head_dim].
    rows = query.reshape(batch, queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * queries, head_dim)
    scores = product("bhqd,bhkd->bhqk", rows, key)
    scores = scores.reshape(batch, kv_heads, group, queries, keys) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
    weights = rounded(weights.reshape(batch, kv_heads, group * queries, keys), value.dtype)
    attended = rounded(product("bhqk,bhkd->bhqd", weights, value), value.dtype)
    attended = attended.reshape(batch, kv_heads, group, queries, head_dim).transpose(0, 3, 1, 2, 4)
    return attended.reshape(batch, queries, heads, head_dim)

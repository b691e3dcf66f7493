"""The key-value cache: one array of keys and one of values per layer, (slot, kv head, position, head dim).

That layout makes both attention products contiguous; separate arrays per layer let a donated decode step update
each in place. A slot's entry at position t is meaningful only below the slot's length; whatever lies beyond is
finite and masked by the reader. The length of the arrays (the window) follows the longest live sequence, since
attention reads all of it. Paging is not covered: every slot has the same window.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from penstock.model.language import ModelConfig


class KVCache(eqx.Module):
    """Keys and values of every slot, layer by layer."""

    keys: tuple[Float[Array, "slots kv_heads window head_dim"], ...]
    values: tuple[Float[Array, "slots kv_heads window head_dim"], ...]

    @property
    def window(self) -> int:
        """Positions that fit."""
        return self.keys[0].shape[2]

    @property
    def slots(self) -> int:
        """Sequences that fit."""
        return self.keys[0].shape[0]


def create_cache(config: ModelConfig, slots: int, window: int) -> KVCache:
    """A cache of zeros in the model's dtype."""
    shape = (slots, config.num_key_value_heads, window, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, config.dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, config.dtype) for _ in layers),
    )


def cache_bytes(config: ModelConfig, slots: int, window: int) -> int:
    """Memory of such a cache."""
    entry_bytes = config.key_value_size * jnp.dtype(config.dtype).itemsize
    return 2 * config.num_hidden_layers * slots * window * entry_bytes


def append(
    cached: Float[Array, "slots kv_heads window head_dim"],
    entry: Float[Array, "slots kv_heads head_dim"],
    positions: Int32[Array, " slots"],
) -> Float[Array, "slots kv_heads window head_dim"]:
    """Writes one entry per slot at the slot's own position; a position beyond the window writes nothing."""
    return cached.at[jnp.arange(cached.shape[0]), :, positions].set(entry, mode="drop")


def resize(cache: KVCache, window: int) -> KVCache:
    """The cache with another window: zeros are added at its end, or its end is cut off."""

    def fit(cached: Array) -> Array:
        extra = window - cached.shape[2]
        return jnp.pad(cached, ((0, 0), (0, 0), (0, extra), (0, 0))) if extra > 0 else cached[:, :, :window]

    return jax.tree.map(fit, cache)


def insert(cache: KVCache, prefilled: KVCache, source: Int32[Array, " slots"]) -> KVCache:
    """Copies prefilled prompts into slots; the n samples of a prompt all name the same row.

    Args:
        cache: Its window is at least the prefill's.
        prefilled: Its slots are the rows of the prefill.
        source: For each slot the row it takes; −1 leaves the slot as it is.
    """
    length = prefilled.window

    def copy(cached: Array, rows: Array) -> Array:
        kept = cached[:, :, :length]
        head = jnp.where((source >= 0)[:, None, None, None], rows[jnp.maximum(source, 0)], kept)
        return jax.lax.dynamic_update_slice(cached, head, (0, 0, 0, 0))

    return jax.tree.map(copy, cache, prefilled)


def fork(cache: KVCache, source: Int32[Array, " slots"]) -> KVCache:
    """Every slot takes the content of the slot that `source` names; its own number changes nothing."""
    return jax.tree.map(lambda cached: cached[source], cache)

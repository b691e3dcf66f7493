"""The compiled programs of an engine: one set for one device, and one for each split over several.

Compiled once per shape and shared by every engine of the process. Only the cache is donated, never weights.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from penstock.inference import cache as kv
from penstock.inference.decoding import decode, prefill

if TYPE_CHECKING:
    from penstock.inference.sharding import ModelSplit


class Programs(NamedTuple):
    """The functions of `penstock.inference.decoding` and `penstock.inference.cache`, compiled."""

    create: Callable[..., kv.KVCache]
    decode: Callable[..., Any]
    prefill: Callable[..., kv.KVCache]
    insert: Callable[..., kv.KVCache]
    fork: Callable[..., kv.KVCache]
    resize: Callable[..., kv.KVCache]


ONE_DEVICE = Programs(
    create=kv.create_cache,
    decode=jax.jit(decode, static_argnames="steps", donate_argnames="cache"),
    prefill=jax.jit(prefill),
    insert=jax.jit(kv.insert, donate_argnames="cache"),
    fork=jax.jit(kv.fork, donate_argnames="cache"),
    resize=jax.jit(kv.resize, static_argnames="window"),
)


@functools.cache
def split_programs(split: "ModelSplit") -> Programs:
    """The same over several devices; a cache that a program returns lies as the one that it was given."""
    cache, whole = split.cache, split.whole
    return Programs(
        create=jax.jit(kv.create_cache, static_argnums=(0, 1, 2), out_shardings=cache),
        decode=jax.jit(decode, static_argnames="steps", donate_argnames="cache", out_shardings=(cache, whole)),
        prefill=jax.jit(prefill, out_shardings=cache),
        insert=jax.jit(kv.insert, donate_argnames="cache", out_shardings=cache),
        fork=jax.jit(kv.fork, donate_argnames="cache", out_shardings=cache),
        resize=jax.jit(kv.resize, static_argnames="window", out_shardings=cache),
    )

"""Attention over packed rows by kernels of chips: of our own for NVIDIA GPUs, JAX's for TPUs, cuDNN's if asked for.

All are tested in interpret mode, but cuDNN's, which has none, and compiled for chips that are not there; ``triton`` and
``cudnn`` have run on one (docs/performance.md).

``triton``  in Pallas by way of Triton. FlashAttention-2's scheme (Dao 2023, https://arxiv.org/abs/2307.08691): online
            softmax forward; backward one kernel for the gradients of queries, one for those of keys and values, both
            of which make weights again from the saved log-sum-exp. What a query sees is a range of positions, from the
            beginning of its segment or window to itself; kernels know of nothing else. Their loops run over the blocks
            that hold something of that range, and mask only those of them that also hold something else, so that time
            is in proportion to the sum over segments of length squared. Query heads read their key head's array.
``splash``  JAX's; masked blocks are skipped, those of other segments are not
``cudnn``   by JAX's private API; keys are repeated, since 0.10.2 misplaces those of several query heads
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Int32

from penstock.model.language.attention_choice import LONGEST_HEAD
from penstock.model.language.precision import rounded

TILE = 128
"""Rows are padded to a multiple of this, of which every block's positions are a divisor."""

_HIDDEN = -1e30
"""Score of a pair that is masked: finite, so that differences are no NaN."""


class Blocks(NamedTuple):
    """Of one kernel: positions of its own block, and of those that it meets one after the other; warps, and stages."""

    own: int
    met: int
    warps: int
    stages: int


class Tuning(NamedTuple):
    """Blocks of the forward kernel, and of those for the gradients of queries, and of keys and values."""

    forward: Blocks
    queries: Blocks
    keys: Blocks


TUNINGS = {
    64: Tuning(Blocks(128, 128, 8, 3), Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 4)),
    128: Tuning(Blocks(64, 64, 4, 3), Blocks(128, 32, 4, 3), Blocks(64, 32, 4, 3)),
    LONGEST_HEAD: Tuning(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2)),
}
"""By numbers of a head at most. Of 64 and 128 the fastest on an H200 of some twenty each; all fit an A100's memory."""

SMALL_CHIPS = ("7.5", "8.6", "8.7", "8.9", "12.0", "12.1")
"""Compute capabilities with 64 to 100 KB of shared memory, where blocks have half the positions."""


class _Shape(NamedTuple):
    """What kernels are compiled for beside their arrays' shapes."""

    scale: float
    tuning: Tuning
    interpret: bool


def triton_attention(
    query: Float[Array, "rows length heads head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    first: Int32[Array, "rows length"],
    last: Int32[Array, "rows length"],
    interpret: bool = False,
    tuning: Tuning | None = None,
) -> Float[Array, "rows length heads head_dim"]:
    """softmax(q·k / sqrt(head_dim)) v over the keys that a query sees: from the first of its own to that of itself.

    Args:
        query: As `Layer.project` returns it, of heads of at most `LONGEST_HEAD` numbers; consecutive ones share a key
            head.
        key: In the layout of `query`, with as many heads as keys have.
        value: In the layout of `key`.
        first: Of each position the first that it sees; grows along a row.
        last: Of each position the last by which it is seen; likewise.
        interpret: Runs anywhere, slowly.
        tuning: None: by `head_dim`.
    """
    length, head_dim = query.shape[1], query.shape[3]
    shape = _Shape(head_dim**-0.5, tuning or tuning_of(head_dim), interpret)
    position = jnp.arange(length + -length % TILE, dtype=jnp.int32)
    ranges = (jnp.where(position < length, each, position) for each in _padded(first, last))
    wide = max(16, pl.next_power_of_2(head_dim)) - head_dim  # Triton's tiles are powers of two, products' at least 16
    heads = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide))) for x in _padded(query, key, value))
    attended: Any = _attend(shape, *heads, *ranges)
    return attended[:, :length, :, :head_dim]


def tuning_of(head_dim: int) -> Tuning:
    """What is taken of heads of so many numbers by the GPU that JAX computes on or compiles for."""
    found = next(tuning for most, tuning in TUNINGS.items() if head_dim <= most)
    if getattr(jax.devices()[0], "compute_capability", None) not in SMALL_CHIPS:
        return found
    return Tuning(*(Blocks(each.own // 2, each.met // 2, 4, 2) for each in found))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: _Shape, query: Array, key: Array, value: Array, first: Array, last: Array) -> Array:
    return _attend_forward(shape, query, key, value, first, last)[0]


def _attend_forward(shape: _Shape, query: Array, key: Array, value: Array, first: Array, last: Array) -> Any:
    blocks, views = shape.tuning.forward, _Views.of(query, key, shape.tuning.forward, backwards=True)
    attended, lse = _called(
        partial(_forward_kernel, shape.scale * math.log2(math.e), blocks.met), blocks, shape.interpret, views,
        [(query, views.own), (key, views.of_key_head), (value, views.of_key_head), (first, views.own_positions)],
        [(query, views.own), (views.per_query, views.own_numbers)],
    )  # fmt: skip
    # Named where they are made, so that what keeps results of products does not compute them twice.
    attended, lse = checkpoint_name(attended, "attended"), checkpoint_name(lse, "attended")
    return attended, (query, key, value, first, last, attended, lse)


def _attend_backward(shape: _Shape, saved: tuple[Array, ...], gradient: Array) -> Any:
    query, key, value, first, last, attended, lse = saved
    # Of a softmax's backward pass: Σ over keys of weight · its gradient.
    drawn = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    blocks, views = shape.tuning.queries, _Views.of(query, key, shape.tuning.queries, backwards=True)
    (to_query,) = _called(
        partial(_query_kernel, shape.scale, blocks.met), blocks, shape.interpret, views,
        [(query, views.own), (key, views.of_key_head), (value, views.of_key_head), (gradient, views.own),
         (lse, views.own_numbers), (drawn, views.own_numbers), (first, views.own_positions)],
        [(query, views.own)],
    )  # fmt: skip
    blocks, views = shape.tuning.keys, _Views.of(query, key, shape.tuning.keys, backwards=False)
    by_head: Any = jax.ShapeDtypeStruct(query.shape, jnp.float32)  # of each query head that reads a key head
    found = _called(
        partial(_key_kernel, shape.scale, blocks.met), blocks, shape.interpret, views,
        [(query, views.of_head), (key, views.own_of_key_head), (value, views.own_of_key_head),
         (gradient, views.of_head), (lse, views.numbers), (drawn, views.numbers), (last, views.own_positions)],
        [(by_head, views.own), (by_head, views.own)],
    )  # fmt: skip
    grouped = (x.reshape(*key.shape[:3], -1, key.shape[3]).sum(axis=3) for x in found)
    to_key, to_value = (rounded(x, key.dtype) for x in grouped)
    return to_query, to_key, to_value, None, None


_attend.defvjp(_attend_forward, _attend_backward)


class _Views(NamedTuple):
    """What a kernel's program for one block of one head of one row is given of arrays.

    Attributes:
        grid: Blocks, heads, rows.
        per_query: Shape of what is one number per query and head.
        own: Of [row, position, head, dim] its own block.
        own_of_key_head: Of its key head.
        of_head: All of its head's.
        of_key_head: All of its key head's.
        own_positions: Of [row, position] its own block.
        own_numbers: Of [row, head, position] its own block.
        numbers: All of its head's.
    """

    grid: tuple[int, int, int]
    per_query: Any
    own: pl.BlockSpec
    own_of_key_head: pl.BlockSpec
    of_head: pl.BlockSpec
    of_key_head: pl.BlockSpec
    own_positions: pl.BlockSpec
    own_numbers: pl.BlockSpec
    numbers: pl.BlockSpec

    @classmethod
    def of(cls, query: Array, key: Array, blocks: Blocks, backwards: bool) -> "_Views":
        """By blocks from the row's end or its beginning: those with most work first."""
        rows, length, heads, dim = query.shape
        count, group, own = length // blocks.own, heads // key.shape[2], blocks.own

        def at(i: Any) -> Any:
            return count - 1 - i if backwards else i

        return cls(
            (count, heads, rows),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
            own=pl.BlockSpec((None, own, None, dim), lambda i, head, row: (row, at(i), head, 0)),
            own_of_key_head=pl.BlockSpec((None, own, None, dim), lambda i, head, row: (row, at(i), head // group, 0)),
            of_head=pl.BlockSpec((None, length, None, dim), lambda i, head, row: (row, 0, head, 0)),
            of_key_head=pl.BlockSpec((None, length, None, dim), lambda i, head, row: (row, 0, head // group, 0)),
            own_positions=pl.BlockSpec((None, own), lambda i, head, row: (row, at(i))),
            own_numbers=pl.BlockSpec((None, None, own), lambda i, head, row: (row, head, at(i))),
            numbers=pl.BlockSpec((None, None, length), lambda i, head, row: (row, head, 0)),
        )


def _called(
    kernel: partial[None],
    blocks: Blocks,
    interpret: bool,
    views: _Views,
    given: list[tuple[Array, pl.BlockSpec]],
    made: list[tuple[Any, pl.BlockSpec]],
) -> Any:
    """A kernel's results, each of a shape and dtype like what stands beside its view."""
    return pl.pallas_call(
        kernel,
        grid=views.grid,
        in_specs=[view for _, view in given],
        out_specs=[view for _, view in made],
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for like, _ in made],
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),
    )(*(array for array, _ in given))


def _forward_kernel(
    scale: float, met: int, query: Any, key: Any, value: Any, first: Any, attended: Any, lse: Any
) -> None:
    own = query.shape[0]
    begin = (pl.num_programs(0) - 1 - pl.program_id(0)) * own
    queries, sees, position = query[...], first[...], begin + jnp.arange(own, dtype=jnp.int32)

    def meet(masked: bool, at: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, weighted = sums
        slots = pl.ds(at * met, met)
        scores = _times(queries, key[slots, :].T) * scale
        if masked:
            other = at * met + jnp.arange(met, dtype=jnp.int32)
            scores = jnp.where((other >= sees[:, None]) & (other <= position[:, None]), scores, _HIDDEN)
        above = jnp.ceil(jnp.maximum(largest, scores.max(axis=1)))  # rounds weights as dense attention does
        weights, faded = jnp.exp2(scores - above[:, None]).astype(value.dtype), jnp.exp2(largest - above)
        added, of_all = _times(weights, value[slots, :]), weights.astype(jnp.float32).sum(axis=1)
        return above, total * faded + of_all, weighted * faded[:, None] + added

    nothing = (
        jnp.full((own,), _HIDDEN, jnp.float32),
        jnp.zeros((own,), jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    largest, total, weighted = _through(_keys_met(begin, own, sees, met), meet, nothing)
    attended[...] = (weighted / total[:, None]).astype(attended.dtype)
    lse[...] = largest + jnp.log2(total)


def _query_kernel(
    scale: float,
    met: int,
    query: Any,
    key: Any,
    value: Any,
    gradient: Any,
    lse: Any,
    drawn: Any,
    first: Any,
    found: Any,
) -> None:
    own = query.shape[0]
    begin = (pl.num_programs(0) - 1 - pl.program_id(0)) * own
    queries, sees, position = query[...], first[...], begin + jnp.arange(own, dtype=jnp.int32)
    of_results, logs, means = gradient[...], lse[...], drawn[...]

    def meet(masked: bool, at: Array, so_far: Array) -> Array:
        slots = pl.ds(at * met, met)
        keys = key[slots, :]
        weights = jnp.exp2(_times(queries, keys.T) * (scale * math.log2(math.e)) - logs[:, None])
        if masked:
            other = at * met + jnp.arange(met, dtype=jnp.int32)
            weights = jnp.where((other >= sees[:, None]) & (other <= position[:, None]), weights, 0.0)
        of_scores = weights * (_times(of_results, value[slots, :].T) - means[:, None])
        return so_far + _times(of_scores.astype(keys.dtype), keys)

    to_query = _through(_keys_met(begin, own, sees, met), meet, jnp.zeros(query.shape, jnp.float32))
    found[...] = (to_query * scale).astype(found.dtype)


def _key_kernel(
    scale: float, met: int, query: Any, key: Any, value: Any, gradient: Any, lse: Any, drawn: Any, last: Any,
    to_keys: Any, to_values: Any,
) -> None:  # fmt: skip
    own = key.shape[0]
    begin = pl.program_id(0) * own
    keys, values, seen, position = key[...], value[...], last[...], begin + jnp.arange(own, dtype=jnp.int32)

    def meet(masked: bool, at: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        slots = pl.ds(at * met, met)
        queries, of_results = query[slots, :], gradient[slots, :]
        weights = jnp.exp2(_times(keys, queries.T) * (scale * math.log2(math.e)) - lse[slots])
        if masked:
            other = at * met + jnp.arange(met, dtype=jnp.int32)
            weights = jnp.where((other >= position[:, None]) & (other <= seen[:, None]), weights, 0.0)
        of_scores = weights * (_times(values, of_results.T) - drawn[slots])
        of_keys = _times(of_scores.astype(queries.dtype), queries)
        return sums[0] + of_keys, sums[1] + _times(weights.astype(of_results.dtype), of_results)

    lower, upper = begin // met, seen.max() // met + 1
    whole = jnp.minimum(pl.cdiv(begin + own - 1, met), upper)  # from here on every query sees the last key, too
    ranges = lower, whole, jnp.maximum(whole, (seen.min() + 1) // met), upper
    nothing = jnp.zeros(key.shape, jnp.float32), jnp.zeros(key.shape, jnp.float32)
    of_keys, of_values = _through(ranges, meet, nothing)
    to_keys[...], to_values[...] = of_keys * scale, of_values


def _keys_met(begin: Any, own: int, sees: Array, met: int) -> tuple[Any, Any, Any, Any]:
    """Blocks of keys for a block of queries: which to mask, which are wholly seen, and which to mask again."""
    upper = (begin + own - 1) // met + 1
    whole = jnp.minimum(pl.cdiv(sees.max(), met), upper)
    return sees.min() // met, whole, jnp.maximum(whole, (begin + 1) // met), upper


def _through(ranges: tuple[Any, Any, Any, Any], meet: Callable[..., Any], sums: Any) -> Any:
    """Over the blocks of three ranges, of which that in the middle needs no mask."""
    for masked, begin, end in zip((True, False, True), ranges[:3], ranges[1:], strict=True):
        sums = lax.fori_loop(begin, end, partial(meet, masked), sums)
    return sums


def _times(left: Array, right: Array) -> Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def _repeated(query: Array, *shared: Array) -> list[Array]:
    """Keys and values with a head of their own for each of the query's."""
    return [jnp.repeat(each, query.shape[2] // each.shape[2], axis=2) for each in shared]


def _padded(*arrays: Array) -> list[Array]:
    """[batch, length, …] with `length` a multiple of `TILE`; zeros are added."""
    return [jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), *[(0, 0)] * (x.ndim - 2))) for x in arrays]


def splash_attention(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads head_dim"],
    ids: Int[Array, "batch length"],
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch length heads head_dim"]:
    """By the Pallas kernel for TPUs; `interpret` runs it anywhere, slowly."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    batch, length, heads, head_dim = query.shape
    kv_heads, group = key.shape[2], heads // key.shape[2]
    scaled = rounded(query.astype(jnp.float32) * head_dim**-0.5, query.dtype)  # the kernel has no scale
    query, key, value, ids = _padded(scaled, key, value, ids)
    square = query.shape[1], query.shape[1]
    mask = masks.CausalMask(square) if window is None else masks.LocalMask(square, (window - 1, 0), offset=0)
    kernel = kernels.make_splash_mqa(
        masks.MultiHeadMask([mask] * group), head_shards=1, q_seq_shards=1, residual_checkpoint_name="attended",
        interpret=interpret,
    )  # fmt: skip
    of_key_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    grouped = query.reshape(batch, -1, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    by_head = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    attended: Any = jax.vmap(of_key_heads)(grouped, *by_head, kernels.SegmentIds(ids, ids))
    return attended.transpose(0, 3, 1, 2, 4).reshape(batch, -1, heads, head_dim)[:, :length]


def cudnn_attention(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads head_dim"],
    ids: Int[Array, "batch length"],
    starts: Int[Array, "batch segments"],
    lengths: Int[Array, "batch segments"],
) -> Float[Array, "batch length heads head_dim"]:
    """By cuDNN, which computes segments only; what it leaves at padding is replaced by zeros."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    real = ids[:, :, None, None] > 0
    query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))  # or gradients there may be no numbers
    lengths = jnp.where(lengths > 0, lengths, -1).astype(jnp.int32)
    offsets = jnp.pad(starts.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=-1)
    attended: Any = cudnn.dot_product_attention(
        query, *_repeated(query, key, value), q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets,
        kv_offsets=offsets, scale=query.shape[-1] ** -0.5, mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip
    return jnp.where(real, attended, 0)

"""Grouped-query attention: over packed rows by one function, `attention`, and over a cache by two.

`attention` has several kernels for the same mathematics; `penstock.model.language.attention_choice` says which is taken
where. Only ``dense`` makes an array of length × length.

``dense``   two plain products and a softmax; the one whose results all others are held to
``blocks``  plain JAX by blocks, masked ones skipped
others      of chips: `penstock.model.language.chip_attention`

Whether engine and learner agree, which may take different ones, is checked by every run. Those of this package round a
softmax's weights to the model's dtype alike, though they see keys in different portions: exp(score) by a power of two,
where in float32 the largest score would do as well, and the division by their sum comes after the values.

*Blocks.* Online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867) and a backward pass that makes
weights again from the saved log-sum-exp (Dao 2023, https://arxiv.org/abs/2307.08691). A block of queries meets only
blocks of keys that hold something it may see: from where its earliest segment or its window begins, to its own; a
block of padding meets none. These bounds are data, so that one program does for every packing. Time is in proportion
to the sum over segments of length squared, memory to the sum of lengths. Query heads share their key head's arrays.
Blocks of all rows are taken one after the other, each large enough for a CPU's cores.

*Caches.* `grouped_attention` reads everything of one, and `ragged_attention` only what rows have filled, row by row.
Keys and values are laid out (batch, head, position, dim). That layout is the fast one on a CPU: both products are plain
batched matrix products over contiguous rows, and a cache needs no transposition.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from penstock.model.language.attention_choice import AttentionKernel
from penstock.model.language.precision import product, rounded

PAGE = 64
"""Positions of a page of the cache: below, more and smaller products cost as much as the positions that they save."""

STEPS = 2
"""How many `reaches` there are from one power of two to the next: twice as many take longer to compile, and no less
to run."""

FEW_ROWS = 8
"""Queries of one key head that a decode step has at most; a prefill has many times as many."""

MASKED = -1e30
"""Score of a forbidden pair: finite, so that a row without any allowed key gives no NaN."""

_LOG2_E = math.log2(math.e)

BLOCK = 64
"""Queries, and keys, of a block. Of 32 to 256 the fastest for sequences up to 512 tokens on one core, forward and
backward; 128 is 5% faster for one of 4,096, and 1.5 times as slow for 64 of 64."""


class Segments(NamedTuple):
    """Where the sequences of packed rows lie; made on the host, by `Segments.of`.

    Attributes:
        ids: 1, 2, … per sequence along its row, 0 for padding.
        starts: Position where sequence s begins, at s − 1; −1 where there is none.
        lengths: Its tokens, at s − 1; 0 where there is none.
    """

    ids: Int[Array, "batch length"]
    starts: Int[Array, "batch segments"]
    lengths: Int[Array, "batch segments"]

    @classmethod
    def of(cls, ids: Any, most: int | None = None) -> "Segments":
        """From the ids alone.

        Args:
            ids: [batch, length] in host memory; the positions of a sequence lie together.
            most: Sequences of a row that there is room for; None: as many as positions.

        Raises:
            ValueError: a row has more.
        """
        ids = np.asarray(ids, np.int32)
        rows, length = ids.shape
        room: int = length if most is None else most
        if ids.size and ids.max() > room:
            raise ValueError(f"a row of {ids.max()} segments, where there is room for {room}")
        begins = (ids > 0) & (np.diff(ids, axis=1, prepend=0) != 0)
        row, position = np.nonzero(begins)
        starts = np.full((rows, room), -1, np.int32)
        starts[row, ids[row, position] - 1] = position
        named = (np.arange(rows)[:, None] * (room + 1) + ids).ravel()
        lengths = np.bincount(named, minlength=rows * (room + 1)).reshape(rows, room + 1)[:, 1:].astype(np.int32)
        return cls(ids, starts, lengths)  # pyright: ignore[reportArgumentType]


def attention(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads head_dim"],
    segments: Segments,
    kernel: AttentionKernel = "dense",
    window: int | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """softmax(q·k / sqrt(head_dim)) v over the keys of a query's own segment up to it.

    Args:
        query: As `Layer.project` returns it; consecutive heads share a key head.
        key: In the layout of `query`, with as many heads as keys have.
        value: In the layout of `key`.
        segments: Where the sequences of the rows lie.
        kernel: What computes it, from `attention_kernel`.
        window: So many keys at most, the query's own among them; None: all.

    Returns:
        Results in the dtype of `value`, of the same name for `jax.checkpoint` whatever the kernel; those at padding
        mean nothing, but are finite.

    Raises:
        NotImplementedError: the kernel has no window.
    """
    segments = Segments(*map(jnp.asarray, segments))
    if kernel == "blocks":
        return block_attention(query, key, value, segments, window)
    if kernel == "dense":
        by_head = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        attended = grouped_attention(query, *by_head, packed_mask(segments.ids, window))
        return checkpoint_name(attended, "attended")
    from penstock.model.language import chip_attention as chips  # Pallas takes a while to load

    if kernel == "triton":
        return chips.triton_attention(query, key, value, *visible_ranges(segments, window))
    if kernel == "splash":
        return chips.splash_attention(query, key, value, segments.ids, window)
    if window is not None and window < query.shape[1]:
        raise NotImplementedError("attention by cudnn has no window")
    return checkpoint_name(chips.cudnn_attention(query, key, value, *segments), "attended")


def visible_ranges(
    segments: Segments, window: int | None
) -> tuple[Int32[Array, "batch length"], Int32[Array, "batch length"]]:
    """Of each position the first that it sees, and the last by which it is seen; padding sees itself alone.

    Args:
        segments: As of `attention`.
        window: As of `attention`.

    Returns:
        Both grow along a row.
    """
    ids = segments.ids.astype(jnp.int32)
    position, own = jnp.arange(ids.shape[1], dtype=jnp.int32), jnp.maximum(ids - 1, 0)
    first, count = (jnp.take_along_axis(each.astype(jnp.int32), own, axis=1) for each in segments[1:])
    last = first + count - 1
    if window is not None:
        first, last = jnp.maximum(first, position - window + 1), jnp.minimum(last, position + window - 1)
    return jnp.where(ids > 0, first, position), jnp.where(ids > 0, last, position)


def packed_mask(
    segment_ids: Int[Array, "batch length"], window: int | None = None
) -> Bool[Array, "batch length length"]:
    """Who sees whom in packed rows: the same segment, not later in the row, fewer than `window` positions before.

    Padding (segment 0) sees earlier padding and itself only, so every row of the mask allows something.
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen = jnp.tril(jnp.ones(same.shape[1:], bool))
    return same & (seen if window is None else jnp.triu(seen, 1 - window))


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
    scores = _scores(rows, key)
    scores = scores.reshape(batch, kv_heads, group, queries, keys) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED).reshape(batch, kv_heads, group * queries, keys)
    attended = _weighted_values(scores, value)
    attended = attended.reshape(batch, kv_heads, group, queries, head_dim).transpose(0, 3, 1, 2, 4)
    return attended.reshape(batch, queries, heads, head_dim)


def _scores(
    rows: Float[Array, "batch kv_heads rows head_dim"], key: Float[Array, "batch kv_heads keys head_dim"]
) -> Float32[Array, "batch kv_heads rows keys"]:
    """Of each row with each key of its head.

    On a CPU few rows are the second operand: XLA's products there bring that into an order of their own first, and the
    keys are much more. The barrier is there because XLA would change the operands' places back.
    """

    def plain(rows: Array, key: Array) -> Array:
        return product("bhqd,bhkd->bhqk", rows, key)

    def swapped(rows: Array, key: Array) -> Array:
        return lax.optimization_barrier(product("bhkd,bhqd->bhkq", key, rows)).swapaxes(2, 3)

    if rows.shape[2] > FEW_ROWS:
        return plain(rows, key)
    return lax.platform_dependent(rows, key, cpu=swapped, default=plain)


@jax.custom_vjp
def _weighted_values(
    scores: Float32[Array, "batch kv_heads rows keys"], value: Float[Array, "batch kv_heads keys head_dim"]
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """softmax(scores) · values."""
    weights = _weights(scores, _ceiling(scores), value.dtype)
    return rounded(product("bhqk,bhkd->bhqd", weights, value) / _sum(weights)[..., None], value.dtype)


def _values_forward(scores: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
    return _weighted_values(scores, value), (jax.nn.softmax(scores, axis=-1), value)


def _values_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """By weights that are divided first: a gradient that is rounded after the division is less exact."""
    weights, value = saved
    through = jax.vjp(partial(product, "bhqk,bhkd->bhqd"), rounded(weights, value.dtype), value)[1]
    to_weights, to_value = through(gradient.astype(jnp.float32))
    met = weights * to_weights.astype(jnp.float32)
    return met - weights * met.sum(axis=-1, keepdims=True), to_value


_weighted_values.defvjp(_values_forward, _values_backward)


def _ceiling(scores: Float32[Array, "*queries keys"]) -> Float32[Array, " *queries"]:
    """Binary logarithm of the least power of two that no key's exp(score) exceeds, a whole number."""
    return jnp.ceil(scores.max(axis=-1) * _LOG2_E)


def _weights(
    scores: Float32[Array, "*queries keys"], ceiling: Float32[Array, " *queries"], dtype: jnp.dtype
) -> Float[Array, "*queries keys"]:
    """exp(score) / 2 ** ceiling in a dtype: its rounding does not depend on which keys a ceiling is of."""
    return rounded(jnp.exp2(scores * _LOG2_E - ceiling[..., None]), dtype)


def _sum(weights: Float[Array, "*queries keys"]) -> Float32[Array, " *queries"]:
    """Of those that values are multiplied by, rounded as they are: so one key's value alone stays what it is."""
    return weights.astype(jnp.float32).sum(axis=-1)


def page_positions(window: int) -> int:
    """Positions of a page of a cache: no more than there are."""
    return min(PAGE, window)


def reaches(window: int) -> list[int]:
    """How many positions of a slot `ragged_attention` can read: one page, two, …, then by steps that grow with them.

    Args:
        window: Positions of the cache, which are the last.
    """
    found = [page_positions(window)]
    while found[-1] < window:
        step = max(PAGE, (1 << (found[-1].bit_length() - 1)) // STEPS)
        found.append(min(found[-1] + step, window))
    return found


def ragged_attention(
    query: Float[Array, "rows heads head_dim"],
    keys: Float[Array, "slots kv_heads length head_dim"],
    values: Float[Array, "slots kv_heads length head_dim"],
    slots: Int32[Array, " rows"],
    seen: Int32[Array, " rows"],
    window: int | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """What `grouped_attention` says of one query per row, by work in proportion to what each row sees.

    One row after the other: so its result depends on no other row. What it reads is copied before its two products,
    which then find it in a core's own cache.

    Args:
        query: As `Layer.project` returns it.
        keys: The cache; what lies beyond what a row sees may be anything finite.
        values: In the layout of `keys`.
        slots: Where each row lies in the cache.
        seen: Of the slot's first positions, the query's own the last of them; 0 for a row that reads none.
        window: So many keys at most, the query's own among them; None: all.

    Returns:
        Results in the dtype of `values`; zeros for a row that reads none.
    """
    kv_heads, length, head_dim = keys.shape[1:]
    sizes = reaches(length)
    least = seen if window is None else jnp.minimum(seen, window)
    if window is not None:
        sizes = sizes[: 1 + sum(size < window for size in sizes)]  # no row reads more than the least that holds that
    which = jnp.searchsorted(jnp.array([0, *sizes], jnp.int32), least, method="compare_all")

    def attend(size: int, query: Array, slot: Array, seen: Array) -> Array:
        start = jnp.maximum(seen - size, 0) if window is not None else 0
        at = start + jnp.arange(size, dtype=jnp.int32)
        mask = at < seen if window is None else (at < seen) & (at >= seen - window)
        place, shape = (slot, 0, start, 0), (1, kv_heads, size, head_dim)
        key, value = (lax.dynamic_slice(cached, place, shape) for cached in (keys, values))
        return grouped_attention(query[None, None], key, value, mask[None, None])[0, 0]

    def nothing(query: Array, slot: Array, seen: Array) -> Array:
        return jnp.zeros_like(query, values.dtype)

    branches = [nothing, *(partial(attend, size) for size in sizes)]

    def one(row: Array, attended: Array) -> Array:
        return attended.at[row].set(lax.switch(which[row], branches, query[row], slots[row], seen[row]))

    return lax.fori_loop(0, len(query), one, jnp.zeros_like(query, values.dtype))


class _BlockShape(NamedTuple):
    """Blocks per row, positions of a block, and how many keys a query sees at most (None: all)."""

    blocks: int
    block: int
    window: int | None


def block_attention(
    query: Float[Array, "rows length heads head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    segments: Segments,
    window: int | None = None,
    block: int = BLOCK,
) -> Float[Array, "rows length heads head_dim"]:
    """softmax(q·k / sqrt(head_dim)) v over the keys of a query's segment up to it.

    Args:
        query: As `Layer.project` returns it; consecutive heads share a key head.
        key: In the layout of `query`, with as many heads as keys have.
        value: In the layout of `key`.
        segments: Where the sequences of the rows lie.
        window: So many keys at most, the query's own among them; None: all.
        block: Positions of a block.

    Returns:
        Results; those at padding mean nothing, but are finite.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    shape = _BlockShape(-(-length // block), block, window)
    padding = shape.blocks * block - length
    query, key, value = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (query, key, value))
    ids = jnp.pad(segments.ids, ((0, 0), (0, padding))).astype(jnp.int32)
    first = first_blocks(segments._replace(ids=ids), block, window)
    grouped = query.reshape(rows, shape.blocks, block, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 1, 3, 4, 2, 5).reshape(rows * shape.blocks, kv_heads, -1, head_dim)
    in_blocks = (x.reshape(-1, block, kv_heads, head_dim).transpose(0, 2, 1, 3) for x in (key, value))
    attended: Any = _attend_blocks(shape, grouped, *in_blocks, ids.reshape(-1, block), first.reshape(-1))
    attended = attended.reshape(rows, shape.blocks, kv_heads, heads // kv_heads, block, head_dim)
    return attended.transpose(0, 1, 4, 2, 3, 5).reshape(rows, -1, heads, head_dim)[:, :length]


def first_blocks(segments: Segments, block: int, window: int | None) -> Int32[Array, "rows blocks"]:
    """Of each block of queries the first block of keys that it meets; of one of padding the block after it.

    Args:
        segments: As in `block_attention`, of a length that is a multiple of `block`.
        block: Positions of a block.
        window: As in `block_attention`.
    """
    rows, length = segments.ids.shape
    first, _ = visible_ranges(segments, window)
    begin = jnp.where(segments.ids > 0, first, length).reshape(rows, -1, block).min(axis=2) // block
    return jnp.minimum(begin, jnp.arange(length // block, dtype=jnp.int32) + 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(
    shape: _BlockShape,
    query: Float[Array, "items kv_heads group_block head_dim"],
    key: Float[Array, "items kv_heads block head_dim"],
    value: Float[Array, "items kv_heads block head_dim"],
    ids: Int32[Array, "items block"],
    first: Int32[Array, " items"],
) -> Array:
    """Over the blocks of all rows, end to end."""
    return _attend_blocks_forward(shape, query, key, value, ids, first)[0]


def _attend_blocks_forward(shape: _BlockShape, query: Array, key: Array, value: Array, ids: Array, first: Array) -> Any:
    def one(item: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        row, number = item - item % shape.blocks, item % shape.blocks
        own = query[item], ids[item]

        def meet(at: Array, sums: _Sums) -> _Sums:
            scores = _block_scores(own[0], key[row + at], _visible(shape, own[1], ids[row + at], number - at))
            return _added(sums, scores, value[row + at])

        sums = lax.fori_loop(first[item], number + 1, meet, _no_sums(own[0]))
        total = jnp.maximum(sums.total, jnp.finfo(jnp.float32).tiny)
        attended = rounded(sums.weighted / total[..., None], query.dtype)
        return results[0].at[item].set(attended), results[1].at[item].set((sums.ceiling + jnp.log2(total)) / _LOG2_E)

    nothing = jnp.zeros_like(query), jnp.zeros(query.shape[:3], jnp.float32)
    attended, lse = lax.fori_loop(0, len(query), one, nothing)
    # Named where they are made, so that what keeps results of products does not compute them twice.
    attended, lse = checkpoint_name(attended, "attended"), checkpoint_name(lse, "attended")
    return attended, (query, key, value, ids, first, attended, lse)


def _attend_blocks_backward(shape: _BlockShape, saved: tuple[Array, ...], gradient: Array) -> Any:
    query, key, value, ids, first, attended, lse = saved
    # Of a softmax's backward pass: Σ over keys of weight · its gradient.
    drawn = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)

    def one(item: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        row, number = item - item % shape.blocks, item % shape.blocks
        own, of_own, scale = query[item], gradient[item], query.shape[-1] ** -0.5

        def meet(at: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            keys, values = key[row + at], value[row + at]
            scores = _block_scores(own, keys, _visible(shape, ids[item], ids[row + at], number - at))
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


_attend_blocks.defvjp(_attend_blocks_forward, _attend_blocks_backward)


class _Sums(NamedTuple):
    """Of the keys met so far, for each query: `_ceiling`, the sum of their `_weights`, and that of them by values."""

    ceiling: Float32[Array, "kv_heads group_block"]
    total: Float32[Array, "kv_heads group_block"]
    weighted: Float32[Array, "kv_heads group_block head_dim"]


def _no_sums(query: Array) -> _Sums:
    none = jnp.zeros(query.shape, jnp.float32)
    return _Sums(jnp.full(query.shape[:2], MASKED, jnp.float32), none[..., 0], none)


def _added(sums: _Sums, scores: Array, value: Array) -> _Sums:
    """With another block of keys; where a query sees none of them yet, what is added counts nothing later."""
    ceiling = jnp.maximum(sums.ceiling, _ceiling(scores))
    weights, faded = _weights(scores, ceiling, value.dtype), jnp.exp2(sums.ceiling - ceiling)
    weighted = product("hqk,hkd->hqd", weights, value)
    total = sums.total * faded + _sum(weights)
    return _Sums(ceiling, total, sums.weighted * faded[..., None] + weighted)


def _block_scores(
    query: Array, key: Array, visible: Bool[Array, "block block"]
) -> Float32[Array, "kv_heads rows block"]:
    kv_heads, rows, head_dim = query.shape
    scores = product("hqd,hkd->hqk", query, key) * head_dim**-0.5
    grouped = scores.reshape(kv_heads, -1, *visible.shape)
    return jnp.where(visible, grouped, MASKED).reshape(kv_heads, rows, -1)


def _visible(shape: _BlockShape, queries: Array, keys: Array, blocks_apart: Array) -> Bool[Array, "block block"]:
    """Who sees whom of two blocks, given their segment ids: the same segment, not later, inside the window."""
    position = jnp.arange(shape.block, dtype=jnp.int32)
    distance = position[:, None] - position + blocks_apart * shape.block
    same = (queries[:, None] == keys) & (distance >= 0)
    return same if shape.window is None else same & (distance < shape.window)

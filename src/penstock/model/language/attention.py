"""Grouped-query attention: over packed rows by one function, `attention`, and over a cache by two.

`attention` has several kernels for the same mathematics; `penstock.model.language.attention_choice` says which is taken
where. Only ``dense`` makes an array of length × length.

``dense``   two plain products and a softmax; the one whose results all others are held to
``blocks``  plain JAX by blocks, masked ones skipped (`penstock.model.language.block_attention`)
``triton``  kernels of our own for NVIDIA GPUs, masked blocks skipped (`penstock.model.language.triton_attention`)
``splash``  JAX's Pallas kernel for TPUs; masked blocks are skipped, those of other segments are not
``cudnn``   cuDNN's packed attention by JAX's private API; keys are repeated, since 0.10.2 misplaces them otherwise

The last three are tested in interpret mode (cuDNN's cannot be) and compiled for chips that are not there; ``triton``
and ``cudnn`` have run on one (docs/performance.md). Whether engine and learner agree is checked by every run.

Of a cache `grouped_attention` reads everything, and `paged_attention` only what rows have filled, page by page. Keys
and values are laid out (batch, head, position, dim). That layout is the fast one on a CPU: both products are plain
batched matrix products over contiguous rows, and a cache needs no transposition.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from penstock.model.language.attention_choice import AttentionKernel
from penstock.model.language.block_attention import block_attention
from penstock.model.language.precision import product, rounded

TILE = 128
"""Rows are padded to a multiple of this for kernels that are made of such tiles."""

PAGE = 64
"""Positions of a page of the cache: below, more and smaller products cost as much as the positions that they save."""

PAGES_AT_ONCE = 16
"""Pages of one step of `paged_attention`, whose keys then stay in a core's own cache between copy and product."""

FEW_ROWS = 8
"""Queries of one key head that a decode step has at most; a prefill has many times as many."""

MASKED = -1e30
"""Score of a forbidden pair: finite, so that a row without any allowed key gives no NaN."""


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
        return block_attention(query, key, value, segments.ids, segments.starts, window)
    if kernel == "splash":
        return splash_attention(query, key, value, segments.ids, window)
    if kernel == "triton":
        from penstock.model.language.triton_attention import triton_attention  # Pallas takes a while to load

        return triton_attention(query, key, value, *segments, window=window)
    if kernel == "cudnn":
        if window is not None and window < query.shape[1]:
            raise NotImplementedError("attention by cudnn has no window")
        attended = cudnn_attention(query, key, value, segments)
    else:
        by_head = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        attended = grouped_attention(query, *by_head, packed_mask(segments.ids, window))
    return checkpoint_name(attended, "attended")


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
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
    weights = rounded(weights.reshape(batch, kv_heads, group * queries, keys), value.dtype)
    attended = rounded(product("bhqk,bhkd->bhqd", weights, value), value.dtype)
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


class Pages(NamedTuple):
    """Which pages of a cache rows read: all of the first row, of the second, …; made by `Pages.of`.

    Where the rows are all slots, in order, their first pages lie side by side: these are read in one go, and are none
    of those that are listed.

    Attributes:
        rows: The row of each, beyond the last page the last row.
        numbers: Which page of its row it is.
        counts: How many of each row are listed.
    """

    rows: Int32[Array, " items"]
    numbers: Int32[Array, " items"]
    counts: Int32[Array, " rows"]

    @classmethod
    def of(cls, lengths: Int32[Array, " rows"], window: int, slots: int) -> "Pages":
        """Those that hold a row's first positions.

        Args:
            lengths: How many; 0 for a row that reads none.
            window: Positions of the cache.
            slots: Of the cache.
        """
        size, first = page_positions(window), _first_listed(len(lengths), slots)
        counts = jnp.maximum(-(-lengths // size) - first, 0)
        ends = jnp.cumsum(counts)
        most = max(1, -(-window // size) - first) * len(lengths)
        items = jnp.arange(-(-most // PAGES_AT_ONCE) * PAGES_AT_ONCE, dtype=jnp.int32)
        rows = jnp.minimum(jnp.searchsorted(ends, items, side="right").astype(jnp.int32), len(lengths) - 1)
        return cls(rows, jnp.maximum(items - (ends - counts)[rows], 0) + first, counts)


def _first_listed(rows: int, slots: int) -> int:
    return int(rows == slots)


def page_positions(window: int) -> int:
    """Positions of a page of a cache: no more than there are."""
    return min(PAGE, window)


def paged_attention(
    query: Float[Array, "rows heads head_dim"],
    keys: Float[Array, "slots kv_heads length head_dim"],
    values: Float[Array, "slots kv_heads length head_dim"],
    slots: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
    pages: Pages,
    window: int | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """What `grouped_attention` says of one query per row, by work in proportion to the pages that the rows have filled.

    Each page has a softmax of its own; a row's are then weighted by their sums, in order (Flash-Decoding: Dao et al.
    2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). So a row's result depends on no other row.

    Args:
        query: As `Layer.project` returns it.
        keys: The cache; what lies beyond a row's position may be anything finite.
        values: In the layout of `keys`.
        slots: Where each row lies in the cache.
        positions: Of the query, whose own key is in the cache already.
        pages: At least those up to the rows' positions.
        window: So many keys at most, the query's own among them; None: all.

    Returns:
        Results in the dtype of `values`. For a row that reads none they are finite, and mean nothing.
    """
    rows, heads, head_dim = query.shape
    kv_heads, length = keys.shape[1:3]
    size, grouped = page_positions(length), query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    first = _first_listed(rows, len(keys))

    def read(cached: Array, slot: Array, start: Array) -> Array:
        return lax.dynamic_slice(cached, (slot, 0, start, 0), (1, kv_heads, size, head_dim))[0]

    def meet(step: Array, found: _PageSums) -> _PageSums:
        row, number = (lax.dynamic_slice_in_dim(a, step * PAGES_AT_ONCE, PAGES_AT_ONCE) for a in pages[:2])
        start = jnp.minimum(number * size, length - size)  # a last page that is shorter overlaps the one before
        key, value = (jax.vmap(read, (None, 0, 0))(cached, slots[row], start) for cached in (keys, values))
        at, newest = start[:, None] + jnp.arange(size, dtype=jnp.int32), positions[row][:, None]
        seen = (at >= number[:, None] * size) & (at <= newest)
        seen = seen if window is None else seen & (at > newest - window)
        new = _page_sums(grouped[row], key, value, seen)
        place = step * PAGES_AT_ONCE
        return jax.tree.map(lambda a, part: lax.dynamic_update_slice_in_dim(a, part, place, 0), found, new)

    def meet_first() -> _PageSums:
        at, newest = jnp.arange(size, dtype=jnp.int32), positions[:, None]
        seen = (at <= newest) if window is None else (at <= newest) & (at > newest - window)
        return _page_sums(grouped, keys[:, :, :size], values[:, :, :size], seen)

    shape = (len(pages.rows), kv_heads, heads // kv_heads)
    nothing = _PageSums(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    steps = -(-jnp.sum(pages.counts) // PAGES_AT_ONCE)
    sums = lax.fori_loop(0, steps, meet, nothing)
    joined = _joined(sums, pages, -(-length // size) - first, meet_first() if first else None)
    return rounded(joined, values.dtype).reshape(rows, heads, head_dim)


class _PageSums(NamedTuple):
    """Of each page, for each query: largest score, Σ exp(score − largest), and Σ of that times values."""

    largest: Float32[Array, "items kv_heads group"]
    total: Float32[Array, "items kv_heads group"]
    weighted: Float32[Array, "items kv_heads group head_dim"]


def _page_sums(
    query: Float[Array, "items kv_heads group head_dim"],
    key: Float[Array, "items kv_heads size head_dim"],
    value: Float[Array, "items kv_heads size head_dim"],
    seen: Bool[Array, "items size"],
) -> _PageSums:
    scores = _scores(query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    largest = scores.max(axis=-1)
    weights = jnp.exp(scores - largest[..., None])
    weighted = product("phgk,phkd->phgd", rounded(weights, value.dtype), value)
    return _PageSums(largest, weights.sum(axis=-1), weighted)


def _joined(
    sums: _PageSums, pages: Pages, most: int, before: _PageSums | None
) -> Float32[Array, "rows kv_heads group head_dim"]:
    """A row's pages together, by their place in the row.

    Args:
        sums: Of the pages that are listed.
        pages: Which these are.
        most: Pages that a row has at most.
        before: Of each row's page before those.
    """
    number = jnp.arange(max(most, 1), dtype=jnp.int32)
    there = number < pages.counts[:, None]
    first = jnp.cumsum(pages.counts) - pages.counts
    of_row = jax.tree.map(lambda a: a[jnp.where(there, first[:, None] + number, 0)], sums)
    if before is not None:
        of_row = jax.tree.map(lambda a, b: jnp.concatenate([b[:, None], a], axis=1), of_row, before)
        there = jnp.pad(there, ((0, 0), (1, 0)), constant_values=True)
    largest = jnp.where(there[:, :, None, None], of_row.largest, MASKED)
    share = jnp.where(there[:, :, None, None], jnp.exp(largest - largest.max(axis=1, keepdims=True)), 0.0)
    total = jnp.sum(share * of_row.total, axis=1)
    weighted = jnp.sum(share[..., None] * of_row.weighted, axis=1)
    return weighted / jnp.where(total > 0, total, 1.0)[..., None]


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
    segments: Segments,
) -> Float[Array, "batch length heads head_dim"]:
    """By cuDNN, which computes segments only; what it leaves at padding is replaced by zeros."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    real = segments.ids[:, :, None, None] > 0
    query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))  # or gradients there may be no numbers
    lengths = jnp.where(segments.lengths > 0, segments.lengths, -1).astype(jnp.int32)
    offsets = jnp.pad(segments.starts.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=-1)
    attended: Any = cudnn.dot_product_attention(
        query, *_repeated(query, key, value), q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets,
        kv_offsets=offsets, scale=query.shape[-1] ** -0.5, mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip
    return jnp.where(real, attended, 0)

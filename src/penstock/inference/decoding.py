"""Prefill and decoding as pure functions: of served weights, a key-value cache, and what each row asks for.

Both compose `Layer.project` and `Layer.finish` with the cache, so that the equations are the learner's. Layers are
unrolled over unstacked weights: scanning stacked ones would copy every layer out of the stack at each step. A prompt's
last token is not prefilled but decoded: its step samples the first token of the response. So prefill needs no output
head, n samples of one prompt differ from their first own step on, and all sampling is in one place. A row that stops
inside a dispatch emits nothing more; the dispatch ends early when no row is left. `resize` is a function of one array,
the same small program for every layer: for all arrays in one program, XLA would compile as many copies of it. `insert`
and `fork`, which copy pages in a loop, are one program over all layers with one loop.

*Cache.* One array of keys and one of values per layer, (slot, kv head, position, head dim). That layout makes both
attention products contiguous; separate arrays per layer let a donated decode step update each in place. A slot's entry
at position t is meaningful only below the slot's length; whatever lies beyond is finite and masked by the reader. The
length of the arrays (the window) follows the longest live sequence. Paging is not covered: every slot has the same
window.

*Attention of a decode step* reads the whole window of every slot at once (``dense``), or of the slots that its rows
name only what they have filled (``ragged``). Which one is fixed when a program is compiled.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32

from penstock.inference.dispatch import DeviceSamples, SlotRows, TextScores
from penstock.inference.sampling import most_probable, sample, uniforms
from penstock.model.arrays import joined_digests, lower_digests, named_leaves
from penstock.model.language import Decoder, Layer, ModelConfig, Segments, grouped_attention, rotary_tables
from penstock.model.language.attention import attention, page_positions, ragged_attention
from penstock.model.language.attention_choice import AttentionKernel
from penstock.model.language.decoder import layer_of, stack_names

_Tree = TypeVar("_Tree")

DecodeKernel = Literal["dense", "ragged"]
"""What computes the attention of a decode step."""


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


def append(
    cached: Float[Array, "slots kv_heads window head_dim"],
    entry: Float[Array, "rows kv_heads head_dim"],
    slots: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
) -> Float[Array, "slots kv_heads window head_dim"]:
    """Writes one entry per row into its slot, at its own position; a position beyond the window writes nothing."""
    return cached.at[slots, :, positions].set(entry, mode="drop")


def resize(
    cached: Float[Array, "slots kv_heads window head_dim"], window: int
) -> Float[Array, "slots kv_heads _ head_dim"]:
    """An array of the cache with another window: zeros are added at its end, or its end is cut off."""
    extra = window - cached.shape[2]
    return jnp.pad(cached, ((0, 0), (0, 0), (0, extra), (0, 0))) if extra > 0 else cached[:, :, :window]


Moves = Int32[Array, "3 moves"]
"""Which pages of cached entries are copied where, one after the other: row or slot that each is read from, slot that it
is written to, its first position there and here. Behind the last the slot is −1."""


def moves_of(sources: Mapping[int, tuple[int, int]], slots: int, length: int) -> Int32[np.ndarray, "3 moves"]:
    """The pages of positions that slots take from elsewhere.

    Args:
        sources: By target: the source, and how many positions.
        slots: How many slots the cache has.
        length: Positions of the arrays that are read.
    """
    size = page_positions(length)
    pages = [(row, slot, at) for slot, (row, reach) in sources.items() for at in range(0, reach, size)]
    found = np.full((3, slots * -(-length // size)), -1, np.int32)
    found[:, : len(pages)] = np.array(pages, np.int32).reshape(-1, 3).T
    return found


def insert(cache: KVCache, prefilled: KVCache, moves: Moves) -> KVCache:
    """Copies pages of prefilled prompts into slots, and touches nothing else.

    One loop for all layers: on GPUs the host is asked at each turn of a loop whether it goes on.

    Args:
        cache: Its window is at least the prefill's.
        prefilled: Its slots are the rows of the prefill.
        moves: In pages of the prefill's length; the n samples of a prompt name the same row.
    """

    def move(number: Array, into: KVCache) -> KVCache:
        return jax.tree.map(lambda held, new: _moved(held, new, moves, number), into, prefilled)

    return lax.fori_loop(0, jnp.sum(moves[1] >= 0), move, cache)


def fork(cache: KVCache, moves: Moves) -> KVCache:
    """Copies pages of slots that are no target themselves into others, likewise."""

    def move(number: Array, into: KVCache) -> KVCache:
        return jax.tree.map(lambda held: _moved(held, held, moves, number), into)

    return lax.fori_loop(0, jnp.sum(moves[1] >= 0), move, cache)


def _moved(into: Array, held: Array, moves: Moves, number: Array) -> Array:
    _, kv_heads, length, head_dim = held.shape
    size = page_positions(length)
    source, target, start = moves[:, number]
    start = jnp.minimum(start, length - size)
    page = lax.dynamic_slice(held, (source, 0, start, 0), (1, kv_heads, size, head_dim))
    return lax.dynamic_update_slice(into, page, (target, 0, start, 0))


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
        """Unstacks the layers, once per weight version; those beside an adapter stay where they are."""
        return cls(dataclasses.replace(decoder, layers=(), adapter=None), decoder.layers_apart())

    def renewed(self, arrays: Mapping[str, Array | np.ndarray]) -> "ServedWeights":
        """With others in the place of some; what is not named is the very array that is served now.

        A stack is taken apart layer by layer, on its way from host memory, too: beyond these weights and the new ones
        never more than one array of one layer is there.

        Args:
            arrays: By the names of the decoder's arrays. Those of JAX are kept by reference where they are served as
                they lie; those in host memory are copied, and cast where they travelled in another dtype.
        """
        host = {name: array for name, array in arrays.items() if not isinstance(array, jax.Array)}
        structure, stacked = jax.tree.structure(self.layers[0]), stack_names(named_leaves(self.layers[0])).keys()
        stacks = jax.tree.unflatten(structure, [arrays.get(name) if name not in host else None for name in stacked])
        layers: list[Layer] = []
        for number, layer in enumerate(self.layers):
            prefix = f"layers.{number}."
            own = {f"layers.{n.removeprefix(prefix)}": array for n, array in arrays.items() if n.startswith(prefix)}
            own |= {name: host[name][number] for name in stacked & host.keys()}
            own |= stack_names(named_leaves(layer_of(stacks, np.int32(number))))
            layers.append(_renewed(layer, stack_names(named_leaves(layer)), own))
        ends = _renewed(self.ends, named_leaves(self.ends), arrays)
        return dataclasses.replace(self, ends=ends, layers=tuple(layers))

    def scores(self, x: Float[Array, "slots hidden"]) -> Float32[Array, "slots vocab"]:
        """Logits from the last layer's residual stream, whole on every device, where each of them then samples."""
        logits = self.ends.logits(self.ends.normalise(x))
        return functools.reduce(lax.with_sharding_constraint, self.scores_via, logits)

    def digests(self) -> dict[str, str]:
        """Of what lies here, by the names of the decoder's arrays: equal to `decoder_digests` of what is served."""
        return joined_digests([(0, named_leaves(self.ends)), *enumerate(map(self._named, self.layers))])

    def lower_digests(self) -> dict[str, Callable[[], Any]]:
        """The programs of `digests`, by what they read."""
        return {
            "digests, embedding and norm": lambda: lower_digests(named_leaves(self.ends)),
            "digests, one layer": lambda: lower_digests(self._named(self.layers[0])),
        }

    @staticmethod
    def _named(layer: Layer) -> dict[str, Any]:
        return stack_names(named_leaves(layer))


def _renewed(tree: _Tree, names: Iterable[str], arrays: Mapping[str, Any]) -> _Tree:
    """The tree with these arrays where its leaves have such names."""
    leaves, structure = jax.tree.flatten(tree)
    named = zip(names, leaves, strict=True)
    return jax.tree.unflatten(structure, [_taken(arrays[n], held) if n in arrays else held for n, held in named])


def _taken(new: Array | np.ndarray, held: Array) -> Array:
    """An array as the one is served that it replaces."""
    if not isinstance(new, jax.Array):  # a copy: on CPUs JAX would refer to the caller's memory, which is used again
        return jax.device_put(np.array(new), held.sharding).astype(held.dtype)
    lies_there = new.sharding.is_equivalent_to(held.sharding, new.ndim)
    return new if lies_there else jax.device_put(new, held.sharding)


class _Progress(NamedTuple):
    step: Int32[Array, ""]
    cache: KVCache
    tokens: Int32[Array, " rows"]
    emitted: DeviceSamples
    live: Bool[Array, " rows"]


def decode(
    weights: ServedWeights,
    cache: KVCache,
    given: Int32[Array, "fields rows"],
    steps: int,
    kernel: DecodeKernel = "dense",
    alternatives: int = 0,
    truncated: bool = True,
) -> tuple[KVCache, Int32[Array, "fields_emitted rows"]]:
    """Runs up to `steps` decode steps for every live row.

    Args:
        weights: Those that are served.
        cache: The entries of all slots.
        given: `SlotRows`, one per slot and in their order for ``dense``; any slots, each once, for ``ragged``.
        steps: At most so many in one dispatch.
        kernel: What computes attention.
        alternatives: How many of the most probable tokens are recorded at each step.
        truncated: As of `sample`.

    Returns:
        The cache, and `DeviceSamples` in one array.
    """
    rows, count = SlotRows.of(given), given.shape[1]
    # Of all steps before the first: in a step XLA would compute the angles again for each layer, and what is random
    # is a loop of many small programs.
    ahead = rows.positions + jnp.arange(steps, dtype=jnp.int32)[:, None]
    tables = tables_of(weights.ends.config, ahead)
    noise = jax.vmap(uniforms, (None, 0))(rows.seeds, ahead)

    def unfinished(progress: _Progress) -> Bool[Array, ""]:
        return (progress.step < steps) & jnp.any(progress.live)

    def advance(progress: _Progress) -> _Progress:
        positions = rows.positions + progress.emitted.count
        now = rows._replace(tokens=progress.tokens, positions=positions)
        here = jax.tree.map(lambda table: table[progress.step], tables)  # a live row has taken every step so far
        cache, logits = decode_step(weights, progress.cache, now, progress.live, here, kernel)
        found = sample(logits, noise[progress.step], **rows.sampling, alternatives=alternatives, truncated=truncated)
        return _record(progress, cache, rows, *found)

    nothing = DeviceSamples(
        jnp.zeros((steps, count), jnp.int32), jnp.zeros((steps, count)), jnp.zeros(count, jnp.int32)
    )
    if alternatives:
        shape = (steps, alternatives, count)
        nothing = nothing._replace(top_tokens=jnp.zeros(shape, jnp.int32), top_logprobs=jnp.zeros(shape))
    start = _Progress(jnp.int32(0), cache, rows.tokens, nothing, rows.budget > 0)
    # Where all rows may have ended before the last step a device that runs ahead of its host would wait for that answer
    # at each step, and the host then for the device: half a millisecond a step on an H200.
    one = jax.jit(advance, inline=True)  # traced once for both
    end = lax.platform_dependent(
        start,
        cpu=lambda progress: lax.while_loop(unfinished, one, progress),
        default=lambda progress: lax.fori_loop(0, steps, lambda _, so_far: one(so_far), progress),
    )
    return end.cache, end.emitted.array()


def _record(
    progress: _Progress,
    cache: KVCache,
    rows: SlotRows,
    tokens: Int32[Array, " rows"],
    logprobs: Float32[Array, " rows"],
    top: tuple[Array, Array] | None,
) -> _Progress:
    """Adds one step's tokens, and ends the rows that stop with them."""
    step, emitted = progress.step, progress.emitted
    count = emitted.count + progress.live
    stopped = jnp.any(tokens[:, None] == rows.stop_token_ids, axis=1)
    written = DeviceSamples(emitted.tokens.at[step].set(tokens), emitted.logprobs.at[step].set(logprobs), count)
    if emitted.top_tokens is not None and emitted.top_logprobs is not None and top is not None:
        top_tokens, top_logprobs = (
            emitted.top_tokens.at[step].set(top[0]),
            emitted.top_logprobs.at[step].set(top[1]),
        )
        written = written._replace(top_tokens=top_tokens, top_logprobs=top_logprobs)
    return _Progress(step + 1, cache, tokens, written, progress.live & ~stopped & (count < rows.budget))


Tables = Mapping[int, tuple[Array, Array]]
"""By attention window, 0 for none (JAX sorts keys): cosines and sines [..., half] of the positions at hand."""


def tables_of(config: ModelConfig, positions: Int32[Array, "*shape"]) -> Tables:
    """`rotary_tables` of each attention window that a layer has."""
    return {window or 0: rotary_tables(config, positions, window) for window in dict.fromkeys(config.windows)}


def decode_step(
    weights: ServedWeights,
    cache: KVCache,
    rows: SlotRows,
    live: Bool[Array, " rows"],
    tables: Tables,
    kernel: DecodeKernel = "dense",
) -> tuple[KVCache, Float32[Array, "rows vocab"]]:
    """Adds one token per live row to the cache and scores the next one.

    Args:
        weights: Those that are served.
        cache: The entries of all slots.
        rows: Newest tokens, their positions, and the slots where the rows lie.
        live: Whose tokens are added.
        tables: Of the rows' positions.
        kernel: As of `decode`.
    """
    targets = jnp.where(live, rows.positions, cache.window)  # beyond the window: a row that is not live writes nothing
    attend = functools.partial(_attend, rows, live, kernel, cache.window)
    cache, x = _through_layers(weights, cache, rows.tokens, tables, rows.slots, targets, attend)
    return cache, weights.scores(x)


def _through_layers(
    weights: ServedWeights,
    cache: KVCache,
    tokens: Int32[Array, " rows"],
    tables: Tables,
    slots: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
    attend: Callable[[Array, Array, Array, int | None], Array],
) -> tuple[KVCache, Float[Array, "rows hidden"]]:
    """The cache with a token more at each of these places, and the residual stream after the last layer."""
    x = weights.ends.embed(tokens)
    keys, values = [], []
    for layer, window, cached_keys, cached_values in zip(
        weights.layers, weights.ends.config.windows, cache.keys, cache.values, strict=True
    ):
        query, key, value = layer.project(x, *tables[window or 0])
        keys.append(append(cached_keys, key, slots, positions))
        values.append(append(cached_values, value, slots, positions))
        x = layer.finish(x, attend(query, keys[-1], values[-1], window))
    return KVCache(tuple(keys), tuple(values)), x


def _attend(
    rows: SlotRows,
    live: Bool[Array, " rows"],
    kernel: DecodeKernel,
    length: int,
    query: Array,
    keys: Array,
    values: Array,
    window: int | None,
) -> Float[Array, "rows heads head_dim"]:
    if kernel == "ragged":
        return ragged_attention(query, keys, values, rows.slots, jnp.where(live, rows.positions + 1, 0), window)
    return grouped_attention(query[:, None], keys, values, _seen(rows.positions, length, window))[:, 0]


def _seen(positions: Int32[Array, " slots"], length: int, window: int | None) -> Bool[Array, "slots 1 length"]:
    """Which entries of the cache a slot's newest token sees in a layer with that attention window."""
    entries, newest = jnp.arange(length), positions[:, None]
    seen = entries <= newest
    return (seen if window is None else seen & (entries > newest - window))[:, None, :]


def prefill(weights: ServedWeights, tokens: Int32[Array, "rows length"], kernel: AttentionKernel = "dense") -> KVCache:
    """Keys and values of padded prompts. Those at padding mean nothing; decoding overwrites before reading them."""
    rows, length = tokens.shape
    positions, config = jnp.broadcast_to(jnp.arange(length), (rows, length)), weights.ends.config
    tables = tables_of(config, positions)
    whole_rows = Segments.of(np.ones((rows, length)), most=1)
    x: Float[Array, "rows length hidden"] = weights.ends.embed(tokens)
    keys, values = [], []
    for layer, window in zip(weights.layers, config.windows, strict=True):
        query, key, value = layer.project(x, *tables[window or 0])
        keys.append(key.transpose(0, 2, 1, 3))
        values.append(value.transpose(0, 2, 1, 3))
        x = layer.finish(x, attention(query, key, value, whole_rows, kernel, window))
    return KVCache(tuple(keys), tuple(values))


def extend(
    weights: ServedWeights,
    cache: KVCache,
    tokens: Int32[Array, " length"],
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
) -> KVCache:
    """Adds the next tokens of a long prompt to what a slot holds of it.

    Args:
        weights: Those that are served.
        cache: The entries of all slots.
        tokens: Padded; padding beyond the prompt is overwritten by decoding, beyond the window it is not written.
        slot: Which one; beyond the last it writes nothing.
        start: Position of the first of them.
    """
    return _extended(weights, cache, tokens, slot, start)[0]


def score(
    weights: ServedWeights,
    cache: KVCache,
    tokens: Int32[Array, " length_and_one"],
    start: Int32[Array, ""],
    temperature: Float32[Array, ""],
    alternatives: int,
) -> tuple[KVCache, TextScores]:
    """Scores the next tokens of a text, of which a cache of one slot holds what is before them.

    Args:
        weights: Those that score.
        cache: The text's own.
        tokens: The last one scored, which is added to the cache with those after it, but for the last; padded at will.
        start: Position of the first of them.
        temperature: Divides the logits; 0 leaves them.
        alternatives: How many of the most probable tokens are told.

    Returns:
        The cache, and the scores of ``tokens[1:]``. At most `length` times the vocabulary exist at once.
    """
    cache, x = _extended(weights, cache, tokens[:-1], jnp.int32(0), start)
    scaled = weights.scores(x) / jnp.where(temperature > 0, temperature, 1.0)
    shifted = scaled - jnp.max(scaled, axis=1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=1))
    chosen = jnp.take_along_axis(shifted, tokens[1:, None], axis=1)
    ranks = 1 + jnp.sum(shifted > chosen, axis=1, dtype=jnp.int32)
    return cache, TextScores(chosen[:, 0] - total, ranks, *most_probable(shifted, total, alternatives))


def _extended(
    weights: ServedWeights,
    cache: KVCache,
    tokens: Int32[Array, " length"],
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
) -> tuple[KVCache, Float[Array, "length hidden"]]:
    """The cache with these tokens, and the residual stream after the last layer."""
    length, config = tokens.shape[0], weights.ends.config
    positions, slots = start + jnp.arange(length, dtype=jnp.int32), jnp.full(length, slot, jnp.int32)
    seen = {window: _seen(positions, cache.window, window)[:, 0][None] for window in dict.fromkeys(config.windows)}

    def attend(query: Array, keys: Array, values: Array, window: int | None) -> Array:
        own_keys, own_values = (lax.dynamic_index_in_dim(cached, slot) for cached in (keys, values))
        return grouped_attention(query[None], own_keys, own_values, seen[window])[0]

    return _through_layers(weights, cache, tokens, tables_of(config, positions), slots, positions, attend)

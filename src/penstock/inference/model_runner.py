"""What is on the device: served weights, key-value cache, and the compiled programs of prefill and decoding.

`ModelRunner.warm_up` compiles every shape that can occur, so that serving never compiles again; `begin` has each
compiled when it is needed first, or when somebody asks for the rest. Which shape a request takes does not depend on
what is compiled, so that neither does what comes out. One thread only writes weights and cache, on however many devices
they lie; any other may `prepare` weights meanwhile. What runs when is decided in `penstock.inference.scheduler`.

*Programs.* Prefill of prompts, and several decode steps in one dispatch. Both compose `Layer.project` and
`Layer.finish` with the cache, so that the equations are the learner's; prefill's attention is chosen by the rule of
``learner.attention: auto``, decoding's is dense over the cache. Layers are unrolled over unstacked weights:
scanning stacked ones would copy every layer out of the stack at each step. A prompt's last token is not prefilled but
decoded: its step samples the first token of the response. So prefill needs no output head, n samples of one prompt
differ from their first own step on, and all sampling is in one place. A row that stops inside a dispatch emits nothing
more; the dispatch ends early when no row is left. What only moves cached entries about runs array by array, the same
small program for every layer: for all arrays in one program, XLA would compile as many copies of it. Programs are
compiled once per shape and shared by every engine of the process; only the cache is donated, never weights.

*Cache.* One array of keys and one of values per layer, (slot, kv head, position, head dim). That layout makes both
attention products contiguous; separate arrays per layer let a donated decode step update each in place. A slot's entry
at position t is meaningful only below the slot's length; whatever lies beyond is finite and masked by the reader. The
length of the arrays (the window) follows the longest live sequence, since attention reads all of it. Paging is not
covered: every slot has the same window.

*Tensor parallelism* over several devices of this machine: one mesh axis, named `model`. Each device holds some of the
attention heads with their part of the cache, some columns of the gated MLP, and (where their number divides) some rows
of the vocabulary; norms and all that a request says are on every device. What is split by columns and then by rows
needs one sum over the devices after attention and one after the MLP (Megatron-LM: Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053); XLA puts them in from the placement alone. Scores are gathered, so every device draws
the same tokens. Sums over devices are rounded in another order than on one; nothing else differs. Not covered: several
machines, several meshes, splitting a head, key heads kept on more than one device.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32

from penstock.inference.config import EngineConfig
from penstock.inference.dispatch import DeviceSamples, HostRows, HostSamples, SlotRows, to_device, to_host
from penstock.inference.sampling import sample, uniforms
from penstock.model.arrays import joined_digests, lower_digests, named_leaves
from penstock.model.language import Decoder, Layer, ModelConfig, Segments, grouped_attention, rotary_tables
from penstock.model.language.attention import attention
from penstock.model.language.attention_choice import AttentionKernel, attention_kernel, platform_named
from penstock.model.language.decoder import stack_names
from penstock.model.programs import LazyPrograms, Programs, choose_cache, compile_programs
from penstock.types import CompiledProgram, ConfigError


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
    entry: Float[Array, "slots kv_heads head_dim"],
    positions: Int32[Array, " slots"],
) -> Float[Array, "slots kv_heads window head_dim"]:
    """Writes one entry per slot at the slot's own position; a position beyond the window writes nothing."""
    return cached.at[jnp.arange(cached.shape[0]), :, positions].set(entry, mode="drop")


def resize(
    cached: Float[Array, "slots kv_heads window head_dim"], window: int
) -> Float[Array, "slots kv_heads _ head_dim"]:
    """An array of the cache with another window: zeros are added at its end, or its end is cut off."""
    extra = window - cached.shape[2]
    return jnp.pad(cached, ((0, 0), (0, 0), (0, extra), (0, 0))) if extra > 0 else cached[:, :, :window]


def insert(
    cached: Float[Array, "slots kv_heads window head_dim"],
    prefilled: Float[Array, "rows kv_heads length head_dim"],
    source: Int32[Array, " slots"],
) -> Float[Array, "slots kv_heads window head_dim"]:
    """Copies prefilled prompts into slots; the n samples of a prompt all name the same row.

    Args:
        cached: An array of the cache; its window is at least the prefill's.
        prefilled: The same array of the prefill's cache, whose slots are its rows.
        source: For each slot the row it takes; −1 leaves the slot as it is.
    """
    kept = cached[:, :, : prefilled.shape[2]]
    head = jnp.where((source >= 0)[:, None, None, None], prefilled[jnp.maximum(source, 0)], kept)
    return jax.lax.dynamic_update_slice(cached, head, (0, 0, 0, 0))


def fork(
    cached: Float[Array, "slots kv_heads window head_dim"], source: Int32[Array, " slots"]
) -> Float[Array, "slots kv_heads window head_dim"]:
    """Every slot takes the content of the slot that `source` names; its own number changes nothing."""
    return cached[source]


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
    def _named(layer: Layer) -> dict[str, Array]:
        return stack_names(named_leaves(layer))


class _Progress(NamedTuple):
    step: Int32[Array, ""]
    cache: KVCache
    tokens: Int32[Array, " slots"]
    emitted: DeviceSamples
    live: Bool[Array, " slots"]


def decode(weights: ServedWeights, cache: KVCache, rows: SlotRows, steps: int) -> tuple[KVCache, DeviceSamples]:
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

    nothing = DeviceSamples(
        jnp.zeros((steps, slots), jnp.int32), jnp.zeros((steps, slots)), jnp.zeros(slots, jnp.int32)
    )
    start = _Progress(jnp.int32(0), cache, rows.tokens, nothing, rows.budget > 0)
    end = lax.while_loop(unfinished, advance, start)
    return end.cache, end.emitted


def _record(
    progress: _Progress,
    cache: KVCache,
    rows: SlotRows,
    tokens: Int32[Array, " slots"],
    logprobs: Float32[Array, " slots"],
) -> _Progress:
    """Adds one step's tokens, and ends the rows that stop with them."""
    step, emitted = progress.step, progress.emitted
    count = emitted.count + progress.live
    stopped = jnp.any(tokens[:, None] == rows.stop_token_ids, axis=1)
    written = DeviceSamples(emitted.tokens.at[step].set(tokens), emitted.logprobs.at[step].set(logprobs), count)
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
    windows = ends.config.windows
    tables = {window: rotary_tables(ends.config, positions, window) for window in dict.fromkeys(windows)}
    seen = {window: _seen(positions, cache.window, window) for window in dict.fromkeys(windows)}
    targets = jnp.where(live, positions, cache.window)  # beyond the window: a slot without a row writes nothing
    x = ends.embed(tokens)
    keys, values = [], []
    for layer, window, cached_keys, cached_values in zip(
        weights.layers, windows, cache.keys, cache.values, strict=True
    ):
        query, key, value = layer.project(x, *tables[window])
        keys.append(append(cached_keys, key, targets))
        values.append(append(cached_values, value, targets))
        attended = grouped_attention(query[:, None], keys[-1], values[-1], seen[window])
        x = layer.finish(x, attended[:, 0])
    return KVCache(tuple(keys), tuple(values)), weights.scores(x)


def _seen(positions: Int32[Array, " slots"], length: int, window: int | None) -> Bool[Array, "slots 1 length"]:
    """Which entries of the cache a slot's newest token sees in a layer with that attention window."""
    entries, newest = jnp.arange(length), positions[:, None]
    seen = entries <= newest
    return (seen if window is None else seen & (entries > newest - window))[:, None, :]


def prefill(weights: ServedWeights, tokens: Int32[Array, "rows length"], kernel: AttentionKernel = "dense") -> KVCache:
    """Keys and values of padded prompts. Those at padding mean nothing; decoding overwrites before reading them."""
    rows, length = tokens.shape
    positions, config = jnp.broadcast_to(jnp.arange(length), (rows, length)), weights.ends.config
    tables = {window: rotary_tables(config, positions, window) for window in dict.fromkeys(config.windows)}
    whole_rows = Segments.of(np.ones((rows, length)), most=1)
    x: Float[Array, "rows length hidden"] = weights.ends.embed(tokens)
    keys, values = [], []
    for layer, window in zip(weights.layers, config.windows, strict=True):
        query, key, value = layer.project(x, *tables[window])
        keys.append(key.transpose(0, 2, 1, 3))
        values.append(value.transpose(0, 2, 1, 3))
        x = layer.finish(x, attention(query, key, value, whole_rows, kernel, window))
    return KVCache(tuple(keys), tuple(values))


class CompiledSteps(NamedTuple):
    """The functions of the cache and of decoding, compiled."""

    create: Callable[..., KVCache]
    decode: Callable[..., Any]
    prefill: Callable[..., KVCache]
    insert: Callable[..., Array]
    fork: Callable[..., Array]
    resize: Callable[..., Array]


ONE_DEVICE = CompiledSteps(
    create=create_cache,
    decode=jax.jit(decode, static_argnames="steps", donate_argnames="cache"),
    prefill=jax.jit(prefill, static_argnames="kernel"),
    insert=jax.jit(insert, donate_argnames="cached"),
    fork=jax.jit(fork, donate_argnames="cached"),
    resize=jax.jit(resize, static_argnames="window"),
)


@functools.cache
def split_programs(split: "ModelSplit") -> CompiledSteps:
    """The same over several devices; a cache that a program returns lies as the one that it was given."""
    cache, whole = split.cache, split.whole
    return CompiledSteps(
        create=jax.jit(create_cache, static_argnums=(0, 1, 2), out_shardings=cache),
        decode=jax.jit(decode, static_argnames="steps", donate_argnames="cache", out_shardings=(cache, whole)),
        prefill=jax.jit(prefill, static_argnames="kernel", out_shardings=cache),
        insert=jax.jit(insert, donate_argnames="cached", out_shardings=cache),
        fork=jax.jit(fork, donate_argnames="cached", out_shardings=cache),
        resize=jax.jit(resize, static_argnames="window", out_shardings=cache),
    )


MODEL_AXIS = "model"

_COLUMNS = ("query", "key", "value", "query_bias", "key_bias", "value_bias", "gate", "up")
_ROWS = ("output", "down")
_VOCABULARY = ("embedding", "head")

_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True)
class ModelSplit:
    """Where the parts of a model lie.

    Attributes:
        mesh: The devices, along the axis `model`.
        vocabulary: Whether embedding and output matrix are split too.
    """

    mesh: Mesh
    vocabulary: bool

    @classmethod
    def over(cls, model: ModelConfig, devices: int, section: str = EngineConfig.section) -> "ModelSplit":
        """Over that many local devices, the first ones.

        Args:
            model: Its heads, key heads and MLP columns must be multiples of `devices`.
            devices: How many, at least one.
            section: Where a config says so; see `EngineConfig`.

        Raises:
            ConfigError: there are fewer, or the model cannot be split so.
        """
        local = jax.local_devices()
        if devices > len(local):
            raise ConfigError(
                f"{section}.model_parallel is {devices}, but this process has {len(local)} device(s) "
                f"({local[0].platform}): lower it, or give the process more devices"
            )
        _check_divides(model, devices, section)
        mesh = Mesh(np.array(local[:devices]), (MODEL_AXIS,), axis_types=(AxisType.Auto,))
        return cls(mesh, model.vocab_size % devices == 0)

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def cache(self) -> NamedSharding:
        """Of each array of a cache: (slot, kv head, position, head dim), split by heads."""
        return NamedSharding(self.mesh, PartitionSpec(None, MODEL_AXIS))

    def serve(self, decoder: Decoder, held: ServedWeights | None = None) -> ServedWeights:
        """Puts each parameter, part by part, onto its devices; the decoder itself stays where it is.

        Args:
            decoder: What is going to be served.
            held: What is served now: beside an adapter the base is the same, and only the adapter is put there.
        """
        if decoder.adapter is not None and held is not None:
            base = tuple(dataclasses.replace(layer, adapter=None) for layer in held.layers)
            decoder = dataclasses.replace(held.ends, layers=base, adapter=self._place(decoder.adapter))
            return dataclasses.replace(ServedWeights.of(decoder), scores_via=held.scores_via)
        weights = ServedWeights.of(self._place(decoder))
        by_token = NamedSharding(self.mesh, PartitionSpec(None, MODEL_AXIS if self.vocabulary else None))
        return dataclasses.replace(self._place(weights), scores_via=(by_token, self.whole))

    def _place(self, tree: _Tree) -> _Tree:
        shardings = jax.tree_util.tree_map_with_path(
            lambda path, array: NamedSharding(self.mesh, self.specification(path[-1].name, array.ndim)), tree
        )
        return jax.device_put(tree, shardings)

    def specification(self, name: str, ndim: int) -> PartitionSpec:
        """Which axis of a parameter is split, by its field's name in `Decoder` or `Layer`; stacked or not."""
        if name in _COLUMNS:
            return PartitionSpec(*[None] * (ndim - 1), MODEL_AXIS)
        if name in _ROWS:
            return PartitionSpec(*[None] * (ndim - 2), MODEL_AXIS)
        if name in _VOCABULARY and self.vocabulary:
            return PartitionSpec(MODEL_AXIS)
        return PartitionSpec()


def _check_divides(model: ModelConfig, devices: int, section: str) -> None:
    counts = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
    }
    uneven = [f"{name} ({count})" for name, count in counts.items() if count % devices]
    if uneven:
        fits = [n for n in range(1, model.num_key_value_heads + 1) if not any(c % n for c in counts.values())]
        raise ConfigError(
            f"{section}.model_parallel: the model cannot be split over {devices} devices, of which "
            f"{', '.join(uneven)} is no multiple: use one of {', '.join(map(str, fits))}"
        )


_DECODE, _FORK, _RESIZE = "decode, window {}", "fork, window {}", "resize, window {} to {}"
_PREFILL = "prefill, {} × {} prompt tokens"
_INSERT = "insert, {} × {} prompt tokens, window {}"
"""Names of programs."""


class ModelRunner:
    """Runs prefill and decode for a fixed number of slots.

    Args:
        decoder: The first weights.
        config: Shapes, and over how many devices.

    Raises:
        ConfigError: the model cannot be split over that many devices, or there are fewer.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self._config = config
        self._windows, self._steps = config.window_buckets, config.steps_per_dispatch
        devices = jax.local_device_count() if config.model_parallel is None else config.model_parallel
        self._split = ModelSplit.over(decoder.config, devices, config.section) if devices > 1 else None
        self._programs = ONE_DEVICE if self._split is None else split_programs(self._split)
        self._lazy: LazyPrograms | None = None
        self._weights = self._prepared(decoder, None)
        self._cache = self._programs.create(decoder.config, config.max_slots, self._windows[0])

    @property
    def window(self) -> int:
        """Positions that fit into the cache at present."""
        return self._cache.window

    def prepare(self, decoder: Decoder) -> ServedWeights:
        """Weights as the programs take them, on their devices; what is served stays as it is. For any thread."""
        return self._prepared(decoder, self._weights)

    def _prepared(self, decoder: Decoder, held: ServedWeights | None) -> ServedWeights:
        weights = ServedWeights.of(decoder) if self._split is None else self._split.serve(decoder, held)
        return jax.block_until_ready(weights)

    @property
    def weights(self) -> ServedWeights:
        """What is served; never donated."""
        return self._weights

    def load(self, weights: ServedWeights) -> None:
        """Serves these from the next program on: a reference changes. Cached keys and values stay as they are."""
        self._weights = weights

    def resize(self, window: int) -> None:
        """Takes the cache to another of the configured windows, through those between (each a compiled step)."""
        current, target = self._windows.index(self.window), self._windows.index(window)
        direction = 1 if target > current else -1
        for index in range(current + direction, target + direction, direction) if target != current else ():
            self._need(_RESIZE.format(self.window, self._windows[index]))
            step = functools.partial(self._programs.resize, window=self._windows[index])
            self._cache = jax.tree.map(step, self._cache)

    def prefill(self, tokens: Int32[np.ndarray, "rows length"], source: Int32[np.ndarray, " slots"]) -> None:
        """Runs padded prompts and copies row ``source[s]`` into slot s (−1: none)."""
        self._need(_PREFILL.format(*tokens.shape), _INSERT.format(*tokens.shape, self.window))
        kernel = self._kernel(tokens.shape[1])
        prefilled = self._programs.prefill(self._weights, jax.device_put(tokens), kernel=kernel)
        rows = jax.device_put(source)
        self._cache = jax.tree.map(lambda *arrays: self._programs.insert(*arrays, rows), self._cache, prefilled)

    def _kernel(self, length: int) -> AttentionKernel:
        """What computes the attention of a prefill; kernels of a chip do not split over devices, dense does."""
        embedding = self._weights.ends.embedding
        platform = platform_named(next(iter(embedding.sharding.device_set)).platform)
        if self._split is not None and platform != "cpu":
            return "dense"
        window = self._weights.ends.config.shortest_window
        return attention_kernel("auto", platform, length, embedding.dtype.name, window)

    def fork(self, source: Int32[np.ndarray, " slots"]) -> None:
        """Copies the cache of slot ``source[s]`` into slot s."""
        self._need(_FORK.format(self.window))
        slots = jax.device_put(source)
        self._cache = jax.tree.map(lambda cached: self._programs.fork(cached, slots), self._cache)

    def decode(self, rows: HostRows) -> HostSamples:
        """Runs one dispatch and waits for it."""
        self._need(_DECODE.format(self.window))
        self._cache, emitted = self._programs.decode(self._weights, self._cache, to_device(rows), steps=self._steps)
        return to_host(emitted)

    def digests(self, weights: ServedWeights) -> dict[str, str]:
        """`ServedWeights.digests`; for any thread."""
        self._need(*weights.lower_digests())
        return weights.digests()

    def begin(
        self, idle_rows: HostRows, on_done: Callable[[CompiledProgram | BaseException], None]
    ) -> LazyPrograms | None:
        """Has every program compiled when it is needed first.

        Those of decoding, as a response grows, from now on, and before that what most short prompts at once need.

        Args:
            idle_rows: Rows with no budget.
            on_done: As of `LazyPrograms`.

        Returns:
            All programs; None over several devices, where they are compiled by `warm_up` alone.
        """
        if self._split is not None:
            return None
        self._lazy = LazyPrograms(self._lowered(idle_rows), on_done)
        smallest = self._windows[0]
        first = [_DECODE.format(smallest)]
        for rows, length in sorted(self._prefill_shapes(smallest), key=lambda shape: (shape[1], -shape[0]))[:1]:
            first += [_PREFILL.format(rows, length), _INSERT.format(rows, length, smallest)]
        self._lazy.compile(first, urgent=True)
        for window, wider in pairwise(self._windows):
            self._lazy.compile([_RESIZE.format(window, wider), _DECODE.format(wider)])
        return self._lazy

    def _need(self, *names: str) -> None:
        if self._lazy is not None:
            self._lazy.need(*names)

    def warm_up(self, idle_rows: HostRows) -> Iterator[CompiledProgram]:
        """Compiles every program in every shape, the smallest first, and then runs each with slots that are not live.

        On one device they are compiled side by side. Over several, where a program's arguments lie is known when it
        is run: there they are compiled one after the other.

        Args:
            idle_rows: Rows with no budget.

        Yields:
            Each program as it is compiled, so that whoever waits for an end need not wait for all of them.
        """
        choose_cache()
        if self._split is None:
            yield from compile_programs(self._lowered(idle_rows))
        runs = list(self._first_runs(idle_rows))
        for number, (name, run) in enumerate(runs, 1):
            started = time.perf_counter()
            run()
            if self._split is not None:
                yield CompiledProgram(name, number, len(runs), time.perf_counter() - started)
        self.resize(self._windows[0])
        jax.block_until_ready(self._cache)

    def _lowered(self, idle_rows: HostRows) -> Programs:
        """Every program in every shape, by what it is for."""
        run: Any = self._programs  # what is jitted can be lowered
        weights, config = self._weights, self._config
        rows, slots = to_device(idle_rows), np.zeros(config.max_slots, np.int32)
        caches = {window: self._cache_shape(config.max_slots, window) for window in self._windows}
        found: dict[str, Any] = {}
        for window, cache in caches.items():
            found[_DECODE.format(window)] = functools.partial(run.decode.lower, weights, cache, rows, steps=self._steps)
            for count, length in self._prefill_shapes(window):
                tokens, prefilled = np.zeros((count, length), np.int32), self._cache_shape(count, length)
                lower = functools.partial(run.prefill.lower, weights, tokens, kernel=self._kernel(length))
                found.setdefault(_PREFILL.format(count, length), lower)
                found[_INSERT.format(count, length, window)] = functools.partial(
                    run.insert.lower, cache.keys[0], prefilled.keys[0], slots
                )
            found[_FORK.format(window)] = functools.partial(run.fork.lower, cache.keys[0], slots)
        for window, other in [*pairwise(self._windows), *pairwise(reversed(self._windows))]:
            found[_RESIZE.format(window, other)] = functools.partial(
                run.resize.lower, caches[window].keys[0], window=other
            )
        found |= weights.lower_digests()
        return {name: lambda lower=lower: lower().compile() for name, lower in found.items()}

    def _cache_shape(self, slots: int, window: int) -> Any:
        return jax.eval_shape(lambda: create_cache(self._weights.ends.config, slots, window))

    def _first_runs(self, idle_rows: HostRows) -> Iterator[tuple[str, Callable[[], object]]]:
        """By name: runs each program once, window by window."""
        slots = self._config.max_slots
        nowhere = np.full(slots, -1, np.int32)

        def begin(window: int) -> None:
            self.resize(window)
            self.decode(idle_rows)
            self.fork(np.arange(slots, dtype=np.int32))

        for window in self._windows:
            yield _DECODE.format(window), functools.partial(begin, window)
            for rows, length in self._prefill_shapes(window):
                prefill = functools.partial(self.prefill, np.zeros((rows, length), np.int32), nowhere)
                yield f"prefill, {rows} × {length} prompt tokens, window {window}", prefill
        yield "digests", self._weights.digests

    def _prefill_shapes(self, window: int) -> Iterator[tuple[int, int]]:
        for length in self._config.prefill_buckets:
            if length <= window:
                yield from ((rows, length) for rows in self._config.prefill_row_counts(length))

"""What is on the device: served weights, key-value cache, and the compiled programs of prefill and decoding.

`ModelRunner.warm_up` compiles every shape that can occur, so that serving never compiles again; `begin` has each
compiled when it is needed first, or when somebody asks for the rest. Which shape a request takes does not depend on
what is compiled, so that neither does what comes out. One thread only writes weights and cache, on however many devices
they lie; any other may `prepare` weights meanwhile. `penstock.inference.scheduler` decides what runs when.

Programs (`penstock.inference.decoding`) are compiled once per shape and shared by every engine of the process; only the
cache is donated, never weights. Prefill's attention is chosen by the rule of ``learner.attention: auto``. A decode step
has the fewest of the configured rows that hold what is live. On one CPU its attention is ragged when those are fewer
than the slots, or when what they read is at most two thirds of the cache: so one long response does not tax all others.
Else it is dense over the cache, which is what a CPU's cores share best.

*Tensor parallelism* over several devices of this machine: one mesh axis, named `model`. Each device holds some of the
attention heads with their part of the cache, some columns of the gated MLP, and (where their number divides) some rows
of the vocabulary; norms and all that a request says are on every device. What is split by columns and then by rows
needs one sum over the devices after attention and one after the MLP (Megatron-LM: Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053); XLA puts them in from the placement alone. Scores are gathered, so every device draws
the same tokens. Only the order of sums differs. Not covered: several machines, splitting a head, copied heads.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from penstock.inference.config import EngineConfig, check_divides
from penstock.inference.decoding import (
    DecodeKernel,
    KVCache,
    ServedWeights,
    create_cache,
    decode,
    extend,
    fork,
    insert,
    moves_of,
    prefill,
    resize,
    score,
)
from penstock.inference.dispatch import HostSamples, SlotRows, truncates
from penstock.inference.sequence import MOST_ALTERNATIVES
from penstock.model.arrays import are_shapes
from penstock.model.language import Decoder, ModelConfig
from penstock.model.language.attention import reaches
from penstock.model.language.attention_choice import AttentionKernel, Platform, attention_kernel, platform_named
from penstock.model.programs import LazyPrograms, Programs, choose_cache, compile_programs, light_compilation
from penstock.types import CompiledProgram, ConfigError

_FEW_REACHES = 2
"""Of a window that is so short that all slots are always read whole."""

HOW_DECODED = ("steps", "kernel", "alternatives", "truncated")
"""Static arguments of `decode`."""


class CompiledSteps(NamedTuple):
    """The functions of the cache and of decoding, compiled."""

    create: Callable[..., KVCache]
    decode: Callable[..., Any]
    prefill: Callable[..., KVCache]
    extend: Callable[..., KVCache]
    insert: Callable[..., KVCache]
    fork: Callable[..., KVCache]
    resize: Callable[..., Array]
    score: Callable[..., Any]


def _jitted(options: Any = None, split: "ModelSplit | None" = None) -> CompiledSteps:
    jit = functools.partial(jax.jit, compiler_options=options)
    caches: Any = {} if split is None else {"out_shardings": split.cache}
    answers: Any = {} if split is None else {"out_shardings": (split.cache, split.whole)}
    return CompiledSteps(
        create=jax.jit(create_cache, static_argnums=(0, 1, 2), **caches),
        decode=jit(decode, static_argnames=HOW_DECODED, donate_argnames="cache", **answers),
        prefill=jit(prefill, static_argnames="kernel", **caches),
        extend=jit(extend, donate_argnames="cache", **caches),
        insert=jit(insert, donate_argnames="cache", **caches),
        fork=jit(fork, donate_argnames="cache", **caches),
        resize=jit(resize, static_argnames="window", **caches),
        score=jit(score, static_argnames="alternatives", donate_argnames="cache", **answers),
    )


ONE_DEVICE = _jitted()


@functools.cache
def light_programs(platform: str, dtype: str) -> CompiledSteps:
    """Those of one device, sooner compiled where `light_compilation` can be."""
    options = light_compilation(platform, dtype, newer_fusions=True)
    return ONE_DEVICE if options is None else _jitted(options)


@functools.cache
def split_programs(split: "ModelSplit") -> CompiledSteps:
    """The same over several devices; a cache that a program returns lies as the one that it was given."""
    return _jitted(split=split)


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
        check_divides(model, devices, section)
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

    def serve(self, decoder: Decoder) -> ServedWeights:
        """Puts each parameter, part by part, onto its devices; the decoder itself stays where it is."""
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


_RAGGED = "decode, {} ragged rows, window {}"
_DECODE, _FORK, _RESIZE = "decode, window {}", "fork, window {}", "resize, window {} to {}"
_PREFILL = "prefill, {} × {} prompt tokens"
_EXTEND = "prefill, {} more prompt tokens, window {}"
_TRUNCATING, _BESIDE = "{}, truncating", "{}, with alternatives"
_SCORE = "scores, window {}"
_INSERT = "insert, {} × {} prompt tokens, window {}"
"""Names of programs."""


class ModelRunner:
    """Runs prefill and decode for a fixed number of slots.

    Args:
        decoder: The first weights. Shapes in their place make one whose programs can be compiled, and nothing else.
        config: Shapes, and over how many devices.

    Attributes:
        first: Whether the weights are the first version of all; see `EngineConfig.all_rows_at_first`.

    Raises:
        ConfigError: the model cannot be split over that many devices, or there are fewer.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self._config = config
        self._windows, self._steps = config.window_buckets, config.steps_per_dispatch
        devices = jax.local_device_count() if config.model_parallel is None else config.model_parallel
        self._split = ModelSplit.over(decoder.config, devices, config.section) if devices > 1 else None
        self._lazy: LazyPrograms | None = None
        self.first = False
        self._weights = self._unstacked(decoder)
        light = functools.partial(light_programs, self._platform, decoder.config.dtype)
        self._programs = light() if self._split is None else split_programs(self._split)
        create = functools.partial(self._programs.create, decoder.config, config.max_slots, self._windows[0])
        self._cache = jax.eval_shape(create) if are_shapes(decoder) else create()
        self._told = min(MOST_ALTERNATIVES, decoder.config.vocab_size)
        # Not for runs, so compiled for whoever asks first; over several devices when they run.
        self._rare = None if self._split is not None else LazyPrograms(self._rarely_run(), lambda _: None)

    @property
    def window(self) -> int:
        """Positions that fit into the cache at present."""
        return self._cache.window

    def _unstacked(self, decoder: Decoder) -> ServedWeights:
        if are_shapes(decoder):
            return jax.eval_shape(ServedWeights.of, decoder)
        weights = ServedWeights.of(decoder) if self._split is None else self._split.serve(decoder)
        return jax.block_until_ready(weights)

    def prepare(self, arrays: Mapping[str, Array | np.ndarray], held: ServedWeights | None = None) -> ServedWeights:
        """Weights as the programs take them, on their devices; what is served stays as it is. For any thread.

        Args:
            arrays: As `ServedWeights.renewed` takes them.
            held: What they are put into; by default what is served.
        """
        return jax.block_until_ready((held or self._weights).renewed(arrays))

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
        length, run = tokens.shape[1], self._programs.prefill
        prefilled = run(self._weights, tokens, kernel=self._prefill_kernel(length))
        self.insert(prefilled, {slot: (row, length) for slot, row in enumerate(source.tolist()) if row >= 0})

    def insert(self, entries: KVCache, rows: Mapping[int, tuple[int, int]]) -> None:
        """Copies entries of another cache, whose window is not longer, into slots: of which row, and how many."""
        moves = moves_of(rows, self._config.max_slots, entries.window)
        self._cache = self._programs.insert(self._cache, entries, moves)

    @property
    def whole(self) -> int | None:
        """Prompts whose padded length is greater are prefilled by `extend`, chunk by chunk; None: no prompt."""
        return self._config.longest_whole if self._by_rows else None

    def extend(self, tokens: Int32[np.ndarray, " length"], slot: int, start: int) -> None:
        """Adds tokens of a prompt to what its slot holds, from that position on."""
        for size in self._config.pieces(len(tokens)):
            piece, tokens = tokens[:size], tokens[size:]
            self._need(_EXTEND.format(size, self.window))
            padded = np.pad(piece, (0, size - len(piece)))
            self._cache = self._programs.extend(self._weights, self._cache, padded, np.int32(slot), np.int32(start))
            start += size

    @property
    def _platform(self) -> Platform:
        placed = self._weights.ends.embedding.sharding  # None of shapes that are of no device
        return platform_named(next(iter(placed.device_set if placed else jax.devices())).platform)

    def _prefill_kernel(self, length: int) -> AttentionKernel:
        """What computes the attention of a prefill; kernels of a chip do not split over devices, dense does."""
        if self._split is not None and self._platform != "cpu":
            return "dense"
        ends = self._weights.ends
        return attention_kernel("auto", self._platform, length, ends.embedding.dtype.name, ends.config.head_dim)

    @property
    def _by_rows(self) -> bool:
        """Whether there are programs of few rows, and of ragged ones: loops of small products are for CPUs."""
        return self._split is None and self._platform == "cpu"

    def _decode_shapes(self, window: int) -> Iterator[tuple[str, int, DecodeKernel]]:
        """By name: rows and kernel of the programs of decoding over a cache of that window."""
        slots = self._config.max_slots
        yield _DECODE.format(window), slots, "dense"
        for rows in self._config.decode_buckets if self._by_rows else ():
            if rows < slots or len(reaches(window)) > _FEW_REACHES:
                yield _RAGGED.format(rows, window), rows, "ragged"

    def _decode_shape(self, whole: Int32[np.ndarray, "fields slots"]) -> tuple[str, int, DecodeKernel]:
        """That of the program for what is live: a function of that, and of whether the weights are the first."""
        slots, window, rows = self._config.max_slots, self.window, SlotRows.of(whole)
        live = rows.budget > 0
        if self.first and self._config.all_rows_at_first:
            return _DECODE.format(window), slots, "dense"
        count = next(b for b in self._config.decode_buckets if b >= live.sum()) if self._by_rows else slots
        sizes = np.array(reaches(window))
        ends = (rows.positions + np.minimum(rows.budget, self._steps))[live]
        read, held = int(sizes[np.searchsorted(sizes, np.minimum(ends, window))].sum()), window * slots
        if count == slots and (3 * read > 2 * held or len(sizes) <= _FEW_REACHES or not self._by_rows):
            return _DECODE.format(window), slots, "dense"
        return _RAGGED.format(count, window), count, "ragged"

    def fork(self, sources: Mapping[int, tuple[int, int]]) -> None:
        """Copies the beginning of slots.

        Args:
            sources: By slot: the one whose entries it takes, which is itself no key, and how many.
        """
        self._need(_FORK.format(self.window))
        moves = moves_of(sources, self._config.max_slots, self.window)
        self._cache = self._programs.fork(self._cache, moves)

    def wait(self) -> float:
        """Waits until the cache is as the last program leaves it; the moment of this process's monotonic clock."""
        jax.block_until_ready(self._cache)
        return time.monotonic()

    def decode(self, whole: Int32[np.ndarray, "fields slots"], alternatives: bool = False) -> HostSamples:
        """Runs one dispatch and waits for it.

        Args:
            whole: `SlotRows` of every slot.
            alternatives: Whether the most probable tokens are told; by programs of their own, as truncation may be.
        """
        rarely = not self._config.always_truncates and truncates(SlotRows.of(whole))
        form = _BESIDE if alternatives else _TRUNCATING if rarely else "{}"
        shape = best = self._decode_shape(whole)
        # Not where what is computed must not hang on when something was compiled.
        lazy = self._lazy if form == "{}" and not self._config.forgets else None
        if lazy is not None and lazy.compiled_s(best[0]) is None:
            wider = {each[0]: each for each in self._decode_shapes(self.window) if each[1] >= best[1]}
            shape = wider[lazy.at_hand(best[0], sorted(wider, key=lambda name: wider[name][1]))]
        started = time.monotonic()
        sampled = self._decode(whole, *shape, form)
        if lazy is not None and shape != best:
            lazy.note_replaced(best[0], shape[0], time.monotonic() - started)
        return sampled

    def _decode(
        self, whole: Int32[np.ndarray, "fields slots"], name: str, count: int, kernel: DecodeKernel, form: str = "{}"
    ) -> HostSamples:
        if form == "{}":
            self._need(name)
        else:
            self.need_rare(form.format(name))
        slots, idle = whole.shape[1], SlotRows.of(whole).budget == 0
        chosen = np.sort(np.argsort(idle, kind="stable")[:count])  # what is live, then the first idle
        given = whole if count == slots else whole[:, chosen]
        self._cache, emitted = self._programs.decode(self._weights, self._cache, given, **self._how(kernel, form))
        return HostSamples.of(emitted, self._steps, chosen, slots)

    def _how(self, kernel: DecodeKernel, form: str = "{}") -> dict[str, Any]:
        """Static arguments of a program of decoding; all of them: what is left out is another key of JAX's."""
        told, truncated = self._told if form == _BESIDE else 0, self._config.always_truncates or form != "{}"
        return dict(zip(HOW_DECODED, (self._steps, kernel, told, truncated), strict=True))

    def score(
        self, weights: ServedWeights, cache: KVCache, tokens: np.ndarray, start: int, temperature: float
    ) -> tuple[KVCache, tuple[np.ndarray, ...]]:
        """`penstock.inference.decoding.score` of up to `scored_at_once` tokens, waited for; behind it is padding.

        The cache, which is donated, is from `scratch`, then from here.
        """
        self.need_rare(_SCORE.format(cache.window))
        padded = np.pad(tokens, (0, self.scored_at_once + 1 - len(tokens)))
        given = padded, np.int32(start), np.float32(temperature)
        cache, found = self._programs.score(weights, cache, *given, alternatives=self._told)
        return cache, tuple(map(np.asarray, found))

    @property
    def scored_at_once(self) -> int:
        """Tokens of a text that are scored between two dispatches; each costs its scores beside what prefill costs."""
        return min(max(1, self._config.prefill_chunk // 2), self._config.max_seq_len)

    def scratch(self, window: int) -> KVCache:
        """An empty cache of one slot."""
        return self._programs.create(self._weights.ends.config, 1, window)

    def need_decoding(self, windows: Iterable[int], alternatives: bool) -> None:
        """Has compiled what tells alternatives, or else truncates, over caches of these windows. For any thread."""
        form = _BESIDE if alternatives else _TRUNCATING
        shapes = (name for window in dict.fromkeys(windows) for name, _, _ in self._decode_shapes(window))
        self.need_rare(*map(form.format, shapes))

    def need_scores(self, window: int, kept: bool) -> None:
        """Has compiled what scores a text over a cache of that window, and what keeps that cache. For any thread."""
        wider = (each for each in self._windows if kept and each >= window)
        self.need_rare(_SCORE.format(window), *(_INSERT.format(1, window, each) for each in wider))

    def need_rare(self, *names: str) -> None:
        """Returns when these are compiled."""
        if self._rare is not None:
            self._rare.need(*names)

    def _rarely_run(self) -> Programs:
        """What no run needs, by name; lowered for the weights of then."""
        run: Any = self._programs
        config, text = self._config, jax.ShapeDtypeStruct((self.scored_at_once + 1,), np.int32)
        start, temperature = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.float32)

        def decodes(window: int, count: int, kernel: DecodeKernel, form: str) -> object:
            cache, rows = self._cache_shape(config.max_slots, window), SlotRows.array(count, config.max_stop_token_ids)
            return run.decode.lower(self._weights, cache, rows, **self._how(kernel, form)).compile()

        def scores(window: int) -> object:
            cache = self._cache_shape(1, window)
            return run.score.lower(self._weights, cache, text, start, temperature, alternatives=self._told).compile()

        def keeps(text: int, window: int) -> object:
            cache, scored = self._cache_shape(config.max_slots, window), self._cache_shape(1, text)
            return run.insert.lower(cache, scored, moves_of({}, config.max_slots, text)).compile()

        found: dict[str, Callable[[], object]] = {}
        for number, window in enumerate(self._windows):
            found[_SCORE.format(window)] = functools.partial(scores, window)
            for each in self._windows[number:]:
                found[_INSERT.format(1, window, each)] = functools.partial(keeps, window, each)
            for (name, count, kernel), form in product(self._decode_shapes(window), (_TRUNCATING, _BESIDE)):
                found[form.format(name)] = functools.partial(decodes, window, count, kernel, form)
        return found

    def digests(self, weights: ServedWeights) -> dict[str, str]:
        """`ServedWeights.digests`; for any thread."""
        self._need(*weights.lower_digests())
        return weights.digests()

    def begin(
        self, on_done: Callable[[CompiledProgram | BaseException], None], begun: LazyPrograms | None = None
    ) -> LazyPrograms | None:
        """Has every program compiled when it is needed first.

        Those of decoding, as a response grows, from now on, and before that `first_programs`.

        Args:
            on_done: As of `LazyPrograms`, like `begun`.
            begun: Has some of them compiled already, or begun.

        Returns:
            All programs; None over several devices, where they are compiled by `warm_up` alone.
        """
        if self._split is not None:
            return None
        self._lazy = LazyPrograms(self._lowered(), on_done, begun)
        self._lazy.compile(self._first, urgent=True)
        for window, wider in pairwise(self._windows):
            self._lazy.compile([_RESIZE.format(window, wider), _DECODE.format(wider)])
        return self._lazy

    def first_programs(self) -> Programs:
        """What most short prompts at once need; none over several devices."""
        if self._split is not None:
            return {}
        run: Any = self._programs
        programs, made = self._lowered(), (self._weights.ends.config, self._config.max_slots, self._windows[0])
        cache = {f"cache, window {made[-1]}": lambda: run.create.lower(*made).compile()}  # which an engine begins with
        return cache | {name: programs[name] for name in self._first}

    @property
    def _first(self) -> list[str]:
        smallest = self._windows[0]
        first = [_DECODE.format(smallest)]
        for shape in sorted(self._prefill_shapes(smallest), key=lambda shape: (shape[1], -shape[0]))[:1]:
            first += [_PREFILL.format(*shape), _INSERT.format(*shape, smallest)]
        return first + list(self._weights.lower_digests())

    def _need(self, *names: str) -> None:
        if self._lazy is not None:
            self._lazy.need(*names)

    def warm_up(self, idle_rows: Int32[np.ndarray, "fields slots"]) -> Iterator[CompiledProgram]:
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
            yield from compile_programs(self._lowered())
        runs = list(self._first_runs(idle_rows))
        for number, (name, run) in enumerate(runs, 1):
            started = time.perf_counter()
            run()
            if self._split is not None:
                yield CompiledProgram(name, number, len(runs), time.perf_counter() - started)
        self.resize(self._windows[0])
        jax.block_until_ready(self._cache)

    def _lowered(self) -> Programs:
        """Every program in every shape, by what it is for."""
        run: Any = self._programs  # what is jitted can be lowered
        weights, config = jax.eval_shape(lambda: self._weights), self._config  # shapes: what waits keeps none alive
        found: dict[str, Any] = {}
        caches = {window: self._cache_shape(config.max_slots, window) for window in self._windows}
        for window, cache in caches.items():
            for name, count, kernel in self._decode_shapes(window):
                rows = SlotRows.array(count, config.max_stop_token_ids)
                found[name] = functools.partial(run.decode.lower, weights, cache, rows, **self._how(kernel))
            for count, length in self._prefill_shapes(window):
                tokens, prefilled = np.zeros((count, length), np.int32), self._cache_shape(count, length)
                lower = functools.partial(run.prefill.lower, weights, tokens, kernel=self._prefill_kernel(length))
                found.setdefault(_PREFILL.format(count, length), lower)
                found[_INSERT.format(count, length, window)] = functools.partial(
                    run.insert.lower, cache, prefilled, moves_of({}, config.max_slots, length)
                )
            for size in self._extensions(window):
                tokens, zero = np.zeros(size, np.int32), np.int32(0)
                lower = functools.partial(run.extend.lower, weights, cache, tokens, zero, zero)
                found[_EXTEND.format(size, window)] = lower
            found[_FORK.format(window)] = functools.partial(
                run.fork.lower, cache, moves_of({}, config.max_slots, window)
            )
        for window, other in [*pairwise(self._windows), *pairwise(reversed(self._windows))]:
            found[_RESIZE.format(window, other)] = functools.partial(
                run.resize.lower, caches[window].keys[0], window=other
            )
        found |= weights.lower_digests()
        return {name: lambda lower=lower: lower().compile() for name, lower in found.items()}

    def _cache_shape(self, slots: int, window: int) -> Any:
        return jax.eval_shape(lambda: create_cache(self._weights.ends.config, slots, window))

    def _first_runs(self, idle_rows: Int32[np.ndarray, "fields slots"]) -> Iterator[tuple[str, Callable[[], object]]]:
        """By name: runs each program once, window by window."""
        nowhere = np.full(self._config.max_slots, -1, np.int32)

        def begin(window: int) -> None:
            self.resize(window)
            for shape in self._decode_shapes(window):
                self._decode(idle_rows, *shape)
            self.fork({})

        for window in self._windows:
            yield _DECODE.format(window), functools.partial(begin, window)
            for shape in self._prefill_shapes(window):
                prefill = functools.partial(self.prefill, np.zeros(shape, np.int32), nowhere)
                yield f"{_PREFILL.format(*shape)}, window {window}", prefill
            for size in self._extensions(window):
                extend = functools.partial(self.extend, np.zeros(size, np.int32), len(nowhere), 0)
                yield _EXTEND.format(size, window), extend
        yield "digests", self._weights.digests

    def _prefill_shapes(self, window: int) -> Iterator[tuple[int, int]]:
        for length in self._config.prefill_buckets:
            if length <= min(window, self.whole or window):
                yield from ((rows, length) for rows in self._config.prefill_row_counts(length))

    def _extensions(self, window: int) -> Iterator[int]:
        """Padded lengths of what is added to cached texts of that window: those that whole prefill could be longer."""
        longest = self._config.padded_length(min(window, self._config.max_seq_len - 1))
        return (size for size in self._config.chunk_buckets if size < longest)

"""The programs of a run, compiled for a chip from shapes alone, and what its compiler allots each of them.

The learner's are its own (`Learner.lowered_update`), made of a decoder of shapes; the engine's are those of
`ModelRunner` at the largest shapes that they can have: the longest window, and of all prefills the one with the most
padded tokens and the one of the longest prompt. No array is made, however large the model.

Bytes are XLA's buffer assignment for that chip, the very one that a run there would use; nothing is executed. TPU
compilers refuse a program that does not fit their chip, and say by how much; they are asked for little optimisation,
which takes a sixth of the time (48 s for 288) and some 5% more memory. What they refuse by is the peak that they report
(`peak_memory_in_bytes`), so that this is what is counted there; their sum of temporaries is larger by up to a half, and
they accept programs by which it does not fit. GPU compilers cannot try out algorithms
without a GPU and take default ones, whose scratch memory may differ a little.
"""

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from penstock.inference.config import EngineConfig
from penstock.inference.decoding import ServedWeights, create_cache, moves_of
from penstock.inference.model_runner import ONE_DEVICE
from penstock.inference.scheduler import SlotTable
from penstock.learner import Learner, LearnerConfig
from penstock.model.language import Decoder, ModelConfig
from penstock.model.language.attention_choice import Platform, attention_kernel, platform_named
from penstock.model.language.decoder import layer_of
from penstock.overseer.config import RunConfig
from penstock.overseer.estimate import base_bytes
from penstock.overseer.fitting.chips import Chip
from penstock.overseer.fitting.chips import Platform as ChipPlatform

Side = Literal["learner", "engine"]
Lowering = functools.partial[Any]
"""A compiled function's `lower`, with arrays or shapes as its arguments."""


@dataclass(frozen=True)
class Temporary:
    """An array that a program makes on its way.

    Attributes:
        shape: As XLA writes it, such as ``f32[14,4096,4096]``.
        made_by: The operation in the program's source.
        size_bytes: Of one.
        count: How many of that shape the program makes there; not all need live at the same time.
    """

    shape: str
    made_by: str
    size_bytes: int
    count: int


@dataclass(frozen=True)
class CompiledPart:
    """One program of a run, compiled.

    Attributes:
        name: What it is for.
        side: Whose.
        arguments_bytes: What it is given.
        temporaries_bytes: What it takes while it runs. Of a program that was refused, what the compiler says it needs.
        results_bytes: What it returns beyond arguments that it may overwrite.
        refused: The compiler's words where the chip is too small for it; None: compiled.
        largest: Its largest temporaries, the largest first.
        host_bytes: What it takes of the host's memory meanwhile, beside its arguments there.
    """

    name: str
    side: Side
    arguments_bytes: int
    temporaries_bytes: int
    results_bytes: int
    refused: str | None = None
    largest: tuple[Temporary, ...] = ()
    host_bytes: int = 0

    @property
    def extra_bytes(self) -> int:
        """What it takes beside its arguments."""
        return self.temporaries_bytes + self.results_bytes


class RunShapes:
    """What a run's arrays are, and what lowers its programs; the shapes of `ModelConfig` alone decide.

    Args:
        config: Of the run, whose weights and tokenizer are not looked at.
        model: Shape and dtype of its policy.
        place: Where its arrays would lie; None: on this machine's CPU. What computes attention follows from that.

    Raises:
        ConfigError: the configured attention cannot act there.
    """

    def __init__(self, config: RunConfig, model: ModelConfig, place: SingleDeviceSharding | None = None) -> None:
        self.model, self.engine = model, config.inference
        place = place or SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        (device,) = place.device_set
        self._platform: Platform = platform_named(device.platform)
        self.decoder: Decoder = jax.tree.map(lambda leaf: _placed(leaf, place), Decoder.of_shapes(model))
        self._learner = Learner(self.decoder, _without_directories(config.learner), total_steps=1)

    @functools.cached_property
    def learner_programs(self) -> dict[str, Lowering]:
        """Those of an update."""
        return self._learner.lowered_update()

    @functools.cached_property
    def optimizer_bytes(self) -> int:
        """Moments, and the float32 master, on the chip or in the host's memory."""
        _, state, *_ = self.learner_programs["optimiser step"].args
        return tree_bytes(state)

    @property
    def shared_bytes(self) -> int:
        """Of the parameters that an engine on this chip reads where the learner has them: its ends, or a whole base."""
        if self.model.lora is not None:
            return base_bytes(self.model)
        return tree_bytes(self.decoder) - tree_bytes(self.decoder.layers)

    @functools.cached_property
    def gradient_bytes(self) -> int:
        """Accumulated in float32, over an update's micro-batches."""
        gradient = next(each for name, each in self.learner_programs.items() if name.startswith("gradient"))
        _, so_far, _ = gradient.args
        return tree_bytes(so_far)

    @functools.cached_property
    def weights(self) -> ServedWeights:
        """What the engine serves."""
        return jax.eval_shape(ServedWeights.of, self.decoder)

    def cache(self, slots: int, window: int) -> Any:
        """The engine's."""
        return jax.eval_shape(lambda: create_cache(self.model, slots, window))

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """Rows and padded length: of the longest prompt that is prefilled whole, and of most tokens."""
        engine = self.engine
        longest = engine.longest_whole if self._platform == "cpu" else engine.max_seq_len
        lengths = [length for length in engine.prefill_buckets if length <= longest]
        shapes = [(rows, length) for length in lengths for rows in engine.prefill_row_counts(length)]
        if not shapes:
            return []
        return list(dict.fromkeys([max(shapes, key=lambda s: (s[1], s[0])), max(shapes, key=lambda s: s[0] * s[1])]))

    @functools.cached_property
    def engine_programs(self) -> dict[str, Lowering]:
        """Decoding and prefill at their largest; what moves the cache about, or takes a layer from new weights."""
        run: Any = ONE_DEVICE
        slots, window = self.engine.max_slots, self.engine.max_seq_len
        cache = self.cache(slots, window)
        rows = SlotTable(slots, self.engine.max_stop_token_ids).whole
        steps = self.engine.steps_per_dispatch
        found = {
            "decode": functools.partial(run.decode.lower, self.weights, cache, rows, steps=steps),
            "fork": functools.partial(run.fork.lower, cache, moves_of({}, slots, window)),
        }
        if not isinstance(self.decoder.layers, tuple):  # beside an adapter the base stays as it lies
            found["swap, a layer"] = functools.partial(layer_of.lower, self.decoder.layers, np.int32(0))
        chunk, zero = min(self.engine.prefill_chunk, window), np.int32(0)
        found[f"prefill, {chunk:,} more prompt tokens"] = functools.partial(
            run.extend.lower, self.weights, cache, np.zeros(chunk, np.int32), zero, zero
        )
        for count, length in self.prefills:
            tokens, prompts = np.zeros((count, length), np.int32), f"{count} × {length:,} prompt tokens"
            kernel = attention_kernel("auto", self._platform, length, self.model.dtype, self.model.head_dim)
            prefill = functools.partial(run.prefill.lower, self.weights, tokens, kernel=kernel)
            found[f"prefill, {prompts}"] = prefill
            prefilled, nowhere = self.cache(count, length), moves_of({}, slots, length)
            found[f"insert, {prompts}"] = functools.partial(run.insert.lower, cache, prefilled, nowhere)
        return found


def _placed(leaf: Any, place: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    """There, or in the host's memory beside it where it lies so (of a GPU that is not here, JAX forgets which)."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    where = place.with_memory_kind(kind) if kind == "pinned_host" else place
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _without_directories(learner: LearnerConfig) -> LearnerConfig:
    """Another's weights have the policy's shape: what they are read from does not matter here."""
    if learner.kl.directory is None:
        return learner
    return learner.model_copy(update={"kl": learner.kl.model_copy(update={"reference": "initial"})})


def tree_bytes(tree: Any) -> int:
    """Of all arrays or shapes in it, wherever they are."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class ChipCompiler:
    """Compiles for one chip; what is asked for twice is compiled once.

    Args:
        chip: For which of `chips.CHIPS`, or this machine.

    Raises:
        ConfigError: its compiler is not installed.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.place = chip.place()
        (device,) = self.place.device_set
        meant = AbstractDevice(device.device_kind, None, device.platform)
        self._mesh = AbstractMesh((), (), abstract_device=meant)  # by it kernels learn what they are compiled for
        self._done: dict[str, CompiledPart] = {}

    def compile(self, name: str, side: Side, lowering: Lowering) -> CompiledPart:
        """The program, for this chip.

        Raises:
            Exception: the compiler's own, of anything but a chip that is too small.
        """
        arguments, keywords = jax.tree.map(self._on_chip, (lowering.args, lowering.keywords))
        with use_abstract_mesh(self._mesh):
            lowered = lowering.func(*arguments, **keywords)
        key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if key not in self._done:
            effort = {"exec_time_optimization_effort": -1.0} if self.chip.platform == "tpu" else None
            given_bytes = tree_bytes(_arrays_of((arguments, keywords)))
            self._done[key] = _compiled(lowered, effort, given_bytes, self.chip.platform)
        return replace(self._done[key], name=name, side=side)

    def _on_chip(self, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        return _placed(leaf, self.place)


def _arrays_of(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def _compiled(
    lowered: Any, options: dict[str, Any] | None, arguments_bytes: int, platform: ChipPlatform
) -> CompiledPart:
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed_bytes(str(error))
        if needed is None:
            raise
        temporaries = max(needed - arguments_bytes, 0)
        return CompiledPart("", "learner", arguments_bytes, temporaries, 0, refused=_first_line(str(error)))
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledPart(
        "",
        "learner",
        memory.argument_size_in_bytes,
        temporaries_of(memory, platform),
        results,
        largest=tuple(largest_temporaries(compiled.as_text())),
        host_bytes=memory.host_temp_size_in_bytes,
    )


def temporaries_of(memory: Any, platform: ChipPlatform) -> int:
    """Bytes that a program takes beside arguments and results, from its `memory_analysis()`.

    A CPU's and a GPU's are one array of XLA's, whatever lives in it at which moment. A TPU's compiler allots within the
    peak that it reports.
    """
    if platform != "tpu":
        return memory.temp_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    at_peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results
    return min(memory.temp_size_in_bytes, max(at_peak, 0))


_USED = re.compile(r"[Uu]sed ([\d.]+)([KMG]) of ([\d.]+)([KMG])")
_TEMPORARIES = re.compile(r"temporaries \(([\d.]+)([KMG])\) exceeds")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def _needed_bytes(message: str) -> int | None:
    """What a program needs in all, from a compiler's refusal; None where it is about something else."""
    found = _USED.search(message) or _TEMPORARIES.search(message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        return None
    return round(float(found[1]) * _UNITS[found[2]])


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:200]


_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b(" + "|".join(_WIDTHS) + r")\[([\d,]+)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(")
_INSIDE = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_NO_NEW_ARRAY = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "copy-done",
    "optimization-barrier", "iota",
}  # fmt: skip
"""Operations whose result is another's array."""


def largest_temporaries(hlo: str, count: int = 5) -> Iterator[Temporary]:
    """The largest arrays that a program's instructions make, by its optimised HLO; what is fused away is none.

    Args:
        hlo: Text of the compiled program.
        count: At most so many, the first ones.
    """
    found: dict[tuple[str, str], int] = defaultdict(int)
    inside = set(_INSIDE.findall(hlo))
    skipped = False
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            skipped = header[2] in inside
        made = None if skipped else _INSTRUCTION.match(line)
        if made is None or made[2] in _NO_NEW_ARRAY:
            continue
        for kind, dimensions in _ARRAY.findall(made[1]):
            found[f"{kind}[{dimensions}]", _made_by(line, made[2])] += 1
    sized = [Temporary(shape, by, array_bytes(shape), number) for (shape, by), number in found.items()]
    yield from sorted(sized, key=lambda each: -each.size_bytes)[:count]


def array_bytes(shape: str) -> int:
    """``f32[2,3]`` -> 24."""
    kind, dimensions = shape[:-1].split("[")
    return _WIDTHS[kind] * int(np.prod([int(size) for size in dimensions.split(",")]))


def _made_by(line: str, operation: str) -> str:
    """The innermost names of the source's operation, and whether it is of the backward pass."""
    source = _SOURCE.search(line)
    if source is None:
        return operation
    parts = [part for part in source[1].split("/") if part not in ("closed_call", "while", "body", "checkpoint")]
    backward = " (backward)" if any(part.startswith("transpose(") for part in parts) else ""
    return "/".join(parts[-2:]) + backward


def compile_run(shapes: RunShapes, compiler: ChipCompiler, generates: bool = True) -> list[CompiledPart]:
    """Every program of a run, of its engine too where it `generates` with Penstock's."""
    sides: Mapping[Side, Mapping[str, Lowering]] = {
        "learner": shapes.learner_programs, "engine": shapes.engine_programs if generates else {},
    }  # fmt: skip
    return [compiler.compile(name, side, lowering) for side, found in sides.items() for name, lowering in found.items()]


def growth_bytes(shapes: RunShapes, engine: EngineConfig) -> int:
    """The cache of the window before the longest, which lives beside that while the cache grows."""
    windows = engine.window_buckets
    return tree_bytes(shapes.cache(engine.max_slots, windows[-2])) if len(windows) > 1 else 0

"""Does a run fit a chip, how fast can a step be there, and what takes the memory: the answer, as numbers and as text.

*Memory* is counted for one process that has learner and engine, at the moment that takes most: what stays (parameters
of both sides, those once that both read, reference, optimiser state, cache at its longest), and the most that the
learner and the engine take beside it in any of their programs. A run that is asynchronous does both at the same time,
one at staleness zero in turn. Bytes of arrays are those of their shapes, bytes of programs the compiler's. Of a vLLM
server on the same card they follow from the shapes alone (`vllm_parts`); what it gives back while it sleeps, it does
not take while the learner computes. On this machine Python, JAX and compiled programs lie in the same memory.

*Time* is a roofline (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785): no phase of a step is faster than
its products at the chip's rate, nor than its least traffic at the memory's; a step is its phases one after the other.
Products and traffic are counted by formula for answers as long as they may be, after prompts that fill the engine's
`max_seq_len` with them: compilers count the body of a loop once, and those for GPUs count nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil, floor
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.learner.config import LearnerConfig
from penstock.model.language.attention_choice import AttentionKernel, attends_again, attention_kernel, platform_named
from penstock.model.language.config import ModelConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.estimate import (
    PROCESS_BYTES,
    base_bytes,
    bytes_text,
    kv_cache_bytes,
    moving_bytes,
    moving_count,
    optimizer_state_bytes,
    reference_bytes,
)
from penstock.overseer.fitting.chips import CUDA_FRACTION, Chip
from penstock.overseer.fitting.compiling import CompiledPart, RunShapes, growth_bytes, tree_bytes

NOT_MEASURED = "compiled, not run: not yet measured"

BATCHED_TOKENS = 8192
"""`--max-num-batched-tokens` of a vLLM server on a large card, where nothing is said."""
VLLM_OTHER_BYTES = 2 * 2**30
"""Of its process on the card: CUDA's context, graphs, libraries. Assumed."""
UTILIZATION = "--gpu-memory-utilization"


@dataclass(frozen=True)
class Phase:
    """A part of a step, at best.

    Attributes:
        name: What is done.
        flops: Of products.
        moved_bytes: Least traffic with the chip's memory.
        seconds: The longer of the two at the chip's rates.
        bound: Which that is: ``products`` or ``memory``.
    """

    name: str
    flops: float
    moved_bytes: float
    seconds: float
    bound: str

    @classmethod
    def of(cls, name: str, flops: float, moved_bytes: float, chip: Chip, dtype: str) -> "Phase":
        """At a chip's rates."""
        by_products, by_memory = flops / chip.flops_per_s[dtype], moved_bytes / chip.bytes_per_s
        bound = "products" if by_products > by_memory else "memory"
        return cls(name, flops, moved_bytes, max(by_products, by_memory), bound)


@dataclass(frozen=True)
class StepWork:
    """What one update is about, at its longest.

    Attributes:
        sequences: Trained by it.
        prompts: Of which that many are answers to.
        prompt_tokens: Longest prompt that leaves room for the longest answer.
        answer_tokens: Longest answer.
    """

    sequences: int
    prompts: int
    prompt_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, config: RunConfig) -> "StepWork":
        """Of the lesson with the longest answers."""
        lessons = [lesson.sampling_params for lesson in config.curriculum.lessons.values()]
        longest = max(lessons, key=lambda lesson: (lesson.max_output_tokens, lesson.n_generations_per_prompt))
        groups, answer = config.replay.groups_per_batch, longest.max_output_tokens
        prompt = config.inference.max_seq_len - answer
        return cls(groups * longest.n_generations_per_prompt, groups, prompt, answer)

    @property
    def sequence_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.answer_tokens


def phases_of(config: RunConfig, model: ModelConfig, trained: int, chip: Chip) -> list[Phase]:
    """Prefill, decoding, gradient, optimiser and hand-over of one update.

    Args:
        config: Of the run, whose longest answers count.
        model: Shape of its policy, and its dtype.
        trained: Number of parameters that train.
        chip: Whose rates of products (FLOP/s) and memory (bytes/s) are taken.
    """
    work, learner, width = StepWork.of(config), config.learner, 2 if model.dtype == "bfloat16" else 4
    parameters, matrices = parameters_read(model) * width, layer_matrices(model)
    length, tokens = work.prompt_tokens, work.prompts * work.prompt_tokens
    prefills = ceil(work.prompts / config.inference.prefill_row_counts(max(length - 1, 1))[-1])
    entry, platform = kv_cache_bytes(model, 1, 1), platform_named(chip.platform)
    dense = attention_kernel("auto", platform, length, model.dtype, model.head_dim) == "dense"
    attention = attention_flops(model, length, length) if dense else causal_flops(model, length)
    made: list[tuple[str, float, float]] = [
        ("prefill", 2 * matrices * tokens + work.prompts * attention, prefills * parameters + tokens * entry),
    ]
    answered, steps = work.sequences * work.answer_tokens, ceil(work.sequences / config.inference.max_slots)
    steps *= work.answer_tokens
    seen = work.prompt_tokens + work.answer_tokens / 2
    head = model.vocab_size * model.hidden_size
    per_token = 2 * (matrices + head) + 4 * model.query_size * model.num_hidden_layers * seen
    made.append(("decode", answered * per_token, steps * parameters + answered * seen * entry))
    kernel = attention_kernel(learner.attention, platform, learner.row_length, model.dtype, model.head_dim)
    made.append(_gradient(model, learner, work, trained, width, kernel))
    own = moving_bytes(model) // moving_count(model)
    state = optimizer_state_bytes(model, learner) + trained * (4 if own == 2 else 0)
    applied = learner.optimizer_steps * (2 * state + trained * (4 + 2 * own))
    made.append(("optimiser", 12.0 * trained * learner.optimizer_steps, applied))
    made.append(("hand-over", 0.0, 2 * moving_bytes(model)))
    return [Phase.of(name, flops, moved, chip, model.dtype) for name, flops, moved in made]


def layer_matrices(model: ModelConfig) -> int:
    """Parameters that every token is multiplied with, but for the output matrix."""
    per_layer = 2 * model.hidden_size * (model.query_size + model.key_value_size)
    return model.num_hidden_layers * (per_layer + 3 * model.hidden_size * model.intermediate_size)


def parameters_read(model: ModelConfig) -> int:
    """Parameters that a forward pass reads: of an embedding that is no output matrix next to none."""
    return model.parameter_count - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)


def attention_flops(model: ModelConfig, queries: int, keys: float) -> float:
    """Of all layers' scores and weighted sums."""
    return 4.0 * model.num_hidden_layers * model.query_size * queries * keys


def causal_flops(model: ModelConfig, length: int) -> float:
    """Of all layers where the queries of a sequence meet no other keys than they see: half, or fewer by a window."""
    windows = [length if window is None else min(window, length) for window in model.windows]
    return 4.0 * model.query_size * sum(window * (length - window / 2) for window in windows)


def _gradient(
    model: ModelConfig, learner: LearnerConfig, work: StepWork, trained: int, width: int, kernel: AttentionKernel
) -> tuple[str, float, float]:
    """Forward and backward over all micro-batches of an update; the passes of a KL, a ratio, and values with them."""
    length, rows = learner.row_length, learner.micro_batch_rows
    per_row = max(length // work.sequence_tokens, 1)
    micro_batches = ceil(ceil(work.sequences / per_row) / rows) * learner.epochs
    tokens = micro_batches * rows * length
    attention = work.sequences * learner.epochs * causal_flops(model, work.sequence_tokens)
    if kernel == "dense":  # every query by every key of its row
        attention = micro_batches * rows * attention_flops(model, length, length)
    products = 2.0 * layer_matrices(model) * tokens
    head = 2.0 * model.vocab_size * model.hidden_size * work.sequences * work.answer_tokens * learner.epochs
    still = model.lora is not None  # a base has no gradient, but hands on that of what it was given
    passes = (4 if learner.remat in ("layer", "offload") else 3) - int(still)
    scored, valued = learner.recomputes_proximal + (learner.kl.reference is not None), int(learner.has_critic)
    flops = passes * products + (3 + attends_again(learner.remat, kernel)) * attention + (3 - int(still)) * head
    flops += ((scored + valued) * (products + attention) + scored * head) / learner.epochs
    read = (passes - 1 + scored + valued) * parameters_read(model) * width
    return "gradient", flops, micro_batches * (read + 2 * 4 * trained)


@dataclass(frozen=True)
class FitReport:
    """Whether a run fits.

    Attributes:
        model: Its policy, in words.
        chip: The chip's label.
        capacity_bytes: What it gives.
        parts: Bytes by purpose, at the moment that takes most.
        programs: As they were compiled.
        slots: Of the engine, and tokens of each.
        slot_bytes: Of one slot's cache.
        phases: Of a step.
        host_bytes: What lies in the host's memory beside: of an offloaded optimiser, and of offloaded activations.
        sharing: How a vLLM server and the learner divide the card, in words; empty without one.
        remedy: The smallest change that makes it fit, as ``key=value`` words, and the bytes that it takes then; None:
            it fits, none was looked for, or (empty) none was found.
    """

    model: str
    chip: str
    capacity_bytes: int
    parts: Mapping[str, int]
    programs: tuple[CompiledPart, ...]
    slots: tuple[int, int]
    slot_bytes: int
    phases: tuple[Phase, ...]
    host_bytes: int = 0
    sharing: str = ""
    remedy: "Remedy | None" = None

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether there is room for all, and no program was refused."""
        return self.total_bytes <= self.capacity_bytes and not any(part.refused for part in self.programs)

    @property
    def room_slots(self) -> int:
        """How many more slots there would be room for; fewer than none where it does not fit."""
        return (self.capacity_bytes - self.total_bytes) // self.slot_bytes

    def program(self, name: str) -> CompiledPart:
        """By its name's beginning."""
        return next(part for part in self.programs if part.name.startswith(name))

    @property
    def exit_code(self) -> int:
        """1 where it does not fit."""
        return 0 if self.fits else 1

    @property
    def step_s(self) -> float:
        """Of a step, at best."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def slowest(self) -> Phase:
        """What most of a step is."""
        return max(self.phases, key=lambda phase: phase.seconds)

    def cells(self) -> tuple[str, ...]:
        """Its line in a table."""
        sizes = self.total_bytes, self.program("gradient").temporaries_bytes, self.slots[0] * self.slot_bytes
        room = f"{self.room_slots:,}" if self.fits else ""
        bound = f"{self.slowest.name}, {self.slowest.bound}"
        return "yes" if self.fits else "no", *map(bytes_text, sizes), room, f"{self.step_s:.3g} s", bound

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "room_slots": self.room_slots,
            "step_s": self.step_s,
            "note": NOT_MEASURED,
        }

    def print(self, console: Console) -> None:
        """For people."""
        console.print(f"{self.model}; {self.chip}: {NOT_MEASURED}\n", highlight=False)
        console.print(self._memory_table())
        console.print(f"\n{self._verdict()}\n", highlight=False)
        if self.sharing:
            console.print(f"{self.sharing}\n", highlight=False, soft_wrap=True)
        if self.host_bytes:
            console.print(f"In the host's memory beside it: {bytes_text(self.host_bytes)}\n", highlight=False)
        console.print(self._programs_table())
        self._print_temporaries(console)
        slots, tokens = self.slots
        cache = f"KV cache: {slots} slots of {tokens:,} tokens, {bytes_text(slots * self.slot_bytes)}"
        room = f"; room for {self.room_slots:,} more" if self.fits else ""
        console.print(f"\n{cache}{room}\n", highlight=False)
        console.print(self._phases_table())
        share = f"{self.slowest.seconds / self.step_s:.0%} of it {self.slowest.name}, bound by {self.slowest.bound}"
        console.print(f"\nA step takes {self.step_s:.3g} s at best, {share}", highlight=False)
        if self.remedy is not None:
            console.print(f"\n{self.remedy}", highlight=False, markup=False)

    def _memory_table(self) -> Table:
        table = Table("memory", "bytes", box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for name, count in {**self.parts, "total": self.total_bytes}.items():
            table.add_row(name, bytes_text(count))
        return table

    def _verdict(self) -> str:
        refused = [part.name for part in self.programs if part.refused]
        words = f"{bytes_text(self.total_bytes)} of {bytes_text(self.capacity_bytes)}: "
        if refused:
            return f"{words}does not fit; its compiler refused {', '.join(refused)}"
        return words + ("fits" if self.fits else "does not fit")

    def _programs_table(self) -> Table:
        table = Table("program", "side", "arguments", "temporaries", "results", box=None, pad_edge=False)
        for column in table.columns[2:]:
            column.justify = "right"
        for part in sorted(self.programs, key=lambda part: -part.extra_bytes):
            sizes = (part.arguments_bytes, part.temporaries_bytes, part.results_bytes)
            table.add_row(part.name, part.side, *map(bytes_text, sizes))
        return table

    def _print_temporaries(self, console: Console) -> None:
        largest = max(self.programs, key=lambda part: part.temporaries_bytes)
        if not largest.largest:
            return
        table = Table(f"temporaries of {largest.name}", "shape", "bytes", "made", box=None, pad_edge=False)
        for each in largest.largest:
            table.add_row(each.made_by, each.shape, bytes_text(each.size_bytes), f"{each.count} ×")
        console.print()
        console.print(table)

    def _phases_table(self) -> Table:
        table = Table("a step, at best", "FLOPs", "bytes moved", "seconds", "bound by", box=None, pad_edge=False)
        for column in table.columns[1:4]:
            column.justify = "right"
        for phase in self.phases:
            row = f"{phase.flops:.3g}", bytes_text(round(phase.moved_bytes)), f"{phase.seconds:.3g}"
            table.add_row(phase.name, *row, phase.bound)
        return table


@dataclass(frozen=True)
class Remedy:
    """The smallest change that makes a run fit.

    Attributes:
        changes: As ``key=value`` words; empty: nothing that was tried is enough.
        total_bytes: What it takes then.
    """

    changes: tuple[str, ...]
    total_bytes: int

    def __str__(self) -> str:
        if not self.changes:
            return (
                "No change of rows, remat, offloading, slots or adapter was found that makes it fit, with rows as long "
                "as they are or shorter: take a larger chip, or a smaller model."
            )
        return f"It fits with {' '.join(self.changes)}: {bytes_text(self.total_bytes)}"


def make_report(config: RunConfig, shapes: RunShapes, programs: list[CompiledPart], chip: Chip) -> FitReport:
    """Counts what was compiled.

    Args:
        config: Of the run, local or not: learner and engine are counted in one process, on one chip.
        shapes: Its arrays, as shapes.
        programs: All of `compile_run`.
        chip: What they were compiled for.
    """
    model, engine = shapes.model, config.inference
    return FitReport(
        model=f"{model.model_type}, {model.parameter_count:,} parameters, {model.dtype}",
        chip=chip.label,
        capacity_bytes=chip.memory_bytes,
        parts=memory_parts(config, shapes, programs)
        | ({"the process itself": PROCESS_BYTES} if chip.platform == "cpu" else {}),
        programs=tuple(programs),
        slots=(engine.max_slots, engine.max_seq_len),
        slot_bytes=kv_cache_bytes(model, 1, engine.max_seq_len),
        phases=tuple(phases_of(config, model, shapes.gradient_bytes // 4, chip)),
        host_bytes=host_bytes(config.learner, shapes, programs),
        sharing="" if engine.external is None else sharing_words(config, model, chip),
    )


def memory_parts(config: RunConfig, shapes: RunShapes, programs: list[CompiledPart]) -> dict[str, int]:
    """Bytes by purpose at the moment that takes most: what stays, and what learner and engine take beside it."""
    engine, offloads = config.inference, config.learner.optimizer.offload
    staying = {
        "parameters of the learner": tree_bytes(shapes.decoder),
        "parameters of the reference": reference_bytes(shapes.model, config.learner),
        "optimiser state": 0 if offloads else shapes.optimizer_bytes,
    }
    if engine.external is None:
        staying |= {
            "parameters of the engine": tree_bytes(shapes.weights) - shapes.shared_bytes,
            "KV cache": tree_bytes(shapes.cache(engine.max_slots, engine.max_seq_len)),
        }
        served, in_turn = _engine_moments(config, shapes, programs), config.replay.synchronous
    else:
        staying |= {"vLLM: CUDA, its graphs (assumed)": VLLM_OTHER_BYTES}
        served, in_turn = [vllm_parts(config, shapes.model)], engine.external.colocate
    learner = _learner_moments(config, shapes, programs)
    sides = [[*learner, *served]] if in_turn else [learner, served]
    for moments in sides:
        staying |= max(moments, key=lambda moment: sum(moment.values()))
    return {name: count for name, count in staying.items() if count}


def host_bytes(learner: LearnerConfig, shapes: RunShapes, programs: list[CompiledPart]) -> int:
    """What the learner keeps in the host's memory beside the chip."""
    kept = max((part.host_bytes for part in programs if part.name.startswith("gradient")), default=0)
    return kept + (shapes.optimizer_bytes if learner.optimizer.offload else 0)


def vllm_parts(config: RunConfig, model: ModelConfig) -> dict[str, int]:
    """What a vLLM server of a run takes of a card by purpose, in bytes, beside `VLLM_OTHER_BYTES`.

    With a cache for all slots at their longest; parameters as they get there: whole and with an output matrix of their
    own, or the base and as many adapters as are kept; and what the forward pass of its largest batch makes.
    """
    engine, width = config.inference, 2 if model.dtype == "bfloat16" else 4
    assert engine.external is not None  # or there is none
    parameters = base_bytes(model) + config.adapters_kept * moving_bytes(model)
    if engine.external.weights != "lora":
        head = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
        parameters = (model.parameter_count + head) * width
    tokens = min(BATCHED_TOKENS, engine.max_slots * engine.max_seq_len)
    per_token = 3 * model.intermediate_size + 4 * model.hidden_size + model.query_size + 2 * model.key_value_size
    scores = 3 * 4 * engine.max_slots * model.vocab_size
    return {
        "vLLM: parameters": parameters,
        "vLLM: KV cache": kv_cache_bytes(model, engine.max_slots, engine.max_seq_len),
        "vLLM: activations": tokens * per_token * width + scores,
    }


def sharing_words(config: RunConfig, model: ModelConfig, chip: Chip) -> str:
    """How learner and server are to be started so that each has its part of the card."""
    external = config.inference.external
    assert external is not None  # or there is nobody to share with
    needed = sum(vllm_parts(config, model).values()) + VLLM_OTHER_BYTES
    words = f"A vLLM server on the same card needs {bytes_text(needed)} for all slots at their longest"
    if chip.platform != "cuda":
        return f"{words}."
    share = ceil(100 * CUDA_FRACTION * needed / chip.memory_bytes) / 100
    rest = floor(100 * (CUDA_FRACTION - share)) / 100
    start = f"XLA_PYTHON_CLIENT_MEM_FRACTION={max(rest, 0.0):.2f}"
    if external.colocate:
        start = "XLA_PYTHON_CLIENT_ALLOCATOR=platform, so that each gives back what the other takes"
    parts = [part for word in external.launch for part in word.split("=", 1)]
    given = next((word for name, word in pairwise(parts) if name == UTILIZATION), None)
    told = f"; external.launch gives it {given}" if given is not None else ""
    return f"{words}: {UTILIZATION} {share:.2f}{told}. Start Penstock with {start}."


Moment = dict[str, int]
"""Bytes by purpose, beside what stays."""


def _learner_moments(config: RunConfig, shapes: RunShapes, programs: list[CompiledPart]) -> list[Moment]:
    several = config.learner.optimizer_steps > 1
    published = (
        {"the version that engines read": tree_bytes(shapes.decoder) - base_bytes(shapes.model)} if several else {}
    )
    accumulated = {"accumulated gradient": shapes.gradient_bytes}
    moments = []
    for part in programs:
        if part.side != "learner" or part.name == "empty gradient":
            continue
        held = {} if part.name.endswith("log-probabilities") or part.name == "values" else accumulated
        results = {"the next version of the parameters": part.results_bytes} if part.name == "optimiser step" else {}
        temporaries = part.extra_bytes - sum(results.values())
        moments.append(published | held | results | {f"temporaries of the learner ({part.name})": temporaries})
    return moments


def _engine_moments(config: RunConfig, shapes: RunShapes, programs: list[CompiledPart]) -> list[Moment]:
    # the ends of the version that is served are the engine's alone once the learner has the next
    base = base_bytes(shapes.model)
    moments: list[Moment] = [
        {"the engine's next version": tree_bytes(shapes.weights) - base},
        {"the cache before it grew": growth_bytes(shapes, config.inference)},
    ]
    for part in programs:
        if part.side == "engine":
            prefilled = part.results_bytes if part.name.startswith("prefill") else 0
            temporaries = {f"temporaries of the engine ({part.name})": part.extra_bytes - prefilled}
            moments.append(temporaries | ({"prefilled keys and values": prefilled} if prefilled else {}))
    return moments

"""Generation speed through the engine's own interface, beside what the machine can do.

    python -m benchmarks.generation [--repeats 9] [--completions 64] [--tokens 64]
    python -m benchmarks.generation --ratios [--repeats 9]
    python -m benchmarks.generation --products [--model DIRECTORY] [--repeats 9]
    python -m benchmarks.generation --transformers-python PATH --vllm-python PATH [--cases 6M-8 …] [--results FILE]

Each round submits every request at once and waits for the futures: admission, prefill, decoding, text, everything.
Rounds of several settings are interleaved, so that a disturbed second hurts all of them, and medians are printed.
The limit is what the matrix products alone would take at the rate measured on this machine for the decode step's own
shapes, and what reading weights and cache once per step would take at the measured memory rate.

`--ratios` compares what single programs cost: processor time of this process and time by the clock, the least of
interleaved rounds, as multiples of a decode step of all 32 slots after 40 tokens each. Each runs once untimed before
it is timed, as steps of an engine follow each other. Marks are on the smaller of both multiples: the clock counts what
other processes take, and processor time what threads without work wait for some.
Below that, a conversation of ten turns by an engine that goes on with what its slots hold, and by one that forgets.

`--products`: a decode step of a checkpoint beside nothing but its products of matrices, by XLA, one after the other as
they depend on each other, for 1 to 64 rows; medians of interleaved rounds. No form of the rest makes a step shorter.

With an interpreter of another engine: tokens per second beside its own, see `benchmarks.generation_table`; exits with 1
where a mark is missed.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.generation_table import add_options, compare
from penstock.inference import EngineConfig, GenerationRequest, InferenceEngine
from penstock.inference.decoding import KVCache, ServedWeights
from penstock.inference.dispatch import HostSamples, SlotRows
from penstock.inference.model_runner import ModelRunner
from penstock.inference.scheduler import SlotTable
from penstock.model.language import Decoder, ModelConfig, load_decoder
from penstock.model.language.lora import LoraConfig
from penstock.model.language.precision import linear
from penstock.types import Decoding, WeightVersion

MODEL = ModelConfig(
    model_type="qwen2", vocab_size=8192, hidden_size=256, intermediate_size=656, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
PROMPT_TOKENS = 16
SAMPLES = 8
MARK = 4500
SECONDS_PER_RATE = 0.5


class NoText:
    """A tokenizer whose texts are empty: the model is random, so there is nothing to read."""

    vocab_size = MODEL.vocab_size
    stop_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        return np.zeros(0, np.int32)

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def render(
        self, prompt: Any, max_tokens: Any = None, chat_template_kwargs: Any = None, continue_final: bool = False
    ) -> np.ndarray:
        return np.zeros(0, np.int32)

    def render_text(self, prompt: Any, chat_template_kwargs: Any = None, continue_final: bool = False) -> str:
        return ""


def started_engine(decoder: Decoder, slots: int, steps: int, max_seq_len: int) -> tuple[InferenceEngine, float]:
    config = EngineConfig(
        max_slots=slots, max_seq_len=max_seq_len, steps_per_dispatch=steps, prefill_lengths=(PROMPT_TOKENS,)
    )
    began = time.perf_counter()
    engine = InferenceEngine(decoder, WeightVersion(0, 0), NoText(), config)
    engine.start()
    engine.wait_until_ready(600.0)
    return engine, time.perf_counter() - began


def generate(engine: InferenceEngine, completions: int, tokens: int, **sampling: Any) -> tuple[float, float]:
    """One round; wall and processor seconds per token."""
    rng = np.random.default_rng(0)
    decoding = Decoding(max_output_tokens=tokens, stop_token_ids=(MODEL.vocab_size,), **sampling)
    requests = [
        GenerationRequest(rng.integers(0, MODEL.vocab_size, PROMPT_TOKENS).astype(np.int32), decoding, i, SAMPLES)
        for i in range(completions // SAMPLES)
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    groups = [future.result(600.0) for future in engine.submit(requests)]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    produced = sum(len(completion.response_tokens) for group in groups for completion in group)
    assert produced == completions * tokens
    return wall / produced, cpu / produced


def repeated_seconds(run: Callable[[], Any]) -> float:
    """Best seconds of one call."""
    jax.block_until_ready(run())
    best, until = float("inf"), time.perf_counter() + SECONDS_PER_RATE
    while time.perf_counter() < until:
        began = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - began)
    return best


def matrix_seconds_per_step(rows: int) -> tuple[float, float]:
    """Seconds that one step's matrix products take alone, and their floating-point operations."""
    hidden, heads, keys = MODEL.hidden_size, MODEL.query_size, MODEL.key_value_size
    layer = [(hidden, heads), (hidden, 2 * keys), (heads, hidden), (hidden, 2 * MODEL.intermediate_size)]
    shapes = [*layer, (MODEL.intermediate_size, hidden)] * MODEL.num_hidden_layers + [(hidden, MODEL.vocab_size)]
    product = jax.jit(jnp.matmul)
    seconds = {}
    for inner, outer in set(shapes):
        left, right = jnp.ones((rows, inner)), jnp.ones((inner, outer))
        seconds[inner, outer] = repeated_seconds(lambda left=left, right=right: product(left, right))
    return sum(seconds[s] for s in shapes), sum(2.0 * rows * inner * outer for inner, outer in shapes)


def bytes_per_step(rows: int, length: float) -> float:
    """Weights once, and keys and values of every row once."""
    cache = 2 * MODEL.num_hidden_layers * rows * MODEL.key_value_size * length * 4
    return MODEL.parameter_count * 4 + cache


def read_bytes_per_s() -> float:
    values = jnp.ones(64 * 1024 * 1024 // 4)
    total = jax.jit(jnp.sum)
    return values.nbytes / repeated_seconds(lambda: total(values))


def print_limit(rows: int, tokens: int) -> None:
    seconds, operations = matrix_seconds_per_step(rows)
    attention = 4.0 * rows * MODEL.num_hidden_layers * MODEL.query_size * (PROMPT_TOKENS + tokens / 2)
    moved, rate = bytes_per_step(rows, PROMPT_TOKENS + tokens / 2), read_bytes_per_s()
    total = operations + attention
    print(f"\nPhysical limit at {rows} rows (rates measured now, on this machine):")
    print(
        f"  {total / rows / 1e6:7.1f} Mflop per token; matrix products reach {operations / seconds / 1e9:.0f} Gflop/s"
    )
    print(f"  {moved / rows / 1e3:7.1f} kB per token;    memory is read at {rate / 1e9:.1f} GB/s")
    print(f"  {rows / (seconds * total / operations):7,.0f} tokens/s by arithmetic")
    print(f"  {rows / (moved / rate):7,.0f} tokens/s by memory")


RATIO_SLOTS, SHORT, LONG = 32, 40, 1000
RATIO_SHAPES = EngineConfig(max_slots=RATIO_SLOTS, max_seq_len=1024, prefill_lengths=(PROMPT_TOKENS, 256))


def rows_of(table: SlotTable, lengths: list[int], **first: float) -> np.ndarray:
    """As the slots were after so many tokens each, with steps to go; `first` is what the first one asks for."""
    whole = table.whole.copy()
    rows: Any = SlotRows.of(whole)
    rows.positions[: len(lengths)], rows.budget[: len(lengths)] = lengths, RATIO_SHAPES.steps_per_dispatch
    for name, value in first.items():
        rows.sampling[name][0] = value
    return whole


RANK = 16


def with_adapter() -> Decoder:
    """The model beside an adapter of all its matrices, drawn."""
    shapes, rng = Decoder.of_shapes(MODEL.with_lora(LoraConfig(rank=RANK), "model.lora")), np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(0.02 * rng.standard_normal(leaf.shape), leaf.dtype), shapes)


def ratio_cases(
    runner: ModelRunner, beside: ModelRunner, table: SlotTable
) -> dict[str, tuple[int, Callable[[], Any], float | None]]:
    """By name: the cache's window, what is run, and the mark; a dispatch counts as its steps.

    Args:
        runner: Of the model.
        beside: Of the model with an adapter, whose cache has the smallest window.
        table: Slots that are not live.
    """
    short = [SHORT] * RATIO_SLOTS

    def step(lengths: list[int], **first: float) -> Callable[[], Any]:
        return functools.partial(runner.decode, rows_of(table, lengths, **first))

    chunk, scored = np.zeros(RATIO_SHAPES.prefill_chunk, np.int32), [runner.scratch(1024)]
    return {
        "a step, all slots short": (128, step(short), None),
        "one live slot": (128, step([SHORT]), 0.4),
        "8 live slots": (128, step([SHORT] * 8), None),
        "one slot of 1,000 tokens among short ones": (1024, step([LONG, *short[1:]]), 1.2),
        "all slots of 1,000 tokens": (1024, step([LONG] * RATIO_SLOTS), None),
        f"a step, all slots short, rank {RANK} beside": (
            128,
            functools.partial(beside.decode, rows_of(table, short)),
            None,
        ),
        "one slot asks for top-p": (128, step(short, top_p=0.9), 1.1),
        "all ask for top-p": (128, functools.partial(runner.decode, all_top_p(table, short)), None),
        "a sibling of a short prompt": (1024, functools.partial(runner.fork, {1: (0, SHORT)}), 0.3),
        "a sibling of 1,000 tokens": (1024, functools.partial(runner.fork, {1: (0, LONG)}), 0.3),
        "what a prompt of 1,000 tokens stalls others": (1024, functools.partial(runner.extend, chunk, 0, 744), 3.0),
        "what scoring of 1,000 tokens stalls others": (1024, functools.partial(score_chunk, runner, scored), 3.0),
    }


def score_chunk(runner: ModelRunner, caches: list[KVCache]) -> None:
    """The last tokens of a text of 1,000 that go at once, over its own cache."""
    text = np.zeros(runner.scored_at_once + 1, np.int32)
    caches[0], _ = runner.score(runner.weights, caches[0], text, LONG - len(text), 1.0)


def all_top_p(table: SlotTable, lengths: list[int]) -> np.ndarray:
    whole = rows_of(table, lengths)
    SlotRows.of(whole).sampling["top_p"][:] = 0.9
    return whole


def print_ratios(repeats: int) -> None:
    runner = ModelRunner(Decoder.initialise(MODEL, jax.random.key(0)), RATIO_SHAPES)
    cases = ratio_cases(runner, ModelRunner(with_adapter(), RATIO_SHAPES), SlotTable(RATIO_SLOTS, 1))
    clocks = time.process_time, time.perf_counter
    least = dict.fromkeys(cases, (math.inf, math.inf))
    for number in range(repeats + 1):
        for name, (window, run, _) in cases.items():
            runner.resize(window)
            run()  # untimed: another case, another model even, was last in the processor's caches
            runner.wait()
            began = [clock() for clock in clocks]
            found = run()
            runner.wait()
            spent = [clock() - before for clock, before in zip(clocks, began, strict=True)]
            steps = int(found.count.max()) if isinstance(found, HostSamples) else 1
            if number:  # the first compiles
                by_processor, by_clock = (min(a, b / steps) for a, b in zip(least[name], spent, strict=True))
                least[name] = by_processor, by_clock
    unit = next(iter(least.values()))
    print(f"{MODEL.parameter_count:,} parameters, float32, {RATIO_SLOTS} slots, short: {SHORT} tokens")
    print(f"{'':46s}{'CPU ms':>8s}{'steps':>7s}{'clock':>8s}{'steps':>7s}{'mark':>7s}")
    for name, (_, _, mark) in cases.items():
        ratios = [seconds / one for seconds, one in zip(least[name], unit, strict=True)]
        verdict = "" if mark is None else f"{mark:7.1f}  {'reached' if min(ratios) <= mark else 'missed'}"
        shown = (f"{s * 1e3:8.2f}{ratio:7.2f}" for s, ratio in zip(least[name], ratios, strict=True))
        print(f"{name:46s}{''.join(shown)}{verdict}")


def products_of_step(weights: ServedWeights, x: Array) -> list[Array]:
    """All products of a decode step, of its sizes and in its order; every result, so that none is left out."""
    results: list[Array] = []
    for layer in weights.layers:
        query, *others = (linear(x, matrix) for matrix in (layer.query, layer.key, layer.value))
        x = x + linear(query, layer.output)
        x = x + linear(linear(x, layer.gate) + linear(x, layer.up), layer.down)
        results += others
    return [*results, weights.ends.logits(x)]


def print_products(folder: Path, repeats: int) -> None:
    decoder, slots = load_decoder(folder, dtype="float32"), (1, 8, 32, 64)
    weights, alone = ServedWeights.of(decoder), jax.jit(products_of_step)
    looked_up = 0 if decoder.head is None else decoder.embedding.size  # row by row, in no product
    count = decoder.config.parameter_count - looked_up
    seconds: dict[int, list[tuple[float, float]]] = {rows: [] for rows in slots}
    for rows in slots:
        runner = ModelRunner(decoder, EngineConfig(max_slots=rows, max_seq_len=128, prefill_lengths=(PROMPT_TOKENS,)))
        given, x = rows_of(SlotTable(rows, 1), [SHORT] * rows), jnp.ones((rows, decoder.config.hidden_size))
        for number in range(repeats + 1):
            began = time.perf_counter()
            steps = int(runner.decode(given).count.max())
            whole = (time.perf_counter() - began) / steps
            began = time.perf_counter()
            jax.block_until_ready(alone(weights, x))
            if number:  # the first compiles
                seconds[rows].append((whole, time.perf_counter() - began))
    print(f"{count:,} parameters in products, float32, {SHORT} tokens before; {4e-6 * count:,.0f} MB of weights")
    print(f"{'rows':>6s}{'step, ms':>10s}{'products, ms':>14s}{'of the step':>13s}{'Gflop/s':>9s}{'GB/s':>7s}")
    for rows, rounds in seconds.items():
        whole, products = (statistics.median(each) for each in zip(*rounds, strict=True))
        rates = f"{2e-9 * rows * count / products:9.0f}{4e-9 * count / products:7.1f}"
        print(f"{rows:6d}{whole * 1e3:10.1f}{products * 1e3:14.1f}{products / whole:13.0%}{rates}")


TURNS, OPENING, ANSWER, REPLY = 10, 200, 16, 40


def converse(engine: InferenceEngine, decoder: Decoder) -> tuple[float, float]:
    """A conversation; padded tokens that it prefilled, and processor seconds."""
    before, began = engine.stats()["inference/prefill_tokens_total"], time.process_time()
    rng = np.random.default_rng(0)
    text = rng.integers(0, MODEL.vocab_size, OPENING).astype(np.int32)
    decoding = Decoding(max_output_tokens=ANSWER, stop_token_ids=(MODEL.vocab_size,))
    for turn in range(TURNS):
        (answer,) = engine.submit([GenerationRequest(text, decoding, turn)])[0].result(600.0)
        reply = rng.integers(0, MODEL.vocab_size, REPLY).astype(np.int32)
        text = np.concatenate([text, answer.response_tokens, reply])
    engine.set_weights(engine.version, decoder)  # the next one takes nothing from this
    return engine.stats()["inference/prefill_tokens_total"] - before, time.process_time() - began


def print_turns(repeats: int) -> None:
    decoder = Decoder.initialise(MODEL, jax.random.key(0))
    engines = {
        forgets: InferenceEngine(
            decoder, WeightVersion(0, 1), NoText(), RATIO_SHAPES.model_copy(update={"forgets": forgets})
        )
        for forgets in (False, True)
    }
    least = dict.fromkeys(engines, (0.0, float("inf")))
    for engine in engines.values():
        engine.start(lazily=True)
    for number in range(repeats + 1):
        for forgets, engine in engines.items():
            found = converse(engine, decoder)
            if number:  # the first compiles
                least[forgets] = min(least[forgets], found, key=lambda each: each[1])
    print(f"\n{TURNS} turns of {ANSWER} tokens after {OPENING} tokens, with {REPLY} tokens between two")
    print(f"{'':46s}{'prefilled':>10s}{'CPU ms':>8s}")
    for forgets, name in ((False, "each prefills what is new"), (True, "each prefills everything")):
        tokens, spent = least[forgets]
        print(f"{name:46s}{tokens:10,.0f}{spent * 1e3:8.0f}")
    (kept, kept_s), (whole, whole_s) = least[False], least[True]
    print(f"{'ratio':46s}{kept / whole:10.2f}{kept_s / whole_s:8.2f}")
    for engine in engines.values():
        engine.stop(30.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ratios", action="store_true", help="what single programs cost, in decode steps")
    parser.add_argument("--products", action="store_true", help="what products alone take of a step of --model")
    add_options(parser)
    options = parser.parse_args()
    if options.transformers_python or options.vllm_python:
        return compare(options)
    if options.products:
        print_products(options.model, options.repeats)
        return 0
    if options.ratios:
        print_ratios(options.repeats)
        print_turns(options.repeats)
        return 0
    decoder = Decoder.initialise(MODEL, jax.random.key(0))
    room = PROMPT_TOKENS + options.tokens
    tight, ready_s = started_engine(decoder, options.completions, 8, room)
    roomy, _ = started_engine(decoder, options.completions, 8, 8 * room)
    half, _ = started_engine(decoder, options.completions // 2, 8, room)
    settings: dict[str, tuple[InferenceEngine, dict[str, Any]]] = {
        "all in slots": (tight, {}),
        "max_seq_len 8 times as long": (roomy, {}),
        "half as many slots": (half, {}),
        "greedy": (tight, {"temperature": 0.0}),
        "top_k 50, top_p 0.9": (tight, {"top_k": 50, "top_p": 0.9}),
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in settings}
    for _ in range(options.repeats):
        for name, (engine, sampling) in settings.items():
            results[name].append(generate(engine, options.completions, options.tokens, **sampling))
    print(f"{options.completions} completions of {options.tokens} tokens, {SAMPLES} per prompt, "
          f"{MODEL.parameter_count:,} parameters, float32; ready after {ready_s:.1f} s of compilation")  # fmt: skip
    print(f"{'':30s}{'tokens/s':>12s}{'(worst–best)':>18s}{'CPU µs/token':>14s}")
    for name, rounds in results.items():
        rates = [1 / wall for wall, _ in rounds]
        spread = f"({min(rates):,.0f}–{max(rates):,.0f})"
        cpu = statistics.median(cpu for _, cpu in rounds) * 1e6
        print(f"{name:30s}{statistics.median(rates):12,.0f}{spread:>18s}{cpu:14.0f}")
    reached = statistics.median(1 / wall for wall, _ in results["all in slots"])
    print(f"The mark is {MARK:,} tokens/s: {'reached' if reached >= MARK else 'missed'}.")
    print_limit(options.completions, options.tokens)
    for engine in (tight, roomy, half):
        engine.stop(30.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

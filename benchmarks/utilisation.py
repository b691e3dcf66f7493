"""What of an accelerator an update uses, what costs it most, and what `penstock fit` foretells of a step.

    python -m benchmarks.utilisation [--models 0.5b 1.5b] [--rows 4096 16384] [--update-only]

Models at random, each with each length of rows in a process of its own, on what JAX computes on: an update of
`--tokens`, an eighth of them at once, in which every sequence fills its row, half of it prompt. Printed are

- model FLOPs utilisation (MFU): FLOPs that the mathematics needs, by seconds of an update and the maker's rate of
  products. What `remat` computes again is not counted, attention is counted causal, and the head of loss tokens only;
- what attention, products of layers, head and optimiser take of the update, each timed alone, and what is left;
- peak memory of learner and engine together, and seconds of each phase of a step, beside those foretold. Decoding is
  one dispatch at the mean length, times those of a step.

`--update-only` runs the learner alone: of a step its gradient and its optimiser. `--keep` writes what was measured, and
`--measured` reads it, perhaps on another machine, which has a compiler to foretell by.

Exits with 1 where a mark of MFU is missed or a case failed. A CPU has no marks: its rate is the one measured here.
On an accelerator nothing but updates has run (docs/performance.md).
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import penstock
from benchmarks.fit import PAGES_OF_ITS_OWN, batch_of, live_rows, measured
from benchmarks.marks import Marks
from penstock.model.language.config import ModelConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.estimate import bytes_text
from penstock.overseer.fitting.chips import CHIPS, CUDA_FRACTION, best_s, this_machine
from penstock.overseer.fitting.search import shape_named
from penstock.types import ConfigError

AIMS = {("0.5b", 4096): 30, ("0.5b", 16384): 20, ("1.5b", 4096): 40, ("1.5b", 16384): 30}
"""Percent of MFU at least, by model and tokens of a row."""
KINDS = {
    "cpu": "cpu", "NVIDIA H100 80GB HBM3": "h100:1", "NVIDIA H200": "h200:1", "NVIDIA A100-SXM4-80GB": "a100:1",
    "TPU v5 lite": "v5e:1", "TPU v5e": "v5e:1", "TPU v6 lite": "v6e:1", "TPU v6e": "v6e:1",
}  # fmt: skip
"""Targets by JAX's name of a device."""
ENGINE_PARTS = "parameters of the engine", "KV cache"
"""What `penstock fit` counts beside the learner's, while that takes most."""
REPEATS = 3


class Case(NamedTuple):
    """What is run here: a model, tokens of a row, tokens of an update, and what is changed besides."""

    model: str
    length: int
    tokens: int
    changes: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> "Case":
        """From its fields as a JSON list."""
        model, length, tokens, changes = json.loads(text)
        return cls(model, length, tokens, tuple(changes))

    @property
    def config(self) -> RunConfig:
        """An eighth of the update at once, and slots for all of its sequences."""
        sequences, lesson = max(self.tokens // self.length, 1), "curriculum.lessons.cats.sampling_params"
        words = [
            "model.dtype=bfloat16", "learner.remat=layer", "learner.minibatches=1", "async=false",
            "replay.groups_per_batch=1", f"{lesson}.n_generations_per_prompt={sequences}",
            f"{lesson}.max_output_tokens={self.length // 2}",
            f"learner.row_length={self.length}", f"learner.micro_batch_rows={max(sequences // 8, 1)}",
            f"inference.max_seq_len={self.length}", f"inference.prefill_lengths=[{self.length // 2}]",
            f"inference.max_slots={sequences}", *self.changes,
        ]  # fmt: skip
        return penstock.load_config("cats", words)  # type: ignore[return-value]


class Ran(NamedTuple):
    """What one case took here.

    Attributes:
        kind: JAX's name of the device.
        dtype: The model's.
        peak_bytes: As `measured` says; of a CPU that runs nothing but updates 0.
        flops: That the mathematics of an update needs.
        tokens: Of an update.
        update_s: Seconds of one, packing its rows included.
        phases: Seconds of a step, by the names that `penstock fit` has for its phases.
        parts: Seconds of an update's parts, each timed alone.
    """

    kind: str
    dtype: str
    peak_bytes: int
    flops: float
    tokens: int
    update_s: float
    phases: Mapping[str, float]
    parts: Mapping[str, float]


def run_here(case: Case, alone: bool = False) -> Ran:
    """Runs it on JAX's default device, in this process; `alone`: nothing but the update, whose peak of memory it is."""
    import jax

    from penstock.overseer.fitting.report import StepWork, attention_flops, layer_matrices

    config = case.config
    model, work = shape_named(case.model, config), StepWork.of(config)
    peak = 0 if alone else measured(config, model)
    gc.collect()
    update_s, phases = _timed_update(config, model, work) if alone else _timed_phases(config, model, work)
    length, tokens = work.sequence_tokens, work.sequences * work.sequence_tokens
    body = 2 * layer_matrices(model) * tokens + work.sequences * attention_flops(model, length, length / 2)
    flops = 3.0 * (body + 2 * model.vocab_size * model.hidden_size * work.sequences * work.answer_tokens)
    parts = ({} if alone else _timed_parts(config, model, work)) | {"optimiser": phases["optimiser"]}
    peak = peak or (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return Ran(jax.local_devices()[0].device_kind, model.dtype, peak, flops, tokens, update_s, phases, parts)


def read_back(folder: Path) -> dict[Case, Ran]:
    """What was measured elsewhere, by `--keep`."""
    return {
        Case.read(json.dumps(case)): Ran(*ran)
        for case, ran in (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    }


def run_apart(case: Case, alone: bool = False) -> Ran:
    """The same in a process of its own, which is given as much of a GPU as `penstock fit` counts.

    Raises:
        subprocess.SubprocessError: it failed, or took an hour.
    """
    given = PAGES_OF_ITS_OWN | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(CUDA_FRACTION)}
    words = ["--case", json.dumps(case), *(["--update-only"] if alone else [])]
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.utilisation", *words],
        stdout=subprocess.PIPE, text=True, timeout=3600, check=True, env=given | os.environ,
    )  # fmt: skip
    return Ran(*json.loads(answer.stdout.splitlines()[-1]))


def _drawn(model: ModelConfig) -> Any:
    """A decoder at random, drawn where it computes: `Decoder.initialise` takes seconds for a billion numbers."""
    import jax

    from penstock.model.language import Decoder

    leaves, structure = jax.tree.flatten(Decoder.of_shapes(model))

    def draw(key: Any) -> list[Any]:
        keys = jax.random.split(key, len(leaves))
        return [0.02 * jax.random.normal(own, x.shape, x.dtype) for own, x in zip(keys, leaves, strict=True)]

    return jax.tree.unflatten(structure, jax.jit(draw)(jax.random.key(0)))


def _timed_update(config: RunConfig, model: ModelConfig, work: Any) -> tuple[float, dict[str, float]]:
    """Seconds of an update, and of its phases; the best of some."""
    from penstock.learner import Learner

    return _updated(Learner(_drawn(model), config.learner, total_steps=REPEATS + 1), config, model, work)


def _updated(learner: Any, config: RunConfig, model: ModelConfig, work: Any) -> tuple[float, dict[str, float]]:
    batch = batch_of(config, work.sequences, work.prompt_tokens, model.vocab_size)
    updates = []
    for step in range(REPEATS + 1):  # the first compiles
        started = time.perf_counter()
        metrics = learner.update(replace(batch, step=step), step)
        updates.append((time.perf_counter() - started, metrics))
    update_s, update = min(updates[1:], key=lambda each: each[0])
    return update_s, {"gradient": update["time/forward_backward"], "optimiser": update["time/apply"]}


def _timed_phases(config: RunConfig, model: ModelConfig, work: Any) -> tuple[float, dict[str, float]]:
    """The same, and of the other phases of a step."""
    import numpy as np

    from penstock.inference.model_runner import ModelRunner
    from penstock.learner import Learner
    from penstock.model.language import named_arrays

    engine, decoder = config.inference, _drawn(model)
    runner, learner = ModelRunner(decoder, engine), Learner(decoder, config.learner, total_steps=REPEATS + 1)
    del decoder
    update_s, of_update = _updated(learner, config, model, work)

    middle, padded = work.prompt_tokens + work.answer_tokens // 2, engine.padded_length(work.prompt_tokens)
    runner.resize(next(n for n in engine.window_buckets if n >= middle + engine.steps_per_dispatch))
    rows, nowhere = live_rows(engine, middle), np.full(engine.max_slots, -1, np.int32)
    prompts = np.ones((engine.prefill_row_counts(padded)[0], padded), np.int32)

    def prefill() -> None:
        if padded <= (runner.whole or padded):
            runner.prefill(prompts, nowhere)
        else:
            runner.extend(prompts[0], 0, 0)
        runner.wait()

    dispatches = ceil(work.sequences / engine.max_slots) * ceil(work.answer_tokens / engine.steps_per_dispatch)
    return update_s, {
        "prefill": ceil(work.prompts / len(prompts)) * best_s(prefill, REPEATS),
        "decode": dispatches * best_s(lambda: runner.decode(rows), REPEATS),
        **of_update,
        "hand-over": best_s(lambda: runner.load(runner.prepare(named_arrays(learner.decoder))), REPEATS),
    }


def _timed_parts(config: RunConfig, model: ModelConfig, work: Any) -> dict[str, float]:
    """Seconds of an update's attention, products of layers, and head; what `remat` computes again counts, too."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from penstock.learner.head import HeadInputs, tiled_loss
    from penstock.model.language.attention import Segments, attention
    from penstock.model.language.attention_choice import attends_again, attention_kernel, platform_named
    from penstock.model.language.precision import linear

    learner, platform = config.learner, platform_named(jax.default_backend())
    rows, length, hidden = learner.micro_batch_rows, learner.row_length, model.hidden_size
    positions, micro_batches = rows * length, ceil(work.sequences / rows)

    def drawn(*shape: int) -> Any:
        return jax.random.normal(jax.random.key(0), shape, model.dtype)

    def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
        """Forward, and backward with what that needs of the forward pass."""
        result = jax.eval_shape(function, *arguments)
        above = drawn(*result.shape).astype(result.dtype)
        forward, backward = jax.jit(function), jax.jit(lambda above, *given: jax.vjp(function, *given)[1](above))
        return (
            best_s(lambda: jax.block_until_ready(forward(*arguments)), REPEATS),
            best_s(lambda: jax.block_until_ready(backward(above, *arguments)), REPEATS),
        )

    kernel = attention_kernel(learner.attention, platform, length, model.dtype, model.head_dim)
    segments = Segments.of(np.ones((rows, length), np.int32), 1)
    counts = model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads
    heads = [drawn(rows, length, count, model.head_dim) for count in counts]
    attended = timed(lambda query, key, value: attention(query, key, value, segments, kernel), *heads)

    inner, keys = model.intermediate_size, model.key_value_size
    wide = {"query": (hidden, model.query_size), "key": (hidden, keys), "value": (hidden, keys),
            "output": (model.query_size, hidden), "gate": (hidden, inner), "up": (hidden, inner),
            "down": (inner, hidden)}  # fmt: skip
    by_shape = {shape: timed(linear, drawn(positions, shape[0]), drawn(*shape)) for shape in set(wide.values())}
    again = learner.remat in ("layer", "offload")
    products = sum(sum(by_shape[shape]) for shape in wide.values())
    products += again * sum(by_shape[shape][0] for name, shape in wide.items() if name != "down")  # that ends the layer

    count = np.int32(rows * work.answer_tokens)
    inputs = HeadInputs(jnp.zeros(positions, jnp.int32), jnp.ones(positions, jnp.float32), jnp.asarray(count))
    tile, weights = learner.head_tile(platform), jnp.ones(positions, jnp.float32)

    def loss(states: Any, matrix: Any) -> Any:
        return tiled_loss(states, matrix, inputs, tile, lambda outputs, weight: weight * outputs.logprobs, weights)[0]

    _, head = timed(loss, drawn(positions, hidden), drawn(model.vocab_size, hidden))
    layers = micro_batches * model.num_hidden_layers
    return {
        "attention": layers * (attends_again(learner.remat, kernel) * attended[0] + attended[1]),
        "products of layers": layers * products,
        "head": micro_batches * head,
    }


def utilise(
    cases: Sequence[Case],
    target: str | None,
    known: Mapping[Case, Ran] = MappingProxyType({}),
    keep: Path | None = None,
    foretell: bool = True,
    alone: bool = False,
) -> int:
    """Runs and prints all cases, and what is foretold of them; how many marks were missed, or cases failed.

    Args:
        cases: Each is run in a process of its own.
        target: The chip whose rates count and which is compiled for; None: the one that JAX names, where it is known.
        known: Cases that have run, and are not run again.
        keep: Folder of a file for each that runs here.
        foretell: Whether to print what is foretold.
        alone: Whether nothing but the update is run.
    """
    marks, found = Marks(), dict[Case, Ran]()
    for case in cases:
        try:
            ran = found[case] = known[case] if case in known else run_apart(case, alone)
        except subprocess.SubprocessError as error:
            print(f"{case.model}, rows of {case.length:,}: failed: {error}", flush=True)
            marks.missed += 1
            continue
        if keep is not None and case not in known:
            keep.mkdir(parents=True, exist_ok=True)
            named = "-".join([case.model, str(case.length), *case.changes]).replace("/", "_")
            (keep / f"{named}.json").write_text(json.dumps([case, ran]))
        target = target or KINDS.get(ran.kind)
        print_run(case, ran, target, marks)
    for case, ran in found.items() if foretell else ():  # a TPU's compiler would keep the chip from those that run
        print_foretold(case, ran, target)
    print("\n".join(marks.lines))
    return marks.missed


def print_run(case: Case, ran: Ran, target: str | None, marks: Marks) -> None:
    """MFU and the largest costs of an update, and the mark of it where there is one."""
    print(f"{case.model}, {ran.dtype}, rows of {case.length:,}, on {ran.kind}, at most {bytes_text(ran.peak_bytes)}")
    update = f"  update {ran.update_s:.4g} s, {ran.tokens / ran.update_s:,.0f} tokens/s, {ran.flops:.3g} FLOPs needed"
    if target is None:
        print(f"{update}; MFU not known, as no rate of this device is: --target names one that has its rate")
    else:
        chip = this_machine() if target == "cpu" else CHIPS[target.partition(":")[0]]
        rate = chip.flops_per_s[ran.dtype]
        share = ran.flops / ran.update_s / rate
        print(f"{update}; MFU {share:.1%} of {rate / 1e12:.4g} TFLOP/s ({chip.label})")
        if ran.kind != "cpu" and (case.model, case.length) in AIMS:
            aim = AIMS[case.model, case.length]
            marks.at_least(f"{case.model}, rows of {case.length:,}: MFU in percent", 100 * share, aim)
    parts = {**ran.parts, "all else": ran.update_s - sum(ran.parts.values())}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    cells = [f"{name} {seconds:.4g} s ({seconds / ran.update_s:.0%})" for name, seconds in largest]
    print(f"  costs: {', '.join(cells[:3])}; then {', '.join(cells[3:])}", flush=True)


def print_foretold(case: Case, ran: Ran, target: str | None) -> None:
    """What `penstock fit` says of a case beside what was measured: of the learner alone where nothing else ran."""
    print(f"{case.model}, rows of {case.length:,}: foretold and measured")
    if target is None:
        print(f"  not known: no target is {ran.kind}")
        return
    try:
        report: Any = penstock.overseer.fit(case.config, target, [case.model], [case.length])
    except ConfigError as error:
        print(f"  not known: {error}")
        return
    phases = [phase for phase in report.phases if phase.name in ran.phases]
    beside = () if len(phases) == len(report.phases) else ENGINE_PARTS
    foretold = sum(count for name, count in report.parts.items() if name not in beside)
    counted = "not counted by a CPU"
    if ran.peak_bytes:
        counted = f"{bytes_text(ran.peak_bytes):>12}  {foretold / ran.peak_bytes - 1:+.1%}"
    print(f"  memory     {bytes_text(foretold):>12} {counted}")
    for phase in phases:
        found = ran.phases[phase.name]
        print(f"  {phase.name:<10} {phase.seconds:>10.4g} s {found:>10.4g} s  at least, by {phase.bound}")
    step_s = sum(phase.seconds for phase in phases)
    print(
        f"  {'a step' if not beside else 'both':<10} {step_s:>10.4g} s {sum(ran.phases.values()):>10.4g} s", flush=True
    )


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.case:
        print(json.dumps(run_here(Case.read(arguments.case), arguments.update_only)))
        return 0
    chosen = product(arguments.models, arguments.rows)
    known = read_back(arguments.measured) if arguments.measured else {}
    cases = list(known) or [Case(model, length, arguments.tokens, tuple(arguments.set)) for model, length in chosen]
    alone = arguments.update_only
    return int(utilise(cases, arguments.target, known, arguments.keep, not (arguments.no_fit or alone), alone) > 0)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=("0.5b", "1.5b"), help="as of `penstock fit --models`")
    parser.add_argument("--rows", nargs="+", type=int, default=(4096, 16384), help="tokens of each")
    parser.add_argument("--tokens", type=int, default=2**17, help="of an update")
    parser.add_argument("--target", help="the device, as `penstock fit` names it; by default as JAX's name for it says")
    parser.add_argument("--set", nargs="+", default=(), metavar="KEY=VALUE", help="of the runs")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="writes there what was measured")
    parser.add_argument("--measured", type=Path, metavar="FOLDER", help="of --keep, perhaps elsewhere: runs nothing")
    parser.add_argument("--update-only", action="store_true", help="no engine, no parts, nothing foretold")
    parser.add_argument("--no-fit", action="store_true", help="nothing is foretold: only a machine with a compiler can")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

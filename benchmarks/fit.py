"""What `penstock fit` foretells, beside what happens; and what large models take on chips that are not here.

    python -m benchmarks.fit                                        # foretold and measured peaks on this machine's CPUs
    python -m benchmarks.fit --target h100:1 --target v5e:1         # models × rows, by the chips' compilers

The first form runs six shapes, each in a process of its own and at staleness zero: a prefill, decoding over the
longest window, an update, its hand-over to the engine, and all of it again. All is compiled before, so that the peak is
of arrays and of programs that run; what the process holds then without any array is subtracted. Every array has pages
of its own (`MALLOC_MMAP_THRESHOLD_`), which its end gives back: else glibc keeps freed arrays of up to 32 MiB, in
pieces of no use to others, and the heap is what is measured. That is measured, too, and is no part of the mark. The
exit code is 1 where a shape differs by more than 10%. The second form (extras `cuda-fit`, `tpu-fit`) runs nothing and
prints the marks below; with `--results FILE` it goes on where it was cut off. A file is of one version of the code.
"""

import argparse
import atexit
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from benchmarks.marks import Marks
from penstock.model.language.config import ModelConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.estimate import bytes_text, model_shape

if TYPE_CHECKING:  # it loads JAX, which must be told first where there is no chip
    from penstock.inference.config import EngineConfig
    from penstock.overseer.fitting.report import FitReport

BASE = {
    "async": False, "model.init.vocab_size": 4096, "curriculum.lessons.cats.sampling_params.max_output_tokens": 16,
    "learner.remat": "layer", "learner.minibatches": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "wide, long rows": {
        "model.init.hidden_size": 512, "model.init.intermediate_size": 1408, "model.init.num_attention_heads": 8,
        "learner.row_length": 1024, "learner.micro_batch_rows": 4, "inference.max_slots": 32,
        "inference.max_seq_len": 512,
    },
    "deep, short rows": {
        "model.init.hidden_size": 384, "model.init.intermediate_size": 1024, "model.init.num_hidden_layers": 12,
        "model.init.num_attention_heads": 6, "learner.row_length": 256, "learner.micro_batch_rows": 16,
        "inference.max_slots": 64, "inference.max_seq_len": 256,
    },
    "large vocabulary": {
        "model.init.hidden_size": 512, "model.init.intermediate_size": 1024, "model.init.num_attention_heads": 8,
        "model.init.vocab_size": 65536, "learner.row_length": 256, "learner.micro_batch_rows": 4,
        "inference.max_slots": 16, "inference.max_seq_len": 256,
    },
    "everything kept": {
        "model.init.hidden_size": 512, "model.init.intermediate_size": 1408, "model.init.num_hidden_layers": 6,
        "model.init.num_attention_heads": 8, "learner.row_length": 256, "learner.micro_batch_rows": 16,
        "learner.remat": "products", "inference.max_slots": 32, "inference.max_seq_len": 256,
    },
    "large cache, bfloat16": {
        "model.init.hidden_size": 512, "model.init.intermediate_size": 1408, "model.init.num_hidden_layers": 4,
        "model.init.num_attention_heads": 8, "model.dtype": "bfloat16", "learner.row_length": 512,
        "learner.micro_batch_rows": 2, "inference.max_slots": 64, "inference.max_seq_len": 512,
    },
    "adapter beside a base": {
        "model.init.hidden_size": 768, "model.init.intermediate_size": 2048, "model.init.num_hidden_layers": 8,
        "model.init.num_attention_heads": 12, "model.lora.rank": 16, "learner.row_length": 256,
        "learner.micro_batch_rows": 4, "inference.max_slots": 32, "inference.max_seq_len": 256,
    },
}  # fmt: skip
"""Changes of the recipe `cats` by what leads in their memory."""
CLOSE = 0.10


def calibrated(name: str) -> RunConfig:
    """The run of one of `SHAPES`; the base of an adapter is a `config.json` in a folder that stays until the end."""
    changes = BASE | SHAPES[name]
    if "model.lora.rank" not in changes:
        return penstock.load_config("cats", changes)  # type: ignore[return-value]
    beside = {key: value for key, value in changes.items() if not key.startswith("model.init")}
    drawn: Any = penstock.load_config("cats", {key: changes[key] for key in changes if key != "model.lora.rank"})
    folder = tempfile.mkdtemp(prefix="penstock-fit-")
    atexit.register(shutil.rmtree, folder)
    (Path(folder) / "config.json").write_text(json.dumps(model_shape(drawn.model).to_hugging_face()))
    beside |= {"model.init": None, "model.path": folder, "model.tokenizer": "penstock"}
    return penstock.load_config("cats", beside)  # type: ignore[return-value]


class Peaks(NamedTuple):
    """Bytes of one shape's run at the worst moment: as `penstock fit` says, measured, and with glibc's own heap."""

    foretold: int
    measured: int
    with_heap: int

    @property
    def share(self) -> float:
        """By which what was foretold differs from what was measured."""
        return abs(self.foretold / self.measured - 1)


PAGES_OF_ITS_OWN = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}
"""An array's; and what is smaller lies in one heap, not in one for each thread."""


def peaks_of(name: str) -> Peaks:
    """Of one of `SHAPES`, each measured in a process of its own."""
    report: Any = penstock.overseer.fit(calibrated(name), "cpu")
    return Peaks(report.total_bytes, _measured_apart(name, PAGES_OF_ITS_OWN), _measured_apart(name, {}))


def _measured_apart(name: str, environment: dict[str, str]) -> int:
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.fit", "--measure", name],
        stdout=subprocess.PIPE, text=True, timeout=1800, check=True, env=os.environ | environment,
    )  # fmt: skip
    return int(answer.stdout.splitlines()[-1])


def measured(config: RunConfig, model: ModelConfig) -> int:
    """Bytes that the run's programs take at most of the device; the first pass compiles them.

    Of a CPU those by which this process grows then; another device counts them itself.
    """
    import jax

    _pass_through(config, model)
    gc.collect()
    before = _restarted_peak()
    _pass_through(config, model)
    counted = jax.local_devices()[0].memory_stats() or {}
    return counted.get("peak_bytes_in_use") or _status("VmHWM") - before


def _pass_through(config: RunConfig, model: ModelConfig) -> None:
    """What a run does of its engine's and learner's: prefill, decode, update, hand-over, twice."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from penstock.inference.model_runner import ModelRunner
    from penstock.learner import Learner
    from penstock.model.language import Decoder, named_arrays

    engine = config.inference
    decoder = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), Decoder.of_shapes(model))
    runner, learner = ModelRunner(decoder, engine), Learner(decoder, config.learner, total_steps=2)
    del decoder
    rows = live_rows(engine, engine.max_seq_len - engine.steps_per_dispatch - 1)
    lengths = [length for length in engine.prefill_buckets if length <= (runner.whole or length)]
    prompts = max(((count, n) for n in lengths for count in engine.prefill_row_counts(n)), key=np.prod)
    batch = batch_of(config, 2 * config.learner.micro_batch_rows, 8)
    for step in range(2):
        runner.resize(engine.max_seq_len)
        runner.prefill(np.zeros(prompts, np.int32), np.zeros(engine.max_slots, np.int32))
        runner.fork({})
        runner.decode(rows)
        learner.update(replace(batch, step=step), step)
        runner.load(runner.prepare(named_arrays(learner.decoder)))
        runner.resize(engine.window_buckets[0])
    jax.block_until_ready(runner.weights)


def live_rows(engine: "EngineConfig", position: int) -> Any:
    """All slots, with so many tokens behind them and a dispatch before them."""
    from penstock.inference.dispatch import SlotRows

    whole = SlotRows.array(engine.max_slots, engine.max_stop_token_ids)
    rows = SlotRows.of(whole)
    rows.budget[:], rows.positions[:] = engine.steps_per_dispatch, position
    return whole


def batch_of(config: RunConfig, sequences: int, prompt: int, vocabulary: int = 2) -> Any:
    """Sequences of a row each, after prompts of so many tokens, drawn below `vocabulary`."""
    import numpy as np

    from penstock.batch import example_from_rollout
    from penstock.types import Rollout, RolloutMetadata, TrainingBatch

    length, answer, rng = config.learner.row_length, config.learner.row_length - prompt, np.random.default_rng(0)
    examples = [
        example_from_rollout(
            Rollout(
                env_name="benchmark",
                env_example_id="0",
                prompt_tokens=rng.integers(0, vocabulary, prompt).astype(np.int32),
                response_tokens=rng.integers(0, vocabulary, answer).astype(np.int32),
                response_logprobs=np.full(answer, -9, np.float32),
                token_rewards=np.zeros(answer, np.float32),
                episode_reward=0.0,
                metadata=RolloutMetadata("benchmark", 0.0, 0),
                rollout_id=f"benchmark-0-0/{index}",
            ),
            advantage=1.0,
            max_tokens=length,
        )
        for index in range(sequences)
    ]
    return TrainingBatch("benchmark", 0, tuple(examples), (), {})


def _restarted_peak() -> int:
    """Gives freed memory back, and counts the peak from now on; bytes held now."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """Of this process, from /proc, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def calibrate(names: Sequence[str]) -> int:
    """Prints the peaks of each shape; how many marks were missed."""
    marks = Marks()
    for name in names:
        peaks = peaks_of(name)
        foretold, measured, with_heap = map(bytes_text, peaks)
        print(
            f"{name:<24} foretold {foretold:>11}   measured {measured:>11}   with glibc's heap {with_heap:>11}",
            flush=True,
        )
        marks.at_most(f"{name}: share that differs", peaks.share, CLOSE)
    print("\n".join(marks.lines))
    return marks.missed


MODELS, ROWS = ("0.5b", "1.5b", "7b"), (4096, 16384, 65536)
LARGE = [
    "model.dtype=bfloat16", "learner.micro_batch_rows=1", "learner.minibatches=1", "learner.remat=layer",
    "inference.max_slots=16",
]  # fmt: skip
"""What the tables change of the recipe `cats`, whose lessons do not matter here."""
RANK, TRAINED = 16, ("full", "lora")
LINEAR = 4.4
"""Growth of temporaries over rows of four times the tokens."""


class Asked(NamedTuple):
    """A line of the tables."""

    target: str
    model: str
    trained: str
    length: int


class Line(NamedTuple):
    """What the tables say of one run: cells to print, and what is judged."""

    cells: tuple[str, ...]
    remedy: str
    fits: bool
    temporaries_bytes: int
    cache_bytes: int

    @classmethod
    def of(cls, report: "FitReport") -> "Line":
        """Of a report; the cache is the largest that there is room for."""
        cached = (report.slots[0] + report.room_slots) * report.slot_bytes if report.fits else 0
        temporaries = report.program("gradient").temporaries_bytes
        return cls(report.cells(), str(report.remedy or ""), report.fits, temporaries, cached)


class Lines:
    """Lines that are compiled once: a file has those of before, each added as it is made.

    Args:
        changes: What all runs change; lines of other changes are not this table's.
        file: JSON, a line each; None: nothing is kept.
    """

    def __init__(self, changes: Sequence[str], file: Path | None) -> None:
        self._changes, self._file = list(changes), file
        self._known: dict[Asked, Line] = {}
        for text in file.read_text().splitlines() if file is not None and file.exists() else []:
            row = json.loads(text)
            if row["changes"] == self._changes:
                found = row["line"]
                self._known[Asked(**row["asked"])] = Line(**found | {"cells": tuple(found["cells"])})

    def line(self, asked: Asked) -> Line:
        """The one that is known, or that `penstock fit` finds now."""
        if asked in self._known:
            return self._known[asked]
        config = penstock.load_config("cats", [*LARGE, *self._changes])
        rank = RANK if asked.trained == "lora" else None
        report: Any = penstock.overseer.fit(config, asked.target, [asked.model], [asked.length], rank)
        made = self._known[asked] = Line.of(report)
        if self._file is not None:
            row = {"asked": asked._asdict(), "changes": self._changes, "line": made._asdict()}
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return made


def tabulate(target: str, models: Sequence[str], rows: Sequence[int], trained: Sequence[str], lines: Lines) -> int:
    """Prints marks, and a line for each model, what trains of it, and row length on a chip; how many were missed."""
    marks = Marks()
    print(f"{target}: compiled, not run: not yet measured", flush=True)
    for model, kind in product(models, trained):
        before: dict[int, int] = {}
        for length in rows:
            line = lines.line(Asked(target, model, kind, length))
            before[length] = line.temporaries_bytes
            cells = "  ".join(f"{cell:>12}" for cell in line.cells)
            print(f"  {model:<5}{kind:<5}{length:>7,}  {cells}  {line.remedy}", flush=True)
            judge(marks, f"{model} {kind}", target, before, line)
    print("\n".join(marks.lines))
    return marks.missed


def judge(marks: Marks, name: str, target: str, temporaries: dict[int, int], line: Line) -> None:
    """What must hold of a line, given temporaries by row length, this line's the last."""
    length, found = list(temporaries.items())[-1]
    if length // 4 in temporaries:
        what = f"{name}, {target}: temporaries of {length:,} by those of {length // 4:,}"
        marks.at_most(what, found / temporaries[length // 4], LINEAR)
    if (name, length) == ("0.5b full", 16384):
        marks.at_most(f"{name}, {length:,}, {target}: GB of temporaries of a row (was 43.7)", found / 1e9, 5)
    if (name, length, target) == ("1.5b full", 16384, "h100:1"):
        marks.at_least(f"{name}, {length:,}, {target}: fits", float(line.fits), 1)
    if (name, length, target) == ("7b lora", 16384, "h100:1"):
        what = f"{name}, {length:,}, {target}: GB of KV cache that there is room for"
        marks.at_least(what, line.cache_bytes / 1e9, 20)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.measure:
        config = calibrated(arguments.measure)
        print(measured(config, model_shape(config.model)))
        return 0
    if arguments.target:
        asked = arguments.models, arguments.rows, arguments.trained, Lines(arguments.set, arguments.results)
        return int(sum(tabulate(target, *asked) for target in arguments.target) > 0)
    return int(calibrate(arguments.shape or list(SHAPES)) > 0)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="of the calibration; by default all")
    parser.add_argument("--target", action="append", help="of the tables, such as h100:1; may be repeated")
    parser.add_argument("--models", nargs="+", default=MODELS, help="of the tables")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of the tables")
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=TRAINED, help="of the tables")
    parser.add_argument("--set", nargs="+", default=(), metavar="KEY=VALUE", help="of the runs in the tables")
    parser.add_argument("--results", type=Path, help="a file that has the tables' lines so far")
    parser.add_argument("--measure", choices=SHAPES, help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

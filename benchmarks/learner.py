"""An update of the learner beside the same one by PyTorch: seconds and memory, in turns.

    .venv/bin/python -m benchmarks.learner --torch-python PYTHON [--model DIRECTORY] [--cases equal ragged …]

PYTHON has torch and transformers. One model (by default 6.3M parameters at random, else a Hugging Face directory), the
same float32 weights, sequences and weights of the loss on both sides, one optimiser step of AdamW per update. Each side
has a process of its own; updates are made in turns, so that both meet the same machine, and the first of each is not
counted. Both compute the head for loss tokens only. Printed are medians on the clock and of processor seconds, their
ratio, pages faulted in, and the peak of resident memory during an update; the losses of the first update must agree. On
a machine that others use, too, `--processors 1` and the processor seconds are what can be compared.

    equal    64 sequences of 80 tokens; torch: a padded batch, which here pads nothing
    ragged   64 sequences of 16 to 512 tokens, most of them short; torch: padded to the longest of a micro-batch
    packed   one row of 4,096 tokens with 64 sequences; torch: the same row and a mask
    segments the same; torch: a padded batch of the 64 sequences

Torch is PyTorch eager with its fused attention (`sdpa`), as transformers calls it, in micro-batches of as many tokens.
It keeps what the backward pass needs, and so does Penstock here (`remat: products`). Both sides have the allocator that
they come with; `--keep penstock` or `--keep both` has glibc keep freed memory, which then is not paged in anew.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.marks import Marks
from benchmarks.update import SHAPE
from penstock.batch import example_from_rollout, pack, trainable_tokens
from penstock.learner import Learner, LearnerConfig, LossConfig, OptimizerConfig
from penstock.model.language import Decoder, load_decoder, save_decoder
from penstock.text import Tokenizer
from penstock.types import RLExample, Rollout, RolloutMetadata, TrainingBatch


class Case(NamedTuple):
    """Sequences, the rows that they are packed into, and what torch gets."""

    lengths: tuple[int, ...]
    row_length: int
    rows: int
    layout: str
    least: float


def ragged_lengths() -> tuple[int, ...]:
    """64 between 16 and 512, evenly spread in their logarithm, in a drawn order."""
    lengths = np.exp(np.linspace(np.log(16), np.log(512), 64)).astype(int)
    return tuple(np.random.default_rng(0).permutation(lengths).tolist())


CASES = {
    "equal": Case((80,) * 64, 80, 16, "padded", 1.0),
    "ragged": Case(ragged_lengths(), 512, 4, "padded", 1.5),
    "packed": Case((64,) * 64, 4096, 1, "packed", 3.0),
    "segments": Case((64,) * 64, 4096, 1, "padded", 1.0),
}
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
"""To glibc: arrays of less than a gibibyte lie in the one heap, whose end is never given back."""


def main() -> None:
    arguments = parse()
    cases = {name: CASES[name]._replace(rows=arguments.rows or CASES[name].rows) for name in arguments.cases}
    if arguments.worker is not None:
        work(Path(arguments.worker), cases[arguments.cases[0]], arguments.attention)
        return
    if arguments.processors is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processors])
    marks = Marks()
    for name in arguments.cases:
        compare(name, cases[name], arguments, marks)
    sys.exit(marks.report())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="an interpreter with torch and transformers")
    parser.add_argument("--model", help="a Hugging Face directory; by default 6.3M parameters at random")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processors", type=int, help="how many each side may use; by default all")
    parser.add_argument("--keep", choices=("none", "penstock", "both"), default="none", help="whose freed memory")
    parser.add_argument("--rows", type=int, help="of a micro-batch, on both sides; by default as many as the case has")
    parser.add_argument("--attention", default="auto", help="learner.attention")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is None and arguments.torch_python is None:
        parser.error("--torch-python is missing: the interpreter of an environment with torch and transformers")
    return arguments


class Side:
    """A process that makes an update for each line that it is sent."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.ready = self._answer()

    def update(self) -> dict[str, Any]:
        """Its seconds and loss, pages that it faulted in, and the peak of its resident memory meanwhile in bytes."""
        proc, pipe = Path(f"/proc/{self._process.pid}"), self._process.stdin
        assert pipe is not None
        (proc / "clear_refs").write_text("5")  # forgets the peak so far
        before = self._faults()
        pipe.write("update\n")
        pipe.flush()
        answer = self._answer()
        status = (proc / "status").read_text().splitlines()
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
        return answer | {"peak_bytes": int(peak) * 1024, "faults": self._faults() - before}

    def end(self) -> None:
        self._process.communicate(timeout=60)

    def _faults(self) -> int:
        """Of all its threads so far: field 10 of ``/proc/<pid>/stat``."""
        return int(Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[7])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait(timeout=60)}")
        return json.loads(line)


def compare(name: str, case: Case, arguments: argparse.Namespace, marks: Marks) -> None:
    """One case: prints medians, and adds its marks."""
    with tempfile.TemporaryDirectory() as folder:
        decoder = prepare(Path(folder), case, arguments.model)
        own = [
            sys.executable,
            "-m",
            "benchmarks.learner",
            "--worker",
            folder,
            "--cases",
            name,
            "--rows",
            str(case.rows),
        ]
        peer = Path(__file__).with_name("learner_peer.py")
        sides = {
            "penstock": Side([*own, "--attention", arguments.attention], KEPT if arguments.keep != "none" else {}),
            "torch": Side(
                [arguments.torch_python, str(peer), folder, case.layout, str(case.row_length * case.rows)],
                KEPT if arguments.keep == "both" else {},
            ),
        }  # fmt: skip
        rounds = [{side: process.update() for side, process in sides.items()} for _ in range(arguments.repeats + 1)]
        for process in sides.values():
            process.end()
    first = {side: found["loss"] for side, found in rounds[0].items()}
    if abs(first["penstock"] - first["torch"]) > 1e-3 * max(1, abs(first["torch"])):
        raise SystemExit(f"{name}: the sides compute another loss: {first}")
    seconds, processor_s, faults = (
        {side: float(np.median([each[side][kind] for each in rounds[1:]])) for side in sides}
        for kind in ("seconds", "processor_s", "faults")
    )
    peak = {side: max(each[side]["peak_bytes"] for each in rounds[1:]) / 1e6 for side in sides}
    tokens = sum(case.lengths)
    print(f"{decoder} {name}: {len(case.lengths)} sequences, {tokens:,} tokens, loss {first['torch']:.5f}")
    for side in sides:
        print(
            f"  {side:<9}{seconds[side]:>8.2f} s {processor_s[side]:>8.2f} processor s "
            f"{tokens / seconds[side]:>8,.0f} tokens/s {peak[side]:>8,.0f} MB {faults[side]:>10,.0f} faults"
        )
    sys.stdout.flush()
    of_processors = processor_s["torch"] / processor_s["penstock"]
    print(f"  torch / penstock {seconds['torch'] / seconds['penstock']:.2f}, of processor seconds {of_processors:.2f}")
    marks.at_least(f"{name}: torch's seconds / penstock's", seconds["torch"] / seconds["penstock"], case.least)
    marks.at_most(f"{name}: penstock's peak memory / torch's", peak["penstock"] / peak["torch"], 1.0)


def prepare(folder: Path, case: Case, model: str | None) -> str:
    """Writes model and sequences, as both sides read them; returns the model's size in words."""
    decoder = Decoder.initialise(SHAPE, jax.random.key(0)) if model is None else load_decoder(model)
    save_decoder(decoder, folder, Tokenizer.load("penstock" if model is None else model))
    examples = make_examples(case, decoder.config.vocab_size)
    rows, longest = pack(examples, case.row_length), max(case.lengths)
    loss_tokens = sum(trainable_tokens(example) for example in examples)

    def weights(example: RLExample) -> np.ndarray:
        return np.where(example.loss_mask, example.advantage / np.float32(loss_tokens), 0)

    def padded(arrays: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.pad(array, (0, longest - len(array))) for array in arrays])

    np.savez(
        folder / "sequences.npz",
        lengths=np.array(case.lengths),
        tokens=padded([example.tokens for example in examples]),
        weights=padded([weights(example) for example in examples]),
        row_tokens=np.stack([row.tokens for row in rows]),
        row_segments=np.stack([row.segment_ids for row in rows]),
        row_positions=np.stack([row.position_ids for row in rows]),
        row_weights=np.stack([weights(row) for row in rows]),
    )
    return f"{decoder.config.parameter_count / 1e6:.0f}M"


def make_examples(case: Case, vocabulary: int) -> tuple[RLExample, ...]:
    """A fifth of each sequence is its prompt; advantages are drawn, none is zero."""
    rng = np.random.default_rng(0)
    made = []
    for index, length in enumerate(case.lengths):
        tokens, prompt = rng.integers(0, vocabulary, length).astype(np.int32), max(1, length // 5)
        response = length - prompt
        rollout = Rollout(
            env_name="benchmark",
            env_example_id=str(index),
            prompt_tokens=tokens[:prompt],
            response_tokens=tokens[prompt:],
            response_logprobs=np.full(response, -9, np.float32),
            token_rewards=np.zeros(response, np.float32),
            episode_reward=0.0,
            metadata=RolloutMetadata("benchmark", 0.0, -1),
            rollout_id=f"benchmark-0-0/{index}",
        )
        made.append(example_from_rollout(rollout, advantage=float(rng.normal()), max_tokens=length))
    return tuple(made)


def work(folder: Path, case: Case, attention: Any) -> None:
    """Penstock's side: an update for each line of the input."""
    config = LearnerConfig(
        loss=LossConfig(surrogate="reinforce", correction={"kind": "none"}),  # pyright: ignore[reportArgumentType]
        row_length=case.row_length,
        micro_batch_rows=case.rows,
        attention=attention,
        remat="products",
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=0),
    )
    learner = Learner(load_decoder(folder), config, 1000)
    learner.compile()
    examples = make_examples(case, learner.decoder.config.vocab_size)
    print(json.dumps({"jax": jax.__version__}), flush=True)
    for _ in sys.stdin:
        started, used = time.perf_counter(), time.process_time()
        metrics = learner.update(TrainingBatch("benchmark", learner.step, examples, (), {}), learner.step)
        jax.block_until_ready(learner.decoder)
        seconds, processor_s = time.perf_counter() - started, time.process_time() - used
        told = {"seconds": seconds, "processor_s": processor_s, "loss": metrics["train/loss"]}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

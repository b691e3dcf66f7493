"""Seconds per step and peak memory beside TRL's trainers, on the same model, prompts, reward and number of answers.

    python -m benchmarks.end_to_end --trl-python PATH [--rounds 3] [--steps 8] [--cases equal ragged small]

- **equal**: the 6.3 million parameters of `benchmarks.steps`, 8 groups of 8 answers of 64 tokens each.
- **ragged**: as many parameters and a vocabulary of 64, one of which ends an answer: mean length 63, at most 256.
- **small**: a million parameters, answers of 64 tokens.

Each round runs Penstock (asynchronous with a staleness budget of 1, and synchronous), `GRPOTrainer` and `RLOOTrainer`
in turn, each in a process of its own, float32, one optimiser step per batch of 64 answers after prompts of 16. A step
is what lies between the ends of two updates, the first three left out; a system's figure is the median over all
rounds. TRL has the whole batch in one micro-batch, no gradient checkpointing and its own generation; Penstock keeps
what products of matrices made (`remat: products`). The ratio is TRL's seconds by Penstock's asynchronous ones, of the
faster of both trainers. Exits with 1 where a mark is missed.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.first_step import last_line, peer, started
from benchmarks.marks import Marks
from benchmarks.steps import PROMPT_TOKENS, SHAPE, WARM_UP

GROUPS, SAMPLES = 8, 8
LEARNING_RATE = 1e-6
"""So small that lengths stay what they are."""
OURS = {"Penstock, asynchronous": 1, "Penstock, synchronous": 0}
"""By name: the staleness budget."""
THEIRS = {"TRL GRPO": "grpo", "TRL RLOO": "rloo"}
LIMIT_S = 1800.0
"""Longest wait for one run."""


class Case(NamedTuple):
    """What is compared.

    Attributes:
        shape: Of the model.
        tokens: Most of an answer.
        ends: Whether answers end before, with the vocabulary's last token.
        rows: Of a micro-batch of Penstock's.
        ratio: How many times faster than TRL is promised.
    """

    shape: dict[str, Any]
    tokens: int
    ends: bool
    rows: int
    ratio: float


class Measured(NamedTuple):
    """One run: seconds of each step, the mean length of its answers, bytes at the peak."""

    seconds: list[float]
    length: float
    peak_bytes: int


_SMALL = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 328, "num_hidden_layers": 3}
CASES = {
    "equal": Case(SHAPE, 64, False, 16, 1.7),
    "ragged": Case(SHAPE | {"vocab_size": 64, "num_hidden_layers": 9}, 256, True, 8, 3.0),
    "small": Case(SHAPE | _SMALL, 64, False, 8, 5.0),
}


def child(case: Case, staleness_budget: int, steps: int, folder: Path) -> None:
    """The process of Penstock that is measured; prints what `Measured` holds."""
    import penstock
    from benchmarks import steps as one_step
    from benchmarks.updates import update_rows
    from penstock.overseer.config_loading import build_config

    options = argparse.Namespace(
        steps=steps - WARM_UP, groups=GROUPS, samples=SAMPLES, tokens=case.tokens, micro_batch_rows=case.rows
    )
    values = one_step.configuration(options, staleness_budget).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    values["model"]["init"] = case.shape
    arguments: dict[str, Any] = values["curriculum"]["lessons"]["fixed"]["environment"]["env_args"]
    vocab = case.shape["vocab_size"]
    values["model"]["tokenizer"] = str(make_tokenizer(vocab, folder.with_name(f"{folder.name}-tokenizer")))
    arguments |= {"vocab_size": vocab - 1, "stop_token": vocab - 1 if case.ends else vocab}
    values["learner"]["optimizer"] = {"learning_rate": LEARNING_RATE, "warmup_steps": 0}
    values["learner"]["remat"] = "products"  # TRL recomputes nothing either
    penstock.train(build_config(penstock.RunConfig, values), folder, recipe="end_to_end", quiet=True)
    rows = update_rows(folder)
    told = {
        "steps": [row["time"] for row in rows],
        "length": sum(row["train/tokens"] for row in rows) / sum(row["train/sequences"] for row in rows),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(told))


def make_tokenizer(vocab: int, folder: Path) -> Path:
    """A directory with one word per token, of which the last one is the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(vocab - 1), "pad_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), "utf-8")
    return folder


def seconds_of(stamps: list[float]) -> list[float]:
    """Of each step after the warm-up, from when each ended."""
    return [later - earlier for earlier, later in zip(stamps[WARM_UP - 1 :], stamps[WARM_UP:], strict=False)]


def measure(name: str, case_name: str, steps: int, python: str, folder: Path) -> Measured:
    """One run of one system.

    Raises:
        RuntimeError: it failed; the reason.
    """
    case = CASES[case_name]
    if name in THEIRS:
        told = peer(
            python, LIMIT_S, trainer=THEIRS[name], steps=steps, groups=GROUPS, samples=SAMPLES, tokens=case.tokens,
            prompt_tokens=PROMPT_TOKENS, shape=case.shape, ends=case.ends, learning_rate=LEARNING_RATE,
        )  # fmt: skip
        return Measured(seconds_of(told["steps"]), statistics.mean(told["lengths"]), told["peak_bytes"])
    _, done = started(
        [sys.executable, "-m", "benchmarks.end_to_end", "--child", case_name, str(OURS[name]), str(steps), str(folder)],
        LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"penstock's run failed: {last_line(done.stderr)}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Measured(seconds_of(told["steps"]), told["length"], told["peak_bytes"])


def compare(case_name: str, runs: dict[str, list[Measured]], marks: Marks) -> Table:
    """Medians over all rounds; the marks are on their ratios."""
    table = Table(title=f"{case_name}: seconds per step, median (each round's)")
    for column in ("", "s/step", "of the rounds", "tokens per answer", "peak GB"):
        table.add_column(column)
    medians, peaks = {}, {}
    for name, found in runs.items():
        medians[name] = statistics.median(second for run in found for second in run.seconds)
        peaks[name] = statistics.median(run.peak_bytes for run in found)
        rounds = ", ".join(f"{statistics.median(run.seconds):.2f}" for run in found)
        length = statistics.mean(run.length for run in found)
        table.add_row(name, f"{medians[name]:.3f}", rounds, f"{length:.1f}", f"{peaks[name] / 1e9:.2f}")
    ours = next(iter(OURS))
    marks.at_least(
        f"{case_name}: TRL's / Penstock's seconds",
        min(map(medians.__getitem__, THEIRS)) / medians[ours],
        CASES[case_name].ratio,
    )
    marks.at_most(
        f"{case_name}: Penstock's / TRL's peak memory", peaks[ours] / min(map(peaks.__getitem__, THEIRS)), 1.0
    )
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured of each run")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--trl-python", help="interpreter that has trl and torch")
    parser.add_argument("--child", nargs=4, metavar=("CASE", "STALENESS", "STEPS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        case_name, staleness_budget, steps, folder = options.child
        child(CASES[case_name], int(staleness_budget), int(steps), Path(folder))
        return 0
    if options.trl_python is None:
        parser.error("--trl-python is missing: it names an interpreter that has trl and torch")
    console, marks = Console(), Marks()
    for case_name in options.cases:
        runs: dict[str, list[Measured]] = defaultdict(list)
        with tempfile.TemporaryDirectory(prefix="penstock-end-to-end-") as folder:
            for number in range(options.rounds):
                for at, name in enumerate([*OURS, *THEIRS]):
                    run_dir = Path(folder) / f"{number}-{at}"
                    runs[name].append(measure(name, case_name, options.steps + WARM_UP, options.trl_python, run_dir))
        console.print(compare(case_name, runs, marks))
    return marks.report("\nMarks\n")


if __name__ == "__main__":
    sys.exit(main())

"""The operating curve of the parity guard: which faults it finds, how soon, by which rule; and false alarms.

    python -m benchmarks.parity [--ray] [--dtype float32] [--learning-rate 1e-3] [--undisturbed 10000]

Each fault of `benchmarks.parity_faults` begins with one version of a run, which is a real one: training loop, engine,
learner and guard are those of `penstock train`, in one process or under Ray. A fault counts as found with the version
whose check ended the run; the table has how many versions that is from the first damaged one, itself counted, and the
rule. The policy is a drawn decoder whose embedding is larger, so that it is as sure of its tokens as a trained one is.
"""

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import parity_faults
from benchmarks.updates import update_rows
from penstock.environments import load_environment
from penstock.model.language import Decoder, InitConfig, save_decoder
from penstock.overseer import RunConfig
from penstock.overseer.config_loading import build_config
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.training import RunRequest
from penstock.text import Tokenizer
from penstock.types import PenstockError

VOCAB, PROMPT_TOKENS, TOKENS = 384, 16, 16
FIRST = 12
"""The first version that suffers: the guard has seen as many sound ones."""
WATCHED = 8
"""Versions from there on in which a fault may be found."""
WITHIN = 3
STALENESS = (0, 1, 4)
SURER = 64.0
"""Factor of the drawn embedding, over the root of the hidden size: entropy is then near 5 nats of 5.95."""
RULES = {"learner.parity.hard_kl_limit": "hard", "learner.parity.kl_limit": "limit", "what was usual": "jump"}


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Attributes:
        fault: Which.
        staleness: Budget of the run.
        versions: From the first damaged one to the one whose check ended the run, both counted; None: not found.
        rule: Which one ended it.
        kl: Median KL of checks before the fault, and the largest since.
        by_digests: `versions`, had the digests of what the engine serves been asked; None: they are right.
    """

    fault: str
    staleness: int
    versions: int | None
    rule: str
    kl: tuple[float, float]
    by_digests: int | None = None

    def __str__(self) -> str:
        return "not found" if self.versions is None else f"{self.versions} {self.rule}"


def write_policy(folder: Path, options: argparse.Namespace) -> None:
    """The policy of all runs, as a Hugging Face directory."""
    dtype, hidden = options.dtype, options.hidden_size
    tokenizer = Tokenizer.load("penstock")
    shape = InitConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    drawn = Decoder.initialise(shape.model(VOCAB, dtype), jax.random.key(0))
    surer = Decoder(
        (drawn.embedding * SURER / hidden**0.5).astype(dtype), drawn.layers, drawn.final_norm, drawn.head, drawn.config
    )
    save_decoder(surer, folder, tokenizer)


def configuration(options: argparse.Namespace, policy: Path, staleness: int, steps: int, runtime: str) -> RunConfig:
    environment = {
        "env_class": "benchmarks.fixed_length.FixedLengthEnvironment",
        "env_args": {"vocab_size": VOCAB, "prompt_tokens": PROMPT_TOKENS},
    }
    sampling = {"n_generations_per_prompt": 4, "max_output_tokens": TOKENS}
    values: dict[str, Any] = {
        "steps": steps,
        "runtime": runtime,
        "model": {"path": str(policy), "dtype": options.dtype},
        "curriculum": {
            "lessons": {"fixed": {"environment": environment, "sampling_params": sampling}},
            "eval_frequency": 0, "micro_eval_frequency": 0, "eval_n_examples": 1,
        },
        "inference": {"max_slots": 16, "max_seq_len": 48, "prefill_lengths": [46], "prefill_rows": 4},
        "replay": {"groups_per_batch": 2, "staleness_budget": staleness},
        "learner": {
            "row_length": 64, "micro_batch_rows": 4, "parity": {"wait_s": options.wait_s},
            "optimizer": {"learning_rate": options.learning_rate, "warmup_steps": 1},
        },
        "overseer": {"checkpoint_every": 1_000_000},
    }  # fmt: skip
    return build_config(RunConfig, values)


def run(config: RunConfig, folder: Path, fault: str, first: int) -> tuple[str, list[dict[str, float]]]:
    """Runs to the end, whatever it is: the error, empty where there was none, and the numbers of all updates."""
    environments = {
        name: load_environment(lesson.environment.spec) for name, lesson in config.curriculum.lessons.items()
    }
    factories = {"inference": parity_faults.make_inference} if config.runtime == "ray" else {}
    if config.runtime == "ray":
        env = {parity_faults.VARIABLE: f"{fault}:{first}"}
        config = build_config(RunConfig, {**config.dump(), "roles": {"inference": {"env": env}}})
    error = ""
    try:
        with parity_faults.in_this_process(fault, first):
            RunRequest(LanguageKind(environments, factories), config, folder, False, "parity", True).run()
    except PenstockError as failure:
        error = str(failure)
    return error, update_rows(folder)


def outcome(fault: str, staleness: int, error: str, rows: Sequence[dict[str, float]]) -> Outcome:
    """Reads the version and the rule out of what ended the run.

    Raises:
        AssertionError: something else ended it, or before the fault began.
    """
    before = [row["train/parity_kl"] for row in rows[:FIRST] if "train/parity_kl" in row]
    since = [row["train/parity_kl"] for row in rows[FIRST:] if "train/parity_kl" in row]
    found = re.search(r"version (\d+): \S+ and the learner disagree.*KL ([\d.e+-]+|inf|nan)", error)
    assert found is not None or not error, error
    unlike = [step for step, names in sorted(parity_faults.UNLIKE.items()) if names]
    by_digests = unlike[0] - FIRST + 1 if unlike else None
    if found is None:
        return Outcome(fault, staleness, None, "", (float(np.median(before)), max(since, default=0.0)), by_digests)
    rule = next(rule for words, rule in RULES.items() if words in error)
    versions = int(found[1]) - FIRST + 1
    assert versions > 0, f"a false alarm: {error}"
    kl = float(np.median(before)), max([*since, float(found[2])])
    return Outcome(fault, staleness, versions, rule, kl, by_digests)


def curve(options: argparse.Namespace, folder: Path, runtime: str) -> list[Outcome]:
    """Every fault at every staleness."""
    found: list[Outcome] = []
    for fault in options.faults:
        for staleness in options.staleness:
            began = time.perf_counter()
            config = configuration(options, folder / "policy", staleness, FIRST + WATCHED, runtime)
            place = folder / f"{runtime}-{parity_faults.NAMES.index(fault)}-{staleness}"
            found.append(outcome(fault, staleness, *run(config, place, fault, FIRST)))
            print(
                f"  {runtime:<6} {fault:<24} staleness {staleness}  {found[-1]!s:<12} KL {found[-1].kl[0]:.1e} before, "
                f"{found[-1].kl[1]:.1e} after  ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
    return found


def start(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """By fault that may be there from the first version on: what finds it, the probe at the start or a later check."""
    said: dict[str, str] = {}
    for fault in (each for each in options.faults if each in parity_faults.FROM_THE_START):
        config = configuration(options, folder / "policy", 1, WATCHED, "local")
        error, _ = run(config, folder / f"start-{parity_faults.NAMES.index(fault)}", fault, 0)
        numbers = re.search(r"(?:(at start-up)|version (\d+)).*KL ([\d.e+-]+|inf)", error)
        assert numbers is not None or not error, error
        said[fault] = "not found" if numbers is None else numbers[1] or f"version {numbers[2]}"
        print(f"  from the start: {fault:<24} {said[fault]}" + (f", KL {numbers[3]}" if numbers else ""), flush=True)
    return said


def table(found: Sequence[Outcome], staleness: Sequence[int], with_digests: bool = False) -> list[str]:
    """By fault and staleness, as Markdown; exceptions are said below.

    Args:
        found: Of every fault at every staleness.
        staleness: The columns.
        with_digests: Whether there were any, in this process.
    """
    lines = [
        "| fault | " + " | ".join(f"staleness {each}" for each in staleness) + " | KL before → after | digests |",
        "| --- |" + " --- |" * (len(staleness) + 2),
    ]
    for fault in dict.fromkeys(each.fault for each in found):
        of_fault = {each.staleness: each for each in found if each.fault == fault}
        before = np.median([each.kl[0] for each in of_fault.values()])
        after = np.median([each.kl[1] for each in of_fault.values()])
        cells = " | ".join(str(of_fault[each]) for each in staleness)
        proven = {each.by_digests for each in of_fault.values()}
        digests = "/".join(sorted(str(each or "right") for each in proven)) if with_digests else "—"
        lines.append(f"| {fault} | {cells} | {before:.1e} → {after:.1e} | {digests} |")
    late = [each for each in found if each.versions is None or each.versions > WITHIN]
    lines += ["", f"found within {WITHIN} versions: {len(found) - len(late)} of {len(found)}"]
    lines += [f"exception: {each.fault}, staleness {each.staleness}: {each}" for each in late]
    return lines


def undisturbed(options: argparse.Namespace, folder: Path, updates: int) -> str:
    """One run without a fault: how many updates it made, and what ended it."""
    began = time.perf_counter()
    config = configuration(options, folder / "policy", options.staleness[-1], updates, "local")
    error, rows = run(config, folder / "undisturbed", "", 0)
    seconds = time.perf_counter() - began
    kls = np.array([row["train/parity_kl"] for row in rows if "train/parity_kl" in row])
    unchecked = rows[-1]["train/parity_unchecked"] if rows else 0.0
    low, middle, high = np.quantile(kls, [0.01, 0.5, 0.99])
    entropies = [row["train/entropy"] for row in rows if "train/entropy" in row] or [math.nan]  # none without signal
    return (
        f"{len(rows):,} undisturbed updates at staleness {options.staleness[-1]} in {seconds:.0f} s: "
        f"{'no false alarm' if not error else 'FALSE ALARM: ' + error}; {len(kls):,} checked, {unchecked:.0f} without "
        f"evidence; KL {low:.1e} to {high:.1e} (1% to 99%), median {middle:.1e}, largest {kls.max():.1e}; "
        f"entropy {entropies[0]:.2f} nats at first, {entropies[-1]:.2f} at last"
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="under Ray; skipped with the reason where it is missing")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--wait-s", type=float, default=20.0, help="learner.parity.wait_s")
    parser.add_argument("--faults", nargs="*", default=list(parity_faults.NAMES), help="by name; all by default")
    parser.add_argument("--staleness", nargs="+", type=int, default=list(STALENESS))
    parser.add_argument("--undisturbed", type=int, default=0, metavar="UPDATES", help="of a run without a fault")
    options = parser.parse_args(words)
    if unknown := set(options.faults) - set(parity_faults.NAMES):
        parser.error(f"--faults names {', '.join(sorted(unknown))}; known are {', '.join(parity_faults.NAMES)}")
    return options


def main() -> int:
    options = parse()
    runtime = "ray" if options.ray else "local"
    if options.ray and (missing := _without_ray()):
        print(f"skipped: {missing}")
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-parity-") as name:
        folder = Path(name)
        write_policy(folder / "policy", options)
        if options.faults:
            print(f"{runtime}, {options.dtype}, learning rate {options.learning_rate:g}: versions until found, by what")
            with_digests = parity_faults.WITH_DIGESTS and not options.ray
            print("\n" + "\n".join(table(curve(options, folder, runtime), options.staleness, with_digests)))
        if options.faults and not options.ray:
            start(options, folder)
        if options.undisturbed:
            print(undisturbed(options, folder, options.undisturbed), flush=True)
    return 0


def _without_ray() -> str:
    try:
        import penstock.overseer.ray  # noqa: F401
    except PenstockError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())

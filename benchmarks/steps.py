"""Seconds per step of reinforcement learning, end to end and split by stage, with the production components.

    python -m benchmarks.steps [--steps 12] [--groups 8] [--samples 8] [--tokens 64]

The shape is a Qwen2 of 6.3 million float32 parameters; a step is 64 completions of 64 tokens after prompts of 16,
scored, stored, packed, trained on, and handed over. The split is of synchronous steps (staleness zero), in which the
stages follow one another; the asynchronous line says what overlapping them gives on the same machine. Medians over
the steps after the first three. The run checks its own correctness: engine and learner agree at every step. With
`--parity ROUNDS` it prints instead what that costs: runs that check every step and runs that never do, in turn.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import penstock
from benchmarks import fixed_length
from benchmarks.updates import update_rows
from penstock.overseer.config_loading import build_config
from penstock.rundir import read_events, read_status

VOCAB = 8192
PROMPT_TOKENS = 16
SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 656,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
"""Of the model: 6.3 million parameters."""
WARM_UP = 3
MARKS = {"generation tokens/s": 4500.0, "update s": 1.5}


NEVER = 1_000_000
"""Updates between two checks of parity, for a run without any."""
MOST_PARITY = 0.03
"""Of a step, where the evidence is in the batch."""


def configuration(options: argparse.Namespace, staleness_budget: int, every: int = 1) -> penstock.RunConfig:
    environment = {
        "env_class": "benchmarks.fixed_length.FixedLengthEnvironment",
        "env_args": {"vocab_size": VOCAB, "prompt_tokens": PROMPT_TOKENS},
    }
    sampling = {"n_generations_per_prompt": options.samples, "max_output_tokens": options.tokens}
    length = PROMPT_TOKENS + options.tokens
    values: dict[str, Any] = {
        "steps": options.steps + WARM_UP,
        "model": {"init": SHAPE},
        "curriculum": {
            "lessons": {"fixed": {"environment": environment, "sampling_params": sampling}},
            "eval_frequency": 0, "micro_eval_frequency": 0, "eval_n_examples": 1,
        },
        "inference": {"max_slots": options.groups * options.samples, "max_seq_len": length},
        "replay": {"groups_per_batch": options.groups, "staleness_budget": staleness_budget},
        "learner": {
            "row_length": length, "micro_batch_rows": options.micro_batch_rows, "parity": {"every": every},
        },
        "overseer": {"checkpoint_every": 10_000},
    }  # fmt: skip
    return build_config(penstock.RunConfig, values)


def run(options: argparse.Namespace, staleness_budget: int, folder: Path, every: int = 1) -> list[dict[str, float]]:
    """One row of seconds per step after the warm-up."""
    fixed_length.GENERATED.clear()
    fixed_length.SCORED.clear()
    run_dir = folder / f"staleness-{staleness_budget}-{len(list(folder.iterdir()))}"
    penstock.train(configuration(options, staleness_budget, every), run_dir, recipe="steps", quiet=True)
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == (options.steps + WARM_UP) * options.groups * options.samples, ledger
    assert any(event["event"] == "parity" for event in read_events(run_dir / "events.jsonl"))
    rows = update_rows(run_dir)
    for earlier, row in zip(rows, rows[1:], strict=False):
        row["seconds"] = row["time"] - earlier["time"]
    return rows[WARM_UP:]


def split(rows: list[dict[str, float]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per stage of synchronous steps; step i's groups are entries i·B … of the environment's records."""
    stages: dict[str, list[float]] = {
        name: [] for name in ("generation", "scoring", "batch", "update", "hand-over", "step")
    }
    for i, row in enumerate(rows, start=WARM_UP):
        window = slice(i * options.groups, (i + 1) * options.groups)
        spans = fixed_length.GENERATED[window]
        generation = max(end for _, end in spans) - min(begin for begin, _ in spans)
        scoring = sum(fixed_length.SCORED[window])
        stages["generation"].append(generation)
        stages["scoring"].append(scoring)
        stages["batch"].append(max(0.0, row["time/wait_for_batch"] - generation - scoring))
        stages["update"].append(row["time/update"])
        stages["hand-over"].append(row["weights/publish_s"])
        stages["step"].append(row["seconds"])
    return stages


def cost_of_parity(options: argparse.Namespace, folder: Path) -> list[str]:
    """What checking every step costs, by staleness: the learner's own seconds, and the difference between steps."""
    lines: list[str] = []
    for staleness, evidence in ((0, "sequences of the batch"), (1, "canaries where none arrived in time")):
        seconds: dict[int, list[float]] = {1: [], NEVER: []}
        parity: list[float] = []
        for _ in range(options.parity):
            for every in seconds:
                rows = run(options, staleness, folder, every)
                seconds[every] += [row["seconds"] for row in rows]
                parity += [row["time/parity"] for row in rows if every == 1]
        checked, unchecked = (statistics.median(each) for each in seconds.values())
        parity_s = statistics.median(parity)
        share = parity_s / checked
        verdict = f" (at most {MOST_PARITY:.0%}: {'reached' if share <= MOST_PARITY else 'MISSED'})"
        lines.append(
            f"staleness {staleness}, {evidence}: {parity_s * 1e3:.1f} ms of a step of {checked:.3f} s, "
            f"{share:.1%}{verdict if staleness == 0 else ''}; steps without any check {unchecked:.3f} s"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--micro-batch-rows", type=int, default=16)
    parser.add_argument("--parity", type=int, default=0, metavar="ROUNDS")
    options = parser.parse_args()
    if options.parity:
        with tempfile.TemporaryDirectory(prefix="penstock-steps-") as folder:
            print("\n".join(cost_of_parity(options, Path(folder))))
        return 0
    tokens = options.groups * options.samples * options.tokens
    with tempfile.TemporaryDirectory(prefix="penstock-steps-") as folder:
        stages = split(run(options, 0, Path(folder)), options)
        overlapped = [row["seconds"] for row in run(options, 1, Path(folder))]
    print(
        f"{options.groups * options.samples} completions of {options.tokens} tokens: "
        f"median (minimum) of {options.steps} steps"
    )
    for name, seconds in stages.items():
        print(f"  {name:<12} {statistics.median(seconds):8.4f} s  ({min(seconds):.4f})")
    print(f"  asynchronous {statistics.median(overlapped):8.4f} s  ({min(overlapped):.4f})  staleness budget 1")
    print(f"generation {tokens / statistics.median(stages['generation']):,.0f} tokens/s "
          f"(mark {MARKS['generation tokens/s']:,.0f}); update {statistics.median(stages['update']):.2f} s "
          f"(mark {MARKS['update s']} s)")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

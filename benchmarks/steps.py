"""Seconds per step of reinforcement learning, end to end and split by stage, with the production components.

    python -m benchmarks.steps [--steps 12] [--groups 8] [--samples 8] [--tokens 64]

The shape is a Qwen2 of 6.3 million float32 parameters; a step is 64 completions of 64 tokens after prompts of 16,
scored, stored, packed, trained on, and handed over. The split is of synchronous steps (staleness zero), in which the
stages follow one another; the asynchronous line says what overlapping them gives on the same machine. Medians over
the steps after the first three. The run checks its own correctness: engine and learner agree at every step.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import penstock
from benchmarks import fixed_length
from penstock.overseer.config_loading import build_config
from penstock.rundir import read_events, read_metrics, read_status

VOCAB = 8192
PROMPT_TOKENS = 16
WARM_UP = 3
MARKS = {"generation tokens/s": 4500.0, "update s": 1.5}


def configuration(options: argparse.Namespace, staleness_budget: int) -> penstock.RunConfig:
    environment = {
        "env_class": "benchmarks.fixed_length.FixedLengthEnvironment",
        "env_args": {"vocab_size": VOCAB, "prompt_tokens": PROMPT_TOKENS},
    }
    sampling = {"n_generations_per_prompt": options.samples, "max_output_tokens": options.tokens}
    length = PROMPT_TOKENS + options.tokens
    shape = {
        "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 656,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    values: dict[str, Any] = {
        "steps": options.steps + WARM_UP,
        "model": {"init": shape},
        "curriculum": {
            "lessons": {"fixed": {"environment": environment, "sampling_params": sampling}},
            "eval_frequency": 0, "micro_eval_frequency": 0, "eval_n_examples": 1,
        },
        "inference": {"max_slots": options.groups * options.samples, "max_seq_len": length},
        "replay": {"groups_per_batch": options.groups, "staleness_budget": staleness_budget},
        "learner": {"row_length": length, "micro_batch_rows": options.micro_batch_rows},
        "overseer": {"checkpoint_every": 10_000},
    }  # fmt: skip
    return build_config(penstock.RunConfig, values)


def run(options: argparse.Namespace, staleness_budget: int, folder: Path) -> list[dict[str, float]]:
    """One row of seconds per step after the warm-up."""
    fixed_length.GENERATED.clear()
    fixed_length.SCORED.clear()
    run_dir = folder / f"staleness-{staleness_budget}"
    penstock.train(configuration(options, staleness_budget), run_dir, recipe="steps", quiet=True)
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == (options.steps + WARM_UP) * options.groups * options.samples, ledger
    assert any(event["event"] == "parity" for event in read_events(run_dir / "events.jsonl"))
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--micro-batch-rows", type=int, default=16)
    options = parser.parse_args()
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

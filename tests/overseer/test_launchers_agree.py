"""A run goes the same way wherever its components live: in one process, or each as in a process of its own."""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.overseer import train
from penstock.rundir import read_metrics, read_records
from tests.overseer.conftest import tiny
from tests.overseer.test_run import running
from tests.overseer.test_training import weights

ALONE: dict[str, Any] = {"rollout": {"workers": 1}, "inference": {"servers": 1}}
CHANGES: dict[str, Any] = {
    "async": False,
    "steps": 4,
    "overseer": {"checkpoint_every": 1, "keep_checkpoints": 9},
    "curriculum": {"eval_frequency": 2, "micro_eval_frequency": 1},
}


def numbers(run_dir: Path, *kept: str) -> dict[int, dict[str, float]]:
    """By step, those of all lines together."""
    found: dict[int, dict[str, float]] = {}
    for row in read_metrics(run_dir / "metrics.jsonl"):
        found.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k.startswith(kept)})
    # The evaluation after the training may forestall the one that is due with the last version.
    found[4] = {name: value for name, value in found[4].items() if not name.startswith("eval/")}
    return found


def said(run_dir: Path) -> dict[str, list[tuple[str, list[int]]]]:
    """By evaluation, ids and answers, which are those of one version."""
    found = {}
    for path in sorted((run_dir / "evaluations").iterdir()):
        records = read_records(path)
        step = int(path.stem.rpartition("-")[2])
        assert {s for r in records for s in r.rollout.response_weight_steps[r.rollout.response_mask]} == {step}
        if path.stem == "eval-0-4":  # of the last version, which the evaluation after the training may forestall
            continue
        found[path.stem] = [(r.rollout.rollout_id, r.rollout.response_tokens.tolist()) for r in records]
    return found


def check_timings(run_dir: Path) -> None:
    """Every stored rollout says what it took, and its stages are no more than the whole."""
    paths = [*(run_dir / "rollouts").glob("part-*.parquet"), *(run_dir / "evaluations").iterdir()]
    for record in (each for path in paths for each in read_records(path)):
        timings = dict(record.rollout.timings)
        assert timings.keys() == {"wait_s", "prefill_s", "decode_s", "reward_s", "generate_s"}
        assert min(timings.values()) >= 0 < timings["decode_s"]
        whole, _ = timings.pop("generate_s"), timings.pop("reward_s")  # which comes after it
        assert sum(timings.values()) <= whole + 1e-5  # servers tell microseconds


def test_staleness_zero_is_the_same_to_the_last_bit_in_one_process_and_in_many(tmp_path: Path):
    local, first, second = tmp_path / "local", tmp_path / "first", tmp_path / "second"
    train(tiny(CHANGES), local, quiet=True)
    for path in (first, second):
        with running(path, {**CHANGES, **ALONE}) as run:
            run.end()
    for path in (first, second):
        for step in range(5):
            np.testing.assert_equal(weights(path, step), weights(local, step))
        kept = ("train/", "rollout/cats/", "env/cats/", "eval/", "eval_report/", "micro_eval/")
        assert numbers(path, *kept) == numbers(local, *kept)
        assert said(path) == said(local)
    for path in (local, first):
        check_timings(path)
    names = ["after-0-4", "eval-0-2", "micro_eval-0-1", "micro_eval-0-3", "untrained-0-0"]
    assert list(said(local)) == names
    assert all("env/cats/failed_groups" in numbers(local, "env/")[step] for step in (1, 2, 3, 4))
    assert all("train/loss" in numbers(local, "train/loss")[step] for step in (1, 2, 3, 4))
    assert all("micro_eval/cats/reward_mean" in numbers(local, "micro_eval")[step] for step in (1, 3))

"""Whole runs whose reward function breaks every rule: they end by themselves, and every reward is its own rollout's."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.environments import misbehaving_rewards
from tests.environments.misbehaving_rewards import DEEDS, DETACHED_S, right_reward

from penstock.rundir import read_parquet, read_status, records_from_table

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
ENVIRONMENT = "curriculum.lessons.cats.environment"


@pytest.mark.attack
@pytest.mark.slow
def test_a_run_with_rewards_that_break_every_rule_trains_on_none_that_are_not_its_own(tmp_path):
    deeds = [*sorted({*DEEDS} - {""}), *[""] * 2 * len(DEEDS)]
    rows = [{"prompt": f"number {i}", "answer": "", "deed": deed} for i, deed in enumerate(deeds)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = {"path": "rows.jsonl", "reward": f"{misbehaving_rewards.__file__}:score", "reward_timeout_s": 2}
    words = [
        *("train", "cats", "steps=40", "--run-dir", "run", "replay.groups_per_batch=4"),
        f"{ENVIRONMENT}.env_class=penstock.environments.jsonl.JsonlEnvironment",
        *(f"{ENVIRONMENT}.env_args.{key}={value}" for key, value in arguments.items()),
        "curriculum.eval_n_examples=4",
    ]
    run = subprocess.run([PENSTOCK, *words], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    assert read_status(tmp_path / "run" / "status.json")["state"] == "finished"
    records = [
        record
        for part in (tmp_path / "run" / "rollouts").glob("*.parquet")
        for record in records_from_table(read_parquet(part))
    ]
    assert len(records) >= 40 * 4 * 8
    wrong = [
        r.rollout.rollout_id for r in records if r.rollout.episode_reward != right_reward(r.rollout.turns[-1].content)
    ]
    assert wrong == []
    assert "reward function" in (tmp_path / "run" / "events.jsonl").read_text()  # failed groups are told
    assert [p for p in psutil.process_iter(["cmdline"]) if DETACHED_S in (p.info["cmdline"] or ())] == []

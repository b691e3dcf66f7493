"""One run through the real command line: trained, interrupted, resumed, evaluated."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.rundir import read_events, read_metrics, read_parquet, read_status, records_from_table

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
LIMIT_S = 240
SMALL = [
    "replay.groups_per_batch=2",
    "curriculum.lessons.cats.sampling_params.n_generations_per_prompt=4",
    "curriculum.eval_n_examples=4",
    "inference.max_slots=16",
    "learner.micro_batch_rows=2",
]


def penstock(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "160"}
    return subprocess.run([PENSTOCK, *words], cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The run directory of a long run that got Ctrl-C after its first updates, and what it left."""
    folder = tmp_path_factory.mktemp("runs")
    words = [PENSTOCK, "train", "cats", "steps=100000", *SMALL, "--run-dir", "mine"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_updates(process, folder / "mine")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return folder / "mine", subprocess.CompletedProcess(words, process.returncode, out, err)


def wait_for_updates(process: subprocess.Popen[str], run_dir: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any("train/loss" in line for line in read_metrics(run_dir / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no update in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def resumed(interrupted) -> tuple[int, subprocess.CompletedProcess[str]]:
    """The step that the resumed run was to reach, and what it left."""
    run_dir, _ = interrupted
    goal = last_step(run_dir) + 2
    return goal, penstock("train", "--resume", "mine", f"steps={goal}", cwd=run_dir.parent)


def last_step(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(interrupted):
    run_dir, done = interrupted
    assert done.returncode == 130, done.stderr
    assert "penstock train --resume mine" in done.stdout and "Traceback" not in done.stderr
    status = read_status(run_dir / "status.json")
    assert status is not None and status["state"] == "stopped"
    assert last_step(run_dir) == status["step"] >= 1


@pytest.mark.slow
def test_resume_goes_on_to_the_new_goal(interrupted, resumed):
    run_dir, _ = interrupted
    goal, done = resumed
    assert done.returncode == 0, done.stderr
    assert f"finished at step {goal}/{goal}" in done.stdout
    trained = [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in line]
    assert trained == list(range(1, goal + 1))
    starts = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "start"]
    assert [event["lineage"] for event in starts] == [0, 1]


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_offline_by_its_own_recipe(interrupted, resumed):
    run_dir, _ = interrupted
    goal, _ = resumed
    words = ["eval", f"mine/checkpoints/step-{goal}", "--n", "3", "--generations", "2", "--json"]
    done = penstock(*words, "--k", "2", "--baseline", str(run_dir / "checkpoints" / f"step-{goal}"),
                    "--rollouts", "out/rollouts.parquet", cwd=run_dir.parent)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    same = {"value": 0.0, "low": 0.0, "high": 0.0}
    assert report["lessons"]["cats"]["difference"] == {
        "prompts": 3, "reward_mean": same, "success_rate": same, "pass_at": {"2": same}, "unpaired": 0
    }  # fmt: skip
    assert report["baseline"]["lessons"]["cats"]["reward_mean"] == report["lessons"]["cats"]["reward_mean"]
    cats = report["lessons"]["cats"]
    assert (cats["prompts"], cats["rollouts"], list(cats["pass_at"])) == (3, 6, ["2"])
    assert cats["reward_mean"]["low"] <= cats["reward_mean"]["value"] <= cats["reward_mean"]["high"]
    records = records_from_table(read_parquet(run_dir.parent / report["rollouts_path"]))
    ids = [record.rollout.rollout_id for record in records]
    assert len(set(ids)) == 12 and {name.partition("-")[0] for name in ids} == {"offline", "baseline"}
    rewards = [record.rollout.episode_reward for record in records if record.group_id.startswith("offline-")]
    assert len(rewards) == 6 and sum(rewards) / 6 == pytest.approx(cats["reward_mean"]["value"], abs=1e-6)


@pytest.mark.slow
def test_a_checkpoint_is_served_until_ctrl_c(interrupted, resumed):
    run_dir, _ = interrupted
    goal, _ = resumed
    words = [
        PENSTOCK,
        "serve",
        f"mine/checkpoints/step-{goal}",
        "--port",
        "0",
        "--name",
        "kitten",
        "engine.max_slots=2",
    ]
    variables = {**os.environ, "PENSTOCK_TOKEN": "open sesame"}
    with subprocess.Popen(
        words, cwd=run_dir.parent, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ending = threading.Timer(LIMIT_S, process.kill)
        ending.start()
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if "http://" in line).split()[-1]
            refused = httpx.get(f"{url}/models", timeout=LIMIT_S)
            token = {"Authorization": "Bearer open sesame"}
            models = httpx.get(f"{url}/models", headers=token, timeout=LIMIT_S)
            asked = {"model": "kitten", "prompt": "cat", "max_tokens": 1}
            answer = httpx.post(f"{url}/completions", json=asked, headers=token, timeout=LIMIT_S)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=LIMIT_S)
        finally:
            ending.cancel()
            process.kill()
    assert refused.status_code == 401
    assert [model["id"] for model in models.json()["data"]] == ["kitten"]
    assert answer.json()["system_fingerprint"] == f"weights-0-{goal}"
    assert (process.returncode, err) == (0, "")


BROKEN = """
from penstock.environments.cats import CatsEnvironment


class Broken(CatsEnvironment):
    def score(self, example, text, completion):
        raise ZeroDivisionError("no cat\\nin sight")
"""


@pytest.mark.slow
def test_a_run_whose_environment_breaks_fails_in_one_line(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["train", "cats", *SMALL, "curriculum.lessons.cats.environment.env_class=broken.py:Broken"]
    done = penstock(*words, "rollout.max_consecutive_failures=2", "--run-dir", "mine", "--quiet", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: the run failed: ")
    assert "Broken raised ZeroDivisionError" in line and "no cat in sight" in line
    events = read_events(tmp_path / "mine" / "events.jsonl")
    [failure] = [event for event in events if event["event"] == "failure"]  # groups may fail after it
    assert "no cat\nin sight" in failure["message"]

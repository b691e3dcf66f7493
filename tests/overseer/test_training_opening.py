"""What a run finds when it goes on: nothing yet, less than there was, or what killed runs left in memory."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.overseer import evaluate, train
from penstock.overseer.training import create_run, resume_point
from penstock.replay import RolloutStore
from penstock.rundir import (
    JsonLinesLog,
    MetricsLog,
    RunDirectory,
    read_events,
    read_json_lines,
    read_metrics,
    read_status,
)
from penstock.types import ConfigError, EnvironmentFailure, RunDirectoryError, RunFailed
from penstock.weights import shared_memory
from tests.overseer.conftest import tiny
from tests.overseer.test_fleet_training import tiny as tiny_control


def with_environment(name: str, **changes: object):
    lesson = {"environment": {"env_class": f"tests.overseer.environments.{name}"}}
    return tiny({"curriculum": {"lessons": {"cats": lesson}}, **changes})


def events_of(run_dir: Path, kind: str) -> list[dict]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["event"] == kind]


@pytest.mark.attack
def test_a_run_without_a_checkpoint_begins_anew_in_the_next_lineage(run_dir: Path):
    directory = RunDirectory.create(run_dir, {})
    (directory.checkpoints / ".tmp-step-0-abc").mkdir()  # killed in the middle of it
    assert resume_point(directory) == (1, None, [])
    tickets = JsonLinesLog(directory.tickets_path)
    tickets.append({"ticket_id": "cart-w0-4-0", "rollouts": 1, "lineage": 4})
    tickets.close()
    assert resume_point(directory) == (5, None, [])
    RolloutStore(directory).lineages.begin(6, 5, -1)
    assert resume_point(directory) == (7, None, [])


@pytest.mark.attack
@pytest.mark.parametrize("sign", ["checkpoints/damaged-step-3-abc", "batches/batch_1.parquet"])
def test_a_run_that_has_trained_never_begins_anew(run_dir: Path, sign: str):
    directory = RunDirectory.create(run_dir, {})
    (run_dir / sign).mkdir()
    with pytest.raises(RunDirectoryError, match="no checkpoint that is whole, though it has trained"):
        resume_point(directory)


def test_nor_where_its_batches_lie_elsewhere_or_are_gone(run_dir: Path):
    directory = RunDirectory.create(run_dir, {})
    log = MetricsLog(directory.metrics_path)
    log.append(0, {"eval/cats/reward_mean": 0.1})
    assert resume_point(directory) == (1, None, []), "it was evaluated, and not trained"
    log.append(1, {"train/loss": 0.1})
    with pytest.raises(RunDirectoryError, match="no checkpoint that is whole, though it has trained"):
        resume_point(directory)


@pytest.mark.attack
@pytest.mark.parametrize("url", [None, "elsewhere"])
def test_rollouts_and_batches_that_were_deleted_are_told_and_the_ledger_closes(run_dir: Path, url: str | None):
    store = {} if url is None else {"replay": {"store": {"url": str(run_dir.parent / url)}}}
    train(tiny({"steps": 2, **store}), run_dir, quiet=True)
    for folder in ("rollouts", "batches"):
        shutil.rmtree((run_dir if url is None else run_dir.parent / url) / folder)
    assert train(tiny({"steps": 3, **store}), run_dir, resume=True, quiet=True).complete
    told = events_of(run_dir, "files_missing")
    assert [Path(event["path"]).name for event in told] == ["rollouts", "batches"]
    assert "can no longer be looked at" in told[0]["reason"]
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == 27
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


@pytest.mark.slow
def test_nothing_is_missing_of_a_whole_run(run_dir: Path):
    train(tiny_control({"steps": 1}), run_dir, quiet=True)
    train(tiny_control({"steps": 2}), run_dir, resume=True, quiet=True)
    assert not events_of(run_dir, "files_missing") and not events_of(run_dir, "started_anew")


@pytest.mark.attack
def test_a_last_evaluation_without_a_result_fails_the_run_and_keeps_what_was_trained(run_dir: Path):
    with pytest.raises(RunFailed, match="last evaluation of cats has no result: .*the verifier is away .*; .*--resume"):
        train(with_environment("UnverifiableEnvironment"), run_dir, quiet=True)
    assert read_status(run_dir / "status.json")["state"] == "failed"
    assert (run_dir / "checkpoints" / "step-3").is_dir()
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    assert not [name for row in rows for name in row if name.startswith(("eval/", "eval_report/"))]
    json.dumps(rows, allow_nan=False)
    assert [event["reward"] for event in events_of(run_dir, "evaluation")] == [{"cats": None}, {"cats": None}]
    with pytest.raises(EnvironmentFailure, match="lesson 'cats' has no result: 4 groups failed, .*is away"):
        evaluate(run_dir / "checkpoints" / "step-3", with_environment("UnverifiableEnvironment"))
    summary = train(tiny(), run_dir, resume=True, quiet=True)
    assert summary.complete and summary.after["cats"].groups == 4


@pytest.mark.attack
def test_rewards_beyond_the_limit_cost_their_groups_and_are_named(run_dir: Path):
    summary = train(with_environment("GenerousEnvironment"), run_dir, quiet=True)
    assert summary.complete and summary.failed_groups >= 1
    named = "environment 'cats', group 0, rollout 0: episode_reward is 1e+30: rewards lie within ±1e+06, so scale it"
    assert summary.last_failure == named
    assert {event["reason"] for event in events_of(run_dir, "group_failed")} == {named}
    fates = [row for row in read_json_lines(run_dir / "fates.jsonl") if row["fate"] == "invalid"]
    assert fates and {row["reason"] for row in fates} == {named}
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert len(rows) == 3 and all(row["train/loss"] is not None for row in rows)


@pytest.mark.parametrize("private", [False, True])
def test_runs_that_begin_in_one_second_have_a_directory_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.overseer.training.time.strftime", lambda form: "20261127-080000")
    config = tiny({"overseer": {"private": private}})
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: create_run(config, None, "cats").path.name, range(4)))
    assert sorted(made) == [f"cats-20261127-080000{number}" for number in ("", "-2", "-3", "-4")]


def test_a_default_place_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("nowhere")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        create_run(tiny(), None, "cats")


@pytest.mark.attack
def test_memory_of_killed_runs_is_freed_by_any_run(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared_memory, "memory_folder", lambda: memory)
    left = shared_memory.job_folder("killed")
    left.mkdir(mode=0o700)
    (left / "broadcaster.lock").touch()
    (left / "segment").write_bytes(bytes(8192))
    train(tiny_control({"steps": 1}), run_dir, quiet=True)
    assert not left.exists()
    assert [(event["path"], event["bytes"]) for event in events_of(run_dir, "memory_freed")] == [(str(left), 8192)]


@pytest.mark.attack
@pytest.mark.parametrize("place", ["line\nbreak.parquet", "file/below.parquet", "."])
def test_rollouts_of_an_evaluation_that_cannot_be_written_are_refused_before_it(run_dir: Path, tmp_path: Path, place):
    train(tiny({"steps": 1, "curriculum": {"eval_n_examples": 1}}), run_dir, quiet=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"--rollouts .* (cannot be (written|printed)|exists already and is not overwritten)"
    ):
        evaluate(run_dir / "checkpoints" / "step-1", tiny(), rollouts_path=tmp_path / place)

"""Whole runs in this process: what they leave behind, what they reproduce, and how they end."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import yaml
from rich.console import Console

from penstock.dashboard import read_run_status
from penstock.learner import Learner
from penstock.overseer import RunConfig, print_summary, train
from penstock.overseer.config_loading import build_config
from penstock.overseer.rerun.replay import replay_updates
from penstock.overseer.run import Run
from penstock.rundir import read_events, read_json_lines, read_metrics, read_status
from penstock.types import ConfigError, MismatchError, NoProgressError, RunDirectoryError, RunFailed
from tests.overseer.conftest import TINY, merged, tiny

CLOCKED = (
    "time",
    "time/",
    "throughput/",
    "weights/publish_s",
    "replay/wait_s",
    "inference/tokens_per_s",
    "replay/store_bytes",
)


def reproducible(run_dir: Path) -> list[dict]:
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows]


def weights(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run_dir / "checkpoints" / f"step-{step}" / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_run_without_signal_says_so_once_in_lines_and_status_and_at_its_end(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    lesson = {"environment": {"env_class": "tests.overseer.environments.UnmovedEnvironment"}}
    often = {"eval_frequency": 0, "micro_eval_frequency": 0}
    summary = train(tiny({"steps": 12, "curriculum": {"lessons": {"cats": lesson}, **often}}), run_dir)
    print_summary(summary, Console())
    lines = capsys.readouterr().out.splitlines()
    updates = [line for line in lines if "] step " in line]
    assert len(updates) == 12
    assert all("reward 0.000  zero variance 100%  truncated " in line and "  staleness " in line for line in updates)
    assert not any("  0 tok/s" in line for line in updates)
    assert "ETA" not in updates[4] and all("ETA" in line for line in updates[6:11])
    assert "evaluated" not in lines and sum("held-out reward at step" in line for line in lines) == 2
    told = [line for line in lines if "no signal" in line]
    assert [line.partition("no signal: ")[2].partition(":")[0] for line in told] == [
        "all 30 groups of 10 updates (1–10) had equal rewards",
        "all 36 groups of 12 updates (1–12) had equal rewards",
    ]
    assert lines.index(told[0]) == lines.index(updates[9]) + 1 and summary.no_signal == (told[1],)
    training = read_status(run_dir / "status.json")["training"]
    assert training["no_signal"] == told[1] and training["held_out"]["cats (report)"] == {"step": 12, "score": 0.0}
    assert training["words"].startswith("reward 0.000  zero variance 100%") and training["step_s"] > 0
    events = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "no_signal"]
    assert [event["step"] for event in events] == [10]


def test_a_run_leaves_a_complete_run_directory(run_dir: Path):
    summary = train(tiny(), run_dir, quiet=True)
    assert summary.complete
    assert summary.step == 3
    assert summary.untrained["cats"].groups == summary.after["cats"].groups == 4

    status = read_status(run_dir / "status.json")
    ledger = status["ledger"]
    assert status["state"] == "finished"
    assert ledger["trained"] == 3 * 3 * 3
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")

    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in updates] == [1, 2, 3]
    assert all(row["train/parity_checked"] >= 8 and row["train/parity_kl"] <= 1e-8 for row in updates)
    assert updates[-1]["train/parity_unchecked"] == 0
    assert all(0 <= row[f"time/idle/{role}"] <= 1 for row in updates for role in ("learner", "inference"))
    assert status["bottleneck"].startswith("learner ")

    told = [row for row in updates if "env/cats/failed_groups" in row]  # where groups ended since the last
    assert told and all(row["env/cats/failed_groups"] == row["env/cats/failed_rollouts"] == 0 for row in told)
    evaluated = {path.stem: pq.read_table(path) for path in (run_dir / "evaluations").iterdir()}
    assert evaluated["untrained-0-0"].num_rows == evaluated["after-0-3"].num_rows == 4
    assert set(evaluated["after-0-3"].column("mode").to_pylist()) == {"eval"}
    samples = [row["rollout_id"] for row in read_json_lines(run_dir / "samples.jsonl") if row["mode"] == "eval"]
    assert len(samples) == len(evaluated) and {"untrained-cats-0-0-0/0", "after-cats-0-3-0/0"} <= set(samples)

    names = [event["event"] for event in read_events(run_dir / "events.jsonl")]
    assert names[0] == "start"
    assert names[-1] == "end"
    assert "parity" in names
    assert "bottleneck" in names

    parts = [pq.read_table(path) for path in (run_dir / "rollouts").glob("part-*.parquet")]
    assert sum(part.num_rows for part in parts) >= 27
    workers = {worker_id for part in parts for worker_id in part.column("worker_id").to_pylist()}
    assert workers == {f"rollout-worker-0@{socket.gethostname()}:{os.getpid()}"}
    batches = [pq.read_table(path) for path in (run_dir / "batches").glob("batch_*.parquet")]
    assert [batch.num_rows for batch in batches] == [9, 9, 9]
    fates = list(read_json_lines(run_dir / "fates.jsonl"))
    assert sum(row["fate"] == "trained" for row in fates) == 27
    assert (run_dir / "checkpoints" / "step-3" / "model" / "config.json").is_file()
    assert (run_dir / "samples.jsonl").stat().st_size > 0
    assert "versions" in (run_dir / "config.yaml").read_text()


def test_staleness_zero_reproduces_itself_to_the_last_bit(tmp_path: Path):
    config = tiny({"async": False})
    for name in ("first", "second"):
        train(config, tmp_path / name, quiet=True)
    first, second = reproducible(tmp_path / "first"), reproducible(tmp_path / "second")
    assert first == second
    assert len([row for row in first if "train/loss" in row]) == 3
    assert all(row["replay/staleness_max"] == 0 for row in first if "train/loss" in row)
    assert all(row["train/parity_kl"] <= 1e-8 for row in first if "train/loss" in row)
    np.testing.assert_equal(weights(tmp_path / "first", 3), weights(tmp_path / "second", 3))


def test_a_resumed_run_goes_the_way_of_one_that_was_never_stopped(tmp_path: Path):
    changes = {"async": False, "overseer": {"checkpoint_every": 2, "keep_every": 2, "keep_checkpoints": 1}}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(tiny({**changes, "steps": 4}), straight, quiet=True)
    train(tiny({**changes, "steps": 2}), stopped, quiet=True)
    summary = train(tiny({**changes, "steps": 4}), stopped, resume=True, quiet=True)
    assert summary.complete
    assert summary.untrained == train_results(straight)["untrained"]

    def updates(run: Path) -> dict[int, dict]:
        rows = [row for row in reproducible(run) if "train/loss" in row]
        kept = ("train/", "rollout/", "curriculum/")
        return {row["step"]: {k: v for k, v in row.items() if k.startswith(kept)} for row in rows}

    assert updates(straight) == updates(stopped)
    np.testing.assert_equal(weights(straight, 4), weights(stopped, 4))
    kept = [sorted(path.name for path in (run / "checkpoints").glob("step-*")) for run in (straight, stopped)]
    assert kept == [["step-0", "step-2", "step-4"]] * 2
    ledger = read_status(stopped / "status.json")["ledger"]
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    assert ledger["trained"] == 4 * 3 * 3


def train_results(run: Path):
    from penstock.overseer.results import read_results

    return read_results(
        json.loads((run / "checkpoints" / "step-4" / "state.json").read_text())["states"]["run"]["results"]
    )


def test_a_perturbed_weight_on_one_side_stops_the_run_at_start_up(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    import penstock.overseer.language.kind as kind

    original = kind.Learner

    class Perturbed(original):
        def __init__(self, decoder, *others, **more):
            if not isinstance(decoder.final_norm, jax.ShapeDtypeStruct):  # what is compiled ahead has no numbers
                decoder = replace(decoder, final_norm=decoder.final_norm.at[0].add(0.5))
            super().__init__(decoder, *others, **more)

    monkeypatch.setattr(kind, "Learner", Perturbed)
    with pytest.raises(MismatchError, match="disagree about log-probabilities at start-up: KL"):
        train(tiny(), run_dir, quiet=True)
    assert read_status(run_dir / "status.json")["state"] == "failed"
    events = read_events(run_dir / "events.jsonl")
    assert [event["error"] for event in events if event["event"] == "failure"] == ["MismatchError"]
    assert not [event for event in events if event["event"] == "evaluation"]  # none was paid for


PROBE = ["checking that engines and learner agree", "parity"]


@pytest.mark.parametrize("warm_start", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parity_is_probed_before_the_first_evaluation_and_again_after_a_warm_start(run_dir: Path, warm_start: bool):
    changes = {"warm_start": {"steps": 1, "batch_size": 2, "learning_rate": 0.01}} if warm_start else {}
    train(tiny({"steps": 1, "learner": changes, "curriculum": {"micro_eval_frequency": 0}}), run_dir, quiet=True)
    told = [event for event in read_events(run_dir / "events.jsonl") if event["event"] in ("phase", "parity")]
    assert [event.get("phase", "parity") for event in told] == [
        "starting components", *PROBE, "evaluating the untrained policy",
        *(["warm start", *PROBE, "evaluating the warm start"] if warm_start else []),
        "training", "evaluating the trained policy",
    ]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_perturbed_weight_on_one_side_stops_the_run_at_the_next_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
):
    original = Learner.named_arrays

    def perturbed(learner: Learner):
        arrays = original(learner)
        return {**arrays, "final_norm": arrays["final_norm"].at[0].add(0.5)}

    monkeypatch.setattr(Learner, "named_arrays", perturbed)
    with pytest.raises(MismatchError, match=r"version \d+: inference-0 and the learner disagree"):
        train(tiny({"async": asynchronous}), run_dir, quiet=True)


def test_an_existing_run_is_never_overwritten(run_dir: Path):
    run_dir.mkdir()
    (run_dir / "precious.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"not overwritten: .*run_dir in Python.*resume=True"):
        train(tiny(), run_dir, quiet=True)
    assert [path.name for path in run_dir.iterdir()] == ["precious.txt"]


def test_bad_input_is_found_before_anything_is_written(run_dir: Path):
    lesson = {"environment": {"env_class": "penstock.environments.cats.CatEnvironment"}}
    with pytest.raises(ConfigError, match="CatsEnvironment"):
        train(tiny({"curriculum": {"lessons": {"cats": lesson}}}), run_dir, quiet=True)
    assert not run_dir.exists()


def test_an_environment_that_always_raises_ends_the_run_with_its_error(run_dir: Path):
    lesson = {"environment": {"env_class": "tests.overseer.environments.RaisingEnvironment"}}
    config = tiny(
        {"curriculum": {"lessons": {"cats": lesson}, "eval_n_examples": 1}, "rollout": {"max_consecutive_failures": 4}}
    )
    with pytest.raises(RunFailed, match="groups in a row failed.*ZeroDivisionError"):
        train(config, run_dir, quiet=True)


def test_an_environment_that_raises_now_and_then_is_counted_and_the_run_completes(run_dir: Path):
    lesson = {"environment": {"env_class": "tests.overseer.environments.FlakyEnvironment"}}
    assert train(tiny({"curriculum": {"lessons": {"cats": lesson}}}), run_dir, quiet=True).complete
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["invalid"] > 0
    assert ledger["trained"] == 27
    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    failed = sum(row.get("env/cats/failed_groups", 0) for row in updates)
    assert 0 < 3 * failed == sum(row.get("env/cats/failed_rollouts", 0) for row in updates) <= ledger["invalid"]


def test_an_exception_in_the_rollout_thread_ends_the_run_with_that_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    import penstock.overseer.language.local as local

    def broken(self) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(local.RolloutWorker, "run_tickets", broken)
    with pytest.raises(OSError, match="no space left"):
        train(tiny(), run_dir, quiet=True)
    failures = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "failure"]
    assert [event["message"] for event in failures] == ["no space left on device"]  # programs may be told after it


@pytest.mark.slow
def test_a_hanging_environment_ends_the_run_naming_what_is_waited_for(run_dir: Path):
    lesson = {"environment": {"env_class": "tests.overseer.environments.HangingEnvironment"}}
    config = tiny(
        {"curriculum": {"lessons": {"cats": lesson}}, "overseer": {"no_progress_s": 6.0, "stop_timeout_s": 1.0}}
    )
    with pytest.raises(NoProgressError, match=r"cats 6|owes|rollout"):
        train(config, run_dir, quiet=True)


def test_a_stop_request_checkpoints_the_last_update_and_can_be_resumed(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    original = Run.on_metrics

    def stopping(self, role, step, values):
        original(self, role, step, values)
        if (role, step) == ("learner", 2):
            self.stop()

    with monkeypatch.context() as patched:
        patched.setattr(Run, "on_metrics", stopping)
        summary = train(tiny({"steps": 50}), run_dir, quiet=True)
    assert (summary.step, summary.complete, summary.after) == (2, False, {})
    assert read_status(run_dir / "status.json")["state"] == "stopped"
    resumed = train(tiny({"steps": 4}), run_dir, resume=True, quiet=True)
    assert resumed.complete
    [resume] = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "resume"]
    assert (resume["changes"], resume["step"]) == ({"steps": [50, 4]}, 2)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["steps"] == 4
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == 4 * 9
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


def test_a_failing_environment_leaves_a_checkpoint_of_the_last_update(run_dir: Path):
    lesson = {"environment": {"env_class": "tests.overseer.environments.FailingLaterEnvironment"}}
    config = tiny(
        {"steps": 50, "curriculum": {"lessons": {"cats": lesson}}, "rollout": {"max_consecutive_failures": 2}}
    )
    with pytest.raises(RunFailed, match="the verifier went away"):
        train(config, run_dir, quiet=True)
    status = read_status(run_dir / "status.json")
    assert status["state"] == "failed"
    assert "the verifier went away" in read_run_status(run_dir).why
    assert 0 < status["step"] < 50
    assert (run_dir / "checkpoints" / f"step-{status['step']}").is_dir()


def test_lessons_may_be_added_and_removed_on_resume(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    original = Run.on_event

    def stopping(self, kind, step, fields):  # with tickets of both lessons outstanding
        original(self, kind, step, fields)
        if (kind, step) == ("checkpoint", 2):
            self.stop()

    lesson = TINY["curriculum"]["lessons"]["cats"]
    pace = {"replay": {"staleness_budget": 2}, "overseer": {"checkpoint_every": 2}}
    with monkeypatch.context() as patched:
        patched.setattr(Run, "on_event", stopping)
        train(tiny({"steps": 9, **pace, "curriculum": {"lessons": {"dogs": lesson}}}), run_dir, quiet=True)
    state = json.loads((run_dir / "checkpoints" / "step-2" / "state.json").read_text())["states"]
    assert "cats" in {ticket[1] for ticket in state["issuer"]["outstanding"]}
    config = merged(TINY, {"steps": 5, "curriculum": {"lessons": {"birds": lesson}}})
    del config["curriculum"]["lessons"]["cats"]
    config["curriculum"]["lessons"] = {"dogs": lesson, **config["curriculum"]["lessons"]}
    summary = train(build_config(RunConfig, config), run_dir, resume=True, quiet=True)
    assert summary.complete
    print_summary(summary, Console(quiet=True))
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == 5 * 9
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    kinds = {(event["event"], event.get("lesson")) for event in read_events(run_dir / "events.jsonl")}
    assert {("added", "birds"), ("removed", "cats"), ("unlocked", "birds")} <= kinds


def test_a_stop_before_the_last_evaluation_leaves_a_run_that_a_resume_completes(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    original = Run.on_metrics

    def stopping(self, role, step, values):
        original(self, role, step, values)
        if (role, step) == ("learner", 3):
            self.stop()

    with monkeypatch.context() as patched:
        patched.setattr(Run, "on_metrics", stopping)
        stopped = train(tiny(), run_dir, quiet=True)
    assert (stopped.step, stopped.complete, stopped.after) == (3, False, {})
    resumed = train(tiny(), run_dir, resume=True, quiet=True)
    assert (resumed.step, resumed.complete, resumed.after["cats"].groups) == (3, True, 4)
    told = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "evaluated_before"]
    assert told == [], "its last evaluation was still to be made"


def test_a_resume_of_a_finished_run_says_that_it_is_only_evaluated_again(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    first = train(tiny({"steps": 1}), run_dir, quiet=True)
    again = train(tiny({"steps": 1}), run_dir, resume=True)
    assert (again.step, again.complete, again.after) == (1, True, first.after)
    assert "the last version was evaluated: it is only evaluated again" in capsys.readouterr().out
    further = train(tiny({"steps": 2}), run_dir, resume=True, quiet=True)
    assert (further.step, further.complete) == (2, True)
    told = [event["event"] for event in read_events(run_dir / "events.jsonl")].count("evaluated_before")
    assert told == 1, "with more steps there is something to train"


@pytest.mark.slow
def test_a_run_ends_complete_once_so_many_rollouts_were_begun(run_dir: Path):
    summary = train(tiny({"steps": 500, "rollout": {"max_rollouts": 40}}), run_dir, quiet=True)
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert summary.complete and 40 <= ledger["started"] <= 40 + 2 * 3 * 3  # what a worker may begin at a time
    assert 2 <= summary.step <= ledger["started"] // 9 and summary.after["cats"].groups == 4
    [told] = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "goal_reached"]
    assert told["step"] == summary.step and told["reason"].endswith(
        "rollouts were begun, and rollout.max_rollouts is 40"
    )
    assert summary.goal == told["reason"]
    again = train(tiny({"steps": 500, "rollout": {"max_rollouts": 40}}), run_dir, resume=True, quiet=True)
    assert again.complete and again.step <= summary.step + 1
    assert read_status(run_dir / "status.json")["ledger"]["started"] <= ledger["started"] + 2 * 3 * 3


@pytest.mark.slow
def test_a_run_begins_with_the_policy_of_a_checkpoint(tmp_path: Path):
    train(tiny({"steps": 2}), tmp_path / "first", quiet=True)
    checkpoint = str(tmp_path / "first" / "checkpoints" / "step-2")
    still = {"steps": 1, "seed": 5, "learner": {"optimizer": {"learning_rate": 0.0}}}
    model = tiny().dump()["model"]
    for name, source in {"init": model, "alone": {**model, "init": None}}.items():
        config = tiny({**still, "model": {**source, "initial_checkpoint": checkpoint}})
        train(config, tmp_path / name, quiet=True)
        np.testing.assert_equal(weights(tmp_path / name, 1), weights(tmp_path / "first", 2))
    other = {**model, "init": {**model["init"], "hidden_size": 2 * model["init"]["hidden_size"]}}
    with pytest.raises(ConfigError, match=r"model.init.hidden_size is \d+, and \d+ in model.initial_checkpoint: name"):
        train(tiny({**still, "model": {**other, "initial_checkpoint": checkpoint}}), tmp_path / "other", quiet=True)
    with pytest.raises(ConfigError, match=r"model': there is no such directory"):
        missing = {**model, "initial_checkpoint": str(tmp_path)}
        train(tiny({**still, "model": missing}), tmp_path / "other", quiet=True)
    assert not (tmp_path / "other").exists()


def test_a_learning_rate_of_zero_changes_nothing(run_dir: Path):
    summary = train(tiny({"async": False, "learner": {"optimizer": {"learning_rate": 0.0}}}), run_dir, quiet=True)
    assert summary.after["cats"].rewards == summary.before["cats"].rewards
    np.testing.assert_equal(weights(run_dir, 0), weights(run_dir, 3)) if (
        run_dir / "checkpoints/step-0"
    ).exists() else None


@pytest.mark.slow
def test_two_turns_with_a_tool_reproduce_themselves_in_lockstep(tmp_path: Path):
    lesson = {
        "environment": {"env_class": "penstock.environments.calculator.CalculatorEnvironment"},
        "sampling_params": {"max_output_tokens": 40},
    }
    changes = {
        "async": False,
        "model": {"init": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}},
        "curriculum": {"lessons": {"cats": lesson}, "eval_frequency": 0, "micro_eval_frequency": 0},
        "inference": {"max_seq_len": 96},
        "learner": {
            "row_length": 128,
            "warm_start": {"steps": 60, "batch_size": 32, "learning_rate": 0.01},
        },
    }
    for name in ("first", "second"):
        train(tiny(changes), tmp_path / name, quiet=True)
    assert reproducible(tmp_path / "first") == reproducible(tmp_path / "second")
    masks = [
        np.array(mask)
        for path in (tmp_path / "first" / "rollouts").glob("part-*.parquet")
        for mask in pq.read_table(path)["response_mask"].to_pylist()
    ]
    assert any((~mask).any() and mask[-1] for mask in masks), "no rollout had a second turn"


def test_a_run_stays_where_its_rollouts_are(run_dir: Path, tmp_path: Path):
    train(tiny(), run_dir, quiet=True)
    moved = tiny({"steps": 9, "replay": {"store": {"url": str(tmp_path / "elsewhere")}}})
    with pytest.raises(
        ConfigError, match="replay.store.url is .*elsewhere, but the rollouts of .* are at its own folder"
    ):
        train(moved, run_dir, resume=True, quiet=True)


def test_a_batch_maker_for_no_environment_and_a_place_that_cannot_be_used_are_bad_input(run_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="replay.batch_makers names dogs: no such environment; this run has"):
        train(tiny({"replay": {"batch_makers": {"dogs": {"name": "grpo"}}}}), run_dir, quiet=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match="replay.store.url: .*file cannot be used: .*name a place that can be written"
    ):
        train(tiny({"replay": {"store": {"url": str(tmp_path / "file")}}}), tmp_path / "other", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [{"attention": "blocks"}, {"attention": "blocks", "row_lengths": [48, 64]}])
def test_cats_has_the_same_curve_by_blocks_as_dense(tmp_path: Path, rows: dict):
    """Twenty updates at staleness zero, also in rows of two lengths; `penstock replay` makes one of them again."""
    base = {"async": False, "steps": 20, "curriculum": {"eval_frequency": 0, "micro_eval_frequency": 0}}
    found = {}
    for name, changes in {"dense": {"attention": "dense"}, "other": rows}.items():
        train(tiny(merged(base, {"learner": changes})), tmp_path / name, quiet=True)
        lines = [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if "train/loss" in row]
        keys = ("train/loss", "train/grad_norm", "train/entropy", "train/reward_mean")
        found[name] = np.array([[row.get(key, 0.0) for key in keys] for row in lines])
    assert found["dense"].shape == (20, 4) and np.ptp(found["dense"][:, 1]) > 0.01
    np.testing.assert_allclose(found["other"], found["dense"], atol=1e-4)
    assert replay_updates(tmp_path / "other", 18, 20).exit_code == 0

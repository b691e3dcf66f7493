"""Whole fleet runs in this process with real simulator processes: what they leave behind, and how they end."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from rich.console import Console

from penstock.dashboard import print_status, read_run_status
from penstock.overseer import FleetRunConfig, evaluate_fleet, print_summary, train
from penstock.overseer.config_loading import build_config
from penstock.overseer.run import Run
from penstock.rundir import (
    fragments_from_table,
    read_events,
    read_json_lines,
    read_metrics,
    read_parquet,
    read_status,
)
from penstock.types import CheckpointError, ConfigError, NoProgressError, RunFailed, SampleFragment, fold
from tests.overseer.conftest import merged
from tests.overseer.simulators import Guess

GUESS = "tests.overseer.simulators:Guess"
TINY: dict[str, Any] = {
    "seed": 3,
    "steps": 3,
    "model": {"hidden_sizes": [8]},
    "fleet": {
        "tasks": {"guess": {"id": GUESS}},
        "envs_per_worker": 4,
        "envs_per_process": 2,
        "fragment_length": 8,
        "queue_fragments": 2,
    },
    "replay": {"fragments_per_batch": 4, "max_waiting": 4},
    "learner": {"epochs": 2, "minibatches": 2, "optimizer": {"learning_rate": 0.01}},
    "evaluation": {"episodes": 4, "simulators": 2},
}


def tiny(changes: dict[str, Any] | None = None) -> FleetRunConfig:
    return build_config(FleetRunConfig, merged(TINY, changes or {}))


def closes(ledger: dict[str, int]) -> bool:
    return ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


def stored_fragments(run_dir: Path) -> list[SampleFragment]:
    return [
        record.rollout
        for path in sorted((run_dir / "fragments").glob("*.parquet"))
        for record in fragments_from_table(read_parquet(path))
    ]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = Run.on_metrics

    def stopping(self, role, reached, values):
        original(self, role, reached, values)
        if (role, reached) == ("learner", step):
            self.stop()

    monkeypatch.setattr(Run, "on_metrics", stopping)


@pytest.mark.slow
def test_rollout_workers_are_components_of_a_run_while_they_live(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict] = []
    original = Run.on_metrics

    def looking(self, role, step, values):
        original(self, role, step, values)
        seen.append(self.status()["components"])

    monkeypatch.setattr(Run, "on_metrics", looking)
    train(tiny({"evaluation": {"before": False}}), run_dir, quiet=True)
    worker = seen[0]["fleet-0"]
    assert (worker["version"][0], worker["state"], worker["doing"].endswith(" steps")) == (0, "running", True)
    assert "fleet-0" not in read_status(run_dir / "status.json")["components"]


def test_a_run_leaves_a_complete_run_directory(run_dir: Path):
    summary = train(tiny({"overseer": {"checkpoint_every": 2}}), run_dir, quiet=True)
    assert (summary.complete, summary.step, summary.kind) == (True, 3, "control")
    assert summary.untrained["guess"].groups == summary.after["guess"].groups == 4
    assert all(0 <= reward <= 10 for reward in summary.after["guess"].rewards)

    status = read_status(run_dir / "status.json")
    assert status["state"] == "finished" and status["ledger"]["trained"] == 12 and closes(status["ledger"])
    assert status["bottleneck"].startswith("learner ")
    said = [event["words"] for event in read_events(run_dir / "events.jsonl") if event["event"] == "bottleneck"]
    assert said and said[0].startswith("learner ")
    assert {"learner-0", "replay-0", "rollout-0", "evaluator-0"} <= status["components"].keys()
    account = status["account"]
    assert account["started"] == sum(count for place, count in account.items() if place != "started")
    assert account["acting"] == account["buffered"] == account["waiting"] == 0
    assert account["sent"] + account["sent_faults"] == status["ledger"]["started"] * 8, "one book continues the other"

    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/steps"] == 32 and row["fleet/steps_per_s"] >= 0 and row["replay/ledger/trained"] >= 0
        assert all(0 <= row[f"time/idle/{role}"] <= 1 for role in ("learner", "inference"))
    tests = [row for row in read_metrics(run_dir / "metrics.jsonl") if "eval/guess/return_mean" in row]
    assert [row["step"] for row in tests] == [0, 3]
    for row in tests:
        assert 0 < row["eval/guess/discounted_return_mean"] <= row["eval/guess/return_mean"]
        assert row["eval/guess/episodes_per_s"] > 0 and row["eval/guess/episodes"] == 4

    events = list(read_events(run_dir / "events.jsonl"))
    assert (events[0]["event"], events[-1]["event"], events[-1]["still_running"]) == ("start", "end", [])
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [0, 2, 3]
    parts = [pq.read_table(path) for path in (run_dir / "fragments").glob("part-*.parquet")]
    assert sum(part.num_rows for part in parts) >= 12
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-2", "step-3"]
    assert not (run_dir / "stacks.txt").exists()

    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, console)
    print_status(read_run_status(run_dir), console)
    text = console.file.getvalue()
    for words in ("Return of episodes", "untrained", "finished at step 3/3", "penstock eval", "tasks ", "fragments "):
        assert words in text
    assert "serve" not in text and "prompts" not in text and "lessons" not in text


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_steps_that_are_too_old_are_cut_off_and_every_step_is_accounted_for(run_dir: Path, memory: str):
    """A budget of zero versions: no fragment that was sent may hold steps of two."""
    changes = {"steps": 8, "fleet": {"max_staleness": 0}, "model": {"memory": memory}, "evaluation": {"before": False}}
    train(tiny(changes), run_dir, quiet=True)
    status, stored = read_status(run_dir / "status.json"), stored_fragments(run_dir)
    assert status["state"] == "finished" and status["ledger"]["trained"] == 8 * 4 and closes(status["ledger"])
    assert closes(status["account"]) and status["account"]["stale"] > 0
    assert any(fragment.length < 8 for fragment in stored), "shorter ones are trained on"
    assert all(len(set(fragment.weight_steps)) == 1 for fragment in stored)
    assert len(stored) == status["ledger"]["started"]
    sent = status["account"]["sent"] + status["account"]["sent_faults"]
    assert sum(fragment.length for fragment in stored) == sent, "one book continues the other, step by step"


@pytest.mark.slow
def test_the_recorded_seeds_reproduce_the_episodes_of_every_simulator(run_dir: Path):
    train(tiny({"steps": 4, "fleet": {"workers": 2}, "evaluation": {"before": False}}), run_dir, quiet=True)
    events = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "simulator_started"]
    started = {(event["worker"], event["process"]): event for event in reversed(events)}  # first lives
    assert {(f"fleet-{worker}", process) for worker in (0, 1) for process in (0, 1)} <= started.keys()
    assert all(event["seed"] == fold(3, "simulators", 0, 0) for event in events if event["worker"] != "evaluator-0")
    firsts = [fragment for fragment in stored_fragments(run_dir) if fragment.group_id.endswith(f"-{fragment.slot}-0")]
    assert firsts
    for fragment in firsts:
        worker = fragment.metadata.worker_id.partition(".")[0]
        event = started[worker, fragment.slot // 2]
        env = Guess()
        shown = [env.reset(seed=event["first_seeds"][event["slots"].index(fragment.slot)])[0]]
        shown += [env.step(int(action))[0] for action in fragment.actions[""]]  # 8 of an episode's 10 steps
        np.testing.assert_array_equal(fragment.observations[""], np.stack(shown))


@pytest.mark.slow
def test_a_policy_learns_what_it_is_shown(run_dir: Path):
    evaluation = {"episodes": 16, "deterministic": False}
    # Advantages of a policy that gets every reward are noise: normalised, they would take it apart again.
    learner = {"discount": 0.0, "epochs": 4, "normalize_advantages": "none", "optimizer": {"learning_rate": 0.01}}
    changes = {"steps": 60, "evaluation": evaluation, "learner": learner}
    summary = train(tiny(changes), run_dir, quiet=True)
    assert summary.untrained["guess"].reward_mean < 7 < 8.5 < summary.after["guess"].reward_mean


@pytest.mark.slow
def test_a_stop_request_leaves_a_checkpoint_that_a_resume_goes_on_from(run_dir: Path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        stopped = train(tiny({"steps": 50}), run_dir, quiet=True)
    assert (stopped.step, stopped.complete, stopped.after) == (2, False, {})
    assert read_status(run_dir / "status.json")["state"] == "stopped"
    before = json.loads((run_dir / "checkpoints" / "step-2" / "state.json").read_text())["states"]

    resumed = train(tiny({"steps": 4}), run_dir, resume=True, quiet=True)
    assert (resumed.step, resumed.complete) == (4, True)
    assert resumed.untrained == stopped.untrained
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["trained"] == 4 * 4 and closes(ledger)
    events = list(read_events(run_dir / "events.jsonl"))
    assert [event["lineage"] for event in events if event["event"] == "start"] == [0, 1]
    assert [event["changes"] for event in events if event["event"] == "resume"] == [{"steps": [50, 4]}]
    last = json.loads((run_dir / "checkpoints" / "step-4" / "state.json").read_text())["states"]
    counted = [states["statistics"][0][1] for states in (before, last)]
    assert 0 < counted[0] < counted[1]
    ids = [row["rollout_id"] for row in read_json_lines(run_dir / "fates.jsonl") if row["fate"] == "trained"]
    assert len(ids) == len(set(ids)) == 16
    assert [event for event in events if event["event"] == "worker_failed"] == []


@pytest.mark.slow
def test_a_learning_rate_of_zero_changes_nothing(run_dir: Path):
    changes = {
        "learner": {"optimizer": {"learning_rate": 0.0}},
        "overseer": {"keep_checkpoints": 9},
        "evaluation": {"deterministic": False},
    }
    summary = train(tiny(changes), run_dir, quiet=True)
    assert summary.after["guess"].rewards == summary.untrained["guess"].rewards
    assert len(set(summary.after["guess"].rewards)) > 1, "the episodes differ, or equal scores would say nothing"
    first, last = (
        safetensors.numpy.load_file(run_dir / "checkpoints" / f"step-{step}" / "model" / "model.safetensors")
        for step in (0, 3)
    )
    np.testing.assert_equal(first, last)


@pytest.mark.slow
def test_evaluations_during_the_run_and_offline_play_the_same_episodes(run_dir: Path):
    changes = {"evaluation": {"every": 1, "before": False}, "overseer": {"keep_checkpoints": 9}, "steps": 4}
    summary = train(tiny(changes), run_dir, quiet=True)
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "eval/guess/return_mean" in row]
    assert rows[-1]["step"] == 4 and len(rows) >= 2
    report = evaluate_fleet(run_dir / "checkpoints" / "step-4", tiny(changes))
    assert report.tasks["guess"].return_mean.value == summary.after["guess"].reward_mean
    assert report.to_json()["tasks"]["guess"]["episodes"] == 4
    with pytest.raises(ConfigError, match="task 'chess' is not in the recipe: its tasks are guess"):
        evaluate_fleet(run_dir / "checkpoints" / "step-4", tiny(), ["chess"])
    with pytest.raises(ConfigError, match="tasks is empty: name some; the tasks are guess"):
        evaluate_fleet(run_dir / "checkpoints" / "step-4", tiny(), [])
    other = tiny({"fleet": {"tasks": {"guess": {"id": "CartPole-v1"}}}})
    with pytest.raises(ConfigError, match=r"for other observations or actions than guess have \(.*box float32 \[4\], "):
        evaluate_fleet(run_dir / "checkpoints" / "step-4", other)
    with pytest.raises(CheckpointError, match="holds no config.json"):
        evaluate_fleet(run_dir, tiny())


@pytest.mark.slow
def test_a_simulator_that_cannot_be_made_is_found_before_anything_is_written(run_dir: Path):
    for simulator, words in (
        ("tests.overseer.simulators:Unmakeable", "the engine is not here"),
        ("CartPol-v1", "CartPole-v1"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(tiny({"fleet": {"tasks": {"guess": {"id": simulator}}}}), run_dir, quiet=True)
    assert not run_dir.exists()


def test_a_resume_with_simulators_that_the_policy_does_not_fit_is_refused_and_changes_nothing(run_dir: Path):
    train(tiny({"steps": 1, "evaluation": {"before": False, "episodes": 2}}), run_dir, quiet=True)
    before = {path: path.read_bytes() for path in run_dir.rglob("*.*") if path.is_file()}
    other = tiny({"steps": 2, "fleet": {"tasks": {"guess": {"id": "CartPole-v1"}}}})
    with pytest.raises(ConfigError, match=r"fleet.tasks: .*step-1 holds a policy for other observations"):
        train(other, run_dir, resume=True, quiet=True)
    assert {path: path.read_bytes() for path in run_dir.rglob("*.*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.attack
def test_a_simulator_that_dies_is_replaced_told_and_counted(run_dir: Path):
    tasks = {"guess": {"id": GUESS, "kwargs": {"die_at": 70}}}
    changes = {"steps": 40, "fleet": {"tasks": tasks, "limits": {"backoff_s": 0.01}}, "evaluation": {"episodes": 2}}
    assert train(tiny(changes), run_dir, quiet=True).complete
    failures = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "simulator_failed"]
    assert failures and "SIGKILL" in failures[0]["reason"]
    status = read_status(run_dir / "status.json")
    assert status["numbers"]["fleet/restarts"] >= 1 and closes(status["ledger"])
    faulty = sum(row["train/faulty_steps"] for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row)
    assert faulty >= 1


@pytest.mark.slow
@pytest.mark.attack
def test_an_observation_of_nan_costs_its_step_and_is_told_and_counted(run_dir: Path):
    tasks = {"guess": {"id": GUESS, "kwargs": {"nan_every": 25}}}
    assert train(tiny({"steps": 20, "fleet": {"tasks": tasks}}), run_dir, quiet=True).complete
    faults = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "simulator_fault"]
    status = read_status(run_dir / "status.json")
    steps = sum(fault["steps"] for fault in faults)
    assert {fault["reason"] for fault in faults} == {"the observation is nan at [0]: it must be finite"}
    assert status["simulators"] == {
        "failed": steps,
        "last_failure": "a simulator failed (task guess): the observation is nan at [0]: it must be finite",
    }
    assert status["ledger"].get("invalid", 0) == 0 and status["numbers"]["fleet/restarts"] == 0
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    faulty, trained = (sum(row[name] for row in rows) for name in ("train/faulty_steps", "train/steps"))
    assert 0.02 < faulty / trained < 0.06, "one step in 25, and no more than that"


@pytest.mark.slow
@pytest.mark.attack
def test_simulators_that_all_fail_too_often_end_the_run_with_a_checkpoint(run_dir: Path):
    tasks = {"guess": {"id": GUESS, "kwargs": {"die_at": 60}}}
    limits = {"backoff_s": 0.01, "max_restarts": 1}
    changes = {"steps": 500, "fleet": {"tasks": tasks, "limits": limits}, "evaluation": {"before": False}}
    changes["overseer"] = {"max_restarts": 2}
    gist = (
        "failed 3 times.*overseer.max_restarts = 2.*were given up.*it was ended by SIGKILL.*"
        "fleet.limits.max_restarts = 1 restarts: raise that"
    )
    with pytest.raises(RunFailed, match=gist):
        train(tiny(changes), run_dir, quiet=True)
    status = read_run_status(run_dir)
    assert status.state == "failed"
    assert (run_dir / "checkpoints" / f"step-{status.content['step']}").is_dir()


def test_a_run_of_which_nothing_can_be_trained_ends_and_says_why(run_dir: Path):
    tasks = {"guess": {"id": GUESS.replace("Guess", "Stumbling")}}
    changes = {"steps": 500, "fleet": {"tasks": tasks}, "evaluation": {"before": False}}
    with pytest.raises(
        RunFailed, match="nothing of the last 128 deliveries may be trained.*all of its steps are faulty"
    ):
        train(tiny(changes), run_dir, quiet=True)
    assert closes(read_status(run_dir / "status.json")["ledger"])


@pytest.mark.slow
def test_a_run_in_which_nothing_moves_ends_naming_what_is_waited_for(run_dir: Path):
    tasks = {"guess": {"id": GUESS, "kwargs": {"hang_at": 40}}}
    limits = {"no_progress_s": 2.0, "stop_timeout_s": 2.0}
    changes = {"steps": 500, "fleet": {"tasks": tasks}, "overseer": limits, "evaluation": {"before": False}}
    with pytest.raises(NoProgressError, match="the learner is at|fresh rollouts|no batch"):
        train(tiny(changes), run_dir, quiet=True)
    assert read_status(run_dir / "status.json")["state"] == "failed"

"""Runs in one process train each problem once per epoch, over a resume too, and say where the data were changed."""

import json
from pathlib import Path

from penstock.overseer import train
from penstock.rundir import read_events, read_json_lines
from tests.overseer.conftest import tiny

PROBLEMS = 9
"""Of training; one more is held out. Three groups per update: an epoch is three updates."""


def write_problems(path: Path, first: int) -> Path:
    rows = [{"prompt": f"{n} cats", "answer": str(n)} for n in range(first, first + PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(folder: Path, steps: int, staleness: int):
    held_out = folder / "held_out.jsonl"
    held_out.write_text('{"prompt": "a dog", "answer": "1"}\n')
    given = {"path": str(folder / "problems.jsonl"), "eval_path": str(held_out)}
    environment = {"env_class": "penstock.environments.jsonl.JsonlEnvironment", "env_args": given}
    changes = {
        "steps": steps,
        "replay": {"staleness_budget": staleness},
        "curriculum": {"lessons": {"cats": {"environment": environment}}},
        "overseer": {"checkpoint_every": 1},
    }
    return tiny(changes)


def trained(run: Path) -> list[tuple[int, int]]:
    """Epoch and problem of every trained group, in the order of their fates."""
    tickets = {row["ticket_id"]: row for row in read_json_lines(run / "tickets.jsonl")}
    fates = {row["rollout_id"]: row["fate"] for row in read_json_lines(run / "fates.jsonl")}
    groups = dict.fromkeys(i.rpartition("/")[0] for i, fate in fates.items() if fate == "trained")
    return [(tickets[group]["epoch"], tickets[group]["problem"]) for group in groups]


def updates(run: Path) -> list[dict]:
    return [row for row in read_json_lines(run / "metrics.jsonl") if "train/loss" in row]


def test_a_resumed_run_trains_each_problem_once_per_epoch(tmp_path: Path):
    write_problems(tmp_path / "problems.jsonl", 0)
    run = tmp_path / "run"
    train(config_of(tmp_path, 2, 0), run, quiet=True)
    train(config_of(tmp_path, 6, 0), run, resume=True, quiet=True)
    done = trained(run)
    assert sorted(done) == [(epoch, problem) for epoch in range(2) for problem in range(PROBLEMS)]
    assert [problem for epoch, problem in done if epoch == 0] != [problem for epoch, problem in done if epoch == 1]
    assert [round(3 * row["data/epoch"], 6) for row in updates(run)] == [1, 2, 3, 4, 5, 6]
    assert {row["data/untrained"] for row in updates(run)} == {0.0}


def test_data_that_were_changed_before_a_resume_begin_an_epoch_and_an_event_says_so(tmp_path: Path):
    write_problems(tmp_path / "problems.jsonl", 0)
    run = tmp_path / "run"
    train(config_of(tmp_path, 2, 1), run, quiet=True)
    before = len(trained(run))
    write_problems(tmp_path / "problems.jsonl", 50)
    train(config_of(tmp_path, 5, 1), run, resume=True, quiet=True)
    told = [event for event in read_events(run / "events.jsonl") if event["event"] == "data_changed"]
    assert [(event["lesson"], event["reason"]) for event in told] == [
        ("cats", "the 9 problems are others than before: epoch 1 begins")
    ]
    done = trained(run)
    assert (before, len(done), len(set(done))) == (6, 15, 15)
    assert sorted(epoch for epoch, _ in done) == [0] * 6 + [1] * 9

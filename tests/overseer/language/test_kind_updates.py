"""What an update leaves behind: the part that sets the pace, in the status and, where it changes, as an event."""

from pathlib import Path
from typing import Any

import pytest

from penstock.overseer.control.kind import FleetUpdates
from penstock.overseer.language.kind import TOKENS, Updates
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.progress import Progress
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Report
from penstock.rundir import RunDirectory, read_events, read_metrics
from penstock.types import CompiledProgram
from tests.overseer.conftest import tiny

TIMES = {"time/wait_for_batch": 1.0, "time/update": 1.0}


class Shares:
    """Stands for what the components' reports amount to."""

    def __init__(self) -> None:
        self.of_roles: dict[str, float] = {}
        self.of_components = {"replay-0": 0.25}

    def look(self, reports: Any) -> None: ...


@pytest.fixture
def log(run_dir: Path):
    config = tiny()
    log = RunLog(RunDirectory.create(run_dir, config.dump()), config, Progress("test", 3, 1))
    yield log
    log.close()


def test_a_bottleneck_is_an_event_where_it_changes_and_a_sentence_at_every_update(log: RunLog, run_dir: Path):
    updates: Any = Updates(log)
    updates._idle = Shares()
    busy_learner, busy_generation = {"learner": 0.05}, {"learner": 0.5, "inference": 0.1}
    idle = [{}, busy_learner, {"learner": 0.01}, busy_generation, {}, {**busy_generation, "learner": 0.4}, busy_learner]
    said = []
    for step, shares in enumerate(idle, start=1):
        updates._idle.of_roles = shares
        updates.add(step, TIMES, ClusterSnapshot(), {})
        said.append(log.bottleneck_words)
    assert said[0] == said[4] == "" and said[2].startswith("learner busy 99%")
    events = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "bottleneck"]
    assert [(event["step"], event["part"]) for event in events] == [(2, "learner"), (4, "inference"), (7, "learner")]
    assert [event["words"] for event in events] == [said[1], said[3], said[6]]
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert rows[3]["time/idle/inference"] == 0.1 and rows[3]["time/idle/replay-0"] == 0.25


def test_updates_without_signal_are_one_event_and_one_line_and_the_truncated_share_is_named(log: RunLog, run_dir: Path):
    updates: Any = Updates(log)
    flat = {**TIMES, "train/zero_variance_groups": 1.0, "train/advantage_zero_fraction": 1.0, "train/groups": 2.0}
    log.progress.note_rollouts({"rollout/cats/groups": 2.0, "rollout/cats/truncated_fraction": 0.75})
    for step in range(1, 13):
        updates.add(step, {**flat, "train/reward_mean": 0.0}, ClusterSnapshot(), {})
    (event,) = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "no_signal"]
    assert event["step"] == 10 and event["words"].startswith("no signal: all 20 groups of 10 updates (1–10)")
    assert "75% of the answers are cut" in event["words"]
    assert sum("no signal" in line for line in log.progress.lines) == 1
    assert "24 groups of 12 updates (1–12)" in log.progress.no_signal == log.progress.stretches[-1]
    updates.add(13, {**flat, "train/zero_variance_groups": 0.5}, ClusterSnapshot(), {})
    assert log.progress.no_signal == ""


def test_what_is_generated_while_the_first_update_waits_for_its_programs_is_no_pace(log: RunLog, monkeypatch):
    now, updates = [100.0], Updates(log)
    monkeypatch.setattr(updates._pace, "_clock", lambda: now[0])
    updates.begin_phase()

    def pace(seconds: float, total: float) -> float | None:
        now[0] += seconds
        engine = Report(Identity("inference", 0, 0), 1, "a", ComponentStatus("running", "", metrics={TOKENS: total}))
        return updates.pace(ClusterSnapshot(reports={"inference-0": engine}))

    log.progress.compiling = {"learner-0": CompiledProgram("gradient", 1, 2, 0.1)}
    assert pace(60.0, 600.0) is None
    log.progress.compiling = {}
    assert pace(2.0, 700.0) == 50.0
    updates.add(1, TIMES, ClusterSnapshot(), {})
    log.progress.compiling = {"inference-1": CompiledProgram("decode", 1, 2, 0.1)}  # it was replaced
    assert pace(2.0, 900.0) == 75.0


def test_the_idle_shares_of_a_fleets_components_are_in_its_metrics(log: RunLog, run_dir: Path):
    updates: Any = FleetUpdates(log, ["guess"])
    updates._idle = Shares()
    updates._idle.of_roles = {"replay": 0.75, "rollout": 0.5}
    updates.add(1, TIMES, ClusterSnapshot(), {})
    (row,) = read_metrics(run_dir / "metrics.jsonl")
    found = {name: row[f"time/idle/{name}"] for name in ("learner", "replay", "rollout", "replay-0")}
    assert found == {"learner": 0.5, "replay": 0.75, "rollout": 0.5, "replay-0": 0.25}

"""Every part of the chaos benchmark in its short form: the marks that the whole of it must reach."""

import json
import re

import pytest
from benchmarks.chaos import __main__ as benchmark
from benchmarks.chaos import drivers, reward_run
from benchmarks.marks import Marks

pytestmark = pytest.mark.attack


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_a_run_survives_ninety_seconds_of_faults(tmp_path, capsys):
    out = tmp_path / "chaos.jsonl"
    length = ["--parts", "run", "--minutes", "1.5", "--more-minutes", "1.5", "--each", "0"]
    policy = ["--bar", "0.3", "--learning-rate", "1e-3", "--groups", "8"]
    code = benchmark.main([*length, *policy, "--seed", "738", "--scratch", str(tmp_path), "--out", str(out)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert len(re.findall(r" reached ", printed.partition("\nMarks\n")[2])) == 15
    faults = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(faults) >= 3 and all(fault["recovered"] for fault in faults)
    assert any(event.startswith("component_death") for fault in faults for event in fault["events"])


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_runs_side_by_side_lose_their_clusters_are_hung_up_on_and_do_not_touch_each_other(tmp_path):
    marks, kinds = Marks(), ["kill control service", "hang up driver"]
    lives = drivers.endure(tmp_path / "drivers", 3, 1, 90.0, marks, kinds)
    assert marks.missed == 0, "\n".join(marks.lines)
    assert sorted(life.kind for life in lives) == sorted([*kinds, "terminate driver"] * 2)
    assert {life.code for life in lives} == {1, 130}


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_a_disk_that_fills_inside_a_checkpoint_and_memory_that_runs_out_are_survived(tmp_path, capsys):
    out = tmp_path / "chaos.jsonl"
    what = ["--parts", "run", "--kinds", "full checkpoints,out of memory", "--faults", "2", "--each", "1"]
    policy = ["--bar", "0.0", "--learning-rate", "1e-3", "--groups", "8", "--more-minutes", "0.2"]
    code = benchmark.main([*what, *policy, "--scratch", str(tmp_path), "--out", str(out)])
    assert code == 0, capsys.readouterr().out
    faults = {fault["kind"]: fault for fault in map(json.loads, out.read_text().splitlines())}
    assert faults["full checkpoints"]["counted"]["disk_full"] >= 1
    assert any("ran out of memory" in event for event in faults["out of memory"]["events"])


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_reward_function_that_misbehaves_in_every_way_costs_its_groups_and_nobody_elses(tmp_path):
    marks, outcome = Marks(), reward_run.misbehave(tmp_path / "rewards", 12, 300.0)
    reward_run.add_marks(outcome, marks)
    assert marks.missed == 0, "\n".join(marks.lines)
    assert outcome.rollouts >= 12 * reward_run.GROUPS * reward_run.SIZE and outcome.wrong == []

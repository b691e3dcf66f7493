"""The benchmark of the first step: where seconds go, what it compares, and what it says where there is no peer."""

import json
import sys

import pytest
from benchmarks.first_step import Part, compare, first_step_s, parts_of, show, trl_round
from benchmarks.marks import Marks

from benchmarks import first_step, steps

EVENTS = [
    {"event": "phase", "phase": "starting components", "time": 103.0},
    {"event": "compiled", "component": "inference-0", "program": "decode, window 80", "seconds": 1.5, "time": 104.5},
    {"event": "compiled", "component": "learner-0", "program": "gradient", "seconds": 2.5, "time": 106.0},
    {"event": "phase", "phase": "checking that engines and learner agree", "time": 106.5},
    {"event": "phase", "phase": "training", "time": 107.25},
    {"event": "phase", "phase": "evaluating the trained policy", "time": 110.0},
]
METRICS = [
    {"step": 0, "time": 107.2, "eval/fixed/reward_mean": 0.5},
    {"step": 1, "time": 109.25, "train/loss": 0.1, "time/wait_for_batch": 0.75, "time/update": 1.0},
    {"step": 2, "time": 111.0, "train/loss": 0.1, "time/wait_for_batch": 0.5, "time/update": 1.0},
]


def test_the_seconds_of_a_start_are_told_apart_and_add_up():
    parts = parts_of(100.0, 102.0, EVENTS, METRICS)
    assert parts == [
        Part("Python and imports", 2.0),
        Part("configuration, model, engine, run directory", 1.0),
        Part("start of engine and learner, compilation", 3.5),
        Part("inference-0: decode, window 80, done at 4.5 s", 1.5, inside=True),
        Part("learner-0: gradient, done at 6.0 s", 2.5, inside=True),
        Part("comparison of engine and learner", 0.75),
        Part("checkpoint, first batch, rest of compilation, update", 2.0),
        Part("first batch", 0.75, inside=True),
        Part("update", 1.0, inside=True),
    ]
    assert sum(part.seconds for part in parts if not part.inside) == first_step_s(100.0, METRICS) == 9.25
    assert show(parts[2:4]).splitlines()[1] == f"    {parts[3].name:<74}   1.50 s"


def test_the_mark_is_on_the_ratio_of_medians():
    marks = Marks()
    lines = compare([9.0, 30.0, 8.0], [5.0, 4.0, 6.0], [9.0, 9.5, 9.25], marks)
    assert lines == [
        "Penstock           9.00 s  (9.00, 30.00, 8.00)",
        "Penstock again     5.00 s  (5.00, 4.00, 6.00)",
        "TRL                9.25 s  (9.00, 9.50, 9.25)",
    ]
    assert marks.missed == 0
    compare([9.5], [5.0], [9.25], marks)
    assert marks.missed == 1 and "MISSED" in marks.lines[1]
    assert compare([9.5], [], [], marks) == ["Penstock           9.50 s  (9.50)"] and len(marks.lines) == 2


@pytest.mark.parametrize(
    ("python", "reason"),
    [(sys.executable, "no (torch|trl) for "), ("/nowhere/python", "/nowhere/python cannot be run: No such file")],
)
def test_a_peer_that_is_not_there_is_skipped_with_the_reason(python, reason):
    with pytest.raises(RuntimeError, match=reason):
        trl_round(python)


def test_both_have_the_shape_that_the_benchmark_of_steps_has(monkeypatch):
    seen = []
    monkeypatch.setattr(first_step, "started", lambda command, *_: seen.append(command) or (0.0, _ended()))
    assert trl_round("python")[0] == 9.0
    what = json.loads(seen[0][2])
    assert what.pop("shape") == steps.SHAPE
    assert what == {"trainer": "grpo", "steps": 1, "groups": 8, "samples": 8, "tokens": 64, "prompt_tokens": 16}
    assert steps.SHAPE["tie_word_embeddings"] is True


def _ended():
    told = '{"version": "1.16.0", "parameters": 6306048, "imported": 4.0, "begun": 5.0, "steps": [9.0]}'
    return first_step.subprocess.CompletedProcess([], 0, f"a word of somebody else\n{told}\n", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_one_update_in_a_fresh_process(capsys):
    assert first_step.main(["--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "TRL skipped: --trl-python names an interpreter that has it" in printed
    assert "Penstock again" in printed
    assert "learner-0: gradient" in printed and "inference-0: decode, window 80" in printed

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.dashboard import RunStatus, print_status, print_status_json
from penstock.dashboard.status import components

CONTENT: dict[str, Any] = {
    "phase": "training", "step": 12, "steps": 50, "lineage": 1, "waiting_for": "the learner waits for 3 groups",
    "bottleneck": "learner idle 41%: rollout workers are busy 97%: add rollout workers (rollout.workers)",
    "ledger": {"started": 96, "trained": 80, "waiting": 16, "aborted": 0},
    "numbers": {"inference/tokens_per_s": 1234.4, "inference/waiting": None},
    "lessons": {"cats": "active"},
    "components": {
        "inference-0": {"incarnation": 2, "state": "running", "deaths": 2, "version": [1, 11], "doing": "serving",
                        "pid": 77, "host": "a", "busy_s": 30.0, "idle_s": 10.0, "last_death": "no answer for 30 s"},
        "learner-0": {"incarnation": 0, "phase": "starting", "deaths": 0, "doing": "learner-0#0 has not answered"},
        "rollout-3": {"incarnation": 0, "state": "running", "deaths": 0, "leaving": True, "doing": "group 7"},
    },
}  # fmt: skip


def shown(content: dict[str, Any], state: str = "running", why: str = "", age_s: float | None = 3.0) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    print_status(RunStatus(Path("runs/x"), state, why, age_s, "ray", content), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_everything_that_is_known_is_shown():
    text = shown(CONTENT)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "runs/x  «running» 3 s ago"
    assert "step        12 of 50, lineage 1" in lines
    assert "bottleneck  learner idle 41%: rollout workers are busy 97%: add rollout workers (rollout.workers)" in lines
    assert "throughput  1,234 tokens/s" in lines
    assert "rollouts    started 96, trained 80, waiting 16" in lines
    assert "waiting     the learner waits for 3 groups" in lines
    (server,) = [line.split() for line in lines if line.startswith("inference-0")]
    assert server == ("inference-0#2 running 2 11, 1 behind 25% a:77 serving (last death: no answer for 30 s)".split())
    assert any("learner-0#0    starting" in line for line in lines)
    assert any("rollout-3#0" in line and "running, leaving" in line for line in lines)


def test_what_only_a_living_run_does_is_not_said_of_one_that_is_over():
    lines = [line.rstrip() for line in shown(CONTENT, "finished").splitlines()]
    assert not any(line.startswith(("phase", "waiting", "throughput")) or "running" in line for line in lines)
    assert "at last     1,234 tokens/s" in lines
    (server,) = [line.split() for line in lines if line.startswith("inference-0")]
    assert server[:2] == ["inference-0#2", "ended"] and "serving" not in server


@pytest.mark.parametrize("state", ["dead", "failed"])
def test_what_a_lost_run_was_at_is_shown_as_the_last_known(state):
    lines = [line.rstrip() for line in shown(CONTENT, state, "its process 77 is gone").splitlines()]
    assert "last phase    training" in lines
    assert "last waiting  the learner waits for 3 groups" in lines
    assert not any(line.startswith(("phase", "waiting")) for line in lines)
    (header,) = [line for line in lines if line.startswith("component")]
    assert header.endswith("last doing")
    (worker,) = [line.split() for line in lines if line.startswith("rollout-3")]
    assert worker == "rollout-3#0 ended 0 group 7".split()


def test_a_run_that_is_over_has_no_forecast_and_one_that_waits_says_all_of_it():
    training = {"words": "reward 0.500  64 tok/s  staleness 1.00  ETA 1–2 min"}
    waiting = "update 3 needs 16 groups; " + "running: cats 16; " * 14 + "serving version 3"
    content = CONTENT | {"training": training, "waiting_for": waiting}
    assert "staleness 1.00  ETA 1–2 min" in shown(content)
    for state in ("finished", "stopped", "dead", "failed"):
        assert "staleness 1.00" in shown(content, state) and "ETA" not in shown(content, state)
    assert all(" ".join(waiting.split()) in " ".join(shown(content, state).split()) for state in ("running", "dead"))


@pytest.mark.parametrize("whose", ["groups", "simulators"])
def test_failures_are_counted_with_the_last_reason(whose):
    text = shown({whose: {"failed": 1234, "last_failure": "it was ended by SIGKILL"}})
    assert f"failures  1,234 of {whose}; the last: it was ended by SIGKILL" in text
    assert "failures" not in shown({whose: {"failed": 0, "last_failure": ""}})


def test_a_dead_run_says_why():
    assert shown(CONTENT, "dead", "its process 77 is gone").startswith("runs/x  «dead» its process 77 is gone\n")


def test_little_is_shown_where_little_is_known():
    assert shown({}, "starting", age_s=None) == "runs/x  «starting»\n"


TRAINING: dict[str, Any] = {
    "units_per_s": 987.6, "words": "reward 0.500  entropy 1.93  ETA ~12 min",
    "held_out": {"cats": {"step": 8, "score": 0.25}, "dogs": {"score": "odd"}, "birds": 7},
    "no_signal": "no signal: all 16 groups of 10 updates (3–12) had equal rewards",
}  # fmt: skip


def test_the_numbers_of_the_view_are_those_of_the_status():
    lines = [line.rstrip() for line in shown({**CONTENT, "training": TRAINING}).splitlines()]
    assert "training    reward 0.500  entropy 1.93  ETA ~12 min" in lines
    assert "evaluated   cats 0.250 at step 8" in lines
    assert "no signal   all 16 groups of 10 updates (3–12) had equal rewards" in lines
    assert "throughput  988 tokens/s" in lines, "by the wall clock, as the view has it"
    odd = shown({**CONTENT, "training": {"words": 3, "held_out": [1], "no_signal": None}}).splitlines()
    assert not any(line.startswith(("training", "evaluated", "no signal")) for line in odd)


def test_what_a_run_wrote_cannot_act_on_the_terminal():
    text = shown({"phase": "\x1b[2J[bold]x", "components": {"a\x1b": {"doing": "b\rc"}}, "ledger": [1], "numbers": 7})
    assert "\x1b" not in text and "\r" not in text and "[bold]x" in text


def test_the_json_form_is_one_object(capsys):
    print_status_json(RunStatus(Path("runs/x"), "dead", "gone", 3.0, "ray", CONTENT))
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "dead" and told["components"]["inference-0"]["lag_steps"] == 1


@pytest.mark.parametrize("odd", [10**400, float("nan"), float("inf"), True, "7"])
def test_what_is_no_number_is_left_out(odd):
    worker = {"state": "running", "busy_s": odd, "idle_s": 1.0}
    text = shown({"step": 3, "numbers": {"inference/tokens_per_s": odd}, "components": {"inference-0": worker}})
    assert "tokens/s" not in text and "inference-0#0" in text and "100%" in text
    found = components({"step": 3, "components": {"inference-0": {"version": [0, odd]}}})
    assert found["inference-0"]["lag_steps"] == 0

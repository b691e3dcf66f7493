"""Which events of simulators are kept, and which the user is told of at once."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.overseer.run_log import failure_in_words, failures_in, simulators_told


@pytest.fixture
def kept():
    """What was told, and what stands in events.jsonl then."""
    events: list[tuple[str, dict[str, Any]]] = []
    ctx: Any = SimpleNamespace(event=lambda kind, step=0, **fields: events.append((kind, {"step": step, **fields})))
    return simulators_told(ctx), events


def test_every_life_of_a_simulator_is_kept_and_the_terminal_is_quiet_about_it(kept):
    tell, events = kept
    for life in (0, 1):
        fields = {"worker": "fleet-0", "life": life, "first_seeds": [7]}
        tell("simulator_started", fields)
        assert events[life] == ("simulator_started", {"step": 0, **fields})
        assert failure_in_words("simulator_started", fields) == ""


def test_a_fork_server_is_news_only_with_troubles(kept):
    tell, events = kept
    tell("nursery_ready", {"seconds": 0.1, "troubles": []})
    tell("nursery_ready", {"seconds": 0.1, "troubles": ["a module started a thread"]})
    tell("nursery_ended", {"reason": "it ended"})
    tell("evaluation_failed", {"step": 7, "error": "none was left"})
    assert [(kind, told["step"]) for kind, told in events] == [
        ("nursery_ready", 0), ("nursery_ended", 0), ("evaluation_failed", 7),
    ]  # fmt: skip
    assert events[0][1]["troubles"] == ["a module started a thread"]


def test_a_failure_is_told_in_one_line_with_its_task():
    told = failure_in_words("simulator_failed", {"task": "pole", "reason": "it\nended by SIGKILL"})
    assert told == "a simulator failed (task pole): it ended by SIGKILL"


def test_steps_that_went_wrong_are_failures_too_each_of_them():
    fields = {"task": "own", "slot": 3, "steps": 7, "reason": "observation 't' is nan at [2]: it must be finite"}
    told = failure_in_words("simulator_fault", fields)
    assert told == "a simulator failed (task own): observation 't' is nan at [2]: it must be finite"
    assert failures_in("simulator_fault", fields) == 7
    assert failures_in("simulator_failed", {}) == 1 and failures_in("simulator_quarantined", {}) == 0


def test_one_that_was_given_up_is_told_with_the_limit_that_it_passed():
    fields = {"task": "own", "reason": "it was ended by SIGSEGV", "limit": "it failed too often: raise that"}
    told = failure_in_words("simulator_quarantined", fields)
    assert told == "a simulator was given up (task own): it was ended by SIGSEGV; it failed too often: raise that"


def test_what_a_fork_server_leaves_to_its_processes_is_told_and_its_own_threads_are_not():
    troubles = {"own.py:make": "importing it starts 2 threads, which forks lack", "threads": "OpenBLAS's"}
    assert failure_in_words("nursery_ready", {"troubles": troubles}) == (
        "not imported ahead of its processes, so each of them imports it: own.py:make: importing it starts 2 threads, "
        "which forks lack"
    )
    assert failure_in_words("nursery_ready", {"troubles": {"threads": "…"}}) == ""

"""A rollout actor of a fleet is killed while a run trains under Ray; the run is a process of its own."""

from pathlib import Path

import pytest
from benchmarks.fleet import actors

from penstock.rundir import read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_killed_actor_is_replaced_and_the_other_one_goes_on(tmp_path: Path):
    found = actors.inflict(2.0, 4, tmp_path / "run", step_s=0.1)  # little is computed, so that nobody is held up
    assert found.wrong == () and found.lives.faults == 0
    # the actor, its fork server, four simulators and their children
    assert found.processes >= 10 and found.left == ()
    assert found.lives.ends_s.keys() == {"rollout-0.0-0", "rollout-1.0-0", "rollout-1.0-1"}
    assert found.lives.trained >= 2 * actors.BATCH
    assert found.noticed_s < 5
    _, during, _ = found.rates  # `python -m benchmarks.fleet.faults` compares it with what was before
    assert during > 0, found.words
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    deaths = [event["component"] for event in events if event["event"] == "component_death"]
    assert deaths == ["rollout-1"], "the other one lives on, and so does everybody else"

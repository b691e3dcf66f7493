"""How long a start may take, and what it counts as meanwhile."""

import pytest

from tests.overseer.supervisor.world import World


def test_a_component_that_never_starts_is_given_more_time_than_one_that_falls_silent():
    world = World()
    world.autorun = False
    world.add("inference-0")
    world.advance(55.0)
    assert world.told("component_death") == []
    world.advance(10.0)
    assert world.told("component_death")[0]["reason"] == (
        "no answer within 60 s of its start (overseer.start_timeout_s)"
    )


def test_a_component_that_answers_but_stays_at_its_start_is_replaced():
    world = World()
    world.add("inference-0")
    world.change("inference-0", state="starting", doing="compiling")
    world.advance(98.0)
    assert world.started("inference-0") == [0]
    world.advance(6.0)
    assert world.started("inference-0") == [0, 1]
    assert "still at «compiling» 100 s after its start" in world.told("component_death")[0]["reason"]


def test_one_limit_counts_for_a_start_in_which_nothing_is_compiled():
    world = World(start_timeout_s=400.0, no_progress_s=100.0)
    world.add("learner-0", essential=True)
    world.change("learner-0", state="starting", doing="compiling", progress=0.0)
    world.advance(395.0)
    assert world.told("component_death") == []
    world.change("learner-0", state="running")
    world.advance(85.0)  # only now it owes progress
    assert world.told("component_death") == []
    world.advance(10.0)
    assert "no progress for" in world.told("component_death")[0]["reason"]


def test_the_limit_of_a_start_counts_from_the_last_program_that_was_compiled():
    world = World()
    world.add("inference-0")
    for compiled in range(1, 5):
        world.change("inference-0", state="starting", doing="compiling", progress=float(compiled))
        world.advance(90.0)
    assert world.told("component_death") == []
    world.advance(15.0)
    assert "after the last program that it compiled" in world.told("component_death")[0]["reason"]


def test_a_start_that_takes_longer_than_its_limit_ends():
    world = World(start_timeout_s=400.0, no_progress_s=100.0)
    world.add("learner-0", essential=True)
    world.change("learner-0", state="starting", doing="compiling", progress=0.0)
    world.advance(405.0)
    assert world.told("component_death")[0]["reason"] == "still at «compiling» 400 s after its start"


@pytest.mark.parametrize("answers", [True, False])
def test_a_start_within_its_limit_is_movement_for_the_runs_watchdog(answers: bool):
    world = World(start_timeout_s=400.0, no_progress_s=100.0)
    world.autorun = answers
    world.add("learner-0", essential=True)
    world.change("learner-0", state="starting", doing="compiling")
    for _ in range(4):
        before = world.supervisor.counters()
        world.advance(90.0)
        assert world.supervisor.counters() != before
    world.newest("learner-0").run()
    world.change("learner-0", state="running")
    world.advance(2.0)
    before = world.supervisor.counters()
    world.advance(50.0)
    assert world.supervisor.counters() == before

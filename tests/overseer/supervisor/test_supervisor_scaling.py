"""The supervisor where components are added and leave while the run goes on."""

import pytest

from penstock.types import ConfigError
from tests.overseer.supervisor.world import World, spec


def test_scaling_up_takes_the_lowest_free_indexes_and_down_drains_the_highest():
    world = World()
    world.add("rollout-0", "rollout-1")
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.supervisor.scale("rollout", 4)
    world.advance(1.0)
    assert world.supervisor.names("rollout") == [f"rollout-{index}" for index in range(4)]
    world.supervisor.scale("rollout", 1)
    world.advance(2.0)
    assert [world.newest(f"rollout-{i}").calls for i in range(4)] == [[], [("drain",)], [("drain",)], [("drain",)]]
    assert world.supervisor.names("rollout") == ["rollout-0"] and len(world.supervisor.view.of("rollout")) == 4
    for index in (1, 2, 3):
        world.change(f"rollout-{index}", state="drained")
    world.advance(2.0)
    assert [peer.identity.name for peer in world.supervisor.view.of("rollout")] == ["rollout-0"]
    assert all(world.newest(f"rollout-{index}").killed for index in (1, 2, 3))
    assert len(world.told("component_removed")) == 3


def test_what_there_is_no_room_for_is_refused_as_a_whole_to_whoever_asks():
    world = World()
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.add("rollout-0")
    world.unplaceable = {"rollout-2"}
    with pytest.raises(ConfigError, match="no room for rollout-2"):
        world.supervisor.scale("rollout", 4, where_there_is_room=True)
    world.advance(2.0)
    assert world.supervisor.names("rollout") == ["rollout-0"]
    assert world.told("scale") == world.told("scale_refused") == []


def test_who_waits_for_a_start_takes_room_too():
    world = World()
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.add("rollout-0")
    world.supervisor.scale("rollout", 2, where_there_is_room=True)
    world.supervisor.scale("rollout", 4, where_there_is_room=True)
    world.supervisor.scale("rollout", 1, where_there_is_room=True)
    assert world.looked_for_room == [(["rollout-1"], 0), (["rollout-2", "rollout-3"], 1)]


def test_what_was_accepted_and_then_fits_nowhere_is_told_and_the_run_goes_on():
    world = World()
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.add("rollout-0")
    world.unplaceable = {"rollout-1"}
    world.supervisor.scale("rollout", 2)
    world.advance(2.0)
    assert world.supervisor.names("rollout") == ["rollout-0"]
    (refused,) = world.told("scale_refused")
    assert refused["component"] == "rollout-1" and "no room" in refused["reason"]


def test_a_component_of_the_run_that_fits_nowhere_ends_it():
    world = World()
    world.unplaceable = {"rollout-0"}
    with pytest.raises(ConfigError, match="no room"):
        world.add("rollout-0")
        world.advance(1.0)


def test_an_index_that_returns_has_a_new_incarnation_and_one_that_leaves_is_not_reused():
    world = World()
    world.add("rollout-0", "rollout-1")
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.supervisor.scale("rollout", 1)
    world.advance(1.0)
    world.supervisor.scale("rollout", 2)  # while rollout-1 drains
    world.advance(1.0)
    assert world.supervisor.names("rollout") == ["rollout-0", "rollout-2"]
    world.change("rollout-1", state="drained")
    world.advance(2.0)
    world.supervisor.scale("rollout", 3)
    world.advance(1.0)
    assert world.started("rollout-1") == [0, 1]


def test_scaling_down_who_is_dying_does_not_bring_it_back():
    world = World()
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.add("rollout-0", "rollout-1", "rollout-2", "rollout-3")
    world.newest("rollout-1").die()  # will wait for its restart
    world.advance(1.0)
    world.newest("rollout-2").stuck_kills = 3
    world.newest("rollout-2").die()  # will not be gone yet
    world.newest("rollout-3").mode = "hanging"  # will die while it should drain
    world.advance(1.0)
    world.supervisor.scale("rollout", 1)
    world.advance(30.0)
    assert [world.started(f"rollout-{index}") for index in range(4)] == [[0]] * 4
    assert [peer.identity.name for peer in world.supervisor.view.peers] == ["rollout-0"]
    assert world.newest("rollout-3").killed


def test_the_death_of_one_that_leaves_is_no_restart_too_many():
    world = World(max_restarts=0)
    world.add("rollout-0")
    world.supervisor.drain("rollout-0")
    world.newest("rollout-0").die()
    world.advance(3.0)
    assert world.supervisor.names("rollout") == [] and world.told("restart_budget_exhausted") == []


def test_scaling_down_who_is_starting_ends_it():
    world = World()
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    world.add("rollout-0")
    world.autorun = False
    world.supervisor.scale("rollout", 2)
    world.advance(1.0)
    world.supervisor.scale("rollout", 1)
    world.advance(1.0)
    assert world.newest("rollout-1").killed and world.supervisor.names("rollout") == ["rollout-0"]


def test_a_drain_that_was_not_heard_is_repeated_and_one_that_takes_too_long_is_cut_short():
    world = World()
    world.add("rollout-0")
    component = world.newest("rollout-0")
    component.failing_calls.add("drain")
    world.supervisor.drain("rollout-0", "no longer needed")
    world.advance(3.0)
    component.failing_calls.clear()
    world.advance(3.0)
    assert 3 <= component.calls.count(("drain",)) <= 5
    world.advance(100.0)
    assert component.killed and world.supervisor.view.peers == () and world.started("rollout-0") == [0]
    assert "not drained within 100 s" in world.told("component_death")[0]["reason"]


@pytest.mark.parametrize(
    ("role", "count", "message"), [("learner", 2, "those that can: rollout"), ("rollout", 0, "1 to")]
)
def test_what_cannot_be_scaled_is_refused(role, count, message):
    world = World()
    world.add("rollout-0")
    world.supervisor.scalable("rollout", lambda index: spec(f"rollout-{index}"))
    with pytest.raises(ConfigError, match=message):
        world.supervisor.scale(role, count)
    assert world.supervisor.names("rollout") == ["rollout-0"]

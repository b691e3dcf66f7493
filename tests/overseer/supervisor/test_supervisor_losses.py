"""The supervisor where a component is lost that the run cannot go on without."""

import pytest

from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.types import ConfigError
from tests.overseer.supervisor.world import World


def test_an_essential_component_is_lost_once_its_process_is_gone_and_returns_when_asked_for():
    world = World()
    world.add("learner-0", essential=True)
    learner = world.newest("learner-0")
    learner.stuck_kills = 2
    learner.die()
    world.advance(1.0)
    assert world.losses == [] and not world.supervisor.is_gone("learner-0")
    world.advance(10.0)
    assert world.losses == [("learner-0#0", "learner-0#0 is dead")] and world.supervisor.is_gone("learner-0")
    assert world.started("learner-0") == [0]
    world.supervisor.set_lineage(1)
    world.supervisor.respawn("learner-0", {"checkpoint": "step-7"})
    world.advance(1.0)
    assert world.started("learner-0") == [0, 1] and world.newest("learner-0").settings == {"checkpoint": "step-7"}
    assert world.newest("learner-0").views[0].lineage == 1


def test_a_loss_may_be_answered_from_within():
    world = World()
    world.add("learner-0", "replay-0", essential=True)
    world.when_lost = lambda identity, reason: [
        world.supervisor.respawn(name, {"lineage": 1}) for name in ("learner-0", "replay-0")
    ]
    world.newest("replay-0").die()
    world.advance(5.0)
    assert world.started("replay-0") == world.started("learner-0") == [0, 1]
    assert [who for who, _ in world.losses] == ["replay-0#0"]  # the learner was ended by request
    assert world.spawned[0].killed and world.newest("learner-0").settings == {"lineage": 1}


def test_the_death_of_one_that_was_started_anew_by_request_is_a_loss_again():
    world = World()
    world.add("learner-0", essential=True)
    world.supervisor.respawn("learner-0")
    world.advance(2.0)
    assert world.started("learner-0") == [0, 1] and world.losses == []
    world.newest("learner-0").die()
    world.advance(5.0)
    assert world.losses == [("learner-0#1", "learner-0#1 is dead")] and world.started("learner-0") == [0, 1]


def test_who_goes_back_with_another_is_gone_before_anything_is_chosen():
    world = World()
    world.add("learner-0", "replay-0", essential=True)
    world.newest("replay-0").die()
    world.newest("learner-0").stuck_kills = 3
    world.advance(1.5)
    assert world.supervisor.is_gone("replay-0") and not world.supervisor.is_gone("learner-0")
    world.supervisor.end("learner-0", "goes back with the replay buffer")
    assert not world.supervisor.is_gone("learner-0")  # it may still finish a checkpoint
    world.advance(3.0)
    assert world.supervisor.is_gone("learner-0") and world.newest("learner-0").killed
    world.supervisor.respawn("replay-0")
    assert world.supervisor.is_gone("replay-0")
    world.advance(3.0)
    assert not world.supervisor.is_gone("replay-0")


def test_a_respawn_after_a_death_waits_its_time():
    world = World()
    world.add("learner-0", essential=True)
    world.when_lost = lambda identity, reason: world.supervisor.respawn("learner-0")
    world.newest("learner-0").die()
    world.advance(1.5)
    assert world.started("learner-0") == [0]
    world.advance(2.0)
    assert world.started("learner-0") == [0, 1]


def test_ending_an_essential_component_tells_of_its_loss_and_costs_no_restart():
    world = World(max_restarts=0)
    world.add("learner-0", essential=True)
    world.add("rollout-0")
    world.supervisor.end("learner-0", "the replay buffer is lost")
    world.supervisor.end("rollout-0", "asked to")
    world.advance(2.0)
    assert world.losses == [("learner-0#0", "the replay buffer is lost")]
    assert world.started("rollout-0") == [0, 1]
    world.supervisor.end("learner-0", "again")
    world.advance(2.0)
    assert len(world.losses) == 1


@pytest.mark.parametrize("before", [{"state": "starting"}, {"state": "running", "worked": False}], ids=str)
@pytest.mark.parametrize("refusing", ["learner-0", "inference-1"])
def test_what_a_component_refuses_before_any_of_its_role_ran_ends_the_run_at_once(refusing, before):
    world = World()
    world.autorun = False
    world.add("learner-0", essential=True)
    world.add("rollout-0", "inference-0", "inference-1")
    for component in world.spawned:
        component.condition = ComponentStatus(**before, doing="loading")
        component.run()
    world.advance(1.0)
    world.change(refusing, state="failed", error="optimizer.name is muon", refused=True)
    with pytest.raises(ConfigError, match=r"^optimizer\.name is muon$"):
        world.advance(2.0)
    assert [event["component"] for event in world.told("component_death")] == [refusing]
    world.advance(30.0)  # the others are looked after until the run has ended
    assert world.started(refusing) == [0] and world.newest(refusing).killed


def test_what_one_refuses_of_a_role_that_ran_is_a_death_like_any_other():
    world = World()
    world.add("inference-0", "inference-1")
    world.add("learner-0", essential=True)
    world.change("inference-1", state="failed", error="no such directory", refused=True)
    world.change("learner-0", state="failed", error="unreadable", refused=True)
    world.advance(4.0)
    assert world.started("inference-1") == [0, 1] and world.losses == [("learner-0#0", "unreadable")]
    assert [event["reason"] for event in world.told("component_death")] == ["no such directory", "unreadable"]

"""The supervisor from outside: who lives, who is replaced, who is told."""

from functools import partial

import pytest

from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Report
from penstock.types import RunFailed, UnreachableError
from tests.overseer.supervisor.world import World, spec


def test_a_component_is_in_the_view_from_its_start_and_its_address_as_soon_as_it_says_it():
    world = World()
    world.autorun = False
    world.add("inference-0")
    peer = world.supervisor.view.peer("inference-0")
    assert peer is not None and peer.address == {} and world.supervisor.reports == {}
    world.newest("inference-0").run()
    world.change("inference-0", address={"url": "http://127.0.0.1:1"})
    number = world.supervisor.view.number
    world.advance(2.0)
    peer = world.supervisor.view.peer("inference-0")
    assert peer is not None and peer.address == {"url": "http://127.0.0.1:1"}
    assert world.supervisor.view.number == number + 1
    assert world.told("component_up")[0]["pid"] == 1000


def test_everybody_is_told_of_a_change_at_once_and_otherwise_once_in_an_interval():
    world = World()
    world.add("rollout-0")
    before = len(world.newest("rollout-0").views)
    world.advance(10.0)
    assert len(world.newest("rollout-0").views) - before == 10
    world.supervisor.set_lineage(4)
    world.advance(0.1, tick_s=0.1)
    world.advance(0.1, tick_s=0.1)
    assert len(world.newest("rollout-0").views) - before == 11
    assert world.newest("rollout-0").views[-1].lineage == 4


def test_a_dead_component_is_restarted_after_a_wait_under_the_next_incarnation():
    world = World()
    world.add("rollout-0", "rollout-1")
    world.newest("rollout-1").die()
    world.advance(1.0)
    assert world.supervisor.view.peer("rollout-1") is None and world.newest("rollout-1").killed
    assert world.told("component_death") == [
        {"component": "rollout-1", "incarnation": 0, "reason": "rollout-1#0 is dead"}
    ]
    world.advance(1.5)
    assert world.started("rollout-1") == [0]
    world.advance(1.0)
    assert world.started("rollout-1") == [0, 1] and world.started("rollout-0") == [0]
    peer = world.supervisor.view.peer("rollout-1")
    assert peer is not None and peer.identity.incarnation == 1


def test_a_component_that_hangs_is_ended_and_replaced():
    world = World()
    world.add("rollout-0")
    hanging = world.newest("rollout-0")
    hanging.mode = "hanging"
    world.advance(10.0)
    assert world.supervisor.view.peer("rollout-0") is not None
    world.advance(5.0)
    assert hanging.killed and world.started("rollout-0") == [0, 1]
    assert world.told("component_death")[0]["reason"] == "no answer for 10 s (overseer.heartbeat_timeout_s)"


def test_a_component_that_says_it_failed_is_replaced_and_its_last_words_are_kept():
    world = World()
    world.add("curriculum-0")
    world.newest("curriculum-0").say("last_words")
    world.change("curriculum-0", state="failed", error="ValueError: no lesson")
    world.advance(4.0)
    assert world.messages == [("curriculum-0#0", "last_words")]
    assert world.told("component_death")[0]["reason"] == "ValueError: no lesson"
    assert world.started("curriculum-0") == [0, 1]


def test_an_unknown_error_of_a_heartbeat_is_the_reason_of_a_death():
    world = World()
    world.add("rollout-0")
    component = world.newest("rollout-0")
    component.mode = "hanging"
    world.advance(1.0)
    component.unanswered.pop().set_exception(ValueError("not a report"))
    world.advance(0.5)
    assert world.told("component_death")[0]["reason"] == "ValueError: not a report"


def test_a_component_that_owes_progress_and_makes_none_is_replaced():
    world = World()
    world.add("rollout-0", "rollout-1")
    world.change("rollout-0", progress=5.0, doing="generating")
    world.change("rollout-1", progress=None)
    world.advance(89.0)
    assert world.told("component_death") == []
    world.advance(10.0)
    assert world.started("rollout-0") == [0, 1] and world.started("rollout-1") == [0]
    assert "at «generating»" in world.told("component_death")[0]["reason"]


def test_who_moves_or_waits_for_others_owes_nothing():
    world = World()
    world.add("rollout-0")
    for progress in [1.0, 2.0, None, 2.0]:
        world.change("rollout-0", progress=progress)
        world.advance(80.0)
    assert world.told("component_death") == []


def test_waits_double_up_to_a_limit_and_one_restart_too_many_ends_the_run():
    world = World()
    world.add("rollout-0")
    starts = []
    for _ in range(3):
        world.newest("rollout-0").die()
        died = world.now
        count = len(world.spawned)
        while len(world.spawned) == count:
            world.advance(0.5)
        starts.append(world.now - died)
        world.advance(0.5)
    assert starts == [pytest.approx(wait, abs=1.5) for wait in (2.0, 4.0, 5.0)]
    world.newest("rollout-0").die()
    with pytest.raises(
        RunFailed, match=r"rollout-0 died 4 times within 300 s .* allows 3 restarts; .*: rollout-0#3 is"
    ):
        world.advance(2.0)
    assert world.told("restart_budget_exhausted")[0]["deaths"] == 4
    world.advance(20.0)  # so that the run can end in good order
    assert world.started("rollout-0") == [0, 1, 2, 3]


def test_the_end_of_the_budget_of_one_hides_nothing_of_the_others():
    world = World(max_restarts=0)
    world.add("rollout-0", "rollout-1", "learner-0")
    world.newest("learner-0").say("last")
    world.newest("rollout-0").die()
    world.newest("rollout-1").die()
    world.now += 1.0
    with pytest.raises(RunFailed, match="rollout-0 died 1 times"):
        world.supervisor.tick()  # asks them all
        world.now += 1.0
        world.supervisor.tick()
    assert [fields["component"] for fields in world.told("component_death")] == ["rollout-0", "rollout-1"]
    assert world.messages == [("learner-0#0", "last")]


def test_deaths_outside_of_the_window_are_forgiven():
    world = World()
    world.add("rollout-0")
    for _ in range(8):
        world.newest("rollout-0").die()
        world.advance(101.0)
    assert world.started("rollout-0") == list(range(9))


def test_nobody_is_replaced_before_its_process_is_gone():
    world = World()
    world.add("learner-0")
    learner = world.newest("learner-0")
    learner.mode, learner.stuck_kills = "hanging", 12
    world.advance(13.5)  # World.spawn asserts that the old one was ended
    assert world.started("learner-0") == [0] and not learner.killed
    world.advance(10.0)
    assert learner.killed and world.started("learner-0") == [0, 1]
    assert [fields["reason"] for fields in world.told("kill_failed")] == ["learner-0#0 is still there"] * 12


def test_a_process_that_cannot_be_shown_dead_ends_the_run_once():
    world = World()
    world.add("learner-0", "rollout-0")
    world.newest("learner-0").stuck_kills = 10_000
    world.newest("learner-0").die()
    with pytest.raises(RunFailed, match=r"learner-0#0 could not be shown to be dead within 20 s .*is still there"):
        world.advance(25.0)
    beats = len(world.newest("rollout-0").views)
    world.advance(25.0)
    assert len(world.newest("rollout-0").views) > beats + 20


def test_messages_are_taken_once_and_acknowledged_after_that():
    world = World()
    world.add("rollout-0")
    component = world.newest("rollout-0")
    component.say("first")
    world.advance(2.0)
    component.say("second")
    world.advance(2.0)
    assert world.messages == [("rollout-0#0", "first"), ("rollout-0#0", "second")]
    assert component.acknowledged == 2


def test_a_message_that_could_not_be_logged_is_not_acknowledged():
    world = World()
    world.add("rollout-0")
    world.newest("rollout-0").say("first")
    taken, world.on_message = world.on_message, refuse
    with pytest.raises(OSError, match="disk full"):
        world.advance(2.0)
    world.on_message = taken
    world.advance(2.0)
    assert world.messages == [("rollout-0#0", "first")]


def refuse(identity, message):
    raise OSError("disk full")


def test_messages_of_the_dead_are_dropped_and_counted():
    world = World()
    world.add("rollout-0")
    hanging = world.newest("rollout-0")
    hanging.mode = "hanging"
    world.advance(15.0)
    assert world.started("rollout-0") == [0, 1]
    hanging.say("from beyond")
    hanging.answer_at_last()
    world.advance(2.0)
    assert world.messages == [] and world.supervisor.metrics()["overseer/late_messages_total"] == 1
    assert world.supervisor.reports["rollout-0"].identity.incarnation == 1


def test_a_report_of_another_incarnation_is_dropped():
    world = World()
    world.add("rollout-0")
    world.newest("rollout-0").say("of another")
    world.newest("rollout-0").report = lambda: Report(  # type: ignore[method-assign]
        Identity("rollout", 0, 7), 1, "", ComponentStatus("failed", ""), tuple(world.newest("rollout-0").outbox)
    )
    world.advance(3.0)
    assert world.messages == [] and world.told("component_death") == []
    assert world.supervisor.metrics()["overseer/late_messages_total"] >= 2


def test_time_in_which_the_overseer_stood_still_is_held_against_nobody():
    world = World()
    world.add("rollout-0")
    world.newest("rollout-0").mode = "hanging"
    world.advance(2.0)
    world.now += 3600.0
    world.supervisor.tick()
    world.newest("rollout-0").run()
    world.advance(20.0)
    assert world.told("component_death") == []


def test_a_component_that_was_told_to_end_by_its_machine_drains_and_is_replaced():
    world = World()
    world.add("rollout-0")
    world.add("learner-0", essential=True)
    for name in ("rollout-0", "learner-0"):
        world.change(name, state="drained")
    world.advance(5.0)
    assert world.started("rollout-0") == [0, 1]
    assert world.losses == [("learner-0#0", "it was told to end, and drained")]


def test_notices_of_machines_use_up_no_restarts():
    world = World()
    world.add("rollout-0")
    for incarnation in range(20):
        assert world.started("rollout-0")[-1] == incarnation
        world.change("rollout-0", state="drained")
        world.advance(5.0)
    assert world.told("component_death") == [] and world.supervisor.metrics()["overseer/deaths_total"] == 0.0
    assert [told["reason"] for told in world.told("component_drained")] == ["it was told to end, and drained"] * 20


def test_a_finished_component_is_left_alone():
    world = World()
    world.add("learner-0", essential=True)
    world.change("learner-0", state="finished")
    world.advance(300.0)
    assert world.losses == [] and not world.newest("learner-0").killed


def test_calls_reach_the_incarnation_that_lives():
    world = World()
    world.add("replay-0")
    call = partial(world.supervisor.call, "replay-0", "status", timeout_s=1.0)
    assert call() == "status by replay-0#0"
    world.newest("replay-0").die()
    world.advance(1.0)
    with pytest.raises(UnreachableError, match="replay-0 is not running at present: status was not called"):
        call()
    world.advance(3.0)
    assert call() == "status by replay-0#1"


def test_who_owes_progress_is_named_with_what_it_does():
    world = World()
    world.add("rollout-0", "learner-0")
    assert "nobody owes progress" in world.supervisor.stalled_components()
    world.change("rollout-0", progress=1.0, doing="generating group 7")
    world.advance(12.0)
    assert world.supervisor.stalled_components() == ("rollout-0#0 is at «generating group 7» without progress for 11 s")
    world.newest("learner-0").die()
    world.advance(1.5)
    assert "learner-0 starts in" in world.supervisor.stalled_components()


def test_counters_move_with_progress_starts_and_deaths_only():
    world = World()
    world.add("rollout-0")
    world.change("rollout-0", progress=1.0)
    world.advance(1.0)
    before = world.supervisor.counters()
    world.change("rollout-0", progress=None)
    world.advance(5.0)
    assert world.supervisor.counters() == before
    world.change("rollout-0", progress=2.0)
    world.advance(1.0)
    assert world.supervisor.counters() == {**before, "rollout-0#0": 2.0}
    world.newest("rollout-0").die()
    world.advance(1.0)
    assert world.supervisor.counters()["deaths"] == 1.0


def test_the_description_of_the_components_for_the_status():
    world = World()
    world.add("rollout-0", "learner-0")
    world.change("rollout-0", busy_s=1.0, idle_s=3.0, facts={"version": [2, 7], "tasks": {}})
    world.newest("learner-0").die()
    world.advance(1.5)
    told = world.supervisor.describe()
    assert list(told) == ["learner-0", "rollout-0"]
    assert told["rollout-0"] == {
        "phase": "living", "incarnation": 0, "deaths": 0, "version": [2, 7], "state": "running", "doing": "working",
        "pid": 1000, "host": "host-a", "busy_s": 1.0, "idle_s": 3.0, "stuck_s": 0.0,
    }  # fmt: skip
    assert told["learner-0"]["phase"] == "waiting" and told["learner-0"]["last_death"] == "learner-0#0 is dead"


def test_a_straggler_is_told_and_replaced_if_asked():
    world = World(replace_stragglers=True, max_restarts=0)
    world.add("rollout-0", "rollout-1", "rollout-2")
    for second in range(40):
        for index, pace in enumerate((1.0, 1.0, 0.1)):
            world.change(f"rollout-{index}", progress=pace * second)
        world.advance(1.0)
    (told,) = world.told("straggler")
    assert told["component"] == "rollout-2" and told["factor"] == pytest.approx(10.0)
    assert world.started("rollout-2") == [0, 1] and world.started("rollout-0") == [0]


def test_stopping_hears_everybody_out_and_ends_them():
    world = World()
    world.add("rollout-0", "learner-0")
    world.newest("learner-0").say("saved")
    world.newest("rollout-0").failing_calls.add("stop")
    assert world.supervisor.stop(4.0) == []
    assert all(component.killed for component in world.spawned)
    assert world.messages == [("learner-0#0", "saved")]
    assert world.newest("learner-0").calls == [("stop", 2.0)]
    assert [fields["component"] for fields in world.told("stop_failed")] == ["rollout-0#0"]
    assert world.supervisor.view.peers == ()


def test_stopping_names_those_whose_end_is_not_certain():
    world = World()
    world.add("rollout-0", "rollout-1")
    world.newest("rollout-0").stuck_kills = 10
    world.newest("rollout-1").stuck_kills = 10_000
    world.newest("rollout-1").die()
    world.advance(1.0)
    assert world.supervisor.stop(4.0) == ["rollout-0#0", "rollout-1#0"]


def test_two_components_of_one_name_are_refused_and_unknown_names_too():
    world = World()
    world.add("rollout-0")
    with pytest.raises(ValueError, match="rollout-0 was added before"):
        world.supervisor.add(spec("rollout-0"))
    with pytest.raises(ValueError, match="rollout-7 is no component of this run; there are rollout-0"):
        world.supervisor.drain("rollout-7")


def test_a_condition_without_an_error_still_has_a_reason():
    world = World()
    world.add("rollout-0")
    world.newest("rollout-0").condition = ComponentStatus("failed", "x")
    world.advance(1.0)
    assert world.told("component_death")[0]["reason"] == "failed without saying why"

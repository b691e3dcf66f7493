"""The host of a component, over threads: calls, errors, heartbeats, messages, and who is refused."""

import threading
import time

import pytest

from penstock.overseer.config import RoleConfig
from penstock.overseer.launch import host as hosting
from penstock.overseer.launch.host import MOST_PER_REPORT, IncarnationFence, Outbox
from penstock.overseer.supervisor.messages import Identity, Membership, Peer, Reply, Report
from penstock.types import (
    CheckpointError,
    PenstockError,
    SupersededError,
    SupersededVersionError,
    TransferError,
    UnreachableError,
)
from tests.overseer import plain_component
from tests.overseer.thread_launcher import ThreadHandle, ThreadLauncher

FIRST, SECOND, OTHER = Identity("rollout", 0, 0), Identity("rollout", 0, 1), Identity("replay", 0, 0)


def view(number: int, *identities: Identity) -> Membership:
    return Membership(number, 0, tuple(Peer(identity, {}) for identity in identities))


@pytest.fixture
def launcher():
    launcher = ThreadLauncher()
    yield launcher
    launcher.close(5.0)


def spawn(
    launcher: ThreadLauncher, identity: Identity, seen: Membership | None = None, **settings: object
) -> ThreadHandle:
    return launcher.spawn(identity, plain_component.make, settings, RoleConfig(), seen or Membership())


def running(handle: ThreadHandle, seen: Membership | None = None) -> Report:
    """Beats until the component is made."""
    deadline = time.monotonic() + 10
    while True:
        report = handle.beat(seen or Membership(), 0).result(10)
        if report.condition.state != "starting":
            return report
        assert time.monotonic() < deadline, "the component is not made"


def test_a_heartbeat_without_a_view_leaves_it_as_it_is(launcher):
    handle = spawn(launcher, OTHER, view(2, OTHER))
    running(handle, view(3, OTHER))
    assert handle.beat(None, 0).result(5).condition.state == "running"
    assert handle.host is not None and handle.host.view.number == 3


# --- calls ---------------------------------------------------------------------------------------------------------


def test_a_call_is_answered(launcher):
    handle = spawn(launcher, OTHER)
    assert running(handle).condition.state == "running"
    assert handle.call("add", 2, 3, timeout_s=5) == 5


@pytest.mark.parametrize("method", ["wait_in_thread", "wait_in_loop"])
def test_many_calls_wait_at_once_and_heartbeats_are_answered_meanwhile(launcher, method):
    handle = spawn(launcher, OTHER)
    running(handle)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(handle.call(method, timeout_s=20)), daemon=True)
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    assert handle.beat(Membership(), 0).result(5).condition.state == "running"
    handle.call("open", timeout_s=5)
    for thread in threads:
        thread.join(10)
    assert answers == ["opened"] * 40


def test_errors_arrive_by_their_own_type(launcher):
    handle = spawn(launcher, OTHER)
    running(handle)
    with pytest.raises(CheckpointError, match="^no such checkpoint$"):
        handle.call("fail", "checkpoint", timeout_s=5)
    with pytest.raises(SupersededVersionError, match="version 3 is gone") as caught:
        handle.call("fail", "version", timeout_s=5)
    assert caught.value.newest == (1, 5)


def test_an_error_of_another_kind_names_its_type_and_harms_nobody_else(launcher):
    handle = spawn(launcher, OTHER)
    running(handle)
    with pytest.raises(PenstockError, match="KeyError: 'unheard'"):
        handle.call("fail", "unheard", timeout_s=5)
    with pytest.raises(PenstockError, match="TypeError"):
        handle.call("add", 1, timeout_s=5)
    assert handle.call("add", 1, 1, timeout_s=5) == 2


@pytest.mark.parametrize("method", ["nothing_such", "_hidden", "__init__", "settings"])
def test_only_public_methods_are_called(launcher, method):
    handle = spawn(launcher, OTHER)
    running(handle)
    with pytest.raises(PenstockError, match=f"has no method {method}"):
        handle.call(method, timeout_s=5)


def test_peers_cannot_touch_the_life_of_a_component(launcher):
    spawn(launcher, FIRST, view(1, FIRST, OTHER))
    handle = spawn(launcher, OTHER, view(1, FIRST, OTHER))
    running(handle)
    running(launcher.handles[FIRST])
    with pytest.raises(PenstockError, match="no method drain for others"):
        launcher.handles[FIRST].call("ask", "replay-0", "drain", (), 5.0, timeout_s=5)
    handle.call("drain", timeout_s=5)
    assert running(handle).condition.state == "drained"


def test_components_call_the_living_incarnation(launcher):
    worker = spawn(launcher, FIRST, view(1, FIRST))
    running(worker)
    with pytest.raises(UnreachableError, match="replay-0 is not running at present: where was not called"):
        worker.call("ask", "replay-0", "where", (), 5.0, timeout_s=5)
    replay = spawn(launcher, OTHER, view(2, FIRST, OTHER))
    running(replay)
    worker.beat(view(2, FIRST, OTHER), 0).result(5)
    assert worker.call("ask", "replay-0", "where", (), 5.0, timeout_s=5)[1] == "replay-0#0"
    launcher.die("replay-0")
    with pytest.raises(UnreachableError, match="replay-0#0 is dead"):
        worker.call("ask", "replay-0", "where", (), 5.0, timeout_s=5)
    successor = Identity("replay", 0, 1)
    running(spawn(launcher, successor, view(3, FIRST, successor)))
    worker.beat(view(3, FIRST, successor), 0).result(5)
    assert worker.call("ask", "replay-0", "where", (), 5.0, timeout_s=5)[1] == "replay-0#1"


# --- late messages -------------------------------------------------------------------------------------------------


def test_a_late_call_of_a_replaced_incarnation_is_refused(launcher):
    replay = spawn(launcher, OTHER, view(1, FIRST, OTHER))
    running(replay)
    assert launcher.late_call(FIRST, "replay-0", "add", 1, 1) == 2
    replay.beat(view(2, SECOND, OTHER), 0).result(5)
    with pytest.raises(SupersededError, match="rollout-0#0 was given up .* rollout-0 is at #1"):
        launcher.late_call(FIRST, "replay-0", "add", 1, 1)
    assert launcher.late_call(SECOND, "replay-0", "add", 1, 1) == 2


def test_one_that_died_and_has_no_successor_yet_is_refused():
    senders = IncarnationFence()
    senders.look(view(1, FIRST, OTHER))
    senders.check(FIRST)
    senders.look(view(2, OTHER))
    with pytest.raises(SupersededError):
        senders.check(FIRST)
    senders.check(SECOND)


def test_a_successor_that_no_view_has_named_yet_is_taken_and_ends_its_predecessor():
    senders = IncarnationFence()
    senders.look(view(1, FIRST))
    senders.check(SECOND)
    with pytest.raises(SupersededError):
        senders.check(FIRST)


def test_one_that_learns_that_it_was_replaced_calls_nobody(launcher):
    worker = spawn(launcher, FIRST, view(1, FIRST, OTHER))
    running(spawn(launcher, OTHER, view(1, FIRST, OTHER)))
    running(worker)
    worker.beat(view(2, SECOND, OTHER), 0).result(5)
    with pytest.raises(SupersededError, match="rollout-0#0 was replaced by rollout-0#1"):
        worker.call("ask", "replay-0", "add", (1, 1), 5.0, timeout_s=5)


# --- heartbeats ----------------------------------------------------------------------------------------------------


def test_messages_are_repeated_until_they_are_acknowledged(launcher):
    handle = spawn(launcher, OTHER)
    running(handle)
    handle.call("report", 7, timeout_s=5)
    for _ in range(2):
        first, second = handle.beat(Membership(), 0).result(5).messages
        assert (first.number, first.kind, first.step, first.name, first.fields) == (
            1, "event", 7, "noted", {"what": "something"}
        )  # fmt: skip
        assert (second.number, second.kind, second.fields) == (2, "metrics", {"plain/number": 2.5})
    assert [message.number for message in handle.beat(Membership(), 1).result(5).messages] == [2]
    assert handle.beat(Membership(), 2).result(5).messages == ()
    handle.call("report", 8, timeout_s=5)
    assert [message.number for message in handle.beat(Membership(), 2).result(5).messages] == [3, 4]


def test_a_report_is_bounded():
    outbox = Outbox()
    for step in range(MOST_PER_REPORT + 5):
        outbox.put("metrics", step, "", {})
    assert len(outbox.unacknowledged(0)) == MOST_PER_REPORT
    assert [message.number for message in outbox.unacknowledged(MOST_PER_REPORT)] == [1001, 1002, 1003, 1004, 1005]


def test_a_component_is_told_of_every_new_view_once_and_of_no_old_one(launcher):
    handle = spawn(launcher, OTHER, view(1, OTHER))
    running(handle, view(1, OTHER))
    for number in (2, 2, 3, 1):
        handle.beat(view(number, OTHER), 0).result(5)
    assert handle.call("view_numbers", timeout_s=5) == [1, 2, 3]


def test_a_component_that_cannot_be_made_says_why(launcher):
    handle = spawn(launcher, OTHER, fails=True)
    condition = running(handle).condition
    assert (condition.state, condition.error) == ("failed", "nothing to start from") and condition.refused
    with pytest.raises(UnreachableError, match="failed to start: nothing to start from"):
        handle.call("add", 1, 1, timeout_s=5)


def test_a_condition_that_raises_is_a_failure(launcher):
    condition = running(spawn(launcher, OTHER, condition_fails=True)).condition
    assert (condition.state, condition.error) == ("failed", "ValueError: no condition")


def test_a_notice_drains_once_and_is_told(launcher):
    handle = spawn(launcher, OTHER)
    running(handle)
    assert handle.host is not None
    handle.host.drain("SIGTERM")
    handle.host.drain("SIGTERM")
    report = handle.beat(Membership(), 0).result(5)
    assert report.condition.state == "drained"
    assert [(m.name, m.fields["reason"]) for m in report.messages] == [("drain_notice", "SIGTERM")]


def test_a_notice_during_the_start_drains_as_soon_as_there_is_something_to_drain(launcher):
    may_go_on = threading.Event()

    def slow(surroundings, settings):
        assert may_go_on.wait(10)
        return plain_component.make(surroundings, settings)

    handle = launcher.spawn(OTHER, slow, {}, RoleConfig(), Membership())
    assert handle.beat(Membership(), 0).result(5).condition.state == "starting"
    with pytest.raises(UnreachableError, match="replay-0#0 is starting"):
        handle.call("add", 1, 1, timeout_s=5)
    handle.host.drain("SIGTERM")
    may_go_on.set()
    deadline = time.monotonic() + 5
    while (state := handle.beat(Membership(), 0).result(5).condition.state) != "drained":
        assert time.monotonic() < deadline, f"it is {state}"


def test_heartbeats_are_answered_when_every_thread_waits(launcher, monkeypatch):
    monkeypatch.setattr(hosting, "CALL_THREADS", 1)
    handle = spawn(launcher, OTHER)
    running(handle)
    waiting = threading.Thread(target=lambda: handle.call("wait_in_thread", timeout_s=20), daemon=True)
    waiting.start()
    queued = threading.Thread(target=lambda: handle.call("add", 1, 1, timeout_s=20), daemon=True)
    queued.start()
    deadline = time.monotonic() + 5
    while not handle.host._calls._work_queue.qsize():
        assert time.monotonic() < deadline, "the second call does not queue"
    assert handle.beat(Membership(), 0).result(5).condition.state == "running"
    handle.host._component.open()
    waiting.join(10)
    queued.join(10)
    assert not waiting.is_alive() and not queued.is_alive()


# --- answers -------------------------------------------------------------------------------------------------------


def test_an_error_of_a_subclass_arrives_as_the_nearest_one_known_to_both():
    class Local(TransferError):
        pass

    with pytest.raises(TransferError, match="^torn$") as caught:
        Reply.of(Local("torn")).result()
    assert type(caught.value) is TransferError


def test_a_name_that_is_no_error_is_still_an_error():
    with pytest.raises(PenstockError, match="odd"):
        Reply(error="Unheard", message="odd").result()


# --- the launcher of threads itself --------------------------------------------------------------------------------


def test_a_frozen_component_answers_when_it_is_thawed(launcher):
    handle = spawn(launcher, OTHER)
    running(handle)
    launcher.freeze("replay-0")
    beat = handle.beat(Membership(), 0)
    with pytest.raises(UnreachableError, match="did not answer add within 0.1 s"):
        handle.call("add", 1, 1, timeout_s=0.1)
    assert not beat.done()
    launcher.thaw("replay-0")
    assert beat.result(5).condition.state == "running"


def test_what_waits_for_a_component_is_told_of_its_death(launcher):
    handle = spawn(launcher, OTHER)
    running(handle)
    launcher.freeze("replay-0")
    beat = handle.beat(Membership(), 0)
    handle.kill(5)
    with pytest.raises(UnreachableError, match="died"):
        beat.result(5)
    with pytest.raises(UnreachableError):
        handle.beat(Membership(), 0).result(5)


def test_a_start_may_be_refused(launcher):
    launcher.refuse("replay-0")
    with pytest.raises(UnreachableError):
        spawn(launcher, OTHER).beat(Membership(), 0).result(5)
    assert running(spawn(launcher, Identity("replay", 0, 1))).condition.state == "running"

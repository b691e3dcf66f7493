"""Back-pressure of an open buffer: who waits, what ends the wait, and what is said of it."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fragments_made import a_batch
from tests.replay.fragment_fleet import Fleet
from tests.replay.open_buffers import ids
from tests.waiting import wait_until

from penstock.replay.buffer import AdmissionLimit
from penstock.types import NoProgressError, Stopped


def blocked(run, count=1):
    """A sender in a thread; returns when it waits."""
    errors = []

    def send():
        try:
            run.buffer.add_batches([a_batch(*[run.fragment() for _ in range(count)])])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: run.buffer.metrics()["replay/blocked_senders"] == 1)
    return thread, errors


def test_a_full_buffer_lets_senders_wait_and_evicts_nothing(fleet):
    run = fleet(max_waiting=3)
    run.add(*[run.fragment() for _ in range(3)])
    assert not run.buffer.has_room
    thread, errors = blocked(run, 3)
    assert run.counts() == {"started": 3, "waiting": 3}
    batch = run.source.next_batch(0, 5.0)  # 2 of 3 are gone: there is room for two
    wait_until(lambda: run.counts()["started"] == 5 and run.buffer.metrics()["replay/blocked_senders"] == 1)
    run.source.finish_update(0)
    assert ids(batch) == ["cart-w0-0-0/0", "cart-w0-0-1/0"]
    run.source.next_batch(1, 5.0)
    thread.join(5)
    assert not thread.is_alive() and errors == []
    assert run.buffer.metrics()["replay/blocked_senders"] == 0 < run.buffer.metrics()["replay/blocked_s"] < 5
    assert run.counts() == {"started": 6, "trained": 2, "waiting": 4}


def test_a_new_version_makes_room_where_fragments_are_stale(fleet):
    run = fleet(max_waiting=2, max_staleness=0)
    run.add(run.fragment(), run.fragment())
    thread, errors = blocked(run)
    run.source.set_current_step(1)
    thread.join(5)
    assert not thread.is_alive() and errors == []
    assert run.counts() == {"started": 3, "stale_step": 3}


def test_time_makes_room_too(fleet):
    run = fleet(max_waiting=2, max_age_s=10.0)
    run.add(run.fragment(), run.fragment())
    run.now += 11
    run.add(run.fragment())
    assert run.counts() == {"started": 3, "stale_time": 2, "waiting": 1}


def test_a_sender_that_waits_hears_of_the_end_and_of_its_limit(fleet):
    run = fleet(max_waiting=2, max_waiting_s=0.1)
    run.add(run.fragment(), run.fragment())
    with pytest.raises(
        NoProgressError, match="waited 0.1 s.*2 rollouts wait.*max_waiting = 2.*learner is at version 0"
    ):
        run.add(run.fragment())
    run = fleet("other", max_waiting=2)
    run.add(run.fragment(), run.fragment())
    thread, errors = blocked(run)
    run.buffer.close()
    thread.join(5)
    assert [type(error) for error in errors] == [Stopped]


def test_what_was_used_does_not_keep_others_out(fleet):
    run = fleet(max_waiting=2, max_samples=3)
    run.add(run.fragment(), run.fragment())
    run.update(0)
    assert run.counts() == {"started": 2, "waiting": 2} and run.buffer.has_room
    run.add(run.fragment())
    assert run.update(1) == ["cart-w0-0-2/0", "cart-w0-0-0/0"]  # what was in no batch yet, then the oldest
    assert run.buffer.pool.unused == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["add", "add", "add", "update", "version", "time"]), max_size=40), st.integers(1, 3))
def test_the_count_of_those_that_wait_for_a_first_batch_is_right(tmp_path_factory, steps, uses):
    run = Fleet(tmp_path_factory.mktemp("run") / "run", max_samples=uses, max_staleness=1, max_age_s=9.0, max_waiting=6)
    used, step = set(), 0
    for what in steps:
        if what == "add" and run.buffer.has_room:
            run.add(run.fragment(weight_steps=step))
        elif what == "update" and (batch := run.buffer.try_next_batch(step)) is not None:
            used.update(ids(batch))
            step += 1
            run.source.finish_update(step - 1)
            run.source.set_current_step(step)
        elif what == "version":
            step += 1
            run.source.set_current_step(step)
        elif what == "time":
            run.now += 4
        waiting = {r.rollout_id for group in run.buffer.pool.waiting for r in group.rollouts}
        assert run.buffer.pool.unused == len(waiting - used) <= 6
    run.end()


class Shared:
    """A count under a condition, with a clock that waiting moves."""

    def __init__(self, count: int) -> None:
        self.count, self.now = count, 0.0
        self.changed = threading.Condition()

    def clock(self) -> float:
        return self.now

    def waiting(self) -> int:
        return self.count


def test_below_the_limit_nobody_waits():
    shared = Shared(3)
    for most in (4, None):
        with shared.changed:
            AdmissionLimit(most, 1.0, shared.clock).wait(shared.changed, shared.waiting, str)
    assert AdmissionLimit(None, 1.0).metrics() == {}


def test_the_wait_ends_when_there_is_room_and_is_counted(monkeypatch):
    shared = Shared(4)
    room = AdmissionLimit(4, 60.0, shared.clock)
    seen = []

    def wait(timeout):
        seen.append((timeout, room.metrics()["replay/blocked_senders"]))
        shared.now += 0.5
        shared.count -= shared.now >= 1.5

    monkeypatch.setattr(shared.changed, "wait", wait)
    with shared.changed:
        room.wait(shared.changed, shared.waiting, str)
    assert seen == [(1.0, 1.0)] * 3
    assert room.metrics() == {"replay/blocked_senders": 0.0, "replay/blocked_s": 1.5}


def test_a_wait_that_is_too_long_says_what_for(monkeypatch):
    shared = Shared(4)
    room = AdmissionLimit(4, 2.5, shared.clock)
    monkeypatch.setattr(shared.changed, "wait", lambda timeout: setattr(shared, "now", shared.now + timeout))
    with (
        shared.changed,
        pytest.raises(
            NoProgressError,
            match=r"waited 2.5 s \(replay.max_waiting_s\): 4 rollouts wait.*max_waiting = 4.*the learner sleeps",
        ),
    ):
        room.wait(shared.changed, shared.waiting, lambda: "the learner sleeps")
    assert room.metrics()["replay/blocked_s"] == 2.5

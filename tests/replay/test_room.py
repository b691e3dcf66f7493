"""Back-pressure of an open buffer: who waits, what ends the wait, and what is said of it."""

import threading

import pytest

from penstock.replay.buffer import AdmissionLimit
from penstock.types import NoProgressError


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

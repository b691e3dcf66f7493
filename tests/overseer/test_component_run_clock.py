"""Rollouts are as old as the replay buffer's clock says, whatever becomes of the clocks of machines."""

import threading
from typing import Any

import pytest

from penstock.overseer.component import ASK_S, RunClock, SteadyClock
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.types import UnreachableError


class Machine:
    """A time of day that can jump, and seconds since the start that cannot."""

    def __init__(self, wall: float, steady: float) -> None:
        self.wall, self.steady = wall, steady

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


class Replay:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.begin()
        self.asked, self.there = 0, True
        self.living = Identity("replay", 0, 0)

    def begin(self) -> None:
        self.clock = SteadyClock(lambda: self.machine.wall, lambda: self.machine.steady)

    @property
    def view(self) -> Membership:
        return Membership(peers=(Peer(self.living, {}),))

    def caller(self, name: str) -> "Replay":
        assert name == "replay-0"
        return self

    def call(self, method: str, *args: object, timeout_s: float) -> float:
        assert method == "now" and not args
        self.asked += 1
        if not self.there:
            raise UnreachableError("replay-0 is not there")
        return self.clock.now()


@pytest.fixture
def replay():
    return Replay(Machine(1_000_000.0, 5.0))


def clock_of(worker: Machine, replay: Replay) -> RunClock:
    ctx: Any = replay  # as a component is given it
    return RunClock(ctx, lambda: worker.wall, lambda: worker.steady)


@pytest.mark.attack
def test_a_steady_clock_does_not_jump_with_the_machine(replay):
    replay.machine.pass_time(3.0)
    replay.machine.wall -= 36_000
    replay.machine.pass_time(4.0)
    assert replay.clock.now() == 1_000_007.0


def test_a_worker_whose_clock_is_hours_behind_stamps_as_the_buffer_does(replay):
    worker = Machine(1_000_000.0 - 7 * 3600, 900.0)
    clock = clock_of(worker, replay)
    assert clock.now() == worker.wall  # nothing better is known
    assert clock.ask()
    assert clock.now() == 1_000_000.0
    worker.wall += 36_000
    for machine in (worker, replay.machine):
        machine.pass_time(2.5)
    assert clock.now() == replay.clock.now() == 1_000_002.5


def test_a_buffer_that_does_not_answer_leaves_the_clock_as_it_was(replay):
    worker = Machine(50.0, 0.0)
    clock = clock_of(worker, replay)
    assert clock.ask()
    replay.there = False
    worker.pass_time(1.0)
    assert not clock.ask()
    assert clock.now() == 1_000_001.0


class Looks(threading.Event):
    """An event whose every wait is a moment of the test's, until the moments are used up."""

    def __init__(self, moments) -> None:
        super().__init__()
        self._moments = iter(moments)

    def wait(self, timeout: float | None = None) -> bool:
        moment = next(self._moments, None)
        if moment is None:
            return True
        moment()
        return False


def test_another_buffer_is_asked_at_once_and_the_same_one_now_and_then(replay):
    worker, asked = Machine(0.0, 0.0), []
    clock = clock_of(worker, replay)

    def look(change=lambda: None):
        def moment():
            asked.append(replay.asked)
            change()

        return moment

    looks = [
        look(),
        look(),
        look(lambda: setattr(replay, "living", Identity("replay", 0, 1))),
        look(lambda: worker.pass_time(ASK_S)),
        look(),
    ]
    clock.follow(Looks(looks))
    assert [*asked, replay.asked] == [0, 1, 1, 2, 3, 3]


def test_a_buffer_that_did_not_answer_is_asked_again_at_the_next_look(replay):
    replay.there = False
    clock = clock_of(Machine(0.0, 0.0), replay)
    clock.follow(Looks([lambda: None] * 3))
    assert replay.asked == 3

"""What one incarnation is asked, and when."""

from concurrent.futures import Future

import pytest

from penstock.overseer.config import OverseerConfig
from penstock.overseer.supervisor.heartbeat import Heartbeat
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Membership, Report

WHO = Identity("rollout", 0, 0)
CONFIG = OverseerConfig(heartbeat_s=1.0)


class Asked:
    """A handle that keeps what it is asked, and answers when it is told to."""

    identity = WHO

    def __init__(self) -> None:
        self.views: list[int | None] = []
        self.outstanding: list[Future[Report]] = []

    def beat(self, view: Membership | None, acknowledged: int) -> Future[Report]:
        self.views.append(None if view is None else view.number)
        self.outstanding.append(Future())
        return self.outstanding[-1]

    def answer(self) -> None:
        self.outstanding.pop().set_result(Report(WHO, 1, "here", ComponentStatus("running", "working")))


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def beat(asked):
    """(view's number, time) → asks where that is due, and takes the answer."""
    heartbeat = Heartbeat(asked, CONFIG, 0.0)

    def beat(number: int, now_s: float) -> None:
        heartbeat.ask(Membership(number), now_s)
        if asked.outstanding:
            asked.answer()
            assert heartbeat.collect(now_s) is not None

    return beat


def test_a_view_travels_once(asked, beat):
    beat(3, 0.0)
    beat(3, 1.0)
    beat(3, 2.0)
    beat(4, 3.0)
    assert asked.views == [3, None, None, 4]


def test_a_newer_view_is_told_before_its_time(asked, beat):
    beat(3, 0.0)
    beat(3, 0.3)
    assert asked.views == [3]
    beat(4, 0.3)
    assert asked.views == [3, 4]
    beat(4, 1.2)
    assert asked.views == [3, 4]
    beat(4, 1.3)
    assert asked.views == [3, 4, None]


def test_many_changes_are_told_together(asked, beat):
    """With a thousand components, every change told to everybody would be all that the overseer does."""
    for turn in range(21):
        beat(turn, turn * 0.05)
    assert asked.views == [0, 5, 10, 15, 20]


def test_nothing_is_asked_while_an_answer_is_outstanding(asked):
    heartbeat = Heartbeat(asked, CONFIG, 0.0)
    heartbeat.ask(Membership(1), 0.0)
    heartbeat.ask(Membership(2), 5.0)
    assert asked.views == [1]
    asked.answer()
    assert heartbeat.collect(5.0) is not None
    heartbeat.ask(Membership(2), 5.0)
    assert asked.views == [1, 2]

import threading
import time
from concurrent.futures import Future

import pytest

from penstock.overseer.supervisor.messages import Identity, Membership, Report
from penstock.overseer.supervisor.stopping import stop_all
from penstock.types.calls import in_background
from tests.overseer.supervisor.world import Component, at_once


@pytest.fixture
def crew() -> list[Component]:
    made = [Component(Identity("rollout", index, 0), {}, Membership()) for index in range(3)]
    for component in made:
        component.run()
    return made


def test_everybody_stops_is_heard_out_and_ended(crew):
    heard: list[Report] = []
    told: list[tuple[str, str]] = []
    crew[1].say("last")
    assert stop_all([(c, 0) for c in crew], Membership(), heard.append, lambda *w: told.append(w), at_once, 8.0) == []
    assert [component.calls for component in crew] == [[("stop", 4.0)]] * 3
    assert [report.identity.index for report in heard] == [0, 1, 2] and heard[1].messages[0].name == "last"
    assert all(component.killed for component in crew) and told == []


def test_who_hangs_keeps_nobody_waiting_and_is_told(crew):
    told: list[tuple[str, str]] = []
    released = threading.Event()
    crew[0].call = lambda method, *words, timeout_s: released.wait(60.0)  # type: ignore[method-assign, assignment]
    crew[1].mode = "hanging"
    crew[2].stuck_kills = 1
    heard: list[Report] = []
    started = time.monotonic()
    left = stop_all([(c, 0) for c in crew], Membership(), heard.append, lambda *w: told.append(w), in_background, 0.8)
    assert time.monotonic() - started < 30.0
    released.set()
    assert left == ["rollout-2#0"] and [report.identity.index for report in heard] == [0, 2]
    assert told == [
        ("rollout-0#0", "no answer within 0.4 s"),
        ("rollout-1#0", "no answer within 0.2 s"),
        ("rollout-2#0", "rollout-2#0 is still there"),
    ]
    assert crew[0].killed and crew[1].killed


def test_last_words_that_cannot_be_logged_leave_nobody_behind(crew):
    def full(report: Report) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        stop_all([(c, 0) for c in crew], Membership(), full, lambda *words: None, at_once, 2.0)
    assert all(component.killed for component in crew)


def test_an_end_that_does_not_return_is_not_taken_for_one(crew):
    def background(function) -> Future[None]:
        return Future()

    left = stop_all([(crew[0], 0)], Membership(), lambda report: None, lambda *words: None, background, 0.2)
    assert left == ["rollout-0#0"]

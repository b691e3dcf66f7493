import threading
from concurrent.futures import Future

import pytest

from penstock.overseer.supervisor.messages import Identity, Membership
from penstock.overseer.supervisor.stopping import Termination
from penstock.types import RunFailed, UnreachableError
from penstock.types.calls import in_background
from tests.overseer.supervisor.world import Component, at_once


def component(stuck_kills: int = 0) -> Component:
    made = Component(Identity("learner", 0, 2), {}, Membership())
    made.stuck_kills = stuck_kills
    return made


def test_attempts_are_repeated_until_the_process_is_gone():
    told: list[str] = []
    ending = Termination(component(2), 10.0, at_once, 0.0)
    assert [ending.poll(second, told.append) for second in (0.0, 1.0, 2.0)] == [False, False, True]
    assert ending.gone and told == ["learner-0#2 is still there"] * 2


def test_the_limit_is_raised_once():
    ending = Termination(component(100), 10.0, at_once, 0.0)
    assert not ending.poll(10.0, lambda reason: None)
    with pytest.raises(RunFailed, match=r"learner-0#2 could not be shown to be dead within 10 s .*: .* is still there"):
        ending.poll(10.1, lambda reason: None)
    assert not ending.poll(20.0, lambda reason: None)


def test_an_attempt_that_does_not_return_counts_too():
    ending = Termination(component(), 10.0, lambda function: Future(), 0.0)
    with pytest.raises(RunFailed, match="the attempt has not returned"):
        ending.poll(11.0, lambda reason: None)


def test_another_error_than_the_promised_one_is_not_swallowed():
    broken = component()
    broken.kill = lambda timeout_s: 1 / 0  # type: ignore[method-assign, assignment]
    ending = Termination(broken, 10.0, in_background, 0.0)
    with pytest.raises(ZeroDivisionError):
        while True:
            ending.poll(0.0, lambda reason: None)


def test_the_background_is_another_thread_and_hands_over_results_and_errors():
    assert in_background(threading.get_ident).result(30) != threading.get_ident()

    def fails() -> None:
        raise UnreachableError("gone")

    with pytest.raises(UnreachableError, match="gone"):
        in_background(fails).result(30)

"""Calls that are repeated: what counts as an answer, when they end, and with what."""

import threading

import pytest

from penstock.types import NoProgressError, RetryingCaller, RunFailed, Stopped, UnreachableError


class Scripted:
    """Answers with these in turn; what is an exception is raised, and takes its time."""

    def __init__(self, *answers, clock=None, call_s=0.0):
        self.answers, self.calls, self.clock, self.call_s = list(answers), [], clock, call_s

    def call(self, method, *args, timeout_s):
        self.calls.append((method, args, timeout_s))
        if self.clock is not None:
            self.clock.now += self.call_s
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def test_a_call_is_repeated_until_it_is_answered():
    caller = Scripted(UnreachableError("dead"), UnreachableError("not yet"), 7)
    calls = RetryingCaller(caller, "replay-0")
    assert calls.call("next", 1, timeout_s=2.0) == 7
    assert caller.calls == [("next", (1,), 2.0)] * 3 and calls.repeats == 2 and not calls.silent


def test_silence_has_a_limit_that_names_who_and_what():
    clock = Clock()
    calls = RetryingCaller(Scripted(UnreachableError("no route"), clock=clock, call_s=4.0), "replay-0", 10.0, clock)
    with pytest.raises(NoProgressError, match=r"replay-0 has not answered for 12 s \(limit 10 s\).*'next'.*no route"):
        calls.call("next", timeout_s=4.0)


def test_an_answer_begins_the_silence_anew_and_so_does_an_error_of_the_other_side():
    clock = Clock()
    dead = UnreachableError("dead")
    caller = Scripted(dead, dead, 1, dead, RunFailed("it says no"), dead, 2, clock=clock, call_s=4.0)
    calls = RetryingCaller(caller, "replay-0", 10.0, clock)
    assert calls.call("next", timeout_s=4.0) == 1
    with pytest.raises(RunFailed, match="it says no"):
        calls.call("next", timeout_s=4.0)
    assert not calls.silent and calls.call("next", timeout_s=4.0) == 2


def test_stop_ends_a_wait_and_later_calls():
    failed = threading.Event()

    class Dead:
        def call(self, method, *args, timeout_s):
            failed.set()
            raise UnreachableError("dead")

    calls = RetryingCaller(Dead(), "replay-0")
    outcome = []

    def run():
        try:
            calls.call("next", timeout_s=1.0)
        except Stopped as stopped:
            outcome.append(str(stopped))

    thread = threading.Thread(target=run)
    thread.start()
    assert failed.wait(5)
    calls.stop()
    thread.join(5)
    assert outcome == ["the connection to replay-0 was closed"]
    with pytest.raises(Stopped):
        calls.call("next", timeout_s=1.0)

"""Calls that are repeated: what counts as an answer, when they end, and with what."""

import sys
import threading
import time
import weakref

import pytest

from penstock.types import NoProgressError, RetryingCaller, RunFailed, Stopped, UnreachableError
from penstock.types.calls import DaemonThreads, in_background

WAIT_S = 280.0


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


def test_pauses_double_up_to_a_second(monkeypatch):
    calls, pauses = RetryingCaller(Scripted(*[UnreachableError("dead")] * 7, 1), "replay-0"), []
    monkeypatch.setattr(calls, "pause", pauses.append)
    assert calls.call("next", timeout_s=2.0) == 1
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_silence_has_a_limit_that_names_who_and_what():
    clock = Clock()
    calls = RetryingCaller(Scripted(UnreachableError("no route"), clock=clock, call_s=4.0), "replay-0", 12.0, clock)
    with pytest.raises(NoProgressError, match=r"replay-0 has not answered for 12 s \(limit 12 s\).*'next'.*no route"):
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


def test_after_a_stop_nobody_is_called():
    caller = Scripted(7)
    calls = RetryingCaller(caller, "replay-0")
    calls.stop()
    with pytest.raises(Stopped, match="the connection to replay-0 was closed"):
        calls.call("next", timeout_s=1.0)
    assert caller.calls == []


def test_a_thread_in_the_background_keeps_no_process_from_ending():
    thread = in_background(threading.current_thread, "of a test").result(WAIT_S)
    assert thread.daemon and thread.name == "of a test"


@pytest.fixture
def threads():
    made = DaemonThreads("of a test")
    yield made
    made.close()


def test_calls_at_a_time_have_a_thread_each(threads):
    together = threading.Barrier(8)
    arrivals = [threads.submit(together.wait, WAIT_S) for _ in range(8)]
    assert sorted(arrival.result(WAIT_S) for arrival in arrivals) == list(range(8))


def wait_for_idle(threads, count):
    """Until so many threads wait for their next call."""
    deadline = time.monotonic() + WAIT_S
    while threads._idle != count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def free(threads):
    """One that waits for its next call. It does some time after its last call's future is done."""
    until = threading.Event()
    while True:
        found = [threads.submit(threading.current_thread).result(WAIT_S) for _ in range(2)]
        if found[0] is found[1]:
            return found[0]
        until.wait(0.01)


def test_a_later_call_takes_the_thread_of_an_earlier_one(threads):
    thread = free(threads)
    assert thread.name == "of a test" and thread.daemon and thread is not threading.main_thread()


def test_what_a_call_raises_is_raised_where_it_is_read_and_its_thread_goes_on(threads):
    thread = free(threads)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(WAIT_S)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(WAIT_S)
    assert thread.is_alive() and threads.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)


def test_a_thread_that_waits_keeps_nothing_of_its_last_call(threads):
    class Large:
        pass

    given = Large()
    kept = weakref.ref(given)
    threads.submit(lambda each: None, given).result(WAIT_S)
    del given
    wait_for_idle(threads, 1)
    assert kept() is None


def test_closing_ends_threads_that_wait_at_once_and_the_others_with_their_call(threads):
    together, until, begun = threading.Barrier(3), threading.Event(), threading.Event()

    def meet():
        together.wait(WAIT_S)
        return threading.current_thread()

    def work():
        busy.append(threading.current_thread())
        begun.set()
        return until.wait(WAIT_S)

    waiting, busy = {future.result(WAIT_S) for future in [threads.submit(meet) for _ in range(3)]}, []
    wait_for_idle(threads, 3)
    future = threads.submit(work)
    assert begun.wait(WAIT_S)
    threads.close()
    waiting -= set(busy)
    for thread in waiting:
        thread.join(WAIT_S)
    assert [thread.is_alive() for thread in [*waiting, *busy]] == [False, False, True]
    until.set()
    assert future.result(WAIT_S)
    busy[0].join(WAIT_S)
    assert not busy[0].is_alive()


def test_what_is_asked_for_after_the_end_still_runs(threads):
    free(threads)
    threads.close()
    assert threads.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)

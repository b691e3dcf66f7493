import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from penstock.inference.server_pool import LoopThread
from penstock.types import NoProgressError, Stopped

WAIT_S = 280.0


async def nothing():
    pass


async def value():
    return 7


def test_it_runs_coroutines_and_calls():
    thread, called = LoopThread("test loop"), threading.Event()
    assert thread.submit(value()).result(WAIT_S) == 7
    thread.call(called.set)
    assert called.wait(WAIT_S)
    thread.close(nothing, WAIT_S)


def test_closing_cancels_what_runs_then_runs_the_last_and_ends_the_thread():
    thread, story, started = LoopThread("test loop"), [], threading.Event()

    async def hang():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            story.append("cancelled")

    async def last():
        story.append("last")

    hanging = thread.submit(hang())
    assert started.wait(WAIT_S)
    thread.close(last, WAIT_S)
    thread.close(last, WAIT_S)
    with pytest.raises(CancelledError):
        hanging.result(WAIT_S)
    assert story == ["cancelled", "last"]
    assert not [t for t in threading.enumerate() if t.name == "test loop"]
    with pytest.raises(Stopped, match="the test loop was closed"):
        thread.submit(value())
    thread.call(lambda: story.append("never"))
    assert story == ["cancelled", "last"]


def test_a_loop_that_hangs_is_told():
    thread, release = LoopThread("test loop"), threading.Event()
    thread.call(lambda: release.wait(WAIT_S))
    with pytest.raises(NoProgressError, match="the test loop did not end within 0.05 s"):
        thread.close(nothing, 0.05)
    release.set()
    thread.close(nothing, WAIT_S)

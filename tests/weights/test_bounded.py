import threading
import time

import pytest

from penstock.types import UnreachableError, WeightsError
from penstock.weights.bounded import MOST_LEFT_BEHIND, BoundedCalls


def test_a_call_returns_or_raises_what_it_did():
    calls = BoundedCalls()
    assert calls("reading", lambda: 7, 30.0) == 7
    with pytest.raises(WeightsError, match="torn"):
        calls("reading", _torn, 30.0)


def test_a_call_that_hangs_is_left_behind_at_its_limit_and_named():
    calls, released = BoundedCalls(), threading.Event()
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"^reading step 3 was not over within 0.1 s$"):
        calls("reading step 3", released.wait, 0.1)
    assert 0.1 <= time.monotonic() - began < 10.0
    assert calls("reading step 4", lambda: 7, 30.0) == 7
    released.set()


def test_only_a_few_calls_hang_at_once():
    calls, released = BoundedCalls(), threading.Event()
    for _ in range(MOST_LEFT_BEHIND):
        with pytest.raises(UnreachableError, match="not over"):
            calls("reading", released.wait, 0.01)
    threads = threading.active_count()
    with pytest.raises(UnreachableError, match=r"looking did not begin: 4 before it hang, reading first"):
        calls("looking", lambda: 7, 30.0)
    assert threading.active_count() == threads
    released.set()
    while threading.active_count() == threads:
        time.sleep(0.01)
    assert calls("looking", lambda: 7, 30.0) == 7


def test_closing_ends_a_wait():
    calls, released, raised = BoundedCalls(), threading.Event(), []

    def read():
        try:
            calls("reading", released.wait, 30.0)
        except UnreachableError as error:
            raised.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    calls.close()
    calls.close()
    reader.join(10.0)
    released.set()
    assert raised == ["reading was given up: the reader was closed"]


def _torn():
    raise WeightsError("torn")

"""The thread that merges small files: it works when there is news, and its failure ends the run."""

import threading
import time

import pytest

from penstock.batch import RecencyBatchMaker
from penstock.replay import ReplayBuffer, ReplayBufferConfig, StoreConfig
from penstock.types import RunFailed


@pytest.fixture
def buffer_over(sim):
    def make(maintain, full_disk_s=0.0):
        store = sim.MemoryStore()
        store.maintain = maintain
        config = ReplayBufferConfig(store=StoreConfig(buffer_size=1, full_disk_s=full_disk_s))
        return ReplayBuffer(config, store, RecencyBatchMaker(max_tokens=16, seed=0), clock=lambda: 1000.0)

    return make


def give(sim, buffer, number=0):
    ticket = sim.Ticket(f"easy-0-{number}", "easy", number, 0, 0, 0)
    sim.deliver(buffer, sim.make_group(ticket, [0.0, 1.0], timestamp=1000.0))


def test_a_written_file_wakes_it(sim, buffer_over):
    looked = threading.Event()
    buffer = buffer_over(looked.set)
    assert not looked.is_set()
    give(sim, buffer)
    assert looked.wait(10.0)
    buffer.close()


def test_a_full_disk_ends_the_run_with_an_error_that_says_so(sim, buffer_over):
    def maintain():
        raise OSError(28, "No space left on device")

    buffer = buffer_over(maintain)
    give(sim, buffer)
    with pytest.raises(RunFailed, match="keeping the rollout files in order failed: .*No space left on device"):
        limit = time.monotonic() + 10.0
        while time.monotonic() < limit:
            buffer.sample(2)
            time.sleep(0.005)


def test_merging_waits_for_room_on_a_full_disk(sim, buffer_over):
    rounds, merged = [], threading.Event()

    def maintain():
        rounds.append(time.monotonic())
        if len(rounds) < 3:
            raise OSError(28, "No space left on device")
        merged.set()

    buffer = buffer_over(maintain, full_disk_s=60.0)
    give(sim, buffer)
    limit = time.monotonic() + 20.0
    while not merged.is_set():
        assert time.monotonic() < limit
        buffer.flush()  # wakes the thread
        time.sleep(0.005)
    assert rounds[1] - rounds[0] >= 0.1 and rounds[2] - rounds[1] >= 0.2
    buffer.close()


def test_closing_does_not_wait_for_a_merge_and_the_thread_ends(sim, buffer_over):
    merging, released = threading.Event(), threading.Event()

    def maintain():
        merging.set()
        assert released.wait(10.0)

    buffer = buffer_over(maintain)
    give(sim, buffer)
    assert merging.wait(10.0)
    started = time.monotonic()
    buffer.close()
    assert time.monotonic() - started < 5.0
    released.set()
    buffer.pool.sealer._thread.join(10.0)
    assert not buffer.pool.sealer._thread.is_alive()

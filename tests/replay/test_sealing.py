"""Groups on their way to a file, and the thread that keeps files in order."""

import errno
import threading
import time
from typing import Any

import pytest
from tests.replay.stored import HandClock

from penstock.batch import RecencyBatchMaker
from penstock.replay import Ledger, ReplayBuffer, ReplayBufferConfig, StoreConfig
from penstock.replay.ledger import DiskSpace
from penstock.replay.store import Sealer
from penstock.types import RunFailed

LIMIT_S = 280.0


class Store:
    """Writes when it may."""

    def __init__(self) -> None:
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.full = False

    def seal(self, records: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writing.set()
        assert self.may_write.wait(LIMIT_S)


def sealer(store: Any, clock: HandClock, buffer_size: int | None = 4) -> Sealer:
    config = StoreConfig(buffer_size=buffer_size, seal_s=30.0)
    made = Sealer(store, Ledger(), config, 3, clock, lambda group_ids: None)
    made.space = DiskSpace(60.0, clock)
    return made


def test_groups_are_overdue_once_their_file_is_due_and_while_it_is_written():
    store, clock = Store(), HandClock()
    queue: Any = sealer(store, clock)
    queue.add("a", ["a/0", "a/1"])
    assert (queue.overdue, len(queue)) == (0, 1)  # it may wait
    clock.now += 31.0
    assert queue.overdue == 1
    writer = threading.Thread(target=queue.seal)
    writer.start()
    assert store.writing.wait(LIMIT_S)
    queue.add("b", ["b/0"])
    assert (queue.overdue, len(queue)) == (1, 2)
    store.may_write.set()
    writer.join(LIMIT_S)
    assert (queue.overdue, len(queue)) == (0, 1)
    queue.add("c", ["c/0", "c/1", "c/2"])
    assert queue.overdue == 2


def test_a_file_is_due_with_the_groups_of_a_batch_however_many_rollouts_they_have():
    clock = HandClock()
    queue: Any = sealer(Store(), clock, None)
    for group_id, size in (("a", 1), ("b", 100)):
        queue.add(group_id, [f"{group_id}/{position}" for position in range(size)])
    assert not queue.due
    queue.add("c", ["c/0"])
    assert queue.due


def test_nothing_is_overdue_while_a_full_disk_is_waited_for():
    store, clock = Store(), HandClock()
    queue: Any = sealer(store, clock)
    queue.add("a", ["a/0"] * 4)
    store.full = True
    queue.seal()
    assert (queue.overdue, len(queue)) == (0, 1)
    clock.now += 1.0
    assert queue.overdue == 1


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

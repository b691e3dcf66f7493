"""The receiver: acknowledges what the buffer took, puts aside what it refused, and stops within its limit."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.waiting import wait_until

from penstock.replay import (
    FileRolloutStorage,
    MemoryRolloutStorage,
    ReplayBufferConfig,
    RolloutReceiver,
    RolloutStorage,
    RolloutStorageConfig,
)
from penstock.types import InvalidRolloutError, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata, Stopped

LIMIT_S = 280.0


class Buffer:
    """Takes each ticket once, as the replay buffer does; may refuse, hang, or break."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.refused_twice: list[str] = []
        self.invalid: set[str] = set()
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def add_batches(self, batches) -> None:
        self.entered.set()
        assert self.open.wait(LIMIT_S)
        for batch in batches:
            for group in batch.groups:
                if group.group_id in self.invalid:
                    raise InvalidRolloutError(f"{group.group_id} is nonsense")
                if self.error is not None:
                    raise self.error
                (self.refused_twice if group.group_id in self.taken else self.taken).append(group.group_id)


@pytest.fixture(params=["memory", "file"])
def storage(request, tmp_path) -> RolloutStorage:
    if request.param == "memory":
        return MemoryRolloutStorage()
    return FileRolloutStorage(tmp_path, RolloutStorageConfig(kind="file", poll_s=0.02))


def make_batch(name: str) -> RolloutBatch:
    rollout = Rollout(
        env_name="cats",
        env_example_id="1",
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.array([3], np.int32),
        response_logprobs=np.array([-0.5], np.float32),
        token_rewards=np.array([1.0], np.float32),
        episode_reward=1.0,
        metadata=RolloutMetadata("w", 1.0, 0),
        rollout_id=f"{name}/0",
    )
    return RolloutBatch.of((RolloutGroup("k", (rollout,), name),))


def write(storage: RolloutStorage, *names: str) -> None:
    storage.writer("w").add_batches([make_batch(name) for name in names])


def test_batches_go_to_the_buffer_in_order_and_are_acknowledged(storage):
    buffer = Buffer()
    receiver = RolloutReceiver(storage, buffer)
    write(storage, "a", "b", "c")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(receiver.run)
        wait_until(lambda: len(buffer.taken) == 3)
        assert receiver.stop(LIMIT_S)
        running.result(LIMIT_S)
    assert buffer.taken == ["a", "b", "c"] and receiver.groups_received == 3
    storage.redeliver()
    assert storage.receive(0.05) is None


def test_what_the_buffer_refuses_is_put_aside_and_the_rest_goes_on(storage):
    buffer = Buffer()
    buffer.invalid = {"b"}
    receiver = RolloutReceiver(storage, buffer)
    write(storage, "a", "b", "c")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(receiver.run)
        wait_until(lambda: len(buffer.taken) == 2)
        receiver.stop(LIMIT_S)
    assert buffer.taken == ["a", "c"]
    metrics = receiver.metrics()
    assert metrics["rollout_storage/groups_received"] == 2 and metrics["rollout_storage/groups_refused"] == 1
    assert storage.metrics()["rollout_storage/quarantined"] == 1
    storage.redeliver()
    assert storage.receive(0.05) is None


@pytest.mark.parametrize("error", [Stopped("closed"), RuntimeError("disk full")])
@pytest.mark.attack
def test_what_was_under_way_when_it_ended_is_delivered_again_and_counts_once(storage, error):
    buffer = Buffer()
    write(storage, "a", "b")
    buffer.error = error
    receiver = RolloutReceiver(storage, buffer)
    if isinstance(error, Stopped):
        receiver.run()
    else:
        with pytest.raises(RuntimeError, match="disk full"):
            receiver.run()
    assert receiver.doing.startswith("stopped") and receiver.stop(0)
    buffer.error, buffer.taken = None, ["a"]  # it was taken, but never acknowledged
    second = RolloutReceiver(storage, buffer)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(second.run)
        wait_until(lambda: len(buffer.taken) == 2)
        second.stop(LIMIT_S)
    assert buffer.taken == ["a", "b"] and buffer.refused_twice == ["a"]


def test_closing_the_storage_ends_it(storage):
    receiver = RolloutReceiver(storage, Buffer())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(receiver.run)
        wait_until(lambda: receiver.doing.startswith("waiting for rollouts"))
        storage.close()
        running.result(LIMIT_S)


def test_it_says_what_it_is_at_and_stops_within_the_limit(storage):
    buffer = Buffer()
    buffer.open.clear()
    receiver = RolloutReceiver(storage, buffer)
    assert receiver.doing.startswith("not started")
    write(storage, "a", "b")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(receiver.run)
        assert buffer.entered.wait(LIMIT_S)
        assert receiver.doing.startswith("handing 1 groups from ") and " to the replay buffer for 0 s" in receiver.doing
        started = time.monotonic()
        assert not receiver.stop(0.05)
        assert time.monotonic() - started < 30.0
        buffer.open.set()
        running.result(LIMIT_S)
    assert buffer.taken == ["a"]  # what it had begun; the rest waits for the next reader
    assert receiver.stop(0)


def test_stopping_before_it_runs(storage):
    receiver = RolloutReceiver(storage, Buffer())
    assert receiver.stop(0)
    receiver.run()
    assert receiver.doing.startswith("stopped")


def test_the_replay_buffer_counts_a_group_once_however_often_it_comes(storage, sim):
    run = sim.Simulation(ReplayBufferConfig(groups_per_batch=2, staleness_budget=0), sim.World(slots=0))
    tickets = run.issuer.acquire(2, 0)
    for ticket in tickets:
        rewards = [0.0, 1.0, 0.0][: sim.GROUP_SIZES[ticket.lesson_id]]
        storage.writer("w").add_batches([RolloutBatch.of((sim.make_group(ticket, rewards, timestamp=run.now),))])
    under_way = storage.receive(LIMIT_S)
    run.buffer.add_batches(under_way.batches)  # and then the receiver died, before it could acknowledge
    receiver = RolloutReceiver(storage, run.buffer)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(receiver.run)
        wait_until(lambda: receiver.groups_received == 2)
        receiver.stop(LIMIT_S)
    assert run.buffer.metrics()["replay/late_deliveries"] == 1
    assert sorted(run.buffer.try_next_batch(0).group_ids) == sorted(ticket.ticket_id for ticket in tickets)
    run.buffer.check_ledger()


class Shelf(Buffer):
    """Takes everything, and keeps it safe when it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: set[str] = set()
        self.may_flush = threading.Event()

    def is_stored(self, group_id: str) -> bool:
        return group_id in self.stored

    def flush(self) -> None:
        if self.may_flush.is_set():
            self.stored.update(self.taken)


def test_where_the_storage_outlives_the_process_a_batch_is_acknowledged_when_it_is_stored(tmp_path):
    storage = FileRolloutStorage(tmp_path, RolloutStorageConfig(kind="file", poll_s=0.02))
    shelf = Shelf()
    receiver = RolloutReceiver(storage, shelf, shelf)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(receiver.run)
        storage.writer("w").add_batches([make_batch("a")])
        wait_until(lambda: shelf.taken)
        assert list(tmp_path.rglob("*.arrow"))  # taken, but not safe
        shelf.may_flush.set()  # nothing more comes, so the receiver asks for it
        wait_until(lambda: not list(tmp_path.rglob("*.arrow")))
        storage.close()
        running.result(LIMIT_S)

"""The loader forms batches ahead of the learner without changing what is trained, and always ends."""

import threading
import time

import pytest
from tests.waiting import wait_until

from penstock.batch import RecencyBatchMaker
from penstock.replay import OpenAdmission, ReplayBuffer, ReplayBufferConfig, ReplayDataLoader, StoreConfig
from penstock.types import NoProgressError, RunFailed, Stopped


@pytest.fixture
def paced(sim):
    """A paced buffer of two groups per update, all of whose tickets are delivered."""

    def make(budget=1, **config):
        settings = dict(groups_per_batch=2, staleness_budget=budget, store=StoreConfig(buffer_size=1))
        run = sim.Simulation(ReplayBufferConfig(**settings | config), sim.World(slots=0))
        run.fill = lambda: [deliver(sim, run, ticket) for ticket in run.issuer.acquire(9, 0)]
        return run

    return make


def deliver(sim, run, ticket):
    rewards = [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]]
    sim.deliver(run.buffer, sim.make_group(ticket, rewards, timestamp=run.now))
    return ticket


def test_the_next_batch_is_stored_while_the_learner_is_busy(paced):
    run = paced()
    tickets = run.fill()
    with ReplayDataLoader(run.buffer, prefetch=1) as loader:
        first = loader.next_batch(0, 5.0)
        wait_until(lambda: len(run.store.batches) == 2)  # nobody asked for the second one yet
        run.buffer.finish_update(0)
        run.buffer.set_current_step(1)
        second = loader.next_batch(1, 5.0)
    assert [first.step, second.step] == [0, 1]
    assert list(first.group_ids + second.group_ids) == [ticket.ticket_id for ticket in tickets]


def test_who_looks_ahead_gets_what_comes_next_and_takes_nothing(paced):
    run = paced()
    run.fill()
    with ReplayDataLoader(run.buffer) as loader:
        assert loader.peek(0) is None, "its thread starts with the first batch that is asked for"
        loader.next_batch(0, 5.0)
        wait_until(lambda: loader.peek(1) is not None)
        assert loader.peek(2) is None and loader.peek(1) is loader.peek(1)
        looked_at = loader.peek(1)
        run.buffer.finish_update(0)
        run.buffer.set_current_step(1)
        assert loader.next_batch(1, 5.0).batch_id == looked_at.batch_id and loader.peek(1) is None
    assert ReplayDataLoader(run.buffer, prefetch=0).peek(1) is None


def test_it_stops_before_the_end_of_the_run(paced):
    run = paced()
    run.fill()
    with ReplayDataLoader(run.buffer, prefetch=2, until=1) as loader:
        loader.next_batch(0, 5.0)
        wait_until(lambda: not loader._thread.is_alive())
    assert len(run.store.batches) == 1


def test_what_was_formed_ahead_is_outstanding_in_a_checkpoint(paced):
    run = paced()
    tickets = run.fill()
    with ReplayDataLoader(run.buffer) as loader:
        loader.next_batch(0, 5.0)
        wait_until(lambda: len(run.store.batches) == 2)
        run.buffer.finish_update(0)
        run.buffer.set_current_step(1)
        with run.buffer.boundary():
            state = run.issuer.state()
            run.buffer.check_ledger()
    assert state["update"] == 1
    assert [row[0] for row in state["outstanding"]] == [ticket.ticket_id for ticket in tickets[2:]]


def test_files_are_forced_and_stragglers_aborted_only_for_a_learner_that_waits(paced, sim):
    run = paced(store=StoreConfig(buffer_size=1000, seal_s=1000.0), straggler_timeout_s=5.0)
    tickets = run.issuer.acquire(9, 0)
    for ticket in tickets[:2]:
        deliver(sim, run, ticket)
    with ReplayDataLoader(run.buffer) as loader:
        loader.next_batch(0, 5.0)  # the learner waited: one file
        assert run.store.files == 1
        deliver(sim, run, tickets[2])
        run.now += 100.0
        time.sleep(0.05)
        assert run.store.files == 1 and run.ledger.snapshot()["aborted"] == 0
        run.buffer.finish_update(0)
        run.buffer.set_current_step(1)
        with pytest.raises(NoProgressError, match=r"no batch within 0\.2 s: update 1 needs 2 groups, 0 are ready"):
            loader.next_batch(1, 0.2)
        assert run.store.files == 1  # a file now would not complete the batch
        deliver(sim, run, tickets[3])
        assert loader.next_batch(1, 5.0).step == 1
        assert run.store.files == 2


def test_a_failure_reaches_the_learner(paced):
    run = paced()
    loader = ReplayDataLoader(run.buffer)
    threading.Timer(0.05, run.issuer.changed.end_with, [RunFailed("the disk is full")]).start()
    with pytest.raises(RunFailed, match="the disk is full"):
        loader.next_batch(0, 5.0)
    loader.stop()


def test_closing_the_buffer_or_stopping_the_loader_ends_a_wait(paced):
    run = paced()
    loader = ReplayDataLoader(run.buffer)
    threading.Timer(0.05, run.buffer.close).start()
    with pytest.raises(Stopped):
        loader.next_batch(0, 5.0)
    loader.stop()
    loader = ReplayDataLoader(paced().buffer)
    threading.Timer(0.05, loader.stop).start()
    with pytest.raises(Stopped, match="data loader was stopped"):
        loader.next_batch(0, 5.0)
    wait_until(lambda: not loader._thread.is_alive())


def test_without_working_ahead_there_is_no_thread(paced):
    run = paced(budget=0)
    run.fill()
    loader = ReplayDataLoader(run.buffer, prefetch=0)
    assert loader.next_batch(0, 5.0).step == 0 and loader._thread is None
    loader.stop()


def test_it_feeds_from_an_open_buffer_too(sim):
    admission = OpenAdmission(sim.MemoryStore().open_ledger())
    config = ReplayBufferConfig(groups_per_batch=1, max_rollout_step_delay=9, store=StoreConfig(buffer_size=1))
    store, now = sim.MemoryStore(), 1000.0
    buffer = ReplayBuffer(config, store, RecencyBatchMaker(max_tokens=16, seed=0), admission, lambda: now)
    with ReplayDataLoader(buffer) as loader:
        for step in range(3):
            ticket = sim.Ticket(f"easy-0-{step}", "easy", step, step, 0, 0)
            sim.deliver(buffer, sim.make_group(ticket, [0.0, 1.0], weight_step=step, timestamp=now))
            batch = loader.next_batch(step, 5.0)
            assert batch.step == step and batch.group_ids == (f"easy-0-{step}",)
            buffer.set_current_step(step + 1)
    assert admission.ledger.snapshot()["trained"] == 6

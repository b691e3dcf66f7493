"""What may take long happens without the lock: files of rollouts and batches, also at a checkpoint."""

import threading

import pytest

from penstock.batch import RecencyBatchMaker
from penstock.replay import ReplayBuffer, ReplayBufferConfig, StoreConfig
from penstock.types import Stopped

WRITES = ("seal", "write_batch", "expire", "maintain")
FILES = StoreConfig(buffer_size=5, seal_s=1e9)


def watched(sim, path):
    """A store whose writes fail where the lock is held, and who wrote what."""
    store, locks, done = sim.MemoryStore(path / "lineages.jsonl"), [], []

    def watch(name):
        write = getattr(store, name)

        def checked(*arguments):
            assert not any(lock._is_owned() for lock in locks), f"{name} with the lock held"
            done.append(name)
            return write(*arguments)

        setattr(store, name, checked)

    for name in WRITES:
        watch(name)
    return store, locks, done


@pytest.mark.parametrize("staleness_budget", [0, 2])
def test_no_file_of_a_paced_buffer_is_written_with_the_lock_held(sim, tmp_path, staleness_budget):
    store, locks, done = watched(sim, tmp_path)
    config = ReplayBufferConfig(groups_per_batch=3, staleness_budget=staleness_budget, store=FILES)
    world = sim.World(failing=0.1, malformed=0.1, slots=8)
    run = sim.Simulation(config, world, store, store.open_ledger(), checkpoint_every=1)
    locks.append(run.issuer.changed)
    run.run(12)
    run.buffer.checkpoint_saved()
    run.buffer.close()
    assert {"seal", "write_batch", "expire"} <= set(done) and len(run.checkpoints) == 12


def test_no_file_of_an_open_buffer_is_written_with_the_lock_held(sim, tmp_path):
    store, locks, done = watched(sim, tmp_path)
    buffer = ReplayBuffer(ReplayBufferConfig(store=FILES), store, RecencyBatchMaker(max_tokens=16, seed=0))
    locks.append(buffer.pool.changed)
    for number in range(7):
        ticket = sim.Ticket(f"easy-0-{number}", "easy", number, 0, 0, 0)
        sim.deliver(buffer, sim.make_group(ticket, [0.0, 1.0], timestamp=9e9))
    assert len(store.sealed) == 12
    buffer.state()
    assert len(store.sealed) == 14, "a checkpoint has everything written"
    assert buffer.sample(2) is not None
    buffer.checkpoint_saved()
    buffer.close()
    assert {"seal", "write_batch", "expire"} <= set(done)


def test_whoever_delivers_waits_for_a_checkpoint_that_is_being_written(sim, tmp_path):
    """Otherwise what arrives while its files are written would put the checkpoint off for ever."""
    store = sim.MemoryStore(tmp_path / "lineages.jsonl")
    run = sim.Simulation(ReplayBufferConfig(groups_per_batch=3, store=FILES), sim.World(slots=0), store)
    early, late = run.issuer.acquire(2, 0)
    writing, may_write, delivered = threading.Event(), threading.Event(), threading.Event()
    seal = store.seal

    def slow_seal(records):
        writing.set()
        assert may_write.wait(10)
        seal(records)

    def deliver(ticket):
        size = sim.GROUP_SIZES[ticket.lesson_id]
        sim.deliver(run.buffer, sim.make_group(ticket, [0.0, 1.0, 0.5][:size], timestamp=run.now))

    def deliver_late():
        deliver(late)
        delivered.set()

    states = []
    deliver(early)
    store.seal = slow_seal
    saver = threading.Thread(target=lambda: states.append(run.buffer.state()), daemon=True)
    saver.start()
    assert writing.wait(10)
    sender = threading.Thread(target=deliver_late, daemon=True)
    sender.start()
    assert not delivered.wait(0.1)
    may_write.set()
    saver.join(10)
    sender.join(10)
    assert states[0]["recorded"] == [early.ticket_id] and delivered.is_set()


def test_closing_ends_the_wait_for_a_checkpoint(sim, tmp_path):
    store = sim.MemoryStore(tmp_path / "lineages.jsonl")
    run = sim.Simulation(ReplayBufferConfig(groups_per_batch=3, store=FILES), sim.World(slots=0), store)
    early, late = run.issuer.acquire(2, 0)
    writing, may_write, ended = threading.Event(), threading.Event(), threading.Event()

    def slow_seal(records):
        writing.set()
        assert may_write.wait(10)

    def deliver(ticket):
        size = sim.GROUP_SIZES[ticket.lesson_id]
        sim.deliver(run.buffer, sim.make_group(ticket, [0.0, 1.0, 0.5][:size], timestamp=run.now))

    def deliver_late():
        with pytest.raises(Stopped):
            deliver(late)
        ended.set()

    deliver(early)
    store.seal = slow_seal
    saver = threading.Thread(target=run.buffer.state, daemon=True)
    saver.start()
    assert writing.wait(10)
    sender = threading.Thread(target=deliver_late, daemon=True)
    sender.start()
    run.buffer.close()
    assert ended.wait(10)
    may_write.set()
    for thread in (saver, sender):
        thread.join(10)
        assert not thread.is_alive()

"""A full disk: what waits for room is kept, seen, and written when there is room again; and the wait has a limit."""

import errno
import time

import pytest

from penstock.replay import Ledger, ReplayBufferConfig, StoreConfig
from penstock.replay.ledger import DiskSpace
from penstock.types import RunFailed, Ticket

FULL = OSError(errno.ENOSPC, "No space left on device", "/full/rollouts/part-1.parquet")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Disk:
    """Refuses what is given to a store while it is full."""

    def __init__(self, store):
        self.full, self.refused = True, 0
        for name in ("seal", "write_batch"):
            setattr(store, name, self._refusing(getattr(store, name)))

    def _refusing(self, write):
        def refuse(*args):
            if self.full:
                self.refused += 1
                raise FULL
            return write(*args)

        return refuse


def test_pauses_grow_and_end_with_the_first_write():
    clock = Clock()
    space = DiskSpace(60.0, clock)
    pauses = []
    for _ in range(8):
        space.note(FULL)
        pauses.append(space.retry_in_s)
        clock.now += space.retry_in_s
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert space.retry_in_s == 0 and "no room on the disk for 16 s" in space.describe()
    space.note_written()
    assert space.describe() == "" and space.retry_in_s == 0
    space.note(FULL)
    assert space.retry_in_s == pytest.approx(0.1)


def test_the_limit_names_the_file_and_the_key():
    clock = Clock()
    space = DiskSpace(60.0, clock)
    space.note(FULL)
    clock.now += 61
    with pytest.raises(
        RunFailed, match=r"/full/rollouts/part-1.parquet.*no room for 61 s \(replay.store.full_disk_s = 60"
    ):
        space.note(FULL)


@pytest.mark.parametrize("limit_s, error", [(0.0, FULL), (60.0, OSError(errno.EIO, "Input/output error"))])
def test_other_errors_and_no_patience_at_all(limit_s, error):
    with pytest.raises(OSError) as raised:
        DiskSpace(limit_s).note(error)
    assert raised.value is error


@pytest.fixture
def full_run(sim):
    def make(full_disk_s=60.0, **fields):
        config = ReplayBufferConfig(groups_per_batch=2, store=StoreConfig(full_disk_s=full_disk_s), **fields)
        run = sim.Simulation(config, sim.World(slots=0))
        run.disk = Disk(run.store)
        return run

    return make


def give(sim, run, tickets):
    for ticket in tickets:
        rewards = [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]]
        sim.deliver(run.buffer, sim.make_group(ticket, rewards, timestamp=run.now))


@pytest.mark.attack
@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.attack
def test_groups_wait_for_room_and_go_on(sim, full_run, budget):
    run = full_run(staleness_budget=budget)
    give(sim, run, run.issuer.acquire(2, 0))
    assert run.buffer.try_next_batch(0) is None and run.disk.refused >= 1
    assert (
        "no room on the disk for 0 s: [Errno 28] No space left on device: '/full/rollouts" in run.buffer.waiting_for()
    )
    refused = run.disk.refused
    for _ in range(20):
        assert run.buffer.try_next_batch(0) is None
        run.buffer.flush()
    assert run.disk.refused <= refused + 1  # tried again after a pause, not at every look
    run.disk.full = False
    batch = run.buffer.next_batch(0, 10.0)
    assert len(batch.group_ids) == 2 and "no room" not in run.buffer.waiting_for()
    run.buffer.check_ledger()


def test_a_batch_waits_for_room_too(sim, full_run):
    run = full_run()
    run.disk.full = False
    give(sim, run, run.issuer.acquire(2, 0))
    with run.buffer.boundary():
        run.disk.full = True
    written = run.store.write_batch

    def room_at_the_third_try(*args):
        run.disk.full = run.disk.refused < 2
        return written(*args)

    run.store.write_batch = room_at_the_third_try
    assert run.buffer.next_batch(0, 10.0).step == 0
    assert run.disk.refused == 2 and len(run.store.batches) == 1


@pytest.mark.attack
def test_a_checkpoint_waits_until_what_was_delivered_is_stored(sim, full_run):
    run = full_run()
    give(sim, run, run.issuer.acquire(2, 0))
    seal = run.store.seal

    def room_at_the_third_try(records):
        run.disk.full = run.disk.refused < 2
        seal(records)

    run.store.seal = room_at_the_third_try
    with run.buffer.boundary():
        assert len(run.store.sealed) == sum(entry.size for entry in run.issuer.outstanding)
        run.buffer.state()


@pytest.mark.attack
def test_beyond_the_limit_the_run_ends(sim, full_run):
    run = full_run(full_disk_s=0.3)
    give(sim, run, run.issuer.acquire(2, 0))
    with pytest.raises(RunFailed, match="/full/rollouts/part-1.parquet.*there has been no room"):
        run.buffer.next_batch(0, 30.0)


class Log:
    """A `JsonLinesLog` on a disk that may be full."""

    def __init__(self):
        self.rows, self.full = [], True

    def append(self, *rows):
        if self.full:
            raise FULL
        self.rows += rows

    def sync(self):
        assert not self.full


def test_lines_of_the_ledger_are_written_later_in_order():
    tickets, fates = Log(), Log()
    ledger = Ledger(0, tickets, fates, space=DiskSpace(60.0))
    for name in "ab":
        ledger.count_started(Ticket(name, "cats", 0, 0, 0, 0), 1)
        ledger.open(name, 1)
    ledger.settle(["a/0"], "invalid", 0, "it failed")
    ledger.check()
    assert not tickets.rows and not fates.rows and "no room" in ledger.space.describe()
    tickets.full = fates.full = False
    limit = time.monotonic() + 10
    while not ledger.write_backlog():
        assert time.monotonic() < limit
        time.sleep(ledger.space.retry_in_s)
    assert [row["ticket_id"] for row in tickets.rows] == ["a", "b"] and [row["rollout_id"] for row in fates.rows] == [
        "a/0"
    ]
    ledger.sync()


def test_without_patience_a_line_that_cannot_be_written_is_an_error_and_not_written_later():
    tickets = Log()
    ledger = Ledger(0, tickets, None)
    with pytest.raises(OSError, match="No space left"):
        ledger.count_started(Ticket("a", "cats", 0, 0, 0, 0), 1)
    tickets.full = False
    ledger.count_started(Ticket("b", "cats", 0, 0, 0, 0), 1)
    assert [row["ticket_id"] for row in tickets.rows] == ["b"]

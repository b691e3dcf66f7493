"""The replay buffer's own rules, one by one; schedules are in test_pacing, crashes in test_recovery."""

import threading
import time

import numpy as np
import pytest

from penstock.batch import BatchMakerConfig
from penstock.replay import ReplayBufferConfig, StoreConfig
from penstock.types import NoProgressError, RunFailed, Stopped


@pytest.fixture
def run(sim):
    """A run without workers: tickets are taken and groups delivered by hand."""

    def make(**config):
        fields = dict(groups_per_batch=2, staleness_budget=1, store=StoreConfig(buffer_size=1))
        return sim.Simulation(ReplayBufferConfig(**fields | config), sim.World(slots=0))

    return make


def give(sim, run, tickets, **fields):
    """Delivers a group with signal for each ticket."""
    fields.setdefault("timestamp", run.now)
    for ticket in tickets:
        size = sim.GROUP_SIZES[ticket.lesson_id]
        sim.deliver(run.buffer, sim.make_group(ticket, list(np.linspace(0, 1, size)), **fields))


def advance(run, step):
    run.buffer.finish_update(step)
    run.buffer.set_current_step(step + 1)
    run.issuer.set_serving_step(step + 1)


def test_a_batch_holds_whole_groups_and_their_facts(sim, run):
    run = run()
    tickets = run.issuer.acquire(3, 0)
    give(sim, run, tickets)
    batch = run.buffer.try_next_batch(0)
    assert batch.step == 0 and batch.group_ids == tuple(t.ticket_id for t in tickets[:2])
    ids = [rollout_id for example in batch.examples for rollout_id in example.rollout_ids]
    assert ids == [f"{t.ticket_id}/{i}" for t in tickets[:2] for i in range(sim.GROUP_SIZES[t.lesson_id])]
    assert batch.batch_id.startswith("batch_") and batch.batch_id.endswith("_1000000")
    metrics = batch.metrics
    third = sim.GROUP_SIZES[tickets[2].lesson_id]
    assert metrics["replay/size"] == third and metrics["replay/in_flight"] == 0
    assert metrics["replay/staleness_mean"] == metrics["replay/staleness_max"] == 0
    assert metrics["replay/ledger/waiting"] == len(ids) + third
    assert "train/reward_mean" in metrics and 0 <= metrics["replay/wait_s"] < 60


def test_fates_follow_the_update_and_not_the_batch(sim, run):
    run = run()
    give(sim, run, run.issuer.acquire(2, 0))
    batch = run.buffer.try_next_batch(0)
    assert run.ledger.snapshot()["trained"] == 0
    run.buffer.finish_update(0)
    assert run.ledger.snapshot()["trained"] == len(batch.examples) and run.ledger.snapshot()["waiting"] == 0
    with pytest.raises(RunFailed, match="update 0 cannot be finished"):
        run.buffer.finish_update(0)


def test_batches_come_in_the_order_of_updates(sim, run):
    run = run()
    with pytest.raises(RunFailed, match="batch of update 1 was asked for, but 0 is next"):
        run.buffer.try_next_batch(1)


def test_a_group_is_trainable_only_when_its_file_is_written(sim, run):
    run = run(store=StoreConfig(buffer_size=1000))
    tickets = run.issuer.acquire(2, 0)
    give(sim, run, tickets)
    assert run.store.files == 0 and run.issuer.outstanding.trainable == 0
    assert run.buffer.try_next_batch(0) is not None  # a waiting learner forces the file
    assert run.store.files == 1


def test_files_are_written_at_a_size_or_at_an_age(sim, run):
    run = run(store=StoreConfig(buffer_size=4, seal_s=5.0), groups_per_batch=8)
    tickets = [ticket for ticket in run.issuer.acquire(9, 0) if ticket.lesson_id == "easy"][:4]
    give(sim, run, tickets[:1])
    assert run.store.files == 0
    give(sim, run, tickets[1:2])
    assert run.store.files == 1 and len(run.store.sealed) == 4
    give(sim, run, tickets[2:3])
    run.now += 5.0
    run.buffer.set_current_step(0)
    assert run.store.files == 2


def test_what_is_malformed_is_invalid_and_frees_its_place(sim, run):
    run = run()
    tickets = run.issuer.acquire(4, 0)
    group = sim.make_group(tickets[0], [0, 1], lesson_id="no such lesson")
    sim.deliver(run.buffer, group)
    assert run.ledger.snapshot()["invalid"] == sim.GROUP_SIZES[tickets[0].lesson_id]
    assert len(run.issuer.outstanding) == 3 and len(run.issuer.acquire(4, 0)) == 1
    assert run.curriculum.groups == []
    run.buffer.check_ledger()


def test_groups_of_tickets_that_do_not_run_are_refused_and_counted(sim, run):
    run = run()
    [ticket] = run.issuer.acquire(1, 0)
    give(sim, run, [ticket])
    give(sim, run, [ticket])  # delivered twice
    stranger = sim.Ticket("easy-0-99", "easy", 99, 0, 1, 0)
    give(sim, run, [stranger])  # never issued
    [aborted] = run.issuer.acquire(1, 0)
    run.issuer.fail(aborted, "aborted", "")
    give(sim, run, [aborted])  # late
    assert run.buffer.metrics()["replay/late_deliveries"] == 3
    assert run.ledger.snapshot()["waiting"] == sim.GROUP_SIZES[ticket.lesson_id]
    run.buffer.check_ledger()


def test_a_version_from_the_future_is_refused_with_the_reason(sim, run):
    run = run()
    [ticket] = run.issuer.acquire(1, 0)
    give(sim, run, [ticket], weight_step=1)
    assert run.ledger.snapshot()["invalid"] == sim.GROUP_SIZES[ticket.lesson_id]
    assert "from the future" in run.issuer.last_failure


def test_freshness_is_decided_rollout_by_rollout_at_every_step(sim, run):
    """A group whose members differ in age shrinks to those that are still fresh, and is trained by them."""
    run = run(staleness_budget=1, groups_per_batch=1)
    first, second = run.issuer.acquire(2, 0)
    give(sim, run, [first])
    run.buffer.try_next_batch(0)
    advance(run, 0)
    members = [sim.make_rollout(f"{second.ticket_id}/{i}", reward=i, weight_step=step, timestamp=run.now)
               for i, step in enumerate([0, 1, 1][: sim.GROUP_SIZES[second.lesson_id]])]  # fmt: skip
    sim.deliver(run.buffer, sim.RolloutGroup("words:1", tuple(members), second.ticket_id))
    run.buffer.set_current_step(2)  # as after an outage: update 1 has not taken it
    assert run.ledger.snapshot()["stale_step"] == 1
    batch = run.buffer.try_next_batch(1)
    assert [i for e in batch.examples for i in e.rollout_ids] == [m.rollout_id for m in members[1:]]
    run.buffer.check_ledger()


def test_a_stale_group_frees_its_place(sim, run):
    run = run()
    tickets = run.issuer.acquire(4, 0)
    give(sim, run, tickets[:1])
    run.buffer.set_current_step(2)
    assert len(run.issuer.outstanding) == 3 and len(run.issuer.acquire(4, 0)) == 1
    run.buffer.check_ledger()


def test_time_staleness_is_applied_at_ingest_and_while_waiting(sim, run):
    run = run(max_rollout_timestamp_delay=60.0)
    first, second = run.issuer.acquire(2, 0)
    give(sim, run, [first], timestamp=run.now - 60.0)
    assert run.ledger.snapshot()["stale_time"] == sim.GROUP_SIZES[first.lesson_id]
    give(sim, run, [second], timestamp=run.now - 59.0)
    assert run.ledger.snapshot()["waiting"] == sim.GROUP_SIZES[second.lesson_id]
    run.now += 1.0
    assert run.buffer.try_next_batch(0) is None
    assert run.ledger.snapshot()["waiting"] == 0
    run.buffer.check_ledger()


def test_at_staleness_zero_a_whole_cohort_waits_for_its_slowest_group(sim, run):
    run = run(staleness_budget=0, max_rollout_timestamp_delay=60.0)
    first, second = run.issuer.acquire(2, 0)
    give(sim, run, [first], timestamp=run.now - 1000.0)
    run.now += 1000.0
    give(sim, run, [second])
    assert run.ledger.snapshot()["stale_time"] == 0
    assert run.buffer.try_next_batch(0).group_ids == ("easy-0-0", "hard-0-0")


def test_rollouts_are_used_up_to_their_cap_and_only_where_a_batch_would_wait(sim, run):
    run = run(groups_per_batch=1, staleness_budget=3, max_samples=2)
    first, second = run.issuer.acquire(2, 0)
    give(sim, run, [first])
    run.buffer.try_next_batch(0)
    advance(run, 0)
    give(sim, run, [second])
    assert run.buffer.try_next_batch(1).group_ids == (second.ticket_id,)  # fresh before used
    advance(run, 1)
    again = run.buffer.try_next_batch(2)
    assert again.group_ids == (first.ticket_id,) and again.metrics["replay/reused"] == 1
    advance(run, 2)
    assert run.ledger.snapshot()["trained"] == sim.GROUP_SIZES[first.lesson_id]
    assert run.buffer.try_next_batch(3).group_ids == (second.ticket_id,)
    advance(run, 3)
    assert run.buffer.try_next_batch(4) is None


def test_a_used_rollout_that_grows_stale_was_trained(sim, run):
    run = run(groups_per_batch=1, staleness_budget=1, max_samples=-1)
    [first] = run.issuer.acquire(1, 0)
    give(sim, run, [first])
    run.buffer.try_next_batch(0)
    run.buffer.finish_update(0)
    run.buffer.set_current_step(2)
    assert run.ledger.snapshot()["trained"] == sim.GROUP_SIZES[first.lesson_id]
    assert run.ledger.snapshot()["stale_step"] == 0
    run.buffer.check_ledger()


def test_above_capacity_the_oldest_groups_are_evicted(sim, run):
    run = run(groups_per_batch=4, capacity=6)
    tickets = [ticket for ticket in run.issuer.acquire(99, 0) if ticket.lesson_id == "easy"][:4]
    give(sim, run, tickets)
    assert run.ledger.snapshot()["evicted"] == 2 and run.ledger.snapshot()["waiting"] == 6
    assert run.issuer.outstanding.get(tickets[0].ticket_id) is None
    assert "evicted" in run.issuer.last_failure and "replay.capacity" in run.issuer.last_failure
    run.buffer.check_ledger()


def test_the_curriculum_hears_of_every_group_once_filtered_ones_included(sim, run):
    run = run(batch_maker=BatchMakerConfig(filter_zero_variance=True))
    tickets = run.issuer.acquire(3, 0)
    sizes = [sim.GROUP_SIZES[ticket.lesson_id] for ticket in tickets]
    sim.deliver(run.buffer, sim.make_group(tickets[0], [0.5] * sizes[0], timestamp=run.now))
    give(sim, run, tickets[1:])
    assert run.curriculum.groups == [ticket.ticket_id for ticket in tickets]
    assert run.ledger.snapshot()["filtered"] == sizes[0] and len(run.issuer.outstanding) == 2
    batch = run.buffer.try_next_batch(0)
    assert batch.metrics["replay/filtered"] == sizes[0]
    assert f"{tickets[0].ticket_id}/0" in run.store.sealed  # stored all the same


def test_a_masked_rollout_is_in_no_batch_and_filtered_with_the_reason(sim, run):
    run = run(groups_per_batch=1, batch_maker=BatchMakerConfig(filter_overlong="mask"))
    [ticket] = run.issuer.acquire(1, 0)
    size = sim.GROUP_SIZES[ticket.lesson_id]
    group = sim.make_group(ticket, [0.0] + [1.0] * (size - 1), timestamp=run.now)
    cut = sim.replace(group.rollouts[-1], finish_reason="length")
    sim.deliver(run.buffer, sim.replace(group, rollouts=(*group.rollouts[:-1], cut)))
    batch = run.buffer.try_next_batch(0)
    assert [example.rollout_ids[0] for example in batch.examples] == [r.rollout_id for r in group.rollouts[:-1]]
    assert (batch.metrics["replay/filtered"], batch.metrics["replay/filtered_overlong"]) == (1.0, 1.0)
    assert run.ledger.snapshot()["filtered"] == 1 and cut.rollout_id in run.store.sealed
    run.buffer.finish_update(0)
    assert run.ledger.snapshot()["trained"] == size - 1
    run.buffer.check_ledger()


def test_what_the_batch_maker_refuses_is_invalid(sim, run):
    run = run(groups_per_batch=1)
    [ticket] = run.issuer.acquire(1, 0)
    group = sim.make_group(ticket, [0, 1, 1][: sim.GROUP_SIZES[ticket.lesson_id]], timestamp=run.now)
    too_long = sim.replace(group.rollouts[0], prompt_tokens=np.ones(40, np.int32))
    sim.deliver(run.buffer, sim.replace(group, rollouts=(too_long, *group.rollouts[1:])))
    batch = run.buffer.try_next_batch(0)
    assert len(batch.examples) == len(group.rollouts) - 1
    assert run.ledger.snapshot()["invalid"] == 1


def test_groups_without_signal_end_the_run_only_where_one_batch_waited_for_all_of_them(sim, run):
    filtering = BatchMakerConfig(filter_zero_variance=True)
    run = run(groups_per_batch=1, max_filtered_groups_per_batch=3, batch_maker=filtering)

    def give_flat(count):
        for ticket in [run.issuer.acquire(1, 0)[0] for _ in range(count)]:
            group = sim.make_group(ticket, [0.5] * sim.GROUP_SIZES[ticket.lesson_id], timestamp=run.now)
            sim.deliver(run.buffer, group)

    give_flat(2)
    give(sim, run, run.issuer.acquire(1, 0))
    assert run.buffer.try_next_batch(0) is not None
    advance(run, 0)
    give_flat(2)
    assert run.buffer.try_next_batch(1) is None
    give_flat(1)
    with pytest.raises(RunFailed, match="^3 groups were filtered while one batch waited "):
        run.buffer.try_next_batch(1)


def test_what_an_earlier_batch_waited_does_not_count_against_stragglers_of_the_next(sim, run):
    run = run(straggler_timeout_s=10.0)
    tickets = run.issuer.acquire(4, 0)
    assert run.buffer.try_next_batch(0) is None  # which waits from now on
    give(sim, run, tickets[:2])
    assert run.buffer.try_next_batch(0) is not None
    advance(run, 0)
    run.now += 20
    assert run.buffer.try_next_batch(1) is None
    assert run.ledger.snapshot()["aborted"] == 0
    run.now += 10
    assert run.buffer.try_next_batch(1) is None
    assert run.ledger.snapshot()["aborted"] == sum(sim.GROUP_SIZES[ticket.lesson_id] for ticket in tickets[2:])


def test_a_wait_ends_in_time_and_says_what_for(sim, run):
    run = run()
    tickets = run.issuer.acquire(3, 0)
    give(sim, run, tickets[:1])
    run.now += 3
    with pytest.raises(NoProgressError) as error:
        run.buffer.next_batch(0, 0.05)
    message = str(error.value)
    assert "no batch within 0.1 s: update 0 needs 2 groups, 1 are ready" in message.replace("0.05", "0.1")
    assert f"(oldest {tickets[1].ticket_id}, for 3.0 s)" in message
    assert "outstanding 3 of at most 4" in message and "serving version 0" in message
    for lesson in {ticket.lesson_id for ticket in tickets[1:]}:
        assert f"{lesson} " in message


def test_the_last_group_wakes_a_waiting_learner(sim, run):
    run = run()
    tickets = run.issuer.acquire(2, 0)
    give(sim, run, tickets[:1])
    batches = []
    learner = threading.Thread(target=lambda: batches.append(run.buffer.next_batch(0, 60.0)), daemon=True)
    learner.start()
    give(sim, run, tickets[1:])
    learner.join(30)
    assert batches and batches[0].metrics["replay/wait_s"] < 30


def test_close_wakes_everybody_and_keeps_what_was_delivered(sim, run):
    run = run(store=StoreConfig(buffer_size=1000))
    tickets = run.issuer.acquire(2, 0)
    give(sim, run, tickets[:1])
    endings = []

    def wait(call):
        try:
            call()
        except Stopped:
            endings.append(call)

    calls = [lambda: run.buffer.next_batch(0, 60.0), lambda: run.issuer.acquire(1, 60.0)]
    run.issuer.acquire(99, 0)
    waiters = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.05)  # lets both get into their waits; they end with Stopped either way
    run.buffer.close()
    for waiter in waiters:
        waiter.join(10)
    assert len(endings) == 2 and len(run.store.sealed) == sim.GROUP_SIZES[tickets[0].lesson_id]
    with pytest.raises(Stopped):
        give(sim, run, tickets[1:])
    run.buffer.state()  # a stopped run is still checkpointed


def test_a_group_that_cannot_be_stored_ends_the_run_with_that_error(sim, run):
    run = run()

    def full(records):
        raise OSError("no space left on device")

    run.store.seal = full
    with pytest.raises(OSError, match="no space left"):
        give(sim, run, run.issuer.acquire(1, 0))


def test_an_error_of_the_curriculum_surfaces(sim, run):
    run = run()

    def broken(group):
        raise KeyError("lesson")

    run.buffer.pool.on_group = broken
    with pytest.raises(KeyError):
        give(sim, run, run.issuer.acquire(1, 0))


def test_versions_only_grow(sim, run):
    run = run()
    run.buffer.set_current_step(3)
    with pytest.raises(RunFailed, match="current step 2 lies behind 3"):
        run.buffer.set_current_step(2)


def test_many_threads_and_one_learner(sim):
    """Eight workers deliver in any order while batches are taken; the books close and nothing is used twice."""
    config = ReplayBufferConfig(groups_per_batch=4, staleness_budget=2, store=StoreConfig(buffer_size=6))
    run = sim.Simulation(config, sim.World(slots=0))
    run.now = time.time()
    failures = []

    def work(number):
        rng = np.random.default_rng(number)
        try:
            while True:
                for ticket in run.issuer.acquire(int(rng.integers(1, 3)), 0.5):
                    if rng.random() < 0.1:
                        run.issuer.fail(ticket, "invalid", "it raised")
                    else:
                        give(sim, run, [ticket])
        except Stopped:
            pass
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for worker in workers:
        worker.start()
    seen = set()
    for step in range(40):
        batch = run.buffer.next_batch(step, 30.0)
        ids = {i for example in batch.examples for i in example.rollout_ids}
        assert len(batch.group_ids) == 4 and not ids & seen
        seen |= ids
        advance(run, step)
        run.buffer.check_ledger()
    run.buffer.close()
    for worker in workers:
        worker.join(10)
    assert not failures and run.ledger.snapshot()["trained"] == len(seen)


def test_a_boundary_holds_everything_still(sim, run):
    run = run()
    tickets = run.issuer.acquire(1, 0)
    delivered = threading.Event()

    def work():
        give(sim, run, tickets)
        delivered.set()

    worker = threading.Thread(target=work, daemon=True)
    with run.buffer.boundary():
        worker.start()
        before = (run.issuer.state(), run.buffer.state(), run.curriculum.state())
        assert not delivered.wait(0.1)
        assert (run.issuer.state(), run.buffer.state(), run.curriculum.state()) == before
    assert delivered.wait(10)
    worker.join(10)
    assert run.buffer.state()["recorded"] == [tickets[0].ticket_id]

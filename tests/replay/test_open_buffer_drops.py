"""What leaves a buffer untrained is said: to `logging`, counted by cause, and in the error of who waits in vain."""

import dataclasses
import logging

import numpy as np
import pytest
from tests.replay.open_buffers import ids

from penstock.replay import ReplayBufferConfig, StoreConfig
from penstock.replay.waiting_groups import LOG_EVERY_S, BatchMetrics
from penstock.types import NoProgressError


@pytest.fixture(autouse=True)
def records(caplog):
    """Lines of the replay package."""
    caplog.set_level(logging.INFO, logger="penstock.replay")
    return caplog


def test_the_time_limit_holds_at_step_delay_zero(open_buffer):
    run = open_buffer(max_rollout_step_delay=0, max_rollout_timestamp_delay=60.0)
    assert run.config.staleness_budget == 0
    run.add(run.group(timestamp=run.now - 1000.0), run.group(timestamp=run.now - 59.0))
    assert run.counts() == {"started": 4, "stale_time": 2, "waiting": 2}
    assert sorted(ids(run.buffer.sample(1))) == ["easy-0-1/0", "easy-0-1/1"]
    run.add(run.group())
    run.now += 60.0
    assert run.buffer.sample(1) is None and run.counts()["stale_time"] == 4


def test_each_new_version_logs_what_it_drops_once_by_cause(open_buffer, records):
    run = open_buffer(max_rollout_step_delay=1, capacity=6)
    run.add(*[run.group() for _ in range(4)])
    run.buffer.set_current_step(1)
    assert records.messages == [
        "2 rollouts left untrained: 2 evicted (more than 6 rollouts of words wait (replay.capacity))"
    ]
    records.clear()
    run.add(run.group(weight_step=7), run.group(weight_step=8), run.group(weight_step=1))
    run.buffer.set_current_step(2)
    run.buffer.set_current_step(3)
    assert records.messages == [
        "10 rollouts left untrained: 4 invalid (weight_step 8 is from the future: the learner is at version 1); "
        "4 stale_step (sampled by version 0, more than 1 updates before the learner's 2); "
        "2 evicted (more than 6 rollouts of words wait (replay.capacity))",
        "2 rollouts left untrained: 2 stale_step (sampled by version 1, more than 1 updates before the learner's 3)",
    ]
    assert {record.levelname for record in records.records} == {"WARNING"}
    run.buffer.set_current_step(4)
    assert len(records.messages) == 2


def test_arrivals_are_logged_now_and_then_and_never_each(open_buffer, records):
    run = open_buffer(max_rollout_timestamp_delay=10.0)
    for _ in range(100):
        run.add(run.group(timestamp=run.now - 10.0))
        run.now += LOG_EVERY_S / 50
    said = [int(message.split()[0]) for message in records.messages]
    assert said == [2, 100] and run.counts()["stale_time"] == 200
    run.buffer.pool.logs_drops = False  # as in a run, which tells it elsewhere
    run.buffer.set_current_step(9)
    assert len(records.messages) == 2


def test_late_deliveries_of_a_paced_buffer_are_logged(sim, records):
    run = sim.Simulation(ReplayBufferConfig(groups_per_batch=2, store=StoreConfig(buffer_size=1)), sim.World(slots=0))
    sim.deliver(run.buffer, sim.make_group(sim.Ticket("easy-0-99", "easy", 99, 0, 1, 0), [0.0, 1.0], timestamp=run.now))
    assert records.messages == [
        "2 rollouts left untrained: 2 late (their ticket is not outstanding: unknown, aborted, or delivered before)"
    ]


def test_a_learner_that_waits_in_vain_is_told_the_commonest_fate_and_its_cause(fleet):
    run = fleet(max_staleness=0, max_age_s=60.0)
    silent = np.full(4, np.nan, np.float32)  # a policy that gives no log-probabilities
    run.add(*[dataclasses.replace(run.fragment(), logprobs=silent) for _ in range(3)])
    run.add(run.fragment(timestamp=run.now - 60.0))  # the time limit holds, whatever the staleness
    with pytest.raises(NoProgressError) as caught:
        run.source.next_batch(0, 0.01)
    assert (
        "left untrained since the last batch: 4 rollouts, 3 of them invalid: logprobs is not finite; an open buffer "
        "with 0 fresh rollouts"
    ) in str(caught.value)
    run.add(run.fragment(), run.fragment())
    assert run.update(0) == ["cart-w0-0-4/0", "cart-w0-0-5/0"]
    with pytest.raises(NoProgressError) as caught:
        run.source.next_batch(1, 0.01)
    assert "left untrained" not in str(caught.value)


def test_causes_that_differ_in_numbers_only_are_one_and_there_are_not_too_many():
    counts = BatchMetrics()
    for number in range(1000):
        counts.note("invalid", 1, f"step {number} costs {number / 7:.3e}")
    assert counts.commonest() == (
        "left untrained since the last batch: 1000 rollouts, 1000 of them invalid: step 999 costs 1.427e+02"
    )
    for letters in range(1, 501):
        counts.note("filtered", 2, "x" * letters)
    assert counts.take_line(0.0, True) == (
        logging.WARNING,
        "2000 rollouts left untrained: 1000 invalid (step 999 costs 1.427e+02); 874 filtered ("
        + "x" * 500 + "); 2 filtered (x); 2 filtered (xx); 2 filtered (xxx); 60 causes more",
    )  # fmt: skip
    assert counts.take_line(0.0, True) is None
    counts.note("filtered", 1, "no signal")
    assert counts.take_line(LOG_EVERY_S - 1, False) is None
    assert counts.take_line(LOG_EVERY_S, False) == (logging.INFO, "1 rollouts left untrained: 1 filtered (no signal)")

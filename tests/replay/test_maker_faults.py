"""What batch makers may do wrong, and what the buffer makes of it."""

import sys
from dataclasses import replace

import pytest
from tests.replay.open_buffers import Hoarder, ids, rename

from penstock.batch import DeadlineBatchMaker, GrpoBatchMaker, example_from_rollout
from penstock.replay import PacedReplayBuffer, ReplayBufferConfig, StoreConfig
from penstock.types import ConfigError, RolloutGroup, RunFailed


def test_of_a_makers_batch_what_is_not_live_is_left_out(open_buffer):
    run = open_buffer(Hoarder())
    run.add(run.group(), run.group())
    assert ids(run.buffer.sample(3)) == ["easy-0-0/0", "easy-0-0/1", "easy-0-1/0"]
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 4, "waiting": 1, "trained": 3}
    batch = run.buffer.sample(4)
    assert ids(batch) == ["easy-0-1/1"] and batch.metrics["replay/dead_in_batch"] == 3
    assert batch.metrics["train/examples"] == 4
    run.buffer.check_ledger()


def same_example(rollout, group):
    return replace(rollout, env_example_id=group.rollouts[0].env_example_id)


def test_what_a_maker_gives_up_has_a_fate(open_buffer):
    run = open_buffer(GrpoBatchMaker(max_tokens=16, seed=0), max_rollout_step_delay=9)
    run.add(run.group([0.5, 0.5]))
    assert run.buffer.sample(1) is None
    assert run.counts() == {"started": 2, "filtered": 2}
    old, new = run.group(number=7), run.group(number=8, weight_step=1)
    new = RolloutGroup(old.key, tuple(same_example(r, old) for r in new.rollouts), new.group_id)
    run.buffer.set_current_step(1)
    run.add(old, new)
    assert {i.rpartition("/")[0] for i in ids(run.buffer.sample(2))} == {"easy-0-8"}
    assert run.counts()["evicted"] == 2
    run.buffer.check_ledger()


class Echo(Hoarder):
    """Draws with replacement: the first rollout as often as it is asked."""

    def create_batch(self, batch_size):
        return [example_from_rollout(self.rollouts[0], 1.0, 16)] * batch_size if self.rollouts else None


@pytest.mark.parametrize("uses", [1, 2])
def test_a_rollout_that_is_drawn_more_often_than_it_may_be_is_left_out(open_buffer, uses):
    run = open_buffer(Echo(), max_samples=uses)
    run.add(run.group())
    batch = run.buffer.sample(4)
    assert ids(batch) == ["easy-0-0/0"] * uses and batch.metrics["replay/dead_in_batch"] == 4 - uses
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 2, "trained": 1, "waiting": 1}
    run.buffer.check_ledger()


class Picky(Hoarder):
    """Ignores what it does not like, and makes no batch of less than it is asked for."""

    def add_rollout(self, rollout):
        if rollout.episode_reward >= 0.5:
            super().add_rollout(rollout)

    def create_batch(self, batch_size):
        if len(self.rollouts) < batch_size:
            return None
        batch, self.rollouts = self.rollouts[:batch_size], self.rollouts[batch_size:]
        return [example_from_rollout(rollout, 1.0, 16) for rollout in batch]


@pytest.mark.parametrize("rewards", [(0.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
def test_a_maker_that_ignores_rollouts_does_not_stop_a_paced_run(sim, rewards):
    config = ReplayBufferConfig(groups_per_batch=2, staleness_budget=1, store=StoreConfig(buffer_size=1))
    run = sim.Simulation(config, sim.World(slots=0))
    run.buffer = PacedReplayBuffer(config, run.store, Picky(), run.issuer, run.clock)

    def deliver_all():
        tickets = run.issuer.acquire(9, 0)
        for ticket in tickets:
            group = sim.make_group(ticket, rewards[: sim.GROUP_SIZES[ticket.lesson_id]], timestamp=run.now)
            sim.deliver(run.buffer, group)
        return len(tickets)

    assert deliver_all() == 4
    batch = run.buffer.try_next_batch(0)
    if 1.0 in rewards:
        assert batch.examples
    else:
        assert batch is None and run.ledger.snapshot()["filtered"] > 0  # places for others
        assert "the batch maker Picky makes no batch of what waits" in run.issuer.last_failure
        assert deliver_all() == 2
    run.buffer.check_ledger()


def test_of_several_makers_one_that_filters_does_not_make_the_batch_smaller(sim):
    makers = [DeadlineBatchMaker(max_tokens=16), GrpoBatchMaker(environment_name="flat", max_tokens=16, seed=0)]
    config = ReplayBufferConfig(groups_per_batch=4, staleness_budget=0, store=StoreConfig(buffer_size=1))
    run = sim.Simulation(config, sim.World(slots=0))
    run.buffer = PacedReplayBuffer(config, run.store, makers, run.issuer, run.clock)
    first, *others = run.issuer.acquire(4, 0)

    def group_of(ticket, rewards, env_name):
        group = sim.make_group(ticket, rewards[: sim.GROUP_SIZES[ticket.lesson_id]], timestamp=run.now)
        return RolloutGroup(group.key, tuple(rename(r, env_name) for r in group.rollouts), group.group_id)

    sim.deliver(run.buffer, group_of(first, [0.0, 1.0, 0.0], "words"))
    for ticket in others:
        sim.deliver(run.buffer, group_of(ticket, [0.5, 0.5, 0.5], "flat"))
    assert run.buffer.try_next_batch(0) is None
    for ticket in run.issuer.acquire(4, 0):
        sim.deliver(run.buffer, group_of(ticket, [0.0, 1.0, 0.0], "words"))
    assert len(run.buffer.try_next_batch(0).group_ids) == 4


class Broken(Hoarder):
    """A user's mistake."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def create_batch(self, batch_size):
        return self.batch()


def test_an_error_in_ones_own_maker_names_it(open_buffer):
    run = open_buffer(Broken(lambda: 1 / 0))
    run.add(run.group())
    with pytest.raises(RunFailed, match="Broken.create_batch raised ZeroDivisionError: division by zero"):
        run.buffer.sample(1)
    run = open_buffer(Broken(lambda: [5]))
    run.add(run.group())
    with pytest.raises(RunFailed, match="Broken.create_batch returned 5: a batch is a list of RLExample"):
        run.buffer.sample(1)
    rollout = run.group().rollouts[0]
    run = open_buffer(Broken(lambda: [example_from_rollout(rollout, float("nan"), max_tokens=64)]))
    run.add(run.group())
    with pytest.raises(RunFailed, match=f"create_batch gave rollout {rollout.rollout_id} an advantage of nan"):
        run.buffer.sample(1)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        run.buffer.sample(0)


async def later():
    return []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (later, "Broken.create_batch returned <coroutine object later .*: it must be a list, or None"),
        (lambda: (example for example in ()), "create_batch returned <generator object .*: it must be a list, or None"),
        (lambda: sys.exit(3), "Broken.create_batch raised SystemExit: 3"),
    ],
)
def test_what_is_no_list_and_what_would_end_the_process_is_said(open_buffer, batch, message):
    run = open_buffer(Broken(batch))
    run.add(run.group())
    with pytest.raises(RunFailed, match=message):
        run.buffer.sample(1)

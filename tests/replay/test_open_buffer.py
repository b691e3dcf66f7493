"""A buffer without tickets: what arrives is taken, sampled, and ends by freshness, capacity or its uses."""

import pytest
from tests.replay.open_buffers import ids

from penstock.batch import GrpoBatchMaker, RecencyBatchMaker
from penstock.replay import ReplayBuffer, ReplayBufferConfig, StoreConfig
from penstock.types import ConfigError, DuplicateGroupError, InvalidRolloutError, RolloutGroup, RunFailed, Stopped


def test_what_arrives_is_sampled_and_is_trained_when_the_learner_goes_on(open_buffer):
    run = open_buffer()
    assert run.buffer.sample(1) is None
    run.add(run.group(), run.group())
    assert run.counts() == {"started": 4, "waiting": 4}
    batch = run.buffer.sample(2)
    assert sorted(ids(batch)) == ["easy-0-0/0", "easy-0-0/1", "easy-0-1/0", "easy-0-1/1"] and batch.step == 0
    assert run.store.batches[0].rollout_ids == tuple(ids(batch))
    assert run.counts() == {"started": 4, "waiting": 4}  # the update is not done
    assert run.buffer.sample(1) is None  # each was used once, and may be no more often
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 4, "trained": 4}
    run.buffer.check_ledger()


def test_both_boundaries_of_both_windows(open_buffer):
    run = open_buffer(max_rollout_step_delay=2, staleness_budget=1, max_rollout_timestamp_delay=60.0)
    run.buffer.set_current_step(5)
    run.add(run.group(weight_step=2))
    assert run.counts() == {"started": 2, "stale_step": 2}  # 5 − 2 = 3 is the oldest
    run.add(run.group(weight_step=3), run.group(weight_step=5), run.group(weight_step=6))
    assert run.counts() == {"started": 8, "stale_step": 2, "waiting": 4, "invalid": 2}  # 6 is from the future
    run.add(run.group(weight_step=5, timestamp=940.0), run.group(weight_step=5, timestamp=940.001))
    assert run.counts()["stale_time"] == 2 and run.counts()["waiting"] == 6
    run.now = 1000.002
    run.buffer.set_current_step(6)
    assert run.counts() == {"started": 12, "stale_step": 4, "invalid": 2, "stale_time": 4, "waiting": 2}
    run.buffer.check_ledger()


def test_a_rollout_is_used_as_often_as_it_may_be_and_its_fate_comes_with_the_last_update(open_buffer):
    run = open_buffer(RecencyBatchMaker(max_tokens=16, max_samples=2, seed=0), max_samples=2, max_rollout_step_delay=9)
    run.add(run.group())
    assert ids(run.buffer.sample(1)) == ids(run.buffer.sample(1)) == ["easy-0-0/0", "easy-0-0/1"]
    assert run.buffer.sample(1) is None and run.counts() == {"started": 2, "waiting": 2}
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 2, "trained": 2}


def test_a_used_rollout_that_goes_stale_was_trained(open_buffer):
    maker = RecencyBatchMaker(max_tokens=16, max_samples=-1, seed=0)
    run = open_buffer(maker, max_samples=-1, max_rollout_step_delay=1)
    run.add(run.group(), run.group())
    used = {i.rpartition("/")[0] for i in ids(run.buffer.sample(1))}
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 4, "waiting": 4}
    run.buffer.set_current_step(2)
    assert len(used) == 1 and run.counts() == {"started": 4, "trained": 2, "stale_step": 2}
    assert run.buffer.sample(1) is None


def test_the_oldest_are_evicted_by_environment(open_buffer):
    run = open_buffer(capacity=4)
    run.add(*[run.group(env_name=name) for name in ("a", "a", "b", "a")])
    assert run.counts() == {"started": 8, "waiting": 6, "evicted": 2}
    assert {row["rollout_id"] for row in run.store.fates.rows} == {"easy-0-0/0", "easy-0-0/1"}
    assert sorted(ids(run.buffer.sample(3)))[0] == "easy-0-1/0"


def test_several_makers_are_bound_to_environments(open_buffer):
    makers = [GrpoBatchMaker(environment_name=name, max_tokens=16, seed=0) for name in ("a", "b")]
    run = open_buffer(makers)
    run.add(run.group(env_name="a"), run.group(env_name="b"))
    assert ids(run.buffer.sample(2, "b")) == sorted(["easy-0-1/0", "easy-0-1/1"], key=ids_order(run, "b"))
    run.add(run.group(env_name="b"), run.group(env_name="c"))
    both = run.buffer.sample(4)
    assert {i.rpartition("/")[0] for i in ids(both)} == {"easy-0-0", "easy-0-2"}
    assert run.counts()["invalid"] == 2  # nobody takes environment c
    assert "no batch maker takes environment 'c'" in run.store.fates.rows[-1]["reason"]


def ids_order(run, env_name):
    """The order in which the batch was written; which of two is first is the maker's draw."""
    written = list(run.store.batches[-1].rollout_ids)
    return written.index


def test_two_makers_for_the_same_rollouts_are_refused(open_buffer):
    with pytest.raises(ConfigError, match="two batch makers take rollouts of environment 'a'"):
        open_buffer([GrpoBatchMaker(environment_name="a"), GrpoBatchMaker(environment_name="a")])
    with pytest.raises(ConfigError, match="at least one batch maker"):
        open_buffer([])


def test_single_rollouts_leave_their_group_one_by_one(open_buffer):
    run = open_buffer(RecencyBatchMaker(unit="rollout", max_tokens=16, seed=0))
    run.add(run.group([0.0, 1.0, 0.0, 1.0]))
    first, second = run.buffer.sample(3), run.buffer.sample(1)
    assert sorted(ids(first) + ids(second)) == [f"easy-0-0/{i}" for i in range(4)]
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 4, "trained": 4}


def test_a_batch_that_is_drawn_for_a_later_update_is_finished_with_that(open_buffer):
    run = open_buffer(max_rollout_step_delay=9)
    run.add(run.group(), run.group())
    now, ahead = run.buffer.sample(1), run.buffer.sample(1, step=1)
    assert (now.step, ahead.step) == (0, 1)
    run.buffer.set_current_step(1)
    assert run.counts() == {"started": 4, "trained": 2, "waiting": 2}
    run.buffer.set_current_step(2)
    assert run.counts() == {"started": 4, "trained": 4}


def test_bad_groups_are_refused_whole_and_lose_nothing(open_buffer, sim):
    run = open_buffer()
    good = run.group()
    with pytest.raises(InvalidRolloutError, match="name the group, and its rollouts <group_id>/0"):
        run.add(RolloutGroup(good.key, good.rollouts, "other"))
    with pytest.raises(InvalidRolloutError, match="group_id is ''"):
        run.add(RolloutGroup(good.key, good.rollouts))
    run.add(good)
    with pytest.raises(DuplicateGroupError, match="'easy-0-0' was used before"):
        run.add(good)
    assert run.counts() == {"started": 2, "waiting": 2}
    with pytest.raises(RunFailed, match="versions only grow"):
        run.buffer.set_current_step(-1)


def test_a_group_is_stored_when_its_file_is_written_or_it_was_refused(open_buffer):
    run = open_buffer()
    run.buffer.pool.sealer._config = StoreConfig(buffer_size=4)
    run.add(run.group())
    assert not run.buffer.is_stored("easy-0-0") and run.buffer.is_stored("easy-0-7")
    run.add(run.group())
    assert run.buffer.is_stored("easy-0-0")


def test_a_group_that_was_settled_is_not_taken_a_second_time(open_buffer):
    run = open_buffer()
    group = run.group()
    run.add(group)
    run.buffer.sample(1)
    run.buffer.set_current_step(1)
    with pytest.raises(DuplicateGroupError, match="was used before"):
        run.add(group)
    assert run.counts() == {"started": 2, "trained": 2}


def test_what_a_generator_announced_is_in_flight_until_it_comes(open_buffer):
    run = open_buffer()
    run.admission.start("easy-0-0", "easy", 3)
    assert run.counts() == {"started": 3, "in_flight": 3}
    run.add(run.group())
    assert run.counts() == {"started": 3, "waiting": 2, "invalid": 1}  # the third never came


def test_a_closed_buffer_says_so(open_buffer, sim):
    run = open_buffer()
    run.buffer.close()
    with pytest.raises(Stopped):
        run.buffer.sample(1)
    with pytest.raises(Stopped):
        sim.deliver(run.buffer, run.group())


def test_tickets_belong_to_the_other_buffer(open_buffer, sim):
    paced = sim.Simulation(ReplayBufferConfig(), sim.World())
    with pytest.raises(ConfigError, match=r"given a TicketIssuer: with tickets use PacedReplayBuffer\("):
        ReplayBuffer(paced.config, paced.store, RecencyBatchMaker(max_tokens=16, seed=0), paced.issuer)
    with pytest.raises(ConfigError, match="replay.max_waiting is 9, but tickets limit what waits"):
        sim.Simulation(ReplayBufferConfig(max_waiting=9), sim.World())


def test_an_announced_group_may_fail(open_buffer):
    run = open_buffer()
    run.admission.start("easy-0-0", "easy", 3)
    run.admission.fail("easy-0-0", "aborted", "the simulator died")
    assert run.counts() == {"started": 3, "aborted": 3}
    with pytest.raises(InvalidRolloutError, match="'easy-0-0' is not in flight"):
        run.admission.fail("easy-0-0", "aborted", "")

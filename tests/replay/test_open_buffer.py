"""A buffer without tickets: what arrives is taken, sampled, and ends by freshness, capacity or its uses."""

import time
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batch import BatchMaker, DeadlineBatchMaker, GrpoBatchMaker, RecencyBatchMaker, example_from_rollout
from penstock.replay import OpenAdmission, ReplayBuffer, ReplayBufferConfig, RolloutStore, StoreConfig
from penstock.rundir import RunDirectory
from penstock.types import (
    ConfigError,
    DuplicateGroupError,
    InvalidRolloutError,
    RolloutGroup,
    RunDirectoryError,
    RunFailed,
    Stopped,
    Ticket,
)


class Open:
    """An open buffer on a virtual clock; groups are numbered."""

    def __init__(self, sim, makers, store=None, states=None, lineage=0, **config):
        self.sim, self.now, self.made = sim, 1000.0, 0
        self.store = sim.MemoryStore() if store is None else store
        self.admission = OpenAdmission(self.store.open_ledger(lineage), lineage)
        settings = {"store": StoreConfig(buffer_size=1), **config}
        self.config = ReplayBufferConfig(**settings)
        self.buffer = ReplayBuffer(self.config, self.store, makers, self.admission, lambda: self.now)
        if states is not None:
            self.buffer.restore(states)

    def group(self, rewards=(0.0, 1.0), env_name=None, lesson="easy", number=None, **fields):
        number = self.made if number is None else number
        self.made = max(self.made, number + 1)
        ticket = Ticket(f"{lesson}-0-{number}", lesson, number, number, 0, 0)
        group = self.sim.make_group(ticket, rewards, **{"timestamp": self.now, "weight_step": 0, **fields})
        if env_name is None:
            return group
        return RolloutGroup(group.key, tuple(rename(r, env_name) for r in group.rollouts), group.group_id)

    def add(self, *groups):
        self.sim.deliver(self.buffer, *groups)
        self.buffer.check_ledger()

    def counts(self):
        return {k: v for k, v in self.buffer._ledger.snapshot().items() if v}


def rename(rollout, env_name):
    return replace(rollout, env_name=env_name)


def ids(batch):
    return [i for example in batch.examples for i in example.rollout_ids]


@pytest.fixture
def open_buffer(sim):
    def make(makers=None, **config):
        return Open(sim, RecencyBatchMaker(max_tokens=16, seed=0) if makers is None else makers, **config)

    return make


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


class Hoarder(BatchMaker):
    """One's own maker with the three methods alone: it forgets nothing and offers the same again and again."""

    def __init__(self):
        self.rollouts = []

    def add_rollout(self, rollout):
        self.rollouts.append(rollout)

    def create_batch(self, batch_size):
        return [example_from_rollout(rollout, 1.0, 16) for rollout in self.rollouts[:batch_size]] or None

    def get_batch_metadata(self, batch):
        return {"metrics": {"train/examples": len(batch)}}


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


def same_example(rollout, group):
    return replace(rollout, env_example_id=group.rollouts[0].env_example_id)


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
    run.buffer._sealer._buffer_size = 4
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


def test_a_closed_buffer_says_so_and_a_paced_one_is_not_sampled(open_buffer, sim):
    run = open_buffer()
    run.buffer.close()
    with pytest.raises(Stopped):
        run.buffer.sample(1)
    with pytest.raises(Stopped):
        sim.deliver(run.buffer, run.group())
    paced = sim.Simulation(ReplayBufferConfig(), sim.World())
    with pytest.raises(RunFailed, match="ask next_batch"):
        paced.buffer.sample(1)


# --- any interleaving -----------------------------------------------------------------------------------------------


class Model:
    """What should be live, by the rules of docs/replay.md and nothing else."""

    def __init__(self, capacity, uses, delay, limit_s):
        self.capacity, self.cap, self.delay, self.limit_s = capacity, uses, delay, limit_s
        self.step, self.now = 0, 1000.0
        self.stamps: dict[str, tuple[str, int, float]] = {}
        self.order: dict[str, deque[list[str]]] = {}
        self.uses: Counter[str] = Counter()

    def fresh(self, step, timestamp):
        return self.step - self.delay <= step <= self.step and timestamp > self.now - self.limit_s

    def add(self, env_name, members):
        live = [i for i, step, timestamp in members if self.fresh(step, timestamp)]
        self.stamps |= {i: (env_name, step, timestamp) for i, step, timestamp in members if i in live}
        if live:
            self.order.setdefault(env_name, deque()).append(live)
        while sum(map(len, self.order.get(env_name, ()))) > self.capacity:
            for i in self.order[env_name].popleft():
                del self.stamps[i]

    def expire(self):
        self.drop([i for i, (_, step, timestamp) in self.stamps.items() if not self.fresh(step, timestamp)])

    def use(self, taken):
        self.uses.update(taken)
        self.drop([i for i in taken if self.uses[i] >= self.cap])

    def drop(self, gone):
        for i in gone:
            env_name, _, _ = self.stamps.pop(i)
            for group in self.order[env_name]:
                if i in group:
                    group.remove(i)
            self.order[env_name] = deque(group for group in self.order[env_name] if group)


MAKERS = {
    "recency": lambda uses: RecencyBatchMaker(max_tokens=16, max_samples=uses, seed=1),
    "rollouts": lambda uses: RecencyBatchMaker(max_tokens=16, max_samples=uses, unit="rollout", seed=1),
    "deadline": lambda uses: DeadlineBatchMaker(max_tokens=16, max_samples=uses),
    "plain": lambda uses: Hoarder(),
}
MEMBERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=3)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("ab"), MEMBERS),
        st.tuples(st.just("step"), st.integers(0, 2), st.integers(0, 20)),
        st.tuples(st.just("sample"), st.integers(1, 3), st.none()),
        st.tuples(st.just("crash"), st.none(), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=OPERATIONS,
    kind=st.sampled_from(sorted(MAKERS)),
    capacity=st.integers(1, 6),
    uses=st.sampled_from([1, 2, -1]),
    delay=st.integers(1, 2),
    limit_s=st.sampled_from([15.0, 1e6]),
)
def test_under_any_interleaving_the_books_close_and_the_rules_hold(
    sim, tmp_path_factory, operations, kind, capacity, uses, delay, limit_s
):
    """Adds, steps, samples and crashes in any order: live is what the model says, and everything has one state."""
    config = dict(
        capacity=capacity, max_samples=uses, max_rollout_step_delay=delay, max_rollout_timestamp_delay=limit_s
    )
    disk = sim.MemoryStore(tmp_path_factory.mktemp("run") / "lineages.jsonl")
    run = Open(sim, MAKERS[kind](uses), disk, **config)
    model = Model(capacity, float("inf") if uses < 0 else uses, delay, limit_s)

    def live():
        return {r.rollout_id for group in run.buffer._stock.waiting for r in group.rollouts}

    for name, first, second in operations:
        if name == "add":
            stamps = [(max(0, model.step - age), run.now - seconds) for age, seconds in second]
            group = run.group([float(i) for i in range(len(stamps))], env_name=first, lesson="easy")
            group = RolloutGroup(group.key, tuple(map(restamped, group.rollouts, stamps)), group.group_id)
            model.add(first, [(r.rollout_id, *stamp) for r, stamp in zip(group.rollouts, stamps, strict=True)])
            run.add(group)
        elif name == "step":
            model.step, model.now = model.step + first, model.now + second
            run.now = model.now
            run.buffer.set_current_step(model.step)
            model.expire()
        elif name == "sample":
            model.expire()
            batch = run.buffer.sample(first)
            taken = [] if batch is None else ids(batch)
            assert set(taken) <= model.stamps.keys() and len(taken) == len(set(taken))
            model.use(taken)
        else:
            with run.buffer.boundary():
                states = run.buffer.state()
            run.add(run.group())  # after the checkpoint, and so it comes back by its file
            model.add("words", [(f"easy-0-{run.made - 1}/{i}", 0, run.now) for i in range(2)])
            made = run.made
            run = Open(sim, MAKERS[kind](uses), disk, states, disk.lineages.newest + 1, **config)
            run.made, run.now = made, model.now
            run.buffer.set_current_step(model.step)
            pending = {i for i in model.uses if i not in model.stamps}
            back = live() - model.stamps.keys()
            assert back <= pending, "only what an unfinished update had used comes back"
            assert back or live() == set(model.stamps)
            run.buffer.check_ledger()
            return
        assert live() == set(model.stamps)
        run.buffer.check_ledger()
        counts = Counter(group.env_name for group in run.buffer._stock.waiting for _ in group.rollouts)
        assert all(count <= capacity for count in counts.values())
    assert uses < 0 or max(model.uses.values(), default=0) <= uses


def restamped(rollout, stamp):
    step, timestamp = stamp
    metadata = replace(rollout.metadata, weight_step=step, timestamp=timestamp)
    return replace(rollout, metadata=metadata, response_weight_steps=np.full(2, step, np.int32))


# --- on disk --------------------------------------------------------------------------------------------------------


def test_an_open_buffer_resumes_from_its_files(sim, tmp_path):
    """Trained before the checkpoint stays so; what was trained after it, or arrived after it, waits again."""
    directory = RunDirectory.create(tmp_path / "run", {})
    config = dict(max_rollout_step_delay=9)
    store = RolloutStore(directory)
    run = Open(sim, DeadlineBatchMaker(max_tokens=16), store, **config)
    run.add(*[run.group() for _ in range(3)])
    run.buffer.sample(1)
    run.buffer.set_current_step(1)
    with run.buffer.boundary():
        states = run.buffer.state()
    run.buffer.sample(1)
    run.buffer.set_current_step(2)
    run.add(run.group())
    run.admission.start("easy-0-9", "easy", 2)  # dies with its simulator
    assert run.counts() == {"started": 10, "trained": 4, "waiting": 4, "in_flight": 2}
    store.close()

    store = RolloutStore(directory)
    again = Open(sim, DeadlineBatchMaker(max_tokens=16), store, states, lineage=1, **config)
    assert again.counts() == {"started": 10, "trained": 2, "waiting": 6, "aborted": 2}
    again.buffer.check_ledger()
    assert ids(again.buffer.sample(3)) == [f"easy-0-{group}/{i}" for group in (1, 2, 3) for i in range(2)]
    again.buffer.set_current_step(2)
    assert again.counts() == {"started": 10, "trained": 8, "aborted": 2}
    store.close()


def test_a_directory_with_a_past_is_not_written_into_unknowingly(sim, tmp_path):
    store = RolloutStore(tmp_path / "mine")
    run = Open(sim, DeadlineBatchMaker(max_tokens=16), store)
    run.add(run.group())
    store.close()
    again = Open(sim, DeadlineBatchMaker(max_tokens=16), RolloutStore(tmp_path / "mine"))
    with pytest.raises(RunDirectoryError, match="mine holds the rollouts of an earlier life: choose another directory"):
        again.add(again.group())


def test_what_a_storage_delivers_again_after_a_crash_is_taken_back(sim, tmp_path):
    """Announced and never stored: a resume counts it as aborted, until a storage that outlived the crash has it."""
    directory = RunDirectory.create(tmp_path / "run", {})
    store = RolloutStore(directory)
    run = Open(sim, DeadlineBatchMaker(max_tokens=16), store)
    with run.buffer.boundary():
        states = run.buffer.state()
    group = run.group()
    run.admission.start(group.group_id, "easy", 2)
    store.close()
    again = Open(sim, DeadlineBatchMaker(max_tokens=16), RolloutStore(directory), states, 1)
    assert again.counts() == {"started": 2, "aborted": 2}
    again.add(group)
    assert again.counts() == {"started": 2, "waiting": 2}
    assert ids(again.buffer.sample(1)) == ["easy-0-0/0", "easy-0-0/1"]
    with pytest.raises(DuplicateGroupError):
        again.add(group)


@pytest.mark.parametrize("keep", [1, 2])
def test_no_file_goes_that_a_kept_checkpoint_may_need(sim, tmp_path, keep):
    store = RolloutStore(RunDirectory.create(tmp_path / "run", {}), StoreConfig(max_bytes=1, buffer_size=1))
    admission = OpenAdmission(store.open_ledger())
    config = ReplayBufferConfig(max_rollout_step_delay=9, store=StoreConfig(buffer_size=1))
    maker = DeadlineBatchMaker(max_tokens=16)
    buffer = ReplayBuffer(config, store, maker, admission, keep_checkpoints=keep)
    left = []
    for step in range(3):
        ticket = Ticket(f"easy-0-{step}", "easy", step, step, 0, 0)
        sim.deliver(buffer, sim.make_group(ticket, [0.0, 1.0], weight_step=step, timestamp=time.time()))
        buffer.sample(1)
        buffer.set_current_step(step + 1)
        with buffer.boundary():
            buffer.state()
        buffer.checkpoint_saved()
        left.append(len(list((tmp_path / "run" / "rollouts").glob("*.parquet"))))
    assert left == ([0, 0, 0] if keep == 1 else [1, 1, 1])
    store.close()


# --- what batch makers may do wrong, and what the buffer makes of it -----------------------------------------------


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
    run.buffer = ReplayBuffer(config, run.store, Picky(), run.issuer, run.clock)

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
    run.buffer = ReplayBuffer(config, run.store, makers, run.issuer, run.clock)
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


@pytest.mark.parametrize("kind", ["recency", "grpo"])
def test_after_a_resume_the_rest_of_a_group_keeps_its_baseline(sim, tmp_path, kind):
    """Rewards 0, 0, 0, 1: whoever is left is measured against all four, as before."""

    def maker():
        if kind == "grpo":
            return GrpoBatchMaker(max_tokens=16, seed=0)
        return RecencyBatchMaker(unit="rollout", max_tokens=16, seed=0)

    directory = RunDirectory.create(tmp_path / "run", {})
    store = RolloutStore(directory)
    run = Open(sim, maker(), store, max_rollout_step_delay=9)
    run.add(run.group([0.0, 0.0, 0.0, 1.0]))
    run.buffer.sample(3)
    run.buffer.set_current_step(1)
    with run.buffer.boundary():
        states = run.buffer.state()
    store.close()
    again = Open(sim, maker(), RolloutStore(directory), states, 1, max_rollout_step_delay=9)
    [example] = again.buffer.sample(1).examples
    reward = 1.0 if example.rollout_ids == ("easy-0-0/3",) else 0.0
    assert float(example.advantage.max() + example.advantage.min()) == pytest.approx(reward - (1.0 - reward) / 3)


def test_rollouts_whose_file_could_not_be_written_are_written_with_the_next(open_buffer):
    run = open_buffer()
    run.buffer._space._limit_s = 0.0  # replay.store.full_disk_s: 0
    seal, full = run.store.seal, [True]

    def store_seal(records):
        if full[0]:
            raise OSError(28, "No space left on device")
        seal(records)

    run.store.seal = store_seal
    with pytest.raises(OSError, match="No space left"):
        run.add(run.group())
    full[0] = False
    run.add(run.group())
    assert len(run.store.sealed) == 4 and len(run.buffer.sample(2).group_ids) == 2
    full[0] = True
    run.buffer._sealer._buffer_size = 100
    run.add(run.group())
    run.buffer.close()  # in a signal handler, maybe: it says what happened to those who ask next
    with pytest.raises(RunFailed, match="the last rollouts could not be stored: .*No space left"):
        run.buffer.sample(1)


def test_all_states_of_a_checkpoint_see_the_same_moment(sim, tmp_path):
    """A group that the batch maker refuses when its file is written is gone before any state is taken."""
    config = ReplayBufferConfig(groups_per_batch=2, store=StoreConfig(buffer_size=1000))
    run = sim.Simulation(config, sim.World(slots=0))
    run.buffer = ReplayBuffer(config, run.store, DeadlineBatchMaker(max_tokens=3), run.issuer, run.clock)
    [ticket] = run.issuer.acquire(1, 0)
    sim.deliver(run.buffer, sim.make_group(ticket, [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]], timestamp=1e3))
    with run.buffer.boundary():
        assert run.issuer.state()["outstanding"] == []
        assert run.buffer.state()["recorded"] == []


def test_an_announced_group_may_fail(open_buffer):
    run = open_buffer()
    run.admission.start("easy-0-0", "easy", 3)
    run.admission.fail("easy-0-0", "aborted", "the simulator died")
    assert run.counts() == {"started": 3, "aborted": 3}
    with pytest.raises(InvalidRolloutError, match="'easy-0-0' is not in flight"):
        run.admission.fail("easy-0-0", "aborted", "")


def test_files_fall_due_without_anybody_coming_by(sim):
    store = sim.MemoryStore()
    config = ReplayBufferConfig(store=StoreConfig(buffer_size=1000, seal_s=0.05))
    buffer = ReplayBuffer(config, store, RecencyBatchMaker(max_tokens=16, seed=0))
    ticket = Ticket("easy-0-0", "easy", 0, 0, 0, 0)
    sim.deliver(buffer, sim.make_group(ticket, [0.0, 1.0], timestamp=time.time()))
    limit = time.monotonic() + 10.0
    while not store.sealed:
        assert time.monotonic() < limit
        time.sleep(0.005)
    buffer.close()


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
    with pytest.raises(ConfigError, match="batch_size is 0"):
        run.buffer.sample(0)

"""Fragments in an open buffer: every fate, back-pressure, files, and what a resume makes of them."""

import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.fragments_made import a_batch, make_fragment

from penstock.batch import FragmentBatchMaker
from penstock.replay import (
    FRAGMENTS,
    FragmentReplayConfig,
    OpenAdmission,
    OpenBatchSource,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutStore,
    StoreConfig,
)
from penstock.rundir import RunDirectory, read_json_lines, read_parquet
from penstock.types import ConfigError, NoProgressError, RolloutRecord, Stopped

STORE = {"buffer_size": 1, "compact_parts": 0}


class Fleet:
    """A buffer of fragments in a run directory, on a virtual clock; fragments are numbered."""

    def __init__(self, path, states=None, store=None, **config):
        self.now, self.made = 1000.0, 0
        self.directory = RunDirectory(path) if path.exists() else RunDirectory.create(path, {})
        self.config = FragmentReplayConfig(**{"fragments_per_batch": 2, "store": {**STORE, **(store or {})}, **config})
        self.store = RolloutStore(self.directory, self.config.store, lambda: self.now, FRAGMENTS)
        lineage = 0 if states is None else self.store.lineages.newest + 1
        self.admission = OpenAdmission(self.store.open_ledger(lineage), lineage)
        maker = FragmentBatchMaker(self.config.order, self.config.max_samples)
        self.buffer = ReplayBuffer(self.config.buffer_config(), self.store, maker, self.admission, lambda: self.now)
        if states is not None:
            self.buffer.restore(states)
        self.source = OpenBatchSource(self.buffer, self.config.fragments_per_batch)

    def fragment(self, **fields):
        self.made += 1
        return make_fragment(f"cart-w0-{self.admission.lineage}-{self.made - 1}", **{"timestamp": self.now, **fields})

    def add(self, *fragments):
        self.buffer.add_batches([a_batch(*fragments)])
        self.buffer.check_ledger()

    def update(self, step):
        batch = self.source.next_batch(step, 5.0)
        self.source.finish_update(step)
        self.source.set_current_step(step + 1)
        self.buffer.check_ledger()
        return ids(batch)

    def counts(self):
        return {k: v for k, v in self.buffer._ledger.snapshot().items() if v}

    def reasons(self):
        return [row["reason"] for row in read_json_lines(self.directory.fates_path)]

    def save(self):
        with self.buffer.boundary():
            return self.buffer.state()

    def end(self):
        self.buffer.flush()  # another thread may be at it
        self.buffer.close()
        self.store.close()


def ids(batch):
    return [i for example in batch.examples for i in example.rollout_ids]


@pytest.fixture
def fleet(tmp_path):
    made = []

    def make(name="run", **arguments):
        made.append(Fleet(tmp_path / name, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.end()


def parts(run):
    return sorted(path.name for path in (run.directory.path / "fragments").glob("*.parquet"))


def test_every_fate_of_a_fragment_is_counted_once(fleet):
    """In flight, waiting, trained, stale by version and by time, faulty, refused by the sender, evicted."""
    run = fleet(max_staleness=2, max_age_s=60.0, max_waiting=-1, capacity=4)
    run.admission.start("cart-w1-0-0", "cart", 1)
    run.admission.start("cart-w1-0-1", "cart", 1)
    assert run.counts() == {"started": 2, "in_flight": 2}
    run.admission.fail("cart-w1-0-1", "aborted", "dropped by policy: the worker's queue was full")
    run.add(make_fragment("cart-w1-0-0", timestamp=1000.0), run.fragment(), run.fragment(faults=(0, 1, 2, 3)))
    assert run.counts() == {"started": 4, "aborted": 1, "waiting": 2, "invalid": 1}
    assert run.update(0) == ["cart-w1-0-0/0", "cart-w0-0-0/0"]
    assert run.counts() == {"started": 4, "aborted": 1, "invalid": 1, "trained": 2}
    run.add(run.fragment(weight_steps=2))  # of a version that there is not yet
    assert run.counts()["invalid"] == 2
    run.source.set_current_step(3)
    run.add(run.fragment(weight_steps=[0, 3, 3, 3]), run.fragment(weight_steps=[1, 3, 3, 3]))
    assert run.counts()["stale_step"] == 1 and run.counts()["waiting"] == 1  # the oldest step decides
    run.source.set_current_step(4)
    assert run.counts()["stale_step"] == 2
    run.add(run.fragment(weight_steps=4, timestamp=940.0), run.fragment(weight_steps=4, timestamp=950.0))
    run.now = 1010.5
    run.source.set_current_step(5)
    assert run.counts()["stale_time"] == 2 and "waiting" not in run.counts()
    run.add(*[run.fragment(weight_steps=5) for _ in range(6)])
    assert run.counts() == {
        "started": 15, "waiting": 4, "trained": 2, "stale_step": 2, "stale_time": 2, "invalid": 2, "aborted": 1,
        "evicted": 2,
    }  # fmt: skip
    assert run.update(5) == ["cart-w0-0-9/0", "cart-w0-0-10/0"]  # the oldest that were not evicted
    text = " | ".join(run.reasons())
    for words in (
        "all of its steps are faulty", "weight_step 2 is from the future", "dropped by policy",
        "weight_step 0 is more than 2 versions behind 3", "rollouts of CartPole-v1 wait (replay.capacity)",
        "trained by update 5",
    ):  # fmt: skip
        assert words in text


def test_a_batch_has_its_numbers_and_names_its_fragments(fleet):
    run = fleet()
    run.source.set_current_step(3)
    run.add(run.fragment(weight_steps=[1, 2, 3, 3]), run.fragment(weight_steps=3, faults=(3,)))
    batch = run.source.next_batch(3, 1.0)
    assert [example.fragment.weight_steps.tolist() for example in batch.examples] == [[1, 2, 3, 3], [3, 3, 3, 3]]
    assert batch.metrics["replay/staleness_max"] == 2 and batch.metrics["train/step_staleness_max"] == 2
    assert batch.metrics["train/faulty_steps"] == 1 and batch.metrics["train/steps"] == 7
    assert run.store.read_batch(batch.batch_id) == ids(batch) == ["cart-w0-0-0/0", "cart-w0-0-1/0"]
    assert run.counts() == {"started": 2, "waiting": 2}  # the update is not done
    [table] = [read_parquet(path) for path in run.directory.batches.glob("*.parquet")]
    assert table.column("step").to_pylist() == [3, 3]


def test_single_fragments_go_in_one_file_when_the_learner_waits(fleet):
    run = fleet(fragments_per_batch=3, store={"buffer_size": 100, "seal_s": 1000.0})
    thread = threading.Thread(target=lambda: [self_add(run) for _ in range(3)])
    thread.start()
    batch = run.source.next_batch(0, 10.0)
    thread.join()
    assert len(batch.examples) == 3 and len(parts(run)) == 1


def self_add(run):
    time.sleep(0.02)
    run.buffer.add_batches([a_batch(run.fragment())])
    run.buffer.wake()


def test_a_learner_that_waits_too_long_says_for_what(fleet):
    run = fleet()
    run.add(run.fragment())
    with pytest.raises(NoProgressError, match="no batch within 0.1 s: an open buffer with 1 fresh.*an update needs 2"):
        run.source.next_batch(0, 0.1)
    threading.Timer(0.05, run.buffer.close).start()
    with pytest.raises(Stopped):
        run.source.next_batch(0, 10.0)


# --- back-pressure --------------------------------------------------------------------------------------------------


def until(happened):
    deadline = time.monotonic() + 5
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def blocked(run, count=1):
    """A sender in a thread; returns when it waits."""
    errors = []

    def send():
        try:
            run.buffer.add_batches([a_batch(*[run.fragment() for _ in range(count)])])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: run.buffer.metrics()["replay/blocked_senders"] == 1)
    return thread, errors


def test_a_full_buffer_lets_senders_wait_and_evicts_nothing(fleet):
    run = fleet(max_waiting=3)
    run.add(*[run.fragment() for _ in range(3)])
    assert not run.buffer.has_room
    thread, errors = blocked(run, 3)
    assert run.counts() == {"started": 3, "waiting": 3}
    batch = run.source.next_batch(0, 5.0)  # 2 of 3 are gone: there is room for two
    until(lambda: run.counts()["started"] == 5 and run.buffer.metrics()["replay/blocked_senders"] == 1)
    run.source.finish_update(0)
    assert ids(batch) == ["cart-w0-0-0/0", "cart-w0-0-1/0"]
    run.source.next_batch(1, 5.0)
    thread.join(5)
    assert not thread.is_alive() and errors == []
    assert run.buffer.metrics()["replay/blocked_senders"] == 0 < run.buffer.metrics()["replay/blocked_s"] < 5
    assert run.counts() == {"started": 6, "trained": 2, "waiting": 4}


def test_a_new_version_makes_room_where_fragments_are_stale(fleet):
    run = fleet(max_waiting=2, max_staleness=0)
    run.add(run.fragment(), run.fragment())
    thread, errors = blocked(run)
    run.source.set_current_step(1)
    thread.join(5)
    assert not thread.is_alive() and errors == []
    assert run.counts() == {"started": 3, "stale_step": 3}


def test_time_makes_room_too(fleet):
    run = fleet(max_waiting=2, max_age_s=10.0)
    run.add(run.fragment(), run.fragment())
    run.now += 11
    run.add(run.fragment())
    assert run.counts() == {"started": 3, "stale_time": 2, "waiting": 1}


def test_a_sender_that_waits_hears_of_the_end_and_of_its_limit(fleet):
    run = fleet(max_waiting=2, max_waiting_s=0.1)
    run.add(run.fragment(), run.fragment())
    with pytest.raises(
        NoProgressError, match="waited 0.1 s.*2 rollouts wait.*max_waiting = 2.*learner is at version 0"
    ):
        run.add(run.fragment())
    run = fleet("other", max_waiting=2)
    run.add(run.fragment(), run.fragment())
    thread, errors = blocked(run)
    run.buffer.close()
    thread.join(5)
    assert [type(error) for error in errors] == [Stopped]


def test_what_was_used_does_not_keep_others_out(fleet):
    run = fleet(max_waiting=2, max_samples=3)
    run.add(run.fragment(), run.fragment())
    run.update(0)
    assert run.counts() == {"started": 2, "waiting": 2} and run.buffer.has_room
    run.add(run.fragment())
    assert run.update(1) == ["cart-w0-0-2/0", "cart-w0-0-0/0"]  # what was in no batch yet, then the oldest
    assert run.buffer._stock.unused == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["add", "add", "add", "update", "version", "time"]), max_size=40), st.integers(1, 3))
def test_the_count_of_those_that_wait_for_a_first_batch_is_right(tmp_path_factory, steps, uses):
    run = Fleet(tmp_path_factory.mktemp("run") / "run", max_samples=uses, max_staleness=1, max_age_s=9.0, max_waiting=6)
    used, step = set(), 0
    for what in steps:
        if what == "add" and run.buffer.has_room:
            run.add(run.fragment(weight_steps=step))
        elif what == "update" and (batch := run.buffer.try_next_batch(step)) is not None:
            used.update(ids(batch))
            step += 1
            run.source.finish_update(step - 1)
            run.source.set_current_step(step)
        elif what == "version":
            step += 1
            run.source.set_current_step(step)
        elif what == "time":
            run.now += 4
        waiting = {r.rollout_id for group in run.buffer._stock.waiting for r in group.rollouts}
        assert run.buffer._stock.unused == len(waiting - used) <= 6
    run.end()


# --- files and resume -----------------------------------------------------------------------------------------------


def test_a_resume_brings_fragments_back_as_they_were(fleet):
    run = fleet(max_waiting=-1)
    run.add(*[run.fragment(reward=float(n)) for n in range(3)])
    run.update(0)
    states = run.save()
    run.add(run.fragment(weight_steps=1), run.fragment(weight_steps=2 - 1))
    run.update(1)
    run.admission.start("cart-w9-0-0", "cart", 1)
    assert run.counts() == {"started": 6, "trained": 4, "waiting": 1, "in_flight": 1}
    run.end()

    again = fleet(states=states, max_waiting=-1)
    assert again.counts() == {"started": 6, "trained": 2, "waiting": 3, "aborted": 1}
    batch = again.source.next_batch(1, 5.0)
    assert ids(batch) == ["cart-w0-0-2/0", "cart-w0-0-3/0"]
    whole = make_fragment("cart-w0-0-2", reward=2.0, timestamp=1000.0)
    assert np.array_equal(batch.examples[0].fragment.observations[""], whole.observations[""])
    assert batch.examples[0].fragment.metadata == whole.metadata
    again.buffer.check_ledger()


def test_fragments_of_later_weights_are_rolled_back(fleet):
    run = fleet(max_waiting=-1)
    run.add(run.fragment(), run.fragment())
    run.update(0)
    states = run.save()
    run.source.set_current_step(3)
    run.add(run.fragment(weight_steps=[1, 1, 1, 2]), run.fragment(weight_steps=1))
    run.end()
    again = fleet(states=states, max_waiting=-1)
    assert again.counts() == {"started": 4, "trained": 2, "rolled_back": 1, "waiting": 1}


def test_without_observations_a_resume_rolls_back_and_says_so(fleet):
    run = fleet(store={"observations": False}, max_waiting=-1)
    run.add(*[run.fragment() for _ in range(3)])
    assert len(run.update(0)) == 2
    states = run.save()
    run.end()
    again = fleet(states=states, store={"observations": False}, max_waiting=-1)
    assert again.counts() == {"started": 3, "trained": 2, "rolled_back": 1}
    assert "its observations were not stored (replay.store.observations)" in again.reasons()[-1]
    assert [record.rollout.observations for record in again.store.read_records()] == [{}] * 3
    again.add(again.fragment(weight_steps=1), again.fragment(weight_steps=1))
    assert len(again.update(1)) == 2


def test_observations_are_no_matter_of_language(tmp_path):
    with pytest.raises(ConfigError, match="replay.store.observations is false, but rollouts have none"):
        RolloutStore(tmp_path, StoreConfig(observations=False))


def test_small_files_of_fragments_are_merged_but_not_those_with_many_bytes(tmp_path, monkeypatch):
    config = StoreConfig(compact_parts=3, compact_after_s=0)
    store = RolloutStore(tmp_path, config, experience=FRAGMENTS, grace_s=0.0)
    for number in range(4):
        store.seal([RolloutRecord(make_fragment(f"cart-{number}"), f"cart-{number}", group_key="k")])
    monkeypatch.setattr("penstock.replay.compaction.LARGE_BYTES", 1)
    store.maintain()
    assert len(list((tmp_path / "fragments").iterdir())) == 4
    monkeypatch.undo()
    store.maintain()
    store.maintain()
    assert len(list((tmp_path / "fragments").iterdir())) == 1
    back = store.read_records()
    assert [record.rollout.rollout_id for record in back] == [f"cart-{number}/0" for number in range(4)]
    assert np.array_equal(back[3].rollout.observations[""], make_fragment().observations[""])
    store.close()


def test_a_fragment_stays_as_long_as_a_batch_that_names_it(fleet):
    """Each in a file of its own; update 0 has fragments 0 and 1, update 1 has 1 and 2."""
    run = fleet(max_waiting=-1, store={"max_bytes": 1, "retention_s": 15.0})
    examples = []
    for number in range(3):
        run.add(run.fragment())
        examples.append(Named(f"cart-w0-0-{number}/0"))
        run.now += 1
    run.store.write_batch(f"batch_{'0' * 32}_{int(run.now * 1000)}", examples[:2], 0, 0)
    run.now += 10
    run.store.write_batch(f"batch_{'1' * 32}_{int(run.now * 1000)}", examples[1:], 1, 0)
    run.now += 10  # only the second batch is younger than 15 s
    offered = run.store.expendable([])
    assert [name.partition("/")[0] for name in offered] == ["batches", "fragments"]
    run.store.expire(offered)
    assert [r.group_id for r in run.store.read_records()] == ["cart-w0-0-1", "cart-w0-0-2"]
    run.now += 10
    assert run.store.expendable(["cart-w0-0-2"]) == ()  # the batch is needed, and so is fragment 1
    run.store.expire(run.store.expendable([]))
    assert run.store.read_records() == [] and run.store.bytes == 0


class Named:
    def __init__(self, *rollout_ids):
        self.rollout_ids = rollout_ids


# --- configuration --------------------------------------------------------------------------------------------------


def test_the_buffers_config_follows():
    config = FragmentReplayConfig(fragments_per_batch=8, max_staleness=3, max_age_s=None, max_samples=2)
    made = config.buffer_config()
    assert (made.groups_per_batch, made.max_rollout_step_delay, made.max_samples) == (8, 3, 2)
    assert (made.max_waiting, made.capacity, made.timestamp_delay_s("cart")) == (16, 64, None)
    assert not made.batch_maker.filter_zero_variance and made.prefetch == 0 and made.store == config.store
    assert FragmentReplayConfig(max_staleness=0).buffer_config().synchronous
    assert FragmentReplayConfig(max_waiting=-1).buffer_config().max_waiting is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_waiting": 15}, "max_waiting is 15, below fragments_per_batch = 16: no batch would ever be full"),
        ({"capacity": 20}, "capacity is 20: it must hold fragments_per_batch = 16 and max_waiting = 32"),
        ({"max_samples": 0}, "max_samples is 0: it must be at least 1"),
    ],
)
def test_limits_that_could_never_be_met_are_refused(fields, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        FragmentReplayConfig(**fields)


def test_the_source_and_the_buffer_agree_on_what_may_wait(fleet):
    run = fleet(max_waiting=3)
    with pytest.raises(ConfigError, match="fragments_per_batch is 4, but replay.max_waiting lets 3 wait"):
        OpenBatchSource(run.buffer, 4)
    with pytest.raises(ConfigError, match="fragments_per_batch is 0"):
        OpenBatchSource(run.buffer, 0)


def test_tickets_need_no_back_pressure(sim):
    config = ReplayBufferConfig(max_waiting=100)
    with pytest.raises(ConfigError, match="replay.max_waiting is 100, but tickets limit what waits"):
        sim.Simulation(config, sim.World(slots=0))
    with pytest.raises(ValidationError, match="with less than groups_per_batch = 8 no batch would ever be full"):
        ReplayBufferConfig(max_waiting=7)

"""Fragments in an open buffer: every fate, files, and what a resume makes of them."""

import re
import threading
import time

import numpy as np
import pytest
from pydantic import ValidationError
from tests.fragments_made import a_batch, make_fragment
from tests.replay.open_buffers import ids

from penstock.replay import (
    FRAGMENTS,
    FragmentReplayConfig,
    ReplayBufferConfig,
    RolloutStore,
    SampledBatches,
    StoreConfig,
)
from penstock.rundir import read_parquet
from penstock.types import ConfigError, NoProgressError, RolloutRecord, Stopped


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
        "sampled by version 0, more than 2 updates before the learner's 3",
        "rollouts of CartPole-v1 wait (replay.capacity)", "trained by update 5",
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
    monkeypatch.setattr("penstock.replay.parts.LARGE_BYTES", 1)
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
        SampledBatches(run.buffer, 4)
    with pytest.raises(ConfigError, match="fragments_per_batch is 0"):
        SampledBatches(run.buffer, 0)


def test_tickets_need_no_back_pressure(sim):
    config = ReplayBufferConfig(max_waiting=100)
    with pytest.raises(ConfigError, match="replay.max_waiting is 100, but tickets limit what waits"):
        sim.Simulation(config, sim.World(slots=0))
    with pytest.raises(ValidationError, match="with less than groups_per_batch = 8 no batch would ever be full"):
        ReplayBufferConfig(max_waiting=7)

"""An open buffer and its files: what a resume brings back, what is kept for it, what a disk refuses."""

import time
from dataclasses import replace

import pytest
from tests.replay.open_buffers import Open, ids

from penstock.batch import BatchMakerConfig, DeadlineBatchMaker, GrpoBatchMaker, RecencyBatchMaker
from penstock.replay import (
    OpenAdmission,
    PacedReplayBuffer,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutStore,
    StoreConfig,
)
from penstock.rundir import RunDirectory
from penstock.types import CheckpointError, DuplicateGroupError, RunDirectoryError, RunFailed, Ticket, WeightVersion


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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("mask", {0: -0.5, 1: -0.5, 2: 1.0}), ("penalise", {0: -1 / 3, 1: -1 / 3, 2: 1.0, 3: -1 / 3})],
)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_after_a_resume_filters_hold_for_those_that_wait_and_those_that_are_gone(sim, tmp_path, kind, expected, before):
    """Rewards 0, 0, 1, 1, of which the last was cut: masked, or worth 0; some are drawn before the resume."""

    def opened(store, *states):
        maker = RecencyBatchMaker(unit="rollout", max_tokens=16, seed=0)
        settings = {"max_rollout_step_delay": 9, "batch_maker": BatchMakerConfig(filter_overlong=kind)}
        return Open(sim, maker, store, *states, **settings)

    directory = RunDirectory.create(tmp_path / "run", {})
    run = opened(store := RolloutStore(directory))
    group = run.group([0.0, 0.0, 1.0, 1.0])
    cut = replace(group.rollouts[3], finish_reason="length")
    run.add(replace(group, rollouts=(*group.rollouts[:3], cut)))
    drawn = list(run.buffer.sample(before).examples) if before else []
    run.buffer.set_current_step(1)
    with run.buffer.boundary():
        states = run.buffer.state()
    store.close()
    again = opened(RolloutStore(directory), states, 1)
    drawn += again.buffer.sample(len(expected) - before).examples
    found = {int(e.rollout_ids[0][-1]): float(e.advantage[e.loss_mask][0]) for e in drawn}
    assert found == pytest.approx(expected)
    again.buffer.check_ledger()
    assert again.counts()["filtered"] == (kind == "mask") if kind == "mask" else "filtered" not in again.counts()


def test_rollouts_whose_file_could_not_be_written_are_written_with_the_next(open_buffer):
    run = open_buffer()
    run.buffer.pool.sealer.space._limit_s = 0.0  # replay.store.full_disk_s: 0
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
    run.buffer.pool.sealer._config = StoreConfig(buffer_size=100)
    run.add(run.group())
    run.buffer.close()  # in a signal handler, maybe: it says what happened to those who ask next
    with pytest.raises(RunFailed, match="the last rollouts could not be stored: .*No space left"):
        run.buffer.sample(1)


def test_all_states_of_a_checkpoint_see_the_same_moment(sim, tmp_path):
    """A group that the batch maker refuses when its file is written is gone before any state is taken."""
    config = ReplayBufferConfig(groups_per_batch=2, store=StoreConfig(buffer_size=1000))
    run = sim.Simulation(config, sim.World(slots=0))
    run.buffer = PacedReplayBuffer(config, run.store, DeadlineBatchMaker(max_tokens=3), run.issuer, run.clock)
    [ticket] = run.issuer.acquire(1, 0)
    sim.deliver(run.buffer, sim.make_group(ticket, [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]], timestamp=1e3))
    with run.buffer.boundary():
        assert run.issuer.state()["outstanding"] == []
        assert run.buffer.state()["recorded"] == []


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


@pytest.mark.attack
def test_a_run_that_begins_anew_accounts_for_all_that_was_started_before(fleet):
    """Killed before its first checkpoint, twice: under Ray simulators roll out by then."""
    first = fleet()
    first.admission.start("cart-w1-0-0", "cart", 1)
    first.add(first.fragment(), first.fragment(), first.fragment(faults=(0, 1, 2, 3)))
    first.end()
    with pytest.raises(RunDirectoryError, match="holds the rollouts of an earlier life"):
        forgetful = fleet()
        forgetful.add(forgetful.fragment())
    forgetful.end()
    second = fleet(begun_anew=1)
    assert second.counts() == {"started": 4, "rolled_back": 3, "aborted": 1}
    second.add(second.fragment(lineage=1), second.fragment(lineage=1))
    second.end()
    third = fleet(begun_anew=2)
    assert third.counts() == {"started": 6, "rolled_back": 5, "aborted": 1}
    third.add(third.fragment(lineage=2), third.fragment(lineage=2))
    assert third.update(0) == ["cart-w0-2-0/0", "cart-w0-2-1/0"], "nothing of weights that are gone"
    assert third.counts() == {"started": 8, "rolled_back": 5, "aborted": 1, "trained": 2}
    assert not third.store.lineages.survives(WeightVersion(0, 0), 2)
    with pytest.raises(CheckpointError, match="lineage 2 .* cannot begin"):
        third.buffer.begin_anew()

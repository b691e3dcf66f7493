"""Losing the process and resuming from a checkpoint: the ledger closes, and at staleness zero nothing changes."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batch import BatchMakerConfig
from penstock.replay import FATES, ReplayBufferConfig, RolloutStore, StoreConfig
from penstock.replay.draws import parse_ticket_id
from penstock.replay.history import History, LoggedFate, SealedRollout, StoredBatch
from penstock.replay.recovery import CheckpointView, plan_recovery
from penstock.rundir import RunDirectory, logs, storage
from penstock.types import CheckpointError, WeightVersion


@pytest.fixture
def no_fsync(monkeypatch):
    """A killed process needs no flush to the disk, and hypothesis writes many files."""
    monkeypatch.setattr(storage.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(logs.os, "fsync", lambda descriptor: None)


def start(sim, config, world, directory, states=None, checkpoint_every=0):
    """A life of a run on disk: the first, or the next one from a checkpoint's states."""
    store = RolloutStore(directory)
    lineage = 0 if states is None else store.lineages.newest + 1
    return sim.Simulation(config, world, store, store.open_ledger(lineage), lineage, states, checkpoint_every)


def audit(directory, lineage, step):
    """The state of every rollout by the files alone; every sealed and every started one has exactly one."""
    history = RolloutStore(directory).history()
    everyone = {i for ids in history.tickets().values() for i in ids}
    assert history.sealed.keys() <= everyone
    assert history.fates.keys() <= everyone
    uses = history.uses(lambda version: RolloutStore(directory).lineages.survives(version, lineage), step)
    return history, uses


def config_of(s, **changes):
    fields = dict(groups_per_batch=2, staleness_budget=s, max_failed_groups_per_batch=10_000, straggler_timeout_s=1e6)
    return ReplayBufferConfig(**fields | changes)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"filter_zero_variance": True},
        {"filter_zero_variance": True, "filter_overlong": "mask"},
        {"filter_overlong": "penalise", "filter_difficulty": (0.2, 0.7)},
    ],
)
@pytest.mark.parametrize("schedule", range(4))
def test_at_staleness_zero_a_resumed_run_trains_what_an_unbroken_one_does(sim, tmp_path, no_fsync, schedule, filters):
    config = config_of(0, groups_per_batch=4, batch_maker=BatchMakerConfig(**filters), store=StoreConfig(buffer_size=1))
    cut = 0.3 if "filter_overlong" in filters else 0.0
    world = dict(outcome_seed=3, failing=0.15, flat=0.2, malformed=0.1, cut=cut)
    straight = sim.Simulation(config, sim.World(schedule_seed=99, **world))
    expected = straight.run(6)

    directory = RunDirectory.create(tmp_path / "run", {})
    dead = start(sim, config, sim.World(schedule_seed=schedule, **world), directory, checkpoint_every=3)
    dead.run(5)
    # The process is lost here: update 5's cohort may be running, and updates 3 and 4 were never committed.
    resumed = start(sim, config, sim.World(schedule_seed=schedule + 50, **world), directory, dead.checkpoints[3])
    after = resumed.run(6)
    assert [update.keys for update in dead.trained[:3] + after] == [update.keys for update in expected]
    assert [u.rewards for u in dead.trained[:3] + after] == [u.rewards for u in expected]
    ingested = {sim.lesson_and_index(group) for group in straight.curriculum.groups}
    assert straight.curriculum.told == resumed.curriculum.told and len(ingested) > 20
    resumed.buffer.check_ledger()
    history, uses = audit(directory, 1, 6)
    assert set(uses.values()) == {1}
    trained = Counter(sim.lesson_and_index(i.rpartition("/")[0]) for i in uses)
    assert set(trained) == {key for update in expected for key in update.keys}
    assert any("taken back" in reason for reason in reasons(directory))  # updates 3 and 4 had trained them


def reasons(directory):
    return [row["reason"] for row in logs.read_json_lines(directory.fates_path)]


def test_cohorts_sampled_under_the_forks_weights_are_not_generated_again(sim, tmp_path, no_fsync):
    config = config_of(0, store=StoreConfig(buffer_size=1))
    directory = RunDirectory.create(tmp_path / "run", {})
    dead = start(sim, config, sim.World(), directory, checkpoint_every=3)
    dead.run(5)
    resumed = start(sim, config, sim.World(), directory, dead.checkpoints[3])
    resumed.run(5)
    reused, generated = resumed.trained[0].batch.group_ids, resumed.trained[1].batch.group_ids
    assert [parse_ticket_id(group)[1] for group in reused] == [0, 0]  # update 3, from version 3
    assert [parse_ticket_id(group)[1] for group in generated] == [1, 1]  # update 4, from lineage 1's version 4
    assert dead.trained[4].keys == resumed.trained[1].keys
    rolled_back = [i for i, fate in audit(directory, 1, 5)[0].fates.items() if fate.fate == "rolled_back"]
    assert {i.rpartition("/")[0] for i in rolled_back} == set(dead.trained[4].batch.group_ids)


def test_a_group_that_the_curriculum_knew_at_the_checkpoint_is_not_told_again(sim, tmp_path):
    """Delivered before the checkpoint, delivered after it, and never delivered: told never, once, once."""
    config = config_of(1, store=StoreConfig(buffer_size=1))
    disk = sim.MemoryStore(tmp_path / "lineages.jsonl")
    dead = sim.Simulation(config, sim.World(slots=0), disk, disk.open_ledger())
    before, after, running, _ = dead.issuer.acquire(4, 0)

    def rewards(ticket):
        return [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]]

    sim.deliver(dead.buffer, sim.make_group(before, rewards(before), timestamp=dead.now))
    with dead.buffer.boundary():
        states = {"curriculum": dead.curriculum.state(), "issuer": dead.issuer.state(), "replay": dead.buffer.state()}
    sim.deliver(dead.buffer, sim.make_group(after, rewards(after), timestamp=dead.now))

    resumed = sim.Simulation(config, sim.World(slots=0), disk, disk.open_ledger(1), 1, states)
    assert resumed.curriculum.groups == [after.ticket_id]
    again, _ = resumed.issuer.acquire(4, 0)
    assert (again.lesson_id, again.index, again.seed) == (running.lesson_id, running.index, running.seed)
    assert again.ticket_id != running.ticket_id
    sim.deliver(resumed.buffer, sim.make_group(again, rewards(again), timestamp=dead.now, lineage=1))
    assert resumed.curriculum.groups == [after.ticket_id, again.ticket_id]
    assert resumed.buffer.try_next_batch(0).group_ids == (before.ticket_id, after.ticket_id)
    resumed.buffer.check_ledger()


@pytest.fixture
def after_the_checkpoint(sim, tmp_path):
    """A life at S = 1 that checkpointed at step 1 before version 1 was published, then finished two groups more."""
    config = config_of(1, groups_per_batch=1, store=StoreConfig(buffer_size=1))
    disk = sim.MemoryStore(tmp_path / "lineages.jsonl")
    dead = sim.Simulation(config, sim.World(slots=0), disk, disk.open_ledger())

    def finish(run, ticket):
        rewards = [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]]
        group = sim.make_group(ticket, rewards, weight_step=0, timestamp=run.now, lineage=run.issuer.lineage)
        sim.deliver(run.buffer, group)

    [first] = dead.issuer.acquire(1, 0)
    finish(dead, first)
    dead.buffer.try_next_batch(0)
    dead.buffer.finish_update(0)
    dead.buffer.set_current_step(1)
    with dead.buffer.boundary():
        states = {"curriculum": dead.curriculum.state(), "issuer": dead.issuer.state(), "replay": dead.buffer.state()}
    assert states["issuer"]["update"] == 1 and states["issuer"]["outstanding"] == []
    [late] = dead.issuer.acquire(9, 0)  # still under version 0, so due at update 1
    finish(dead, late)
    resumed = sim.Simulation(config, sim.World(slots=0), disk, disk.open_ledger(1), 1, states)
    return resumed, late


def test_a_group_that_is_claimed_keeps_the_deadline_of_its_own_weights(after_the_checkpoint):
    resumed, late = after_the_checkpoint
    assert len(resumed.issuer.outstanding) == 0 and resumed.ledger.snapshot()["waiting"] > 0
    [fresh] = resumed.issuer.acquire(9, 0)  # two places: the claimed group has the other one
    due = {entry.ticket.ticket_id: entry.ticket.deadline_step for entry in resumed.issuer.outstanding}
    assert due == {late.ticket_id: 1, fresh.ticket_id: 2}
    assert resumed.buffer.try_next_batch(1).group_ids == (late.ticket_id,)
    resumed.buffer.check_ledger()


def test_a_group_that_nobody_claims_in_time_is_stale(after_the_checkpoint):
    resumed, late = after_the_checkpoint
    waiting = resumed.ledger.snapshot()["waiting"]
    resumed.buffer.set_current_step(2)
    counts = resumed.ledger.snapshot()
    assert (counts["waiting"], counts["stale_step"]) == (0, waiting)
    again = resumed.issuer.acquire(1, 0)
    assert [ticket.index for ticket in again if ticket.lesson_id == late.lesson_id] in ([late.index], [])
    resumed.buffer.check_ledger()


CRASHES = given(
    s=st.integers(0, 3),
    samples=st.sampled_from([1, 2]),
    lives=st.lists(st.tuples(st.integers(1, 250), st.integers(0, 1000)), min_size=1, max_size=4),
    filtering=st.booleans(),
    every=st.integers(1, 3),
    explicit=st.booleans(),
    ahead=st.integers(0, 2),
    maker=st.sampled_from(["deadline", "recency", "grpo"]),
)


def crashes(examples):
    """How many runs that crash are tried."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def close_after_crashes(sim, tmp_path_factory, s, samples, lives, filtering, every, explicit, ahead, maker):
    """Several lives in a row, each ending anywhere, resumed from the newest checkpoint or from any earlier one."""
    overlong = "mask" if filtering else None
    config = config_of(
        s,
        max_samples=samples,
        batch_maker=BatchMakerConfig(name=maker, filter_zero_variance=filtering, filter_overlong=overlong),
        store=StoreConfig(buffer_size=4),
        max_filtered_groups_per_batch=10_000,
    )
    world = dict(outcome_seed=1, ahead=ahead, failing=0.1, flat=0.2, malformed=0.1, cut=0.2 * filtering)
    disk = sim.MemoryStore(tmp_path_factory.mktemp("run") / "lineages.jsonl")
    states, checkpoints = None, {}

    def begin(schedule):
        lineage = 0 if states is None else disk.lineages.newest + 1
        ledger = disk.open_ledger(lineage)
        life = sim.World(schedule_seed=schedule, **world)
        return sim.Simulation(config, life, disk, ledger, lineage, states, every)

    for events, schedule in lives:
        life = begin(schedule)
        life.buffer.check_ledger()
        with pytest.raises(AssertionError, match="no end after"):
            life.run(10_000, most_events=events)
        checkpoints |= life.checkpoints
        if not checkpoints:
            return  # it crashed before its first checkpoint: there is nothing to resume from
        states = checkpoints[(min if explicit else max)(checkpoints)]
    last = begin(0)
    first_step = last.step
    trained = last.run(first_step + 4)
    assert [update.step for update in trained] == list(range(first_step, first_step + 4))
    last.buffer.check_ledger()

    history = disk.history()
    uses = history.uses(lambda version: disk.lineages.survives(version, last.issuer.lineage), last.step)
    assert max(uses.values()) <= samples
    groups = Counter(sim.lesson_and_index(g) for g in {i.rpartition("/")[0] for i in uses})
    assert set(groups.values()) == {1}, "a ticket was trained under two ids"
    counts = last.ledger.snapshot()
    assert counts["started"] == sum(len(ids) for ids in history.tickets().values())
    by_log = Counter(logged.fate for logged in history.fates.values() if logged.fate in FATES)
    assert {fate: counts[fate] for fate in FATES if counts[fate]} == dict(by_log)
    ended = {i for i, logged in history.fates.items() if logged.fate in FATES}
    live = [i for ids in history.tickets().values() for i in ids if i not in ended]
    assert len(live) == counts["in_flight"] + counts["waiting"]


@crashes(10)
@CRASHES
@pytest.mark.attack
def test_the_ledger_closes_after_crashes_at_any_point(sim, tmp_path_factory, **run):
    close_after_crashes(sim, tmp_path_factory, **run)


@pytest.mark.slow
@crashes(80)
@CRASHES
def test_the_ledger_closes_after_many_crashes(sim, tmp_path_factory, **run):
    close_after_crashes(sim, tmp_path_factory, **run)


# --- the plan, case by case -----------------------------------------------------------------------------------


def sealed(rollout_id, lineage=0, step=0):
    return rollout_id, SealedRollout(rollout_id, rollout_id.rpartition("/")[0], WeightVersion(lineage, step))


def logged(step=2, lineage=0, **fates):
    return {
        f"a-0-{name[1:-1]}/{name[-1]}": LoggedFate(fate, WeightVersion(lineage, step)) for name, fate in fates.items()
    }


def key_of(ticket):
    lesson_id, _, index = parse_ticket_id(ticket)
    return lesson_id, index


def plan(history, outstanding=(), drawn=0, step=3, alive=None):
    """Resuming lineage 0 at a step, with so many tickets of lesson a drawn."""
    view = CheckpointView(
        step,
        {key_of(ticket): ticket for ticket in outstanding},
        alive or {},
        key_of,
        lambda key: key[1] < drawn,
        lambda version: version.lineage == 0 and version.step <= step,
    )
    return plan_recovery(history, view)


def test_what_was_settled_before_the_checkpoint_keeps_its_fate():
    history = History(
        started={"a-0-0": 2, "a-0-1": 1},
        sealed=dict([sealed("a-0-0/0"), sealed("a-0-0/1"), sealed("a-0-1/0")]),
        fates=logged(r00="trained", r01="stale_step", r10="filtered"),
        batches=[StoredBatch("b", WeightVersion(0, 2), ("a-0-0/0",))],
    )
    outcome = plan(history, drawn=2)
    assert outcome.started == 3 and outcome.decisions == [] and outcome.waiting == {}
    assert outcome.fates == {"trained": 1, "stale_step": 1, "filtered": 1}


@pytest.mark.attack
def test_a_trained_fate_that_was_lost_with_the_machine_follows_from_the_batch():
    history = History({"a-0-0": 1}, dict([sealed("a-0-0/0")]), {}, [])
    batch = StoredBatch("b", WeightVersion(0, 2), ("a-0-0/0",))
    outcome = plan(History(history.started, history.sealed, {}, [batch]), drawn=1)
    assert [decision[:2] for decision in outcome.decisions] == [("a-0-0/0", "trained")]
    later = StoredBatch("b", WeightVersion(0, 3), ("a-0-0/0",))
    outcome = plan(History(history.started, history.sealed, {}, [later]), drawn=1)
    assert outcome.fates == {"rolled_back": 1} and outcome.uses == {}


def test_an_outstanding_group_comes_back_unless_it_saw_later_weights():
    history = History(
        started={"a-0-0": 2, "a-0-1": 1, "a-0-2": 1},
        sealed=dict([sealed("a-0-0/0", step=3), sealed("a-0-0/1", step=2), sealed("a-0-1/0", step=4)]),
        fates=logged(step=3, r00="trained"),
        batches=[StoredBatch("b", WeightVersion(0, 3), ("a-0-0/0", "a-0-0/1"))],
    )
    outcome = plan(history, ["a-0-0", "a-0-1", "a-0-2"], drawn=3)
    assert outcome.waiting == {"a-0-0": ["a-0-0/0", "a-0-0/1"]} and outcome.uses == {}
    assert outcome.claims == {("a", 0): "a-0-0"}
    assert outcome.fates == {"rolled_back": 1, "aborted": 1}
    assert {decision[:2] for decision in outcome.decisions} == {
        ("a-0-0/0", "waiting"),
        ("a-0-1/0", "rolled_back"),
        ("a-0-2/0", "aborted"),
    }


@pytest.mark.attack
def test_weights_of_a_branch_that_was_left_do_not_come_back():
    history = History({"a-1-0": 1}, dict([sealed("a-1-0/0", lineage=1, step=2)]), {}, [])
    assert plan(history, ["a-0-0"], drawn=1).fates == {"rolled_back": 1}


@pytest.mark.attack
def test_of_two_lives_that_finished_a_ticket_one_group_comes_back():
    history = History(
        started={"a-0-0": 1, "a-2-0": 1},
        sealed=dict([sealed("a-0-0/0", step=1), sealed("a-2-0/0", step=1)]),  # both under weights that survive
        fates={},
        batches=[],
    )
    outcome = plan(history, ["a-0-0"], drawn=1)
    assert outcome.claims == {("a", 0): "a-0-0"} and outcome.fates == {"rolled_back": 1}
    assert plan(history).claims == {("a", 0): "a-2-0"}  # drawn after the checkpoint: the newest


def test_a_group_with_uses_left_comes_back_with_its_uses():
    history = History(
        {"a-0-0": 1},
        dict([sealed("a-0-0/0")]),
        {},
        [StoredBatch("b", WeightVersion(0, 1), ("a-0-0/0",)), StoredBatch("c", WeightVersion(0, 5), ("a-0-0/0",))],
    )
    outcome = plan(history, drawn=1, alive={"a-0-0": ["a-0-0/0"]})
    assert outcome.waiting == {"a-0-0": ["a-0-0/0"]} and outcome.uses == {"a-0-0/0": 1} and not outcome.claims


def test_of_a_group_with_uses_left_only_what_was_alive_comes_back():
    """One member had all its uses before the checkpoint, one became stale before it, one was used up after it."""
    history = History(
        {"a-0-0": 3},
        dict([sealed("a-0-0/0"), sealed("a-0-0/1"), sealed("a-0-0/2")]),
        logged(step=1, r00="trained", r01="stale_step") | logged(step=5, r02="trained"),
        [StoredBatch("b", WeightVersion(0, 1), ("a-0-0/0",)), StoredBatch("c", WeightVersion(0, 5), ("a-0-0/2",))],
    )
    outcome = plan(history, drawn=1, alive={"a-0-0": ["a-0-0/2"]})
    assert outcome.waiting == {"a-0-0": ["a-0-0/2"]}
    assert outcome.fates == {"trained": 1, "stale_step": 1}
    assert [decision[:2] for decision in outcome.decisions] == [("a-0-0/2", "waiting")]


def test_what_was_trained_before_the_checkpoint_is_known_without_its_batch_file():
    history = History({"a-0-0": 1}, {}, logged(step=2, r00="trained"), [])  # files of final rollouts may be gone
    assert plan(history, drawn=1).fates == {"trained": 1}
    history = History({"a-0-0": 1}, dict([sealed("a-0-0/0")]), logged(step=3, r00="trained"), [])
    assert plan(history, drawn=1).fates == {"rolled_back": 1}  # trained after the checkpoint


def test_a_start_that_was_lost_with_the_machine_is_known_by_its_rows():
    outcome = plan(History({}, dict([sealed("a-0-9/1", step=1)]), {}, []), drawn=3)
    assert outcome.started == 1 and outcome.claims == {("a", 9): "a-0-9"}


def test_states_that_do_not_fit_are_refused(sim, tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    run = start(sim, config_of(1), sim.World(), directory)
    with pytest.raises(CheckpointError, match="issuer's state does not fit"):
        run.issuer.restore({"update": 3})
    with pytest.raises(CheckpointError, match="buffer's state does not fit"):
        run.buffer.restore({"recorded": []})
    with pytest.raises(CheckpointError, match="cannot begin from lineage 5"):
        run.buffer.restore({"recorded": [], "alive": {}, "lineage": 5})

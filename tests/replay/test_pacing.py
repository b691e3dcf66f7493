"""The admission and consumption rule, under random schedules: the properties that DESIGN section 5 promises."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batch import BatchMakerConfig
from penstock.replay import ReplayBufferConfig, StoreConfig
from penstock.types import RunFailed

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def worlds(draw):
    return dict(
        outcome_seed=draw(st.integers(0, 10_000)),
        schedule_seed=draw(st.integers(0, 10_000)),
        slots=draw(st.integers(1, 12)),
        failing=draw(st.sampled_from([0.0, 0.1, 0.4])),
        flat=draw(st.sampled_from([0.0, 0.3])),
        malformed=draw(st.sampled_from([0.0, 0.15])),
        slow=draw(st.sampled_from([0.0, 0.2, 0.8])),
        serving_lag_s=draw(st.sampled_from([0.0, 0.5, 5.0])),
        digest_lag_s=draw(st.sampled_from([None, 0.0, 0.5, 20.0])),
        ahead=draw(st.sampled_from([0, 1, 2])),
    )


@QUIET
@given(
    worlds(),
    st.integers(1, 5),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([1, 2, -1]),
    st.sampled_from(["deadline", "recency"]),
    st.sampled_from([None, 0, 1]),
)
def test_every_update_is_formed_and_nothing_is_trained_late(sim, world, b, s, filtering, samples, maker, tolerance):
    config = ReplayBufferConfig(
        groups_per_batch=b,
        staleness_budget=s,
        batch_maker=BatchMakerConfig(name=maker, filter_zero_variance=filtering),
        max_samples=samples,
        tolerances={} if tolerance is None else {"hard": {"max_rollout_step_delay": tolerance}},
        max_failed_groups_per_batch=10_000,
        straggler_timeout_s=1e6,
    )
    simulation = sim.Simulation(config, sim.World(**world))
    trained = simulation.run(8)
    assert [update.step for update in trained] == list(range(8))
    counts = simulation.ledger.snapshot()
    assert counts["stale_step"] == counts["stale_time"] == counts["evicted"] == counts["aborted"] == 0
    assert counts["started"] == sum(counts.values()) - counts["started"]


@QUIET
@given(worlds(), st.integers(1, 4), st.integers(0, 3), st.sampled_from([1, 2]), st.booleans())
def test_makers_that_pick_single_rollouts_keep_the_run_going(sim, world, b, s, samples, grpo):
    """They give the deadlines up: what they leave too long is stale, and counted."""
    maker = BatchMakerConfig(name="grpo") if grpo else BatchMakerConfig(name="recency", unit="rollout")
    config = ReplayBufferConfig(
        groups_per_batch=b,
        staleness_budget=s,
        batch_maker=maker,
        max_samples=samples,
        max_failed_groups_per_batch=10_000,
        max_filtered_groups_per_batch=10_000,
        straggler_timeout_s=1e6,
    )
    simulation = sim.Simulation(config, sim.World(**world))
    assert [update.step for update in simulation.run(6)] == list(range(6))
    counts = simulation.ledger.snapshot()
    assert counts["started"] == sum(counts.values()) - counts["started"]
    assert counts["stale_time"] == counts["evicted"] == counts["aborted"] == 0


@QUIET
@given(worlds(), st.integers(1, 4), st.integers(0, 3))
def test_generators_that_hang_cost_a_timeout_and_not_the_run(sim, world, b, s):
    config = ReplayBufferConfig(
        groups_per_batch=b, staleness_budget=s, straggler_timeout_s=50, max_failed_groups_per_batch=10_000
    )
    simulation = sim.Simulation(config, sim.World(**world | {"hanging": 0.3}))
    assert len(simulation.run(6)) == 6
    counts = simulation.ledger.snapshot()
    assert counts["stale_step"] == 0


@QUIET
@given(worlds(), worlds(), st.integers(1, 5), st.booleans())
def test_at_staleness_zero_only_tickets_matter(sim, world, other, b, filtering):
    """Two schedules that agree in nothing but outcomes train the same groups in the same order."""
    config = ReplayBufferConfig(
        groups_per_batch=b,
        staleness_budget=0,
        batch_maker=BatchMakerConfig(filter_zero_variance=filtering),
        max_failed_groups_per_batch=10_000,
        straggler_timeout_s=1e6,
    )
    same = {key: world[key] for key in ("outcome_seed", "failing", "flat", "malformed")}
    first = sim.Simulation(config, sim.World(**world))
    second = sim.Simulation(config, sim.World(**other | same))
    runs = [simulation.run(6) for simulation in (first, second)]
    assert [update.keys for update in runs[0]] == [update.keys for update in runs[1]]
    assert [update.rewards for update in runs[0]] == [update.rewards for update in runs[1]]
    assert first.curriculum.groups == second.curriculum.groups
    assert all(update.batch.metrics["replay/staleness_max"] == 0 for update in runs[0])


def test_a_fast_group_may_not_overtake_when_a_slow_one_would_then_be_late(sim):
    """B = 1, S = 2: two groups due at update 2 are slow; update 1 must take one of them, not the fast third."""
    config = ReplayBufferConfig(groups_per_batch=1, staleness_budget=2, store=StoreConfig(buffer_size=1))
    run = sim.Simulation(config, sim.World(slots=0))
    first, slow, slower = run.issuer.acquire(3, 0)
    assert {t.deadline_step for t in (first, slow, slower)} == {2}
    sim.deliver(run.buffer, sim.make_group(first, [0, 1, 1], timestamp=run.now))
    assert run.buffer.try_next_batch(0).group_ids == (first.ticket_id,)
    run.buffer.finish_update(0)
    run.buffer.set_current_step(1)
    run.issuer.set_serving_step(1)
    [fast] = run.issuer.acquire(9, 0)
    assert fast.deadline_step == 3
    sim.deliver(run.buffer, sim.make_group(fast, [0, 1, 1], timestamp=run.now))
    assert run.buffer.try_next_batch(1) is None  # the naive rule would take `fast` here
    sim.deliver(run.buffer, sim.make_group(slower, [0, 1, 1], timestamp=run.now))
    batch = run.buffer.try_next_batch(1)
    assert batch.group_ids == (slower.ticket_id,) and batch.metrics["replay/overtakes"] == 1
    run.buffer.finish_update(1)
    run.buffer.set_current_step(2)
    assert run.buffer.try_next_batch(2) is None  # now `slow` is due
    sim.deliver(run.buffer, sim.make_group(slow, [0, 1, 1], timestamp=run.now))
    assert run.buffer.try_next_batch(2).group_ids == (slow.ticket_id,)


def test_a_pressing_group_is_taken_before_one_that_finished_earlier(sim):
    """The batch maker orders by arrival; what presses because of a later deadline comes first all the same."""
    config = ReplayBufferConfig(groups_per_batch=1, staleness_budget=2, store=StoreConfig(buffer_size=1))
    run = sim.Simulation(config, sim.World(slots=0))
    first, slow, slower = run.issuer.acquire(3, 0)
    sim.deliver(run.buffer, sim.make_group(first, [0, 1, 1], timestamp=run.now))
    run.buffer.try_next_batch(0)
    run.buffer.finish_update(0)
    run.buffer.set_current_step(1)
    run.issuer.set_serving_step(1)
    [fast] = run.issuer.acquire(9, 0)
    for ticket in (fast, slow):  # the fast one is in the maker first
        sim.deliver(run.buffer, sim.make_group(ticket, [0, 1, 1], timestamp=run.now))
    assert run.buffer.try_next_batch(1).group_ids == (slow.ticket_id,)


def test_without_pressure_the_oldest_finished_group_goes_first(sim):
    config = ReplayBufferConfig(groups_per_batch=1, staleness_budget=1, store=StoreConfig(buffer_size=1))
    run = sim.Simulation(config, sim.World(slots=0))
    first, second = run.issuer.acquire(9, 0)
    for ticket in (second, first):
        sim.deliver(run.buffer, sim.make_group(ticket, [0, 1, 1], timestamp=run.now))
    assert run.buffer.try_next_batch(0).group_ids == (second.ticket_id,)


def test_when_the_filter_leaves_nothing_the_run_ends_with_the_lessons_and_the_remedy(sim):
    config = ReplayBufferConfig(groups_per_batch=2, batch_maker=BatchMakerConfig(filter_zero_variance=True))
    simulation = sim.Simulation(config, sim.World(flat=1.0))
    with pytest.raises(
        RunFailed, match=r"64 groups were filtered.*easy \(\d+ groups, mean reward 0.5\).*hard"
    ) as error:
        simulation.run(1)
    assert "filter_zero_variance: false" in str(error.value) and "n_generations_per_prompt" in str(error.value)


def test_when_every_group_fails_the_run_ends_with_the_last_reason(sim):
    simulation = sim.Simulation(ReplayBufferConfig(groups_per_batch=2), sim.World(failing=1.0))
    with pytest.raises(RunFailed, match="64 groups failed.*lesson .*: the environment raised"):
        simulation.run(1)

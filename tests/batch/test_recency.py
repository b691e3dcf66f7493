from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare
from tests.batch.conftest import advantages_of, groups_of, ids_of

from penstock.batch import RecencyBatchMaker
from penstock.types import ConfigError, InvalidRolloutError


def drawn(maker: RecencyBatchMaker, batches: int, size: int = 1) -> Counter[str]:
    return Counter(group_id for _ in range(batches) for group_id in groups_of(maker.create_batch(size)))


def agrees(counts: Counter[str], ids: list[str], weights: np.ndarray) -> bool:
    expected = weights / weights.sum() * sum(counts.values())
    assert set(counts) <= set(ids)
    return chisquare([counts[name] for name in ids], expected).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=pytest.mark.slow), 1.0, 3.0])
@pytest.mark.parametrize("unit", ["group", pytest.param("rollout", marks=pytest.mark.slow)])
def test_newer_ones_are_drawn_more_often_by_the_exact_probabilities(add, alpha, unit):
    maker = RecencyBatchMaker(alpha=alpha, unit=unit, max_samples=-1, seed=3)
    ids = [f"a-0-{index}" for index in range(5)]
    for group_id in ids:
        add(maker, group_id)
    weights = np.arange(1, 6 if unit == "group" else 11) ** alpha
    assert agrees(drawn(maker, 2000), ids, weights if unit == "group" else weights.reshape(5, 2).sum(axis=1))


def test_ranks_are_those_of_what_is_still_here(add):
    maker = RecencyBatchMaker(alpha=2.0, max_samples=-1, seed=4)
    for index in range(6):
        add(maker, f"a-0-{index}")
    maker.create_batch(1)
    maker.discard([f"a-0-{index}/{member}" for index in (0, 3) for member in (0, 1)])
    assert agrees(drawn(maker, 2000), ["a-0-1", "a-0-2", "a-0-4", "a-0-5"], np.arange(1, 5) ** 2.0)


@pytest.mark.parametrize(
    ("balance", "expected"), [("even", {"cats": 250, "dogs": 250}), ("size", {"cats": 450, "dogs": 50})]
)
def test_environments_share_batches_by_balance(add, balance, expected):
    maker = RecencyBatchMaker(balance=balance, max_samples=-1, seed=5)
    for index in range(18):
        add(maker, f"cats-0-{index}", env="cats")
    add(maker, "dogs-0-0", env="dogs")
    add(maker, "dogs-0-1", env="dogs")
    counts = Counter(name.partition("-")[0] for name in drawn(maker, 250, size=2).elements())
    assert counts == expected


def test_an_environment_with_too_few_gives_its_places_away(add):
    maker = RecencyBatchMaker(balance="even")
    for index in range(9):
        add(maker, f"cats-0-{index}", env="cats")
    add(maker, "dogs-0-0", env="dogs")
    assert Counter(name.partition("-")[0] for name in groups_of(maker.create_batch(6))) == {"cats": 5, "dogs": 1}


def test_equal_seeds_make_equal_batches_and_others_do_not(add):
    def batches(seed):
        maker = RecencyBatchMaker(alpha=1.0, max_samples=2, seed=seed, unit="rollout")
        for index in range(20):
            add(maker, f"a-0-{index}")
        return [ids_of(maker.create_batch(5)) for _ in range(6)]

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)
    assert batches(None) != batches(None)


def test_a_batch_depends_on_its_step_and_on_no_batch_before(add):
    """So that a resumed run draws what the run without interruption would have drawn."""

    def batch(steps):
        maker = RecencyBatchMaker(alpha=0.0, max_samples=-1, seed=1)
        for index in range(50):
            add(maker, f"a-0-{index}")
        for step in steps:
            maker.set_step(step)
            made = ids_of(maker.create_batch(5))
        return made

    assert batch([1, 2, 3]) == batch([3])
    assert batch([3, 3]) != batch([3])


def test_a_unit_is_retired_after_max_samples_uses(add):
    maker = RecencyBatchMaker(max_samples=2, unit="rollout", seed=6)
    add(maker, "a-0-0")
    add(maker, "a-0-1")
    uses = Counter(name for _ in range(8) for name in ids_of(maker.create_batch(1)))
    assert set(uses.values()) == {2} and len(uses) == 4
    assert maker.create_batch(1) is None and len(maker) == 0


def test_nothing_is_twice_in_a_batch_and_too_few_make_none(add):
    maker = RecencyBatchMaker(alpha=50.0, max_samples=-1)
    for index in range(30):
        add(maker, f"a-0-{index}")
    assert len(maker) == 30
    assert maker.create_batch(31) is None
    for size in (3, 30):
        assert len(groups_of(maker.create_batch(size))) == size


def test_groups_with_a_deadline_come_first_and_whole(add):
    maker = RecencyBatchMaker(max_samples=-1, unit="rollout", seed=7)
    for index, deadline in enumerate([9, 8, 3, 9]):
        add(maker, f"a-0-{index}", deadline, rewards=(0.0, 1.0, 1.0))
    add(maker, "b-0-0", rewards=(0.0, 1.0, 1.0))
    maker.set_step(3)
    assert groups_of(maker.create_batch(1)) == ["a-0-2"]
    assert ids_of(maker.create_batch(4)) == [f"a-0-{index}/{member}" for index in (0, 1) for member in range(3)]
    third = ids_of(maker.create_batch(8))
    assert third[:3] == ["a-0-3/0", "a-0-3/1", "a-0-3/2"] and len(set(third)) == 8


def test_with_deadlines_only_what_had_its_first_use_is_drawn(add):
    maker = RecencyBatchMaker(alpha=3.0, max_samples=3, seed=8)
    for index in range(8):
        add(maker, f"a-0-{index}", deadline_step=50)
    first = [groups_of(maker.create_batch(4)) for _ in range(2)]
    assert first == [[f"a-0-{index}" for index in range(4)], [f"a-0-{index}" for index in range(4, 8)]]
    assert len(groups_of(maker.create_batch(8))) == 8


@pytest.mark.parametrize("seed", range(5))
def test_a_deadline_may_follow_a_batch_and_then_the_group_is_not_drawn_as_well(add, seed):
    maker = RecencyBatchMaker(seed=seed)
    for index in range(5):
        add(maker, f"a-0-{index}")
    left = {f"a-0-{index}" for index in range(5)} - set(groups_of(maker.create_batch(1)))
    due = max(left)
    maker.set_deadline(due, 0)
    batch = groups_of(maker.create_batch(3))
    assert batch[0] == due and len(batch) == 3
    assert groups_of(maker.create_batch(1)) == list(left - set(batch))


def test_advantages_of_single_rollouts_are_those_of_the_whole_group(add):
    """A baseline does not shrink because a member was used or discarded."""
    maker = RecencyBatchMaker(unit="rollout", max_samples=1)
    add(maker, "a-0-0", rewards=(0.0, 1.0, 0.0))
    maker.create_batch(4)
    maker.discard(["a-0-0/0", "a-0-0/0"])
    found = advantages_of(maker.create_batch(1)) | advantages_of(maker.create_batch(1))
    assert found == {"a-0-0/1": 1.0, "a-0-0/2": -0.5}


def test_reinforce_pp_is_of_the_batch_with_either_unit(add):
    for unit, size in (("group", 2), ("rollout", 4)):
        maker = RecencyBatchMaker("reinforce_pp", unit=unit)
        add(maker, "a-0-0", rewards=(0.0, 0.0))
        add(maker, "a-0-1", rewards=(1.0, 1.0))
        found = advantages_of(maker.create_batch(size))
        assert found["a-0-1/0"] == pytest.approx(0.5 / np.std([0, 0, 1, 1], ddof=1), rel=1e-5)


def test_a_rollout_that_comes_after_its_group_has_places_is_refused(add):
    maker = RecencyBatchMaker(unit="rollout")
    add(maker, "a-0-0")
    maker.create_batch(1)
    with pytest.raises(InvalidRolloutError, match="add all rollouts of a group before the next create_batch"):
        add(maker, "a-0-0")


@pytest.mark.parametrize(("unit", "size"), [("rollout", 8), ("group", 3)])
def test_metadata_names_groups_once_and_counts_flat_ones(add, unit, size):
    maker = RecencyBatchMaker(unit=unit)
    add(maker, "a-0-0", rewards=(0.0, 1.0))
    add(maker, "a-0-1", rewards=(1.0, 1.0))
    add(maker, "a-0-2", rewards=(0.0, 1.0, 1.0, 1.0))
    batch = maker.create_batch(size)
    facts = maker.get_batch_metadata(batch)
    assert sorted(facts["group_ids"]) == ["a-0-0", "a-0-1", "a-0-2"]
    assert facts["rollout_ids"] == tuple(ids_of(batch))
    assert facts["metrics"]["train/zero_variance_groups"] == pytest.approx(1 / 3)
    assert facts["metrics"]["train/reward_mean"] == 0.75
    assert (maker.unit, maker.environment_name, maker.dropped()) == (unit, None, [])


def test_whether_a_group_is_flat_is_asked_of_all_of_it(add):
    maker = RecencyBatchMaker(unit="rollout")
    add(maker, "a-0-0", rewards=(0.0, 1.0))
    assert maker.get_batch_metadata(maker.create_batch(1))["metrics"]["train/zero_variance_groups"] == 0.0


def test_no_more_groups_with_a_deadline_are_taken_than_fill_the_batch(add):
    maker = RecencyBatchMaker(unit="rollout")
    for index, rewards in enumerate([(0.0,), (0.0, 1.0, 0.0), (1.0,)]):
        add(maker, f"a-0-{index}", 9, rewards=rewards)
    assert groups_of(maker.create_batch(3)) == ["a-0-0", "a-0-1"]


def test_a_deadline_is_for_the_first_use_of_what_is_here(add):
    maker = RecencyBatchMaker(alpha=40.0, max_samples=-1)  # the newest, all but surely
    for index, deadline in enumerate([9, 9, None, None]):
        add(maker, f"a-0-{index}", deadline)
    assert groups_of(maker.create_batch(1)) == ["a-0-0"]
    maker.discard(["a-0-1/0", "a-0-1/1"])
    for group_id in ("a-0-0", "a-0-1", "never-seen"):
        maker.set_deadline(group_id, 0)
    maker.set_step(9)
    assert groups_of(maker.create_batch(1)) == ["a-0-3"]


def test_a_baseline_of_the_group_needs_whole_groups():
    with pytest.raises(ConfigError, match="draw whole groups"):
        RecencyBatchMaker("reinforce_pp_baseline", unit="rollout")
    assert RecencyBatchMaker("reinforce_pp_baseline").create_batch(1) is None


@pytest.mark.parametrize("alpha", [-1.0, float("inf"), float("nan")])
def test_alpha_is_checked(alpha):
    with pytest.raises(ConfigError, match="alpha is .*: it must be a finite number"):
        RecencyBatchMaker(alpha=alpha)

from collections import Counter

import pytest
from scipy.stats import chisquare
from tests.batch.conftest import advantages_of, ids_of, small_group

from penstock.batch import GrpoBatchMaker, reservoir
from penstock.types import InvalidRolloutError, RolloutRecord


def fates(maker: GrpoBatchMaker) -> dict[str, str]:
    return {rollout_id: fate for rollout_id, fate, _ in maker.dropped()}


def test_advantages_are_rloo_and_zero_ones_are_filtered(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", rewards=(0.0, 0.5, 1.0), example="x")
    add(maker, "a-0-1", rewards=(1.0, 1.0), example="y")
    assert len(maker) == 5
    assert advantages_of(maker.create_batch(2)) == {"a-0-0/0": -0.75, "a-0-0/2": 0.75}
    (first, *_) = dropped = maker.dropped()
    assert {d.rollout_id: d.fate for d in dropped} == dict.fromkeys(["a-0-0/1", "a-0-1/0", "a-0-1/1"], "filtered")
    assert first.reason == "its advantage is zero among 3 rollouts of problem env:x"
    assert maker.dropped() == []


def test_what_is_too_few_is_still_reported(add):
    """A buffer that waits for a batch must learn which places are free again."""
    maker = GrpoBatchMaker()
    add(maker, "a-0-0", rewards=(1.0, 1.0))
    assert maker.create_batch(1) is None
    assert fates(maker) == {"a-0-0/0": "filtered", "a-0-0/1": "filtered"}


def test_groups_of_one_problem_and_version_share_a_baseline(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", rewards=(1.0, 1.0), step=4)
    add(maker, "a-0-1", rewards=(0.0, 0.0), step=4)
    found = advantages_of(maker.create_batch(4))
    assert found == pytest.approx({"a-0-0/0": 2 / 3, "a-0-0/1": 2 / 3, "a-0-1/0": -2 / 3, "a-0-1/1": -2 / 3})
    assert maker.dropped() == []


def test_other_problems_environments_and_versions_do_not(add):
    maker = GrpoBatchMaker(retention="all", seed=0)
    add(maker, "a-0-0", rewards=(0.0, 1.0), step=4)
    for index, fields in enumerate([{"step": 5}, {"example": "y", "step": 4}, {"env": "other", "step": 4}]):
        add(maker, f"b-0-{index}", rewards=(5.0, 5.0), **fields)
    assert advantages_of(maker.create_batch(2)) == {"a-0-0/0": -1.0, "a-0-0/1": 1.0}
    assert len(fates(maker)) == 6


def test_what_was_filtered_stays_so_but_counts_for_later_members(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", rewards=(1.0, 1.0))
    assert maker.create_batch(1) is None
    add(maker, "a-0-1", rewards=(1.0, 0.0))
    assert advantages_of(maker.create_batch(2)) == pytest.approx({"a-0-1/0": 1 / 3, "a-0-1/1": -1.0})
    assert fates(maker) == {"a-0-0/0": "filtered", "a-0-0/1": "filtered"}


def test_what_becomes_zero_by_later_members_is_filtered(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", rewards=(0.5, 1.0))
    assert maker.create_batch(3) is None and maker.dropped() == []
    add(maker, "a-0-1", rewards=(0.0,))
    assert advantages_of(maker.create_batch(2)) == {"a-0-0/1": 0.75, "a-0-1/0": -0.75}
    assert fates(maker) == {"a-0-0/0": "filtered"}


def test_baselines_keep_counting_what_was_used_or_discarded(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", rewards=(0.0, 1.0, 1.0))
    assert maker.create_batch(4) is None
    maker.discard(["a-0-0/0"])
    assert advantages_of(maker.create_batch(1)).popitem()[1] == 0.5
    assert advantages_of(maker.create_batch(1)).popitem()[1] == 0.5
    add(maker, "a-0-1", rewards=(1.0,))
    assert advantages_of(maker.create_batch(1)) == pytest.approx({"a-0-1/0": 1 / 3})


def test_a_newer_version_of_a_problem_evicts_the_older_one(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", step=4)
    add(maker, "a-0-9", step=4, example="other")
    assert maker.create_batch(5) is None
    add(maker, "a-0-1", step=6)
    assert maker.create_batch(5) is None
    first, second = maker.dropped()
    assert (first.rollout_id, second.rollout_id, first.fate) == ("a-0-0/0", "a-0-0/1", "evicted")
    assert first.reason == (
        "weight step 6 of problem env:example came; this is weight step 4"
    )  # fmt: skip
    assert set(ids_of(maker.create_batch(4))) == {"a-0-1/0", "a-0-1/1", "a-0-9/0", "a-0-9/1"}


def test_every_group_of_a_problem_is_evicted_or_filtered_and_not_every_other(add):
    maker = GrpoBatchMaker(seed=0)
    for index in range(3):
        add(maker, f"a-0-{index}", step=4)
        add(maker, f"b-0-{index}", rewards=(1.0, 1.0), example="flat", step=4)
    assert maker.create_batch(7) is None
    assert fates(maker) == {f"b-0-{index}/{member}": "filtered" for index in range(3) for member in (0, 1)}
    add(maker, "a-0-3", step=6)
    assert maker.create_batch(7) is None
    assert fates(maker) == {f"a-0-{index}/{member}": "evicted" for index in range(3) for member in (0, 1)}


def test_an_older_version_that_comes_late_is_evicted_too(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-1", step=6)
    assert len(maker.create_batch(2)) == 2
    add(maker, "a-0-0", step=4)
    assert maker.create_batch(1) is None
    dropped = maker.dropped()
    assert [d.fate for d in dropped] == ["evicted", "evicted"]
    assert dropped[0].reason == ("problem env:example has weight step 6 already; this is weight step 4")


def test_versions_stay_side_by_side_when_all_are_kept(add):
    maker = GrpoBatchMaker(retention="all", seed=0)
    add(maker, "a-0-1", step=6)
    add(maker, "a-0-0", step=4)
    assert len(maker.create_batch(4)) == 4 and maker.dropped() == []


def test_a_group_that_straddles_a_swap_stays_one_and_is_as_old_as_its_oldest(add):
    maker = GrpoBatchMaker(seed=0)
    maker.add_rollout(small_group("a-0-0", [0.0], step=4)[0])
    maker.add_rollout(small_group("a-0-0", [0.0, 1.0], step=5)[1])
    assert advantages_of(maker.create_batch(2)) == {"a-0-0/0": -1.0, "a-0-0/1": 1.0}
    add(maker, "a-0-1", step=4)  # the same version, and not an older one
    assert maker.create_batch(1) is not None and maker.dropped() == []


def test_draws_are_uniform_without_replacement_and_seeded(add):
    def batches(seed, count=600):
        maker = GrpoBatchMaker(seed=seed, max_samples=-1)
        for index in range(5):
            add(maker, f"a-0-{index}", example=str(index))
        return [ids_of(maker.create_batch(3)) for _ in range(count)]

    made = batches(1)
    assert all(len(set(batch)) == 3 for batch in made)
    assert chisquare(list(Counter(name for batch in made for name in batch).values())).pvalue > 1e-3
    assert chisquare(list(Counter(batch[0] for batch in made).values())).pvalue > 1e-3
    assert batches(1, 5) == made[:5] != batches(2, 5)
    assert batches(None, 5) != batches(None, 5)


def test_rollouts_are_used_max_samples_times(add):
    maker = GrpoBatchMaker(seed=0, max_samples=2)
    add(maker, "a-0-0", rewards=(0.0, 1.0, 0.0, 1.0))
    uses = Counter(name for _ in range(8) for name in ids_of(maker.create_batch(1)))
    assert uses == Counter(dict.fromkeys(uses, 2)) and len(uses) == 4
    assert maker.create_batch(1) is None


def test_due_groups_come_first_and_all_of_them(add):
    maker = GrpoBatchMaker(seed=0)
    for index, deadline in enumerate([9, 2, None, 2]):
        add(maker, f"a-0-{index}", deadline, example=str(index))
    maker.set_step(2)
    assert ids_of(maker.create_batch(1)) == ["a-0-1/0", "a-0-1/1", "a-0-3/0", "a-0-3/1"]
    maker.set_step(9)
    batch = ids_of(maker.create_batch(3))
    assert batch[:2] == ["a-0-0/0", "a-0-0/1"] and batch[2].startswith("a-0-2/")


def test_a_due_group_of_which_some_were_used_gives_the_others(add):
    maker = GrpoBatchMaker(seed=0, max_samples=2)
    add(maker, "a-0-0", 5, rewards=(0.0, 1.0, 1.0))
    used = ids_of(maker.create_batch(1))
    maker.set_step(5)
    assert set(ids_of(maker.create_batch(1))) == {"a-0-0/0", "a-0-0/1", "a-0-0/2"} - set(used)


def test_what_was_due_may_be_drawn_again(add):
    maker = GrpoBatchMaker(seed=0, max_samples=2)
    add(maker, "a-0-0", 0)
    maker.set_deadline("never-seen", 0)
    assert ids_of(maker.create_batch(1)) == ["a-0-0/0", "a-0-0/1"]
    assert sorted(ids_of(maker.create_batch(2))) == ["a-0-0/0", "a-0-0/1"]
    assert maker.create_batch(1) is None


def test_what_leaves_before_its_deadline_leaves_nothing_behind(add):
    maker = GrpoBatchMaker(seed=0)
    for index, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 1.0)]):
        add(maker, f"a-0-{index}", 5, rewards=rewards, example=str(index))
    maker.discard(["a-0-0/0", "a-0-0/1"])
    assert len(maker.create_batch(2)) == 2
    assert (maker._deadlines.pop_due(5), len(maker._held), len(maker)) == ([], 0, 0)


def test_it_is_bound_to_one_environment(add):
    maker = GrpoBatchMaker(environment_name="cats")
    add(maker, "a-0-0", env="cats")
    assert (maker.unit, maker.environment_name) == ("rollout", "cats")
    with pytest.raises(InvalidRolloutError, match="'env', but this batch maker takes 'cats' only"):
        add(maker, "a-0-1")


def test_problems_without_rollouts_are_forgotten_after_many_others(add, monkeypatch):
    monkeypatch.setattr(reservoir, "REMEMBERED", 3)
    maker = GrpoBatchMaker(seed=0)
    for index in range(10):
        add(maker, f"a-0-{index}", example=str(index), step=6)
        assert len(maker.create_batch(2)) == 2
    assert len(maker._baselines) == 3
    add(maker, "b-0-0", example="0", step=4)  # forgotten: taken as if new
    add(maker, "b-0-1", example="9", step=4)  # remembered: too old
    assert set(ids_of(maker.create_batch(2))) == {"b-0-0/0", "b-0-0/1"}
    assert fates(maker) == {"b-0-1/0": "evicted", "b-0-1/1": "evicted"}


def test_metadata_of_a_batch(add):
    maker = GrpoBatchMaker(seed=0)
    add(maker, "a-0-0", rewards=(0.0, 1.0, 0.0, 1.0))
    batch = maker.create_batch(4)
    facts = maker.get_batch_metadata(batch)
    assert facts["group_ids"] == ("a-0-0",) and facts["rollout_ids"] == tuple(ids_of(batch))
    assert facts["metrics"]["train/reward_mean"] == 0.5 and facts["metrics"]["train/reward_std"] == 0.5
    assert facts["metrics"]["train/zero_variance_groups"] == 0.0


def test_stored_records_are_taken_for_their_rollouts():
    maker = GrpoBatchMaker(seed=0)
    for rollout in small_group("a-0-0", (0.0, 1.0)):
        maker.add_rollout(RolloutRecord(rollout, "a-0-0"))
    assert advantages_of(maker.create_batch(2)) == {"a-0-0/0": -1.0, "a-0-0/1": 1.0}

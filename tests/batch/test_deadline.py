import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batch.conftest import advantages_of, groups_of, small_group

from penstock.batch import DeadlineBatchMaker
from penstock.types import InvalidRolloutError


def test_groups_due_now_come_first_then_the_oldest_finished(add):
    maker = DeadlineBatchMaker()
    for group_id, deadline in [("a-0-0", 9), ("a-0-1", 8), ("a-0-2", 7), ("a-0-3", 7)]:
        add(maker, group_id, deadline)
    maker.set_step(7)
    assert groups_of(maker.create_batch(3)) == ["a-0-2", "a-0-3", "a-0-0"]
    maker.set_step(8)
    assert groups_of(maker.create_batch(1)) == ["a-0-1"]
    assert len(maker) == 0


def test_all_groups_due_go_even_if_more_than_asked(add):
    maker = DeadlineBatchMaker()
    for index in range(3):
        add(maker, f"a-0-{index}", deadline_step=2)
    add(maker, "a-0-9", deadline_step=5)
    maker.set_step(2)
    assert groups_of(maker.create_batch(2)) == ["a-0-0", "a-0-1", "a-0-2"]


def test_what_was_taken_before_its_deadline_is_not_due_again(add):
    maker = DeadlineBatchMaker(max_samples=2)
    for index in range(3):
        add(maker, f"a-0-{index}", deadline_step=5)
    assert groups_of(maker.create_batch(1)) == ["a-0-0"]
    maker.set_step(5)
    assert groups_of(maker.create_batch(1)) == ["a-0-1", "a-0-2"]


def test_the_oldest_is_who_came_first_whatever_its_ticket(add):
    maker = DeadlineBatchMaker()
    for group_id in ("b-0-9", "a-0-0"):
        add(maker, group_id)
    assert groups_of(maker.create_batch(1)) == ["b-0-9"]


def test_an_overdue_group_and_one_without_a_deadline(add):
    maker = DeadlineBatchMaker()
    add(maker, "a-0-0", None)
    add(maker, "a-0-1", 1)
    maker.set_step(4)
    assert groups_of(maker.create_batch(1)) == ["a-0-1"]
    assert groups_of(maker.create_batch(1)) == ["a-0-0"]


def test_too_few_groups_make_no_batch_and_lose_nothing(add):
    maker = DeadlineBatchMaker()
    assert maker.create_batch(0) is None
    add(maker, "a-0-0")
    assert maker.create_batch(2) is None
    assert len(maker.create_batch(1)) == 2


def test_ordered_batches_do_not_depend_on_arrival(add):
    ids = ["b-0-1", "a-0-10", "a-0-2", "b-0-0"]
    batches = []
    for order in (ids, ids[::-1]):
        maker = DeadlineBatchMaker(ordered=True)
        for group_id in order:
            add(maker, group_id, 0)
        batches.append([e.rollout_ids for e in maker.create_batch(4)])
    assert batches[0] == batches[1]
    assert [ids[0] for ids in batches[0]][::2] == ["a-0-2/0", "a-0-10/0", "b-0-0/0", "b-0-1/0"]


def test_advantages_are_of_the_group_and_reach_the_sampled_tokens(add):
    maker = DeadlineBatchMaker("rloo")
    add(maker, "a-0-0", rewards=(0.0, 1.0, 0.0))
    values = [example.advantage.tolist() for example in maker.create_batch(1)]
    assert values == [[0, -0.5], [0, 1], [0, -0.5]]


def test_reinforce_pp_uses_the_whole_batch(add):
    maker = DeadlineBatchMaker("reinforce_pp")
    add(maker, "a-0-0", rewards=(0.0, 0.0))
    add(maker, "a-0-1", rewards=(1.0, 1.0))
    values = [float(example.advantage[-1]) for example in maker.create_batch(2)]
    np.testing.assert_allclose(values, np.array([-0.5, -0.5, 0.5, 0.5]) / np.std([0, 0, 1, 1], ddof=1), rtol=1e-5)


def test_duplicate_prompts_stay_two_groups(add):
    maker = DeadlineBatchMaker("rloo")
    add(maker, "a-0-0", rewards=(0.0, 1.0))
    add(maker, "a-0-1", rewards=(1.0, 1.0))
    assert [float(e.advantage[-1]) for e in maker.create_batch(2)] == [-1.0, 1.0, 0.0, 0.0]


def test_discarded_groups_are_gone_and_unknown_ids_do_no_harm(add):
    maker = DeadlineBatchMaker()
    add(maker, "a-0-0")
    add(maker, "a-0-1")
    maker.discard(["a-0-0/0", "a-0-0/1", "never-seen/0", "a-0-1/7", "odd"])
    assert groups_of(maker.create_batch(1)) == ["a-0-1"]


def test_a_rollout_that_cannot_be_trained_on_is_refused_and_not_kept(make_rollout):
    maker = DeadlineBatchMaker(max_tokens=4)
    with pytest.raises(InvalidRolloutError, match="has 5 tokens, a training row 4"):
        maker.add_rollout(make_rollout())
    assert len(maker) == 0 and maker.create_batch(1) is None


def test_metadata_names_groups_rollouts_and_rewards(add):
    maker = DeadlineBatchMaker()
    add(maker, "a-0-0", rewards=(0.0, 1.0))
    add(maker, "a-0-1", rewards=(1.0, 1.0))
    add(maker, "a-0-2", rewards=(0.0, 1.0, 1.0, 1.0))
    metadata = maker.get_batch_metadata(maker.create_batch(3))
    assert metadata["group_ids"] == ("a-0-0", "a-0-1", "a-0-2")
    assert metadata["rollout_ids"][:5] == ("a-0-0/0", "a-0-0/1", "a-0-1/0", "a-0-1/1", "a-0-2/0")
    assert metadata["metrics"]["train/reward_mean"] == 0.75
    assert metadata["metrics"]["train/zero_variance_groups"] == pytest.approx(1 / 3)
    assert metadata["metrics"]["train/response_tokens"] == 1.0


def test_a_group_is_used_max_samples_times_and_fresh_ones_come_first(add):
    maker = DeadlineBatchMaker(max_samples=2)
    for index in range(3):
        add(maker, f"a-0-{index}", deadline_step=9)
    assert groups_of(maker.create_batch(2)) == ["a-0-0", "a-0-1"]
    add(maker, "a-0-3")
    assert groups_of(maker.create_batch(3)) == ["a-0-2", "a-0-3", "a-0-0"]
    assert len(maker) == 3
    assert groups_of(maker.create_batch(3)) == ["a-0-1", "a-0-2", "a-0-3"]
    assert maker.create_batch(1) is None and len(maker) == 0


def test_without_a_limit_groups_are_used_in_turn(add):
    maker = DeadlineBatchMaker(max_samples=-1)
    for index in range(3):
        add(maker, f"a-0-{index}")
    batches = [groups_of(maker.create_batch(2)) for _ in range(3)]
    assert batches == [["a-0-0", "a-0-1"], ["a-0-2", "a-0-0"], ["a-0-1", "a-0-2"]]


def test_a_deadline_is_for_the_first_use_only_and_may_come_nearer(add):
    maker = DeadlineBatchMaker(max_samples=2)
    for index in range(3):
        add(maker, f"a-0-{index}", deadline_step=5)
    maker.set_deadline("a-0-2", 1)
    maker.set_deadline("never-seen", 1)
    maker.set_step(1)
    assert groups_of(maker.create_batch(1)) == ["a-0-2"]
    maker.set_deadline("a-0-2", 1)
    assert groups_of(maker.create_batch(2)) == ["a-0-0", "a-0-1"]


def test_a_deadline_may_follow_a_batch(add):
    """A group that had none so far is not taken twice."""
    maker = DeadlineBatchMaker()
    for index in range(3):
        add(maker, f"a-0-{index}")
    assert groups_of(maker.create_batch(1)) == ["a-0-0"]
    maker.set_deadline("a-0-2", 0)
    assert groups_of(maker.create_batch(1)) == ["a-0-2"]
    assert groups_of(maker.create_batch(1)) == ["a-0-1"]
    assert maker.create_batch(1) is None


def test_a_deadline_that_follows_a_use_changes_the_order_and_no_count(add):
    maker = DeadlineBatchMaker(max_samples=-1)
    for index in range(2):
        add(maker, f"a-0-{index}")
    maker.create_batch(1)
    maker.set_deadline("a-0-1", 9)
    assert groups_of(maker.create_batch(2)) == ["a-0-1", "a-0-0"]


def test_what_was_discarded_is_neither_due_nor_next(add):
    maker = DeadlineBatchMaker()
    for index, deadline in enumerate([None, None, 1, None]):
        add(maker, f"a-0-{index}", deadline)
    assert groups_of(maker.create_batch(1)) == ["a-0-2"]
    add(maker, "a-0-4", 1)
    maker.discard([f"a-0-{index}/{member}" for index in (0, 4) for member in (0, 1)])
    maker.set_step(1)
    assert groups_of(maker.create_batch(2)) == ["a-0-1", "a-0-3"]


def test_advantages_may_be_by_one_s_own_function(add):
    maker = DeadlineBatchMaker(lambda group: group.rewards * 3)
    add(maker, "a-0-0")
    assert advantages_of(maker.create_batch(1)) == {"a-0-0/0": 0.0, "a-0-0/1": 3.0}


def test_single_rollouts_are_discarded_and_the_rest_keeps_its_place(add):
    maker = DeadlineBatchMaker("rloo")
    add(maker, "a-0-0", rewards=(0.0, 1.0, 0.5))
    add(maker, "a-0-1")
    maker.discard(["a-0-0/2"])
    assert advantages_of(maker.create_batch(1)) == {"a-0-0/0": -1.0, "a-0-0/1": 1.0}


def test_what_was_discarded_may_come_again(add):
    maker = DeadlineBatchMaker()
    add(maker, "a-0-0", deadline_step=3)
    maker.discard(["a-0-0/0", "a-0-0/1"])
    add(maker, "a-0-0")
    assert len(maker.create_batch(1)) == 2


def test_it_counts_groups_of_its_environment_and_gives_nothing_up(add):
    maker = DeadlineBatchMaker(environment_name="cats")
    assert (maker.unit, maker.environment_name, maker.dropped()) == ("group", "cats", [])
    with pytest.raises(InvalidRolloutError, match="'env'"):
        add(maker, "a-0-0")


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_overtaking_is_bounded_by_the_deadline(batch_size, staleness, random):
    """With at most (S + 1)·B tickets outstanding, no group is trained after its deadline, whoever is fast."""
    maker, running, issued = DeadlineBatchMaker(), {}, 0
    deadlines = {}

    def finish(group_id):
        deadlines[group_id] = running.pop(group_id)
        maker.add_rollout(*small_group(group_id, [0.0]))
        maker.set_deadline(group_id, deadlines[group_id])

    for step in range(12):
        while len(running) + len(maker) < (staleness + 1) * batch_size:
            running[f"l-0-{issued}"] = step + staleness
            issued += 1
        for group_id in random.sample(sorted(running), k=random.randint(0, len(running))):
            finish(group_id)
        for group_id in [g for g, deadline in running.items() if deadline == step]:  # the buffer waits for these
            finish(group_id)
        while len(maker) < batch_size:  # and for a full batch
            group_id = next(iter(running))
            finish(group_id)
        maker.set_step(step)
        taken = [deadlines[group] for group in groups_of(maker.create_batch(batch_size))]
        assert len(taken) == batch_size or (len(taken) > batch_size and set(taken) == {step})
        assert min(taken) >= step

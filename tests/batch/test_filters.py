"""Filters by hand: what leaves a group, why, and what the others are trained with."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.batch import BatchMakerConfig, DeadlineBatchMaker, GroupFilters, overlong_penalty, rloo
from penstock.learner.losses import sequence_weights
from penstock.types import Decoding, PackedRollout, RolloutGroup


@pytest.fixture
def make(make_rollout):
    """A group whose members have these rewards; those of `cut` were cut, those of `lengths` have so many tokens."""

    def make(rewards, cut=(), lengths=None, limit=10):
        rollouts = [
            make_rollout(
                reward,
                response=3 if lengths is None else lengths[i],
                rollout_id=f"lesson-0-0/{i}",
                finish_reason="length" if i in cut else "stop",
                decoding=Decoding(max_output_tokens=limit),
            )
            for i, reward in enumerate(rewards)
        ]
        return RolloutGroup("env:example", tuple(rollouts), "lesson-0-0")

    return make


def judged(group, **config):
    filters = GroupFilters(BatchMakerConfig(**config))
    return filters, *filters.judge(group)


@pytest.mark.parametrize(
    ("tokens", "fraction", "most", "expected"),
    [
        (8, 0.2, 1.0, 0.0), (9, 0.2, 1.0, 0.5), (10, 0.2, 1.0, 1.0), (1, 0.2, 1.0, 0.0), (9, 0.2, 4.0, 2.0),
        (5, 1.0, 1.0, 0.5), (12, 0.2, 1.0, 1.0),
    ],
)  # fmt: skip
def test_the_penalty_grows_over_the_last_share_of_the_limit(make_rollout, tokens, fraction, most, expected):
    rollout = make_rollout(response=tokens, decoding=Decoding(max_output_tokens=10))
    assert overlong_penalty(rollout, fraction, most) == pytest.approx(expected)
    cut = make_rollout(response=3, decoding=Decoding(max_output_tokens=10), finish_reason="length")
    assert overlong_penalty(cut, fraction, most) == most  # by the room of the context


def test_masked_rollouts_leave_batch_and_baseline(make):
    group = make([0, 1, 1, 0], cut=[2])
    filters, kept, left = judged(group, filter_overlong="mask")
    assert [rollout.rollout_id for rollout in kept.rollouts] == ["lesson-0-0/0", "lesson-0-0/1", "lesson-0-0/3"]
    np.testing.assert_array_equal(rloo(kept), np.float32([-0.5, 1, -0.5]))
    assert left == {"it was cut at its longest (replay.batch_maker.filter_overlong: mask)": ["lesson-0-0/2"]}
    assert filters.take_metrics(kept.rollouts) == {"replay/filtered_overlong": 1.0}
    assert filters.take_metrics(kept.rollouts) == {"replay/filtered_overlong": 0.0}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_masked_sequence_leaves_numerator_and_denominator_alike(make, aggregation):
    """Four sequences of 2, 4, 6 and 8 tokens, of which the last was cut: the weights are those of the first three."""
    _, kept, _ = judged(make([0, 1, 0, 1], cut=[3], lengths=[2, 4, 6, 8]), filter_overlong="mask")
    maker = DeadlineBatchMaker()
    for rollout in kept.rollouts:
        maker.add_rollout(rollout)
    examples = maker.create_batch(1)
    weights = sequence_weights([int(e.loss_mask.sum()) for e in examples], aggregation, [10] * len(examples))
    expected = {"token": [1 / 12] * 3, "sequence": [1 / 6, 1 / 12, 1 / 18], "constant": [1 / 30] * 3}
    np.testing.assert_allclose(weights, expected[aggregation], rtol=1e-6)


def test_a_group_that_was_cut_altogether_or_down_to_one_sort_of_reward(make):
    _, kept, left = judged(make([0, 1], cut=[0, 1]), filter_overlong="mask")
    assert kept is None and list(left.values()) == [["lesson-0-0/0", "lesson-0-0/1"]]
    filters, kept, left = judged(make([1, 1, 0], cut=[2]), filter_overlong="mask", filter_zero_variance=True)
    assert kept is None and left["the group's valid rewards are all equal"] == ["lesson-0-0/0", "lesson-0-0/1"]
    assert filters.counts == {"overlong": 1, "zero_variance": 2}
    cause, remedy = filters.describe()
    assert cause == "all rewards of a group were equal (2 rollouts); answers were cut (1 rollouts)"
    assert remedy.startswith("make rewards differ (")
    assert remedy.endswith("set replay.batch_maker.filter_overlong: null"), "to leave it out is not enough under dapo"
    filters, _, _ = judged(make([0, 1], cut=[0, 1]), filter_overlong="mask", filter_zero_variance=True)
    assert "rewards" not in " ".join(filters.describe())
    _, kept, _ = judged(make([1, 0], cut=[1]), filter_overlong="mask")
    assert rloo(kept).tolist() == [0.0]  # alone, and without an advantage


def test_penalised_rewards_are_what_advantages_are_of_and_variance_is_asked_of(make):
    group = make([1, 1, 1], lengths=[4, 9, 10], cut=[2])
    filters, kept, left = judged(group, filter_overlong="penalise", overlong_penalty=2.0, filter_zero_variance=True)
    assert left == {} and kept.rewards.tolist() == [1.0, 0.0, -1.0]
    np.testing.assert_array_equal(rloo(kept), np.float32([1.5, 0, -1.5]))
    assert [rollout.token_rewards.tolist() for rollout in kept.rollouts][1] == [0.0] * 8 + [0.0]
    assert group.rewards.tolist() == [1.0, 1.0, 1.0]
    metrics = {"replay/filtered_zero_variance": 0.0, "train/overlong_penalty": 1.0}
    assert filters.take_metrics(kept.rollouts) == metrics


def test_the_penalty_falls_on_the_last_token_that_the_policy_sampled(make):
    [rollout] = make([1.0], lengths=[9]).rollouts
    told = replace(rollout, response_mask=np.array([1, 1, 1, 1, 1, 1, 1, 0, 0], np.bool_))
    expected = [0, 0, 0, 0, 0, 0, -0.5, 0, 1]
    for form in (told, PackedRollout(told)):
        [found] = GroupFilters(BatchMakerConfig(filter_overlong="penalise")).members([form])
        np.testing.assert_allclose(found.token_rewards, expected, atol=1e-6)
        assert found.episode_reward == pytest.approx(0.5) and found.rollout_id == "lesson-0-0/0"


def test_nothing_is_taken_from_a_rollout_in_which_the_policy_said_nothing(make):
    [cut] = make([0.0], cut=[0]).rollouts
    cut.response_mask[:] = False
    assert GroupFilters(BatchMakerConfig(filter_overlong="penalise")).members([cut]) == (cut,)


@pytest.mark.parametrize(
    ("rewards", "stays"),
    [
        ([0, 0, 0, 1], True), ([0, 1, 1, 1], True), ([0, 0, 0, 0], False), ([1, 1, 1, 1], False),
        ([1, 1, 0.9, 0.8], False),
    ],
)  # fmt: skip
def test_the_band_of_difficulty_takes_its_edges_in(make, rewards, stays):
    filters, kept, left = judged(make(rewards), filter_difficulty=(0.25, 0.75))
    assert (kept is not None) == stays
    if not stays:
        mean = f"{np.mean(rewards):.4g}"
        [reason] = left
        assert (
            reason == f"the group's mean reward {mean} is outside 0.25 to 0.75 (replay.batch_maker.filter_difficulty)"
        )
        assert filters.take_metrics([]) == {"replay/filtered_difficulty": 4.0}


def test_difficulty_is_of_rewards_as_they_were_earned(make):
    group = make([1, 1, 0, 0], cut=[0, 1])
    band = {"filter_difficulty": (0.4, 0.6)}
    assert judged(group, filter_overlong="mask", **band)[1].rewards.tolist() == [0, 0]
    assert judged(group, filter_overlong="penalise", **band)[1].rewards.tolist() == [0, 0, 0, 0]


def test_without_filters_a_group_stays_as_it_is(make):
    filters, kept, left = judged(group := make([1, 1], cut=[0]))
    assert kept.rollouts == group.rollouts and left == {} and filters.take_metrics(kept.rollouts) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"filter_difficulty": (0.5, 0.5)}, r"filter_difficulty is \[0.5, 0.5\]: the first number must be below"),
        ({"filter_overlong": "penalise", "overlong_penalty": float("inf")}, "finite number"),
        ({"overlong_penalty": 2.0}, "overlong_penalty is 2.0, which has no effect: filter_overlong is None"),
        ({"filter_overlong": "mask", "overlong_fraction": 0.5}, "has no effect: filter_overlong is 'mask'"),
    ],
)
def test_keys_that_cannot_act_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        BatchMakerConfig(**given)

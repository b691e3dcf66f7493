import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import compute_advantages, dr_grpo, grpo, has_signal, reinforce_pp, rloo, valid_rollouts
from penstock.types import Rollout, RolloutGroup


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0, 1, 0], [-0.5, 1, -0.5]), ([0, 0.5, 1], [-0.75, 0, 0.75]), ([2, 4], [-2, 2])],
)
def test_rloo_subtracts_the_mean_of_the_others(make_group, rewards, expected):
    np.testing.assert_allclose(rloo(make_group(rewards)), expected, rtol=1e-6)


def test_grpo_divides_by_the_sample_deviation(make_group):
    np.testing.assert_allclose(grpo(make_group([0, 1, 0])), [-0.57735, 1.15470, -0.57735], atol=5e-6)


def test_dr_grpo_only_subtracts_the_mean(make_group):
    np.testing.assert_allclose(dr_grpo(make_group([0, 1, 0])), [-1 / 3, 2 / 3, -1 / 3], rtol=1e-6)


def test_reinforce_pp_standardises_over_the_whole_batch(make_group):
    first, second = reinforce_pp([make_group([0, 1]), make_group([1, 2, 1])])
    deviation = np.std(np.repeat([0, 1, 1, 2, 1], 3), ddof=1)  # of three tokens each
    np.testing.assert_allclose(first, np.array([-1, 0]) / deviation, atol=4e-6)
    np.testing.assert_allclose(second, np.array([0, 1, 0]) / deviation, atol=4e-6)


def test_reinforce_pp_counts_every_token(make_rollout):
    """Rewards 0, 1, 1, 1: mean .75, squares .5625 + 3 · .0625 = .75, sample deviation .5."""
    group = RolloutGroup("k", (make_rollout(0.0, response=1), make_rollout(1.0, response=3)))
    np.testing.assert_allclose(reinforce_pp([group])[0], [-1.5, 0.5], atol=4e-6)


def test_reinforce_pp_with_a_baseline_whitens_what_the_group_leaves(make_rollout, make_group):
    """r less group means: [−.5, .5], [−1, 1] on 1, 3, 2 and 2 tokens: mean .125; squares over 8 tokens 4.875."""
    easy = RolloutGroup("k", (make_rollout(0.0, response=1), make_rollout(1.0, response=3)))
    hard = RolloutGroup("l", (make_rollout(5.0, response=2), make_rollout(7.0, response=2)))
    first, second = compute_advantages("reinforce_pp_baseline", [easy, hard])
    deviation = np.sqrt(4.875 / 7)
    np.testing.assert_allclose(first, np.array([-0.625, 0.375]) / deviation, atol=2e-6)
    np.testing.assert_allclose(second, np.array([-1.125, 0.875]) / deviation, atol=2e-6)
    plain, _ = compute_advantages("reinforce_pp", [easy, hard])
    assert (plain < 0).all(), "without it an easy problem's best answer is pushed away"


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exactly_zero(make_group, name, reward):
    (advantages,) = compute_advantages(name, [make_group([reward] * 7)])
    assert advantages.dtype == np.float32
    assert advantages.tolist() == [0.0] * 7


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_only_valid_rollouts_enter_a_baseline(make_group, name):
    group = make_group([0, 100, 1, -100, 0], empty=(1,), aborted=(3,))
    assert valid_rollouts(group).tolist() == [True, False, True, False, True]
    (advantages,) = compute_advantages(name, [group])
    (alone,) = compute_advantages(name, [make_group([0, 1, 0])])
    np.testing.assert_array_equal(advantages[[0, 2, 4]], alone)
    assert advantages[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_group_with_one_valid_rollout_has_advantage_zero(make_group, name):
    (advantages,) = compute_advantages(name, [make_group([5.0, 1.0], empty=(1,))])
    assert advantages.tolist() == [0.0, 0.0]


def test_an_overlong_rollout_enters_the_baseline(make_rollout):
    rollouts = (make_rollout(1.0), make_rollout(0.0, finish_reason="length"))
    np.testing.assert_allclose(rloo(RolloutGroup("k", rollouts)), [1, -1])


def test_no_groups_give_no_advantages():
    assert reinforce_pp([]) == []
    assert compute_advantages("rloo", []) == []


def test_signal_is_a_difference_between_valid_rewards(make_group):
    assert has_signal(make_group([0, 1]))
    assert not has_signal(make_group([1, 1]))
    assert not has_signal(make_group([1, 0, 1], empty=(1,)))
    assert not has_signal(make_group([1]))
    assert not has_signal(make_group([1, 0], empty=(0, 1)))


def _group(rewards: list[float]) -> RolloutGroup:
    one, zero = np.ones(1, np.int32), np.zeros(1, np.float32)
    return RolloutGroup(
        "k", tuple(Rollout("e", "x", one, one, zero, np.full(1, r, np.float32), float(np.float32(r))) for r in rewards)
    )


@given(st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=9), st.floats(-10, 10, width=16))
def test_group_baselines_ignore_a_shift_of_all_rewards(rewards, shift):
    for advantage in (rloo, dr_grpo):
        moved = advantage(_group([reward + shift for reward in rewards]))
        np.testing.assert_allclose(moved, advantage(_group(rewards)), atol=2e-5)
        assert abs(float(moved.sum(dtype=np.float64))) < 1e-4


def test_the_estimates_are_those_of_others(make_rollout):
    """verl's, of ragged sequences in two groups (scripts/make_golden_losses.py)."""
    golden = json.loads((Path(__file__).parents[1] / "learner" / "golden" / "losses.json").read_text("utf-8"))
    lengths = np.sum(golden["batch"]["mask"], axis=1).astype(int)
    rollouts = [make_rollout(r, response=int(n)) for r, n in zip(golden["rewards"], lengths, strict=True)]
    groups = [RolloutGroup("first", tuple(rollouts[:4])), RolloutGroup("second", tuple(rollouts[4:]))]
    assert golden["groups"] == [0] * 4 + [1] * 4
    for name, expected in golden["advantages"].items():
        np.testing.assert_allclose(np.concatenate(compute_advantages(name, groups)), expected, rtol=1e-5, err_msg=name)
    assert set(golden["advantages"]) == {"rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"}

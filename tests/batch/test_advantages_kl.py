"""A KL in the reward, by hand: rewards 1, 0, 0 less what each answer strayed from the reference."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.batch import example_from_rollout, with_kl_in_reward
from penstock.types import PackedRollout

REWARDS = [1.0, 0.0, 0.0]
STRAYED = [[1.0, 0.5, 0.5], [0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]
"""ℓ_b − ℓ_ref of each answer's tokens: in sum 2, 0 and −1."""


@pytest.fixture
def scored(make_group):
    """A group with its examples, whose reference is off by `STRAYED`."""
    rollouts = make_group(REWARDS).rollouts
    examples = [example_from_rollout(rollout, 9.0, 20) for rollout in rollouts]
    for index, strayed in enumerate(STRAYED):
        reference = examples[index].generator_log_probs - np.array([0, 0, *strayed], np.float32)
        examples[index] = replace(examples[index], reference_log_probs=reference)
    return rollouts, examples


def of_answers(examples):
    return [example.advantage[2:].tolist() for example in examples]


@pytest.mark.parametrize("packed", [False, True])
def test_group_baselines_are_of_the_lowered_rewards(scored, packed):
    rollouts, examples = scored
    given = [PackedRollout(rollout) for rollout in rollouts] if packed else rollouts
    changed = with_kl_in_reward("rloo", given, examples, 0.25)
    # rewards .5, 0, .25: leave-one-out means .125, .375, .25
    np.testing.assert_allclose(of_answers(changed), [[0.375] * 3, [-0.375] * 3, [0.0] * 3], atol=1e-6)
    assert [each.rollout_ids for each in changed] == [each.rollout_ids for each in examples]
    assert changed[0].reference_log_probs is examples[0].reference_log_probs and changed[0].advantage[:2].tolist() == [
        0,
        0,
    ]
    unchanged = with_kl_in_reward("rloo", given, examples, 0.0)
    np.testing.assert_allclose(of_answers(unchanged), [[1.0] * 3, [-0.5] * 3, [-0.5] * 3], atol=1e-6)


def test_the_order_of_the_examples_is_kept_and_groups_stay_apart(make_group):
    groups = [make_group([1.0, 0.0], group_id="lesson-0-0"), make_group([1.0, 1.0], group_id="lesson-0-1")]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    examples = [
        replace(example, reference_log_probs=example.generator_log_probs - np.float32(index % 2))
        for index, example in enumerate(example_from_rollout(rollout, 0.0, 20) for rollout in rollouts)
    ]
    changed = with_kl_in_reward("rloo", rollouts, examples[::-1], 0.1)  # rewards 1, −.3 and 1, .7
    assert [each.rollout_ids[0] for each in changed] == [each.rollout_ids[0] for each in examples[::-1]]
    np.testing.assert_allclose([each.advantage[-1] for each in changed[::-1]], [1.3, -1.3, 0.3, -0.3], atol=1e-6)


def test_turns_are_charged_what_their_own_tokens_strayed(make_rollout):
    """Two turns of one token each, between them one token of the environment's, which is charged nothing."""
    mask = np.array([True, False, True])
    rollouts, examples = [], []
    for index, (reward, strayed) in enumerate([(1.0, (1.0, 7.0, 2.0)), (0.0, (0.0, 0.0, 0.0))]):
        logprobs = np.where(mask, -np.arange(1, 4), 0).astype(np.float32)
        rollout = make_rollout(reward, response_mask=mask, rollout_id=f"lesson-0-0/{index}")
        rollout = replace(rollout, response_logprobs=logprobs)
        example = example_from_rollout(rollout, 0.0, 20)
        reference = example.generator_log_probs - np.array([0, 0, *strayed], np.float32)
        rollouts.append(rollout)
        examples.append(replace(example, reference_log_probs=reference))
    first, second = with_kl_in_reward("turn", rollouts, examples, 0.1)
    # turn rewards −.1, .8 against 0, 0: rewards to go .7, .8
    np.testing.assert_allclose(first.advantage[2:], [0.7, 0, 0.8], atol=1e-6)
    np.testing.assert_allclose(second.advantage[2:], [-0.7, 0, -0.8], atol=1e-6)


def test_one_s_own_function_sees_the_lowered_rewards(scored):
    rollouts, examples = scored
    changed = with_kl_in_reward(lambda group: group.rewards, rollouts, examples, 0.25)
    np.testing.assert_allclose([each.advantage[-1] for each in changed], [0.5, 0.0, 0.25], atol=1e-6)

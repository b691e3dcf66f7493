import numpy as np
import pytest

from penstock.types import (
    InvalidRolloutError,
    Rollout,
    RolloutBatch,
    RolloutBatchStats,
    RolloutGroup,
    RolloutMetadata,
)


def rollout(reward: float = 1.0, length: int = 3, **changes) -> Rollout:
    fields = {
        "env_name": "cats",
        "env_example_id": "7",
        "prompt_tokens": np.array([1, 2], np.int32),
        "response_tokens": np.arange(length, dtype=np.int32),
        "response_logprobs": np.full(length, -0.5, np.float32),
        "token_rewards": np.array([0.0] * (length - 1) + [reward], np.float32) if length else np.zeros(0, np.float32),
        "episode_reward": reward,
    }
    return Rollout(**{**fields, **changes})


def test_the_response_mask_defaults_to_all_sampled():
    assert rollout(length=3).response_mask.tolist() == [True, True, True]
    assert rollout(length=3).sampled_tokens == 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("response_logprobs", np.zeros(2, np.float32), "response_logprobs has 2 entries but response_tokens has 3"),
        ("response_tokens", np.arange(3), "response_tokens is int64"),
        ("response_tokens", [1, 2, 3], "response_tokens is a list"),
        ("prompt_tokens", np.zeros(0, np.int32), "prompt_tokens is empty"),
        ("prompt_tokens", np.array([-1], np.int32), "prompt_tokens holds a negative token id"),
        ("response_logprobs", np.array([0, np.nan, 0], np.float32), "response_logprobs holds a value that is not"),
        ("token_rewards", np.zeros((3, 1), np.float32), r"token_rewards is float32\[3, 1\]"),
        ("response_mask", np.ones(4, np.bool_), "response_mask has 4 entries"),
        ("response_mask", np.ones(3, np.int32), "response_mask is int32"),
        ("response_weight_steps", np.ones(2, np.int32), "response_weight_steps has 2"),
        ("episode_reward", float("nan"), "episode_reward is nan"),
        ("episode_reward", 2.0, "token_rewards sum to 1 but episode_reward is 2"),
    ],
)
def test_a_malformed_field_is_refused_by_name(field: str, value: object, message: str):
    with pytest.raises(InvalidRolloutError, match=message):
        rollout(**{field: value})


def test_an_empty_response_is_a_valid_rollout_without_sampled_tokens():
    assert rollout(length=0).sampled_tokens == 0


def test_metadata_and_ids_are_attached_by_the_generator():
    stamped = rollout().with_metadata(RolloutMetadata("worker-0", 10.0, 4), "cats-0-12/3", "easy")
    assert stamped.metadata == RolloutMetadata("worker-0", 10.0, 4, lineage=0, schema_version=1)
    assert (stamped.rollout_id, stamped.group_id, stamped.lesson_id) == ("cats-0-12/3", "cats-0-12", "easy")


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [([0, 1, 0], [-0.5, 1, -0.5]), ([0, 0.5, 1], [-0.75, 0, 0.75]), ([0.3], [0]), ([0.2, 0.2], [0, 0])],
)
def test_rloo_advantages_have_their_golden_values(rewards: list[float], advantages: list[float]):
    group = RolloutGroup("cats:7", tuple(rollout(reward) for reward in rewards))
    np.testing.assert_allclose(group.compute_rloo_advantages(), advantages, atol=1e-6)
    assert group.compute_rloo_advantages().dtype == np.float32


def test_a_group_without_rollouts_is_refused():
    with pytest.raises(InvalidRolloutError, match="'cats:7' has no rollouts"):
        RolloutGroup("cats:7", ())


def test_a_batch_carries_its_oldest_members_metadata():
    stamps = [RolloutMetadata("w", 3.0, 5), RolloutMetadata("w", 9.0, 4), RolloutMetadata("w", 1.0, 6)]
    members = tuple(rollout().with_metadata(stamp, f"t/{i}", "easy") for i, stamp in enumerate(stamps))
    assert RolloutBatch.of((RolloutGroup("k", members),)).metadata == stamps[1]


def test_batch_statistics_have_expected_values():
    groups = (
        RolloutGroup("a", (rollout(1.0, 2), rollout(0.0, 4, finish_reason="length"))),
        RolloutGroup("a", (rollout(0.25, 3), rollout(0.25, 3))),
    )
    stats = RolloutBatchStats.of("easy", RolloutBatch.of(groups), success_threshold=0.5)
    assert (stats.groups, stats.rollouts) == (2, 4)
    assert stats.reward_mean == pytest.approx(0.375)
    assert stats.success_rate == pytest.approx(0.25)
    assert stats.pass_at_k == pytest.approx(0.5)
    assert stats.response_tokens == pytest.approx(3.0)
    assert stats.truncated_fraction == pytest.approx(0.25)


def test_an_empty_batch_has_defined_statistics():
    stats = RolloutBatchStats.of("easy", RolloutBatch.of(()))
    assert (stats.groups, stats.rollouts, stats.reward_mean, stats.success_rate) == (0, 0, 0.0, 0.0)

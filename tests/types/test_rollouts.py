import sys

import numpy as np
import pytest

from penstock.types import (
    ConfigError,
    InvalidRolloutError,
    PackedRollout,
    Rollout,
    RolloutBatch,
    RolloutBatchStats,
    RolloutGroup,
    RolloutMetadata,
    RolloutRecord,
    Turn,
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


def conversation(reward: float, said: str, **changes) -> Rollout:
    turns = (Turn("user", "Who hunts mice?", 0, 2), Turn("assistant", said, 2, 5))
    made = rollout(reward, turns=turns, **changes)
    return made.with_metadata(RolloutMetadata("worker-0", 12.5, 4), f"cats-0-7/{int(reward > 0)}", "pets")


def batch_of_two() -> RolloutBatch:
    members = (conversation(0.0, "a dog", finish_reason="length"), conversation(0.5, "the cat, " * 20))
    return RolloutBatch.of((RolloutGroup("cats:7", members, "cats-0-7"),))


def test_records_show_themselves_in_one_line():
    batch = batch_of_two()
    bad, good = batch.groups[0].rollouts
    assert repr(bad) == repr(PackedRollout(bad)) == "Rollout(cats-0-7/0, reward 0, 2 + 3 tokens, length, 'a dog')"
    assert repr(good) == f"Rollout(cats-0-7/1, reward 0.5, 2 + 3 tokens, {('the cat, ' * 20)[:39] + '…'!r})"
    assert repr(rollout(1.0)) == "Rollout(cats:7, reward 1, 2 + 3 tokens)"
    assert repr(batch.groups[0]) == "RolloutGroup(cats:7, 2 rollouts, mean reward 0.25 (0 to 0.5))"
    assert repr(batch) == "RolloutBatch(1 groups, 2 rollouts, mean reward 0.25)"
    assert repr(RolloutBatch(())) == "RolloutBatch(0 groups, 0 rollouts, mean reward 0)"
    stats = RolloutBatchStats.of("pets", batch, 0.5)
    assert repr(stats) == "RolloutBatchStats(pets, 2 rollouts in 1 groups, mean reward 0.25, success 50%)"
    assert "array" not in repr(RolloutRecord(good, "cats-0-7"))


def test_a_batch_becomes_a_data_frame_with_a_row_per_rollout():
    frame = batch_of_two().to_pandas()
    assert frame["rollout_id"].tolist() == ["cats-0-7/0", "cats-0-7/1"]
    assert frame.groupby("group_key")["episode_reward"].mean().to_dict() == {"cats:7": 0.25}
    assert frame["prompt"].tolist() == ["Who hunts mice?"] * 2 and frame["response"][0] == "a dog"
    assert frame["weight_step"].tolist() == [4, 4] and frame["worker_id"][0] == "worker-0"
    assert frame["response_tokens"][1].tolist() == [0, 1, 2] and frame["finish_reason"][0] == "length"
    bare = RolloutBatch((RolloutGroup("cats:7", (rollout(),)),)).to_pandas()
    assert bare["prompt"][0] is None and bare["weight_step"][0] is None
    empty = RolloutBatch(()).to_pandas()
    assert len(empty) == 0 and "episode_reward" in empty.columns


def test_a_data_frame_without_pandas_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="^to_pandas needs the package pandas: pip install pandas$"):
        batch_of_two().to_pandas()


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

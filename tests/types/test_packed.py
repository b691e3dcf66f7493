"""A packed rollout reads like the one it was made of."""

import dataclasses
import sys

import numpy as np
import pytest

from penstock.types import Decoding, PackedRollout, Rollout, RolloutMetadata, Turn


def make_rollout(p=3, r=5, steps=True, index=0):
    rewards = np.zeros(r, np.float32)
    rewards[-1] = 1.5
    return Rollout(
        env_name="words",
        env_example_id="7",
        prompt_tokens=np.arange(p, dtype=np.int32),
        response_tokens=np.arange(100, 100 + r, dtype=np.int32),
        response_logprobs=-np.arange(1, r + 1, dtype=np.float32),
        token_rewards=rewards,
        episode_reward=1.5,
        metadata=RolloutMetadata("w", 5.0, 3),
        rollout_id=f"a-0-1/{index}",
        lesson_id="a",
        response_mask=np.arange(r) % 2 == 0,
        response_weight_steps=np.full(r, 4, np.int32) if steps else None,
        oldest_weight_step=2,
        turns=(Turn("user", "hi", 0, p),),
        decoding=Decoding(temperature=0.7),
        finish_reason="length",
        sample_starts=(0, p + 1) if r > 1 else (0,),
        rewards_by_function=(("right", 1.0), ("brief", None)),
        timings={"decode_s": 0.25, "generate_s": 0.5 + index} if steps else {},
    )


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize(("p", "r"), [(1, 1), (3, 5), (64, 257)])
def test_every_field_and_property_is_the_same(p, r, steps):
    rollout = make_rollout(p, r, steps)
    packed = PackedRollout(rollout)
    for field in dataclasses.fields(Rollout):
        mine, other = getattr(packed, field.name), getattr(rollout, field.name)
        if isinstance(other, np.ndarray):
            assert mine.dtype == other.dtype and np.array_equal(mine, other) and not mine.flags.writeable
        else:
            assert mine == other, field.name
    for name in ("group_id", "sampled_tokens", "newest_weight_step", "defect", "longest_sample"):
        assert getattr(packed, name) == getattr(rollout, name), name
    assert packed.response_length == r


@pytest.mark.parametrize("name", ["a-0-1/12", "a-0-1/012", "a-0-1/x", "plain", "", "a/b/3", "3", "/3"])
def test_any_id_comes_back_as_it_was(name):
    rollout = dataclasses.replace(make_rollout(), rollout_id=name)
    assert (PackedRollout(rollout).rollout_id, PackedRollout(rollout).group_id) == (name, rollout.group_id)


def test_without_metadata_it_has_none():
    assert PackedRollout(dataclasses.replace(make_rollout(), metadata=None)).metadata is None


def test_unpacking_shares_the_memory():
    packed = PackedRollout(make_rollout())
    again = packed.unpacked()
    assert isinstance(again, Rollout) and again.metadata == packed.metadata
    assert np.shares_memory(again.response_tokens, packed.response_tokens)


def test_changing_the_original_changes_nothing():
    rollout = make_rollout()
    packed = PackedRollout(rollout)
    rollout.response_tokens[0] = 99
    assert packed.response_tokens[0] == 100


@pytest.mark.parametrize("name", ["episode_reward", "finish_reason", "token_rewards", "_block"])
def test_it_is_read_only_as_a_rollout_is(name):
    packed = PackedRollout(make_rollout())
    before = packed.episode_reward
    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(packed, name, 9.0)
    assert packed.episode_reward == before


def test_members_of_a_group_share_what_is_equal():
    first = PackedRollout(make_rollout())
    second = PackedRollout(make_rollout(index=1), first)
    stranger = PackedRollout(dataclasses.replace(make_rollout(index=2), env_example_id="8"), first)
    assert second._shared is first._shared and stranger._shared is not first._shared
    assert stranger.env_example_id == "8" and first.env_example_id == "7"


def test_it_costs_little_more_than_its_numbers():
    rollout = make_rollout(64, 256)
    fields = ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "response_mask")
    own = sum(getattr(rollout, name).nbytes for name in (*fields, "response_weight_steps"))
    packed = PackedRollout(rollout)
    assert sys.getsizeof(packed) + sys.getsizeof(packed._block) < 1.05 * own


def test_defects_are_those_of_a_rollout():
    nothing = dataclasses.replace(make_rollout(), response_mask=np.zeros(5, np.bool_))
    assert PackedRollout(nothing).defect == nothing.defect == "the policy sampled none of its tokens"
    aborted = dataclasses.replace(make_rollout(), finish_reason="aborted")
    assert PackedRollout(aborted).defect == aborted.defect == "its generation was aborted"

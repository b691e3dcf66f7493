"""Advantages of each turn of a conversation, from its rewards to the tokens of a batch."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import DeadlineBatchMaker, GrpoBatchMaker, RecencyBatchMaker, compute_advantages, pack, rloo, turn
from penstock.batch.advantages import rewards_to_go
from penstock.batch.config import BatchMakerConfig
from penstock.batch.factory import make_batch_maker
from penstock.rundir import records_from_table, table_from_records
from penstock.types import (
    ConfigError,
    PackedRollout,
    Rollout,
    RolloutGroup,
    RolloutMetadata,
    RolloutRecord,
)

SAID, TOLD = 2, 1
"""Tokens of a turn of the policy, and of what it is told between two."""


def conversation(rewards: Sequence[float], index: int = 0, group: str = "a-0-0", **fields: object) -> Rollout:
    """Turns of two sampled tokens, the reward of each at its end, one token between two."""
    mask = ([True] * SAID + [False] * TOLD) * len(rewards)
    mask = mask[: len(mask) - TOLD]
    token_rewards = np.zeros(len(mask), np.float32)
    token_rewards[SAID - 1 :: SAID + TOLD] = rewards
    tokens = np.arange(20, 20 + len(mask), dtype=np.int32)
    made = Rollout(
        "env", "example", np.ones(1, np.int32), tokens, -np.ones(len(mask), np.float32) * np.array(mask, np.float32),
        token_rewards, float(token_rewards.sum(dtype=np.float64)), response_mask=np.array(mask),
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    return made.with_metadata(RolloutMetadata("worker", 1.0, 5), f"{group}/{index}", "lesson")


def group_of(*turns: Sequence[float], name: str = "a-0-0") -> RolloutGroup:
    return RolloutGroup("env:example", tuple(conversation(t, i, name) for i, t in enumerate(turns)), name)


def of_turns(group: RolloutGroup) -> list[list[float]]:
    """Of each rollout, the advantage of each turn; all of a turn's tokens must have the same."""
    found = []
    for rollout, advantages in zip(group.rollouts, turn(group), strict=True):
        assert advantages.dtype == np.float32 and len(advantages) == len(rollout.response_tokens)
        assert not advantages[~rollout.response_mask].any()
        first, second = (advantages[place :: SAID + TOLD].tolist() for place in range(SAID))
        assert first == second
        found.append(first)
    return found


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([[0, 1], [1, 0], [0]], [[0.5, 1], [0.5, -1], [-1]]),
        ([[0], [1], [0]], [[-0.5], [1], [-0.5]]),
        ([[0, 1], [1, 0]], [[0, 1], [0, -1]]),  # the episodes earn the same
        ([[0, 0, 1], [1]], [[0, 0, 0], [0]]),  # nobody to compare later turns with
        ([[0, 1, 1], [0, 0, 0], [0, 0]], [[2, 2, 1], [-1, -1, -1], [-1, -1]]),
        ([[0.25, 0.5]], [[0, 0]]),
    ],
)
def test_golden_numbers(rewards, expected):
    assert of_turns(group_of(*rewards)) == expected


REWARDS = st.floats(-10, 10, width=16)
CONVERSATIONS = st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=2, max_size=6)


@given(st.lists(REWARDS, min_size=1, max_size=7))
def test_one_turn_is_rloo_bit_for_bit(rewards):
    group = group_of(*([reward] for reward in rewards))
    assert [advantage for (advantage,) in of_turns(group)] == rloo(group).tolist()


@given(CONVERSATIONS)
def test_advantages_of_a_turn_sum_to_zero_over_its_members(rewards):
    advantages = of_turns(group_of(*rewards))
    for k in range(max(map(len, rewards))):
        assert abs(sum(found[k] for found in advantages if len(found) > k)) < 1e-3


@given(CONVERSATIONS, st.data())
def test_a_baseline_is_the_others_alone(rewards, data):
    """What a member earns at turn k moves its own advantages up to k by as much, and none of its later ones."""
    who = data.draw(st.integers(0, len(rewards) - 1))
    k = data.draw(st.integers(0, len(rewards[who]) - 1))
    before = of_turns(group_of(*rewards))[who]
    changed = [list(turns) for turns in rewards]
    changed[who][k] += 4.0
    after = of_turns(group_of(*changed))[who]
    shared = [sum(len(turns) > j for turns in rewards) > 1 for j in range(len(before))]
    moved = [4.0 * (j <= k and shared[j]) for j in range(len(before))]
    np.testing.assert_allclose(np.subtract(after, before), moved, atol=1e-3)


def test_equal_endings_give_exactly_zero_whatever_came_before():
    (_, first), (_, second) = of_turns(group_of([0.1, 0.2], [0.7, 0.2]))
    assert first == second == 0.0


def test_episodes_that_earn_the_same_by_other_ways_have_exactly_zero():
    """.6 + .1 of float32 is not .7; the episodes' rewards are equal."""
    group = group_of([0.6, 0.1], [0.7])
    for rollout in group.rollouts:
        object.__setattr__(rollout, "episode_reward", 0.7)
    assert of_turns(group) == [[0.0, 0.0], [0.0]]
    assert [to_go[0] for to_go in rewards_to_go(group)] == [np.float32(0.7)] * 2


def test_what_stands_before_the_first_turn_counts_to_it():
    """A reward of 1 for what the environment said first, of 2 for the second answer, against 1 for another's first."""
    group = group_of([0, 0], [1, 0])
    told = group.rollouts[0]
    told.response_mask[:] = [False, True, False, True, True]
    told.token_rewards[:] = [1, 0, 0, 0, 2]
    object.__setattr__(told, "episode_reward", 3.0)
    assert [advantages.tolist() for advantages in turn(group)] == [[0, 2, 0, 2, 2], [-2, -2, 0, -2, -2]]


def test_reward_that_falls_between_two_turns_belongs_to_the_one_before():
    group = group_of([0, 0], [0, 0])
    group.rollouts[0].token_rewards[SAID] = 3.0  # at what the environment said
    object.__setattr__(group.rollouts[0], "episode_reward", 3.0)
    assert of_turns(group) == [[3.0, 0.0], [-3.0, 0.0]]


def test_a_cut_conversation_counts_and_an_aborted_or_an_empty_one_does_not():
    cut = conversation([0], 1, finish_reason="length")
    aborted = conversation([9, 9], 2, finish_reason="aborted")
    empty = conversation([9], 3)
    empty.response_mask[:] = False
    found = turn(RolloutGroup("k", (conversation([1, 1], 0), cut, aborted, empty)))
    assert [advantages.tolist() for advantages in found] == [[2, 2, 0, 0, 0], [-2, -2], [0] * 5, [0, 0]]
    assert [to_go.tolist() for to_go in rewards_to_go(RolloutGroup("k", (aborted, empty)))] == [[0] * 5, [0, 0]]


def test_a_group_without_a_valid_member_has_zeros():
    group = group_of([1.0], [0.0])
    for rollout in group.rollouts:
        rollout.response_mask[:] = False
    assert [advantages.tolist() for advantages in turn(group)] == [[0, 0], [0, 0]]


def through_files(rollouts: Sequence[Rollout]) -> list[PackedRollout]:
    """As they come out of Parquet and stand in a buffer."""
    stored = records_from_table(table_from_records([RolloutRecord(r, r.group_id) for r in rollouts]))
    return [PackedRollout(record.rollout) for record in stored]


@pytest.mark.parametrize(
    "maker",
    [
        DeadlineBatchMaker("turn", 64),
        RecencyBatchMaker("turn", 64),
        RecencyBatchMaker("turn", 64, unit="rollout", max_samples=-1),
    ],
    ids=["deadline", "recency", "rollouts"],
)
def test_batches_carry_them_token_by_token_through_files_and_packing(maker):
    group = group_of([0, 1], [1, 0], [0])
    for rollout in through_files(group.rollouts):
        maker.add_rollout(rollout)
    batch = maker.create_batch(3 if maker.unit == "rollout" else 1)
    by_id = {example.rollout_ids[0]: example for example in batch}
    expected = {"a-0-0/0": [0, 0.5, 0.5, 0, 1, 1], "a-0-0/1": [0, 0.5, 0.5, 0, -1, -1], "a-0-0/2": [0, -1, -1]}
    assert {name: example.advantage.tolist() for name, example in by_id.items()} == expected
    (row,) = pack(batch, row_length=16)
    for segment, name in enumerate(row.rollout_ids, start=1):
        assert row.advantage[row.segment_ids == segment].tolist() == expected[name]


def test_single_rollouts_keep_their_advantages_while_others_leave():
    maker = RecencyBatchMaker("turn", 64, unit="rollout", max_samples=-1)
    for number in range(50):  # enough for the pool to close up
        for rollout in group_of([0, 1], [1, 0], [0], name=f"a-0-{number}").rollouts:
            maker.add_rollout(rollout)
    maker.create_batch(1)
    maker.discard([f"a-0-{number}/{member}" for number in range(49) for member in (0, 1, 2)] + ["a-0-49/0"])
    (first, second) = sorted(maker.create_batch(2), key=lambda example: example.rollout_ids)
    assert first.advantage.tolist() == [0, 0.5, 0.5, 0, -1, -1] and second.advantage.tolist() == [0, -1, -1]


def test_the_reservoir_of_one_baseline_per_problem_refuses_them():
    config = BatchMakerConfig(name="grpo")
    options = {"ordered": False, "allow_truncated_sampling": False, "seed": 0}
    with pytest.raises(ConfigError, match="rloo, but 'turn' is asked for"):
        make_batch_maker(config, advantage="turn", max_tokens=64, max_samples=1, **options)
    assert isinstance(
        make_batch_maker(config, advantage="rloo", max_tokens=9, max_samples=1, **options), GrpoBatchMaker
    )


def test_a_batch_is_computed_group_by_group():
    first, second = compute_advantages("turn", [group_of([0, 1], [1, 0]), group_of([2], [0])])
    assert [a.tolist() for a in first] == [[0, 0, 0, 1, 1], [0, 0, 0, -1, -1]]
    assert [a.tolist() for a in second] == [[2, 2], [-2, -2]]

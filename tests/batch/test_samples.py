"""Rollouts of several samples: what becomes of their tokens on the way to packed rows, and which are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import check_trainable, example_from_rollout, pack, rloo, turn
from penstock.batch.advantages import rewards_to_go
from penstock.batch.examples import assemble_examples, longest_sample, sample_starts_of, samples_of
from penstock.types import InvalidRolloutError, PackedRollout, Rollout, RolloutGroup, RolloutMetadata

ROW = 24
ARRAYS = (
    "tokens", "loss_mask", "segment_ids", "position_ids", "advantage", "generator_log_probs", "temperature",
    "weight_steps",
)  # fmt: skip
of_sample = st.tuples(st.integers(1, 8), st.lists(st.booleans(), min_size=1, max_size=12))
of_samples = st.lists(of_sample, min_size=1, max_size=5)


def rollout(samples: list[tuple[int, list[bool]]], rollout_id: str = "t-0-0/0", reward: float = 1.0) -> Rollout:
    """Of samples with so many tokens of context, and this mask after it; all its tokens are different."""
    starts, mask = [0], list[bool]()
    for context, said in samples:
        mask += [False] * context + [True, *said]
        starts.append(len(mask))
    prompt, length = samples[0][0], len(mask)
    numbers, sampled = np.arange(length, dtype=np.int32), np.array(mask[prompt:])
    rewards = np.zeros(length - prompt, np.float32)
    rewards[-1] = reward
    return Rollout(
        "test", "1", numbers[:prompt], numbers[prompt:], np.where(sampled, -numbers[prompt:] / 8, 0).astype(np.float32),
        rewards, reward, RolloutMetadata("w", 1.0, 3), rollout_id, "test", sampled,
        np.full(length - prompt, 3, np.int32), sample_starts=tuple(starts[:-1]),
    )  # fmt: skip


@given(of_samples)
def test_what_was_written_is_trained_once_and_where_it_was_written(samples):
    made = rollout(samples)
    example = example_from_rollout(made, 0.5, ROW)
    rows = pack([example], ROW)
    trained = np.concatenate([row.tokens[row.loss_mask] for row in rows])
    written = made.response_tokens[made.response_mask]
    assert sorted(trained.tolist()) == written.tolist(), "every written token once, and no other"
    assert longest_sample(example) == made.longest_sample == max(p + 1 + len(said) for p, said in samples)
    whole = [*made.prompt_tokens.tolist(), *made.response_tokens.tolist()]
    spans = zip(made.sample_starts, [*made.sample_starts[1:], len(whole)], strict=True)
    found = {
        tuple(row.tokens[row.segment_ids == segment].tolist()): row.position_ids[row.segment_ids == segment].tolist()
        for row in rows
        for segment in range(1, int(row.segment_ids.max()) + 1)
    }
    wanted = [tuple(whole[start:stop]) for start, stop in spans]
    assert found == {tokens: list(range(len(tokens))) for tokens in wanted}, "a segment each, its own positions"
    assert [name for row in rows for name in row.rollout_ids] == ["t-0-0/0"] * len(samples)


@given(of_samples)
def test_samples_put_together_are_the_example(samples):
    example = example_from_rollout(rollout(samples), 0.5, ROW)
    parts = samples_of(example)
    assert sample_starts_of(example) == np.cumsum([0, *(len(part.tokens) for part in parts)])[:-1].tolist()
    for name in ("tokens", "loss_mask", "position_ids", "advantage", "generator_log_probs", "weight_steps"):
        together = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(together, getattr(example, name))
    assert all((part.segment_ids == 1).all() for part in parts)


@given(st.lists(st.tuples(of_samples, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_examples_that_are_made_together_are_those_that_are_made_alone(each):
    rollouts: list[Rollout | PackedRollout] = []
    advantages: list[float | np.ndarray] = []
    for index, (samples, says_versions, by_token, packed) in enumerate(each):
        made = rollout(samples, f"t-0-0/{index}")
        made = replace(made, oldest_weight_step=index) if says_versions else replace(made, response_weight_steps=None)
        rollouts.append(PackedRollout(made) if packed else made)
        numbers = np.linspace(1, 2, len(made.response_tokens), dtype=np.float32)
        advantages.append(numbers if by_token else float(index))
    together = assemble_examples([RolloutGroup("test:1", tuple(rollouts))], [advantages])
    for found, one, advantage in zip(together, rollouts, advantages, strict=True):
        alone = example_from_rollout(one, advantage, 100)
        assert found.rollout_ids == alone.rollout_ids == (one.rollout_id,)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name), strict=True)
        assert alone.tokens.tolist() == [*one.prompt_tokens.tolist(), *one.response_tokens.tolist()]
        earned = alone.advantage[alone.loss_mask]
        np.testing.assert_array_equal(earned, np.broadcast_to(advantage, len(one.response_mask))[one.response_mask])
        assert alone.first_sampled == np.flatnonzero(alone.loss_mask)[0]


def test_advantages_of_another_length_are_not_given_to_neighbours():
    several = RolloutGroup("test:1", (rollout([(2, [True] * 3)]), rollout([(2, [True] * 5)])))
    with pytest.raises(ValueError, match="broadcast"):
        assemble_examples([several], [[np.ones(6, np.float32), np.ones(4, np.float32)]])


def test_no_examples_of_no_groups():
    assert assemble_examples([], []) == []


def test_each_sample_must_fit_a_row_and_not_all_of_them_together():
    made = rollout([(4, [True] * 10), (6, [True] * 12)])
    check_trainable(made, 19)
    with pytest.raises(InvalidRolloutError, match="has a sample of 19 tokens, a training row 18"):
        check_trainable(made, 18)


def test_advantages_are_of_the_rollout():
    """By hand: two samples are two turns, and the reward falls at the end of the last."""
    two, one = rollout([(2, [True]), (3, [False, True])]), rollout([(2, [True])], "t-0-0/1", 0.0)
    group = RolloutGroup("test:1", (two, one), "t-0-0")
    np.testing.assert_array_equal(rloo(group), [1.0, -1.0])
    np.testing.assert_array_equal(rewards_to_go(group)[0], [1, 1, 0, 0, 0, 1, 0, 1])
    np.testing.assert_array_equal(turn(group)[0], [1, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((), "sample_starts is []: it must begin with 0"),
        ((3,), "sample_starts is [3]"),
        ((0, 2), "sample_starts is [0, 2]: it must begin with 0 and ascend, the others within the response, 3 to 9"),
        ((0, 10), "sample_starts is [0, 10]"),
        ((0, 6, 4), "sample_starts is [0, 6, 4]"),
        ((0, 3), "the sample at 3 begins with a sampled token"),
    ],
)
def test_samples_that_cannot_be_are_refused(starts, message):
    good = rollout([(2, [True]), (3, [False, True])])
    with pytest.raises(InvalidRolloutError) as error:
        replace(good, sample_starts=starts)
    assert message in str(error.value)
    assert "2 samples" in repr(good)

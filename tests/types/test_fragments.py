"""Fragments refuse what does not fit together, and read like any other experience."""

from dataclasses import replace

import numpy as np
import pytest
from tests.fragments_made import a_batch, make_fragment

from penstock.types import FragmentExample, InvalidRolloutError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.zeros(0, np.float32)}, "rewards is empty: a fragment has at least one step"),
        ({"faults": np.zeros(3, np.bool_)}, r"faults is bool\[3\]: it must be bool\[4\]"),
        ({"first": np.zeros(4, np.bool_)}, r"first is bool\[4\]: it must be bool\[5\]"),
        ({"logprobs": np.zeros(4)}, r"logprobs is float64\[4\]: it must be float32\[4\]"),
        ({"observations": {"": np.zeros((4, 4))}}, r"observations\[''\] has 4 rows: it must have 5"),
        ({"actions": {"a": np.zeros(5)}}, r"actions\['a'\] has 5 rows: it must have 4"),
        ({"final_observations": {"": np.zeros((2, 4))}}, r"final_observations\[''\] has 2 rows: it must have 1"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(InvalidRolloutError, match=message):
        replace(make_fragment(), **changes)


def test_a_fragment_reads_like_a_rollout():
    fragment = make_fragment("cart-w0-0-7", weight_steps=[5, 5, 6, 8], faults=(1,), reward=2.0)
    assert (fragment.rollout_id, fragment.group_id, fragment.lesson_id) == ("cart-w0-0-7/0", "cart-w0-0-7", "cart")
    assert (fragment.env_example_id, fragment.sampled_tokens, fragment.episode_reward) == ("3", 3, 6.0)
    assert (fragment.oldest_weight_step, fragment.newest_weight_step) == (5, 8)
    assert fragment.metadata is not None and fragment.metadata.weight_step == 5
    assert FragmentExample(fragment).rollout_ids == ("cart-w0-0-7/0",)
    batch = a_batch(make_fragment("b", weight_steps=2), make_fragment("a", weight_steps=1))
    assert batch.metadata is not None and batch.metadata.weight_step == 1
    assert [each.group_id for each in batch.rollouts()] == ["b", "a"]


def test_fragments_show_themselves_in_one_line_and_as_a_data_frame():
    fragment = make_fragment("cart-w0-0-7", weight_steps=[5, 5, 6, 8], faults=(1,), reward=2.0)
    ended = int((fragment.terminated | fragment.truncated).sum())
    shown = f"SampleFragment(cart, cart-w0-0-7, 4 steps, {ended} episodes ended, reward 6)"
    assert repr(fragment) == shown and repr(FragmentExample(fragment)).startswith(f"FragmentExample(fragment={shown}")
    frame = a_batch(fragment).to_pandas()
    assert frame[["group_id", "lesson_id", "episode_reward", "weight_step"]].values.tolist() == [
        ["cart-w0-0-7", "cart", 6.0, 5]
    ]
    assert frame["rewards"][0].tolist() == [2.0] * 4 and frame["faults"][0].tolist() == [False, True, False, False]


def test_what_cannot_be_trained_says_why():
    fragment = make_fragment()
    assert fragment.defect is None
    assert make_fragment(faults=(0, 1, 2, 3)).defect == "all of its steps are faulty"
    nothing = np.array([0, np.nan, 0, 0], np.float32)
    assert replace(fragment, rewards=nothing).defect == "rewards is not finite"
    assert replace(make_fragment(faults=(1,)), rewards=nothing).defect is None  # it is not trained on anyway

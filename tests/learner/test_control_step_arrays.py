from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.control_batches import SPACES, make_fragment, make_policy, with_fault

from penstock.learner.control_step import (
    BatchShape,
    FragmentReadOptions,
    blank_arrays,
    minibatch_columns,
    minibatch_steps,
    squared_returns,
    stack_fragments,
)
from penstock.types import InvalidRolloutError, LeafSpace, SampleFragment, Spaces


@pytest.fixture(scope="module")
def policy():
    return make_policy()


def reading(**changes) -> FragmentReadOptions:
    fields = {"spaces": SPACES, "initial_state": {}, "version_step": 5, "old_beyond": 1}
    return FragmentReadOptions(**(fields | changes))


def stacked(fragments: list[SampleFragment], **changes):
    return stack_fragments(fragments, BatchShape.holding(fragments, 1), reading(**changes))


def test_shorter_fragments_are_padded_with_what_does_not_count(policy):
    fragments = [make_fragment(policy, 4, 0), make_fragment(policy, 2, 1)]
    arrays = stacked(fragments)
    assert arrays.observations[""].shape == (5, 2, 3) and arrays.actions[""].shape == (4, 2)
    np.testing.assert_array_equal(arrays.counted.T, [[True] * 4, [True, True, False, False]])
    for name in ("rewards", "logprobs"):
        np.testing.assert_array_equal(getattr(arrays, name)[:, 0], getattr(fragments[0], name))
        np.testing.assert_array_equal(getattr(arrays, name)[:, 1], [*getattr(fragments[1], name), 0, 0])
    np.testing.assert_array_equal(arrays.observations[""][:3, 1], fragments[1].observations[""])
    np.testing.assert_array_equal(arrays.actions[""][:, 1], [*fragments[1].actions[""], 0, 0])
    assert arrays.actions[""].dtype == np.int32, "JAX has no 64-bit integers by default"


def test_final_observations_are_packed_where_a_value_is_bootstrapped_from_them(policy):
    """Not those of terminated episodes, nor those behind a fault."""
    first = make_fragment(policy, 4, 0, ends={1: "terminated", 2: "truncated"})
    second = make_fragment(policy, 4, 1, ends={0: "truncated", 3: "truncated"})
    third = with_fault(make_fragment(policy, 4, 2, ends={2: "truncated"}), 2)
    arrays = stacked([first, second, third])
    np.testing.assert_array_equal(arrays.final_steps, [2, 0, 3] + [4] * 13)
    np.testing.assert_array_equal(arrays.final_fragments[:3], [0, 1, 1])
    np.testing.assert_array_equal(arrays.final_observations[""][0], first.final_observations[""][1])
    np.testing.assert_array_equal(arrays.final_observations[""][1:3], second.final_observations[""])
    assert not arrays.final_observations[""][3:].any()


def test_integers_keep_their_values(policy):
    """As the policy's device has them, in last observations too."""
    leaf = LeafSpace("", "box", (3,), "int64", low=0, high=2**32 - 1)
    spaces = Spaces((leaf,), SPACES.actions)
    fragment = make_fragment(policy, 2, 0, ends={0: "truncated"})
    values = np.array([[0, 2**31, 2**32 - 1]] * 3)
    fragment = replace(fragment, observations={"": values}, final_observations={"": values[:1]})
    arrays = stacked([fragment], spaces=spaces)
    for array in (arrays.observations[""][:, 0], arrays.final_observations[""][:1]):
        assert array.dtype == np.uint32 and (array == values[0]).all()


def test_there_are_few_sizes(policy):
    many = [make_fragment(policy, 4, seed, ends={step: "truncated" for step in range(4)}) for seed in range(5)]
    assert BatchShape.holding(many[:4], 1) == (4, 4, 16)
    assert BatchShape.holding(many, 1) == (4, 5, 64)
    assert BatchShape.holding(many, 5, least_steps=9) == (9, 5, 64)
    assert BatchShape.holding(many, 2) == (4, 6, 64), "one blank fragment evens the minibatches out"
    assert BatchShape.holding(many[:2], 8) == (4, 2, 16), "there are no more minibatches than fragments"


def test_a_truncation_without_its_last_observation_does_not_count(policy):
    fragment = make_fragment(policy, 4, 0, ends={1: "truncated", 3: "terminated"})
    unknown = replace(
        fragment, final_steps=np.zeros(0, np.int32), final_observations={"": np.zeros((0, 3), np.float32)}
    )
    np.testing.assert_array_equal(stacked([unknown]).counted[:, 0], [True, False, True, True])
    np.testing.assert_array_equal(stacked([fragment]).counted[:, 0], [True] * 4)


def test_what_ended_by_itself_needs_no_value_though_it_was_cut_too(policy):
    both = make_fragment(policy, 4, 0, ends={1: "terminated"}, truncated=np.arange(4) == 1)
    arrays = stacked([both])
    assert arrays.counted.all() and (arrays.final_steps == 4).all()
    unknown = {"final_steps": np.zeros(0, np.int32), "final_observations": {"": np.zeros((0, 3), np.float32)}}
    assert stacked([replace(both, **unknown)]).counted.all()


def test_nothing_of_a_fault_is_left_that_could_meet_a_gradient(policy):
    fragment = with_fault(with_fault(make_fragment(policy, 4, 0), 1), 2)
    observations = fragment.observations[""].copy()
    observations[1:3] = [np.nan, np.inf, 2.0], [-np.inf, 0.5, -1.0]
    arrays = stacked([replace(fragment, observations={"": observations})])
    np.testing.assert_array_equal(arrays.counted[:, 0], [True, False, False, True])
    assert arrays.rewards[1, 0] == arrays.logprobs[1, 0] == arrays.actions[""][1, 0] == 0
    np.testing.assert_array_equal(arrays.observations[""][1:3, 0], [[0.0, 0.0, 2.0], [0.0, 0.5, -1.0]])


def test_the_return_of_a_step_that_does_not_count_is_not_told(policy):
    fragment = replace(make_fragment(policy, 3, 0), rewards=np.float32([1, 2, 3]))
    assert squared_returns(stacked([with_fault(fragment, 1)]), 1.0).tolist() == [[4.0**2 + 3.0**2, 2.0]]


def test_age_is_that_of_the_oldest_step_that_counts(policy):
    def aged(seed: int, *versions: int) -> SampleFragment:
        return replace(make_fragment(policy, 3, seed), weight_steps=np.array(versions, np.int32))

    fragments = [aged(0, 5, 5, 5), aged(1, 4, 4, 5), aged(2, 3, 5, 5), with_fault(aged(3, 3, 5, 5), 0)]
    np.testing.assert_array_equal(stacked(fragments).old, [False, False, True, False])
    assert not stacked(fragments, old_beyond=None).old.any()


def test_own_steps_of_a_recurrent_policy_follow_only_own_steps():
    policy = make_policy("gru")
    state = {"hidden": np.zeros((1, 8), np.float32)}
    fragment = make_fragment(policy, 6, 0, ends={3: "terminated"})
    fragment = replace(fragment, weight_steps=np.array([5, 4, 5, 5, 5, 5], np.int32))
    with_memory = stacked([fragment], initial_state=state).own_version[:, 0]
    np.testing.assert_array_equal(with_memory, [True, False, False, False, True, True])
    plain = replace(fragment, initial_state={})
    np.testing.assert_array_equal(stacked([plain]).own_version[:, 0], [True, False, True, True, True, True])
    begun = replace(fragment, weight_steps=np.array([4, 5, 5, 5, 5, 5], np.int32))
    with_memory = stacked([begun], initial_state=state).own_version[:, 0]
    np.testing.assert_array_equal(with_memory, [False, False, False, False, True, True])


def test_own_steps_are_among_those_that_count(policy):
    arrays = stacked([make_fragment(policy, 3, 0, version=5), with_fault(make_fragment(policy, 2, 1, version=5), 1)])
    np.testing.assert_array_equal(arrays.own_version.T, [[True, True, True], [True, False, False]])


def test_recurrent_state_is_each_fragments_own():
    policy = make_policy("gru")
    states = [np.full(8, value, np.float32) for value in (1.0, 2.0)]
    fragments = [make_fragment(policy, 2 + i, i, state={"hidden": state}) for i, state in enumerate(states)]
    arrays = stacked(fragments, initial_state={"hidden": np.zeros((1, 8), np.float32)})
    np.testing.assert_array_equal(arrays.initial_state["hidden"], states)


def test_a_fragment_of_another_policy_is_named(policy):
    fragment = make_fragment(policy, 2, 7)
    with pytest.raises(
        InvalidRolloutError, match=r"w-0-0-7/0: observations\[''\] is \[3, 2\], the policy needs \[3, 3\]"
    ):
        stacked([replace(fragment, observations={"": np.zeros((3, 2), np.float32)})])
    with pytest.raises(InvalidRolloutError, match=r"initial_state has \[\], the policy needs \['hidden'\]"):
        stacked([fragment], initial_state={"hidden": np.zeros((1, 8), np.float32)})
    with pytest.raises(InvalidRolloutError, match=r"actions has \['x'\]"):
        stacked([replace(fragment, actions={"x": fragment.actions[""]})])


def test_blank_arrays_count_nothing():
    arrays = blank_arrays(BatchShape(3, 2, 16), reading())
    assert not arrays.counted.any() and (arrays.final_steps == 3).all()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 5))
def test_minibatches_of_steps_are_an_even_partition_of_those_that_count(steps, fragments, minibatches, seed):
    counted = np.random.default_rng(seed).random((steps, fragments)) < 0.7
    chosen = minibatch_steps(counted, minibatches, np.random.default_rng(seed))
    real = [row[row < counted.size] for row in chosen]
    assert sorted(np.concatenate(real)) == list(np.flatnonzero(counted))
    assert max(map(len, real)) - min(map(len, real)) <= 1 and chosen.shape[0] == minibatches
    assert set(chosen[chosen >= counted.size]) <= {(steps + 1) * fragments}, "none of the observations either"
    np.testing.assert_array_equal(chosen, minibatch_steps(counted, minibatches, np.random.default_rng(seed)))


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
def test_minibatches_are_an_even_partition(count, minibatches, seed):
    columns = minibatch_columns(count, minibatches, count, np.random.default_rng(seed))
    real = [row[row != count] for row in columns]
    assert sorted(np.concatenate(real)) == list(range(count))
    assert len(real) == min(minibatches, count)
    assert max(map(len, real)) - min(map(len, real)) <= 1 and min(map(len, real)) >= 1
    again = minibatch_columns(count, minibatches, count, np.random.default_rng(seed))
    np.testing.assert_array_equal(columns, again)

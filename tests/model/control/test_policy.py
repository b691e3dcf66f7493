from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.control import make_control_policy, named_arrays
from penstock.model.control.encoders import ObservationStatistics
from penstock.types import ConfigError, LeafSpace

OBSERVATIONS = (
    LeafSpace("image", "box", (36, 36, 3), "uint8"),
    LeafSpace("vector", "box", (3,), "float32"),
    LeafSpace("held", "discrete", (), "int64", (5,)),
)
ACTIONS = (LeafSpace("buttons", "multi_discrete", (1,), "int64", (7,)), LeafSpace("camera", "box", (2,), "float32"))
STEPS, BATCH = 5, 3
FIRST = jnp.zeros((STEPS, BATCH), bool).at[0, 1].set(True).at[3, 0].set(True)


@pytest.mark.parametrize(
    ("network", "memory", "normalized"),
    [("mlp", "none", True), ("nature_cnn", "gru", False), ("mlp", "lstm", True), ("impala_cnn", "transformer", False)],
)
def test_unrolling_equals_stepping(make_policy, draw, network, memory, normalized):
    sizes = {"impala_channels": (4,), "image_features": 8}
    policy = make_policy(OBSERVATIONS, ACTIONS, network=network, memory=memory, **sizes)
    observations, actions = draw(OBSERVATIONS, STEPS, BATCH), draw(ACTIONS, STEPS, BATCH)
    if normalized:
        seen = {"vector": 7 + 3 * draw(OBSERVATIONS, STEPS, BATCH, seed=1)["vector"]}
        statistics = ObservationStatistics.of_none(policy.config, OBSERVATIONS)
        policy = replace(policy, statistics=statistics.with_steps(seen, jnp.ones((STEPS, BATCH), bool)))
    state = policy.initial_state(BATCH)
    distribution, values, after = jax.jit(lambda *args: policy.unroll(*args))(observations, FIRST, state)
    logprobs = distribution.log_prob(actions)
    step = jax.jit(lambda *args: policy.step(*args))
    for t in range(STEPS):
        row = jax.tree.map(lambda array, t=t: array[t], (observations, actions))
        one, value, state = step(row[0], state, FIRST[t])
        np.testing.assert_allclose(values[t], value, atol=1e-5)
        np.testing.assert_allclose(logprobs[t], one.log_prob(row[1]), atol=1e-5)
        for name in state:
            np.testing.assert_allclose(after[name][t], state[name], atol=1e-5)
    assert set(after) == set(policy.initial_state(1)) == set(state)


def test_acting_samples_and_says_how_probable_it_was(make_policy, draw):
    policy = make_policy(OBSERVATIONS, ACTIONS, memory="gru")
    observations, state = draw(OBSERVATIONS, BATCH), policy.initial_state(BATCH)
    actions, logprobs, values, after = policy.act(observations, state, jax.random.key(1))
    distribution, expected, _ = policy.step(observations, state, jnp.zeros(BATCH, bool))
    np.testing.assert_allclose(logprobs, distribution.log_prob(actions), rtol=1e-6)
    np.testing.assert_array_equal(values, expected)
    assert actions["buttons"].shape == (BATCH, 1) and after["hidden"].shape == (BATCH, 8)


def test_the_first_policy_is_close_to_uniform_and_values_can_begin_at_zero(make_policy, draw):
    policy = make_policy(actions=(LeafSpace("", "discrete", (), "int64", (4,)),), perturbed=False, value_gain=0.0)
    distribution, values, _ = policy.step(draw(policy.spaces.observations, 64), {}, jnp.zeros(64, bool))
    np.testing.assert_allclose(distribution.entropy(), np.log(4), atol=1e-3)
    assert np.asarray(distribution.entropy()).min() < np.log(4) - 1e-9  # but not without any weight
    np.testing.assert_array_equal(values, np.zeros(64))


def test_a_seed_names_the_weights(make_policy):
    one, same, other = (make_policy(perturbed=False, seed=seed) for seed in (1, 1, 2))
    arrays, again = named_arrays(one), named_arrays(same)
    assert all((arrays[name] == again[name]).all() for name in arrays)
    assert (named_arrays(other)["heads.0.dense.weight"] != arrays["heads.0.dense.weight"]).any()


def test_a_separate_value_network_shares_nothing(make_policy, draw):
    policy = make_policy(value_network="separate")
    observations = draw(policy.spaces.observations, 2)

    def value(policy):
        return policy.step(observations, {}, jnp.zeros(2, bool))[1].sum()

    gradient = jax.jit(jax.grad(value))(policy)
    assert all((np.asarray(a) == 0).all() for a in jax.tree.leaves((gradient.encoder, gradient.heads)))
    assert all((np.asarray(a) != 0).any() for a in jax.tree.leaves(gradient.value_encoder))
    shared = jax.jit(jax.grad(value))(make_policy())
    assert (shared.encoder.mlp.layers[0].weight != 0).any()


@pytest.mark.parametrize("memory", ["gru", "lstm", "transformer"])
def test_every_parameter_has_a_gradient(make_policy, draw, memory):
    policy = make_policy(OBSERVATIONS, ACTIONS, memory=memory, memory_window=3)
    actions = draw(ACTIONS, STEPS, BATCH)

    def score(policy):
        args = draw(OBSERVATIONS, STEPS, BATCH), FIRST, policy.initial_state(BATCH)
        distribution, values, _ = policy.unroll(*args)
        return (distribution.log_prob(actions) + values).sum()

    for name, gradient in named_arrays(jax.jit(jax.grad(score))(policy)).items():
        assert np.isfinite(gradient).all() and (np.asarray(gradient) != 0).any(), name


def test_the_spaces_and_the_config_travel_with_the_policy(make_policy):
    policy = make_policy(OBSERVATIONS, ACTIONS)
    assert policy.spaces.observations == OBSERVATIONS
    again = make_control_policy(policy.config, policy.spaces, seed=0)
    assert jax.tree.structure(again) == jax.tree.structure(policy)


@pytest.mark.parametrize("side", ["observations", "actions"])
def test_a_leaf_without_a_number_is_refused_by_name(make_policy, side):
    with pytest.raises(ConfigError, match=r"^box 'rest' has shape \[2, 0\], which holds no number: wrap the simulator"):
        make_policy(**{side: (LeafSpace("rest", "box", (2, 0), "float32"), LeafSpace("", "box", (3,), "float32"))})

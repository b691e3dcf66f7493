import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import OptimizerConfig
from penstock.learner.optimizer import apply_gradients, initial_state
from penstock.types import ConfigError

RATE = jnp.float32(0.1)
FINITE = jnp.float32(0.0)


def test_warm_up_rises_linearly_and_the_first_update_already_learns():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [config.rate_at(step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert OptimizerConfig(learning_rate=1.0, warmup_steps=0).rate_at(0, 10) == 1.0


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)])
def test_schedules_fall_to_their_floor_at_the_last_update(schedule, middle):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=1, schedule=schedule, final_fraction=0.1)
    last = 1.0 if schedule == "constant" else 0.1
    rates = [config.rate_at(step, 12) for step in range(12)]
    assert rates[1] == pytest.approx(1.0)
    assert rates[6] == pytest.approx(middle)
    assert rates[11] == pytest.approx(last)
    assert config.rate_at(500, 12) == pytest.approx(last)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_a_learning_rate_of_zero_stays_zero():
    assert OptimizerConfig(learning_rate=0.0).rate_at(3, 10) == 0.0


def _step(config, parameters, gradients, state=None, loss=FINITE, rate=RATE):
    state = initial_state(config, parameters) if state is None else state
    return apply_gradients(config, parameters, state, gradients, rate, loss)


def test_two_adamw_steps_by_hand():
    config = OptimizerConfig(beta1=0.9, beta2=0.99, weight_decay=0.5, max_grad_norm=None, epsilon=0.1)
    parameters = {"weight": jnp.array([1.0, -2.0])}
    mean = square = np.zeros(2)
    expected, state = np.array([1.0, -2.0]), None
    for count, gradient in enumerate(([0.5, -1.0], [0.25, 3.0]), start=1):
        gradients = {"weight": jnp.array(gradient)}
        parameters, state, applied = _step(config, parameters, gradients, state)
        mean = 0.9 * mean + 0.1 * np.array(gradient)
        square = 0.99 * square + 0.01 * np.array(gradient) ** 2
        scaled = (mean / (1 - 0.9**count)) / (np.sqrt(square / (1 - 0.99**count)) + 0.1)
        expected = expected - 0.1 * (scaled + 0.5 * expected)
        np.testing.assert_allclose(parameters["weight"], expected, rtol=1e-5)
        assert float(applied.grad_norm) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)


def test_decay_spares_norms_and_biases(decoder):
    config = OptimizerConfig(weight_decay=1.0)
    nothing = jax.tree.map(jnp.zeros_like, decoder)
    after, _, _ = _step(config, decoder, nothing)
    for name in ("input_norm", "post_norm", "query_bias", "key_bias", "value_bias"):
        np.testing.assert_array_equal(getattr(after.layers, name), getattr(decoder.layers, name))
    np.testing.assert_array_equal(after.final_norm, decoder.final_norm)
    for name in ("query", "output", "gate", "down"):
        np.testing.assert_allclose(getattr(after.layers, name), 0.9 * getattr(decoder.layers, name), rtol=1e-6)
    np.testing.assert_allclose(after.embedding, 0.9 * decoder.embedding, rtol=1e-6)


def test_large_gradients_are_scaled_to_the_limit_and_reported_unscaled():
    """Adam forgets a constant scale, so the clip shows in its moments."""
    config = OptimizerConfig(max_grad_norm=1.0, beta1=0.0)
    parameters = {"weight": jnp.zeros(2)}
    _, state, applied = _step(config, parameters, {"weight": jnp.array([3.0, 4.0])})
    moments = [np.asarray(leaf) for leaf in jax.tree.leaves(state.adam) if np.shape(leaf) == (2,)]
    np.testing.assert_allclose(moments[0], [0.6, 0.8], rtol=1e-6)
    assert float(applied.grad_norm) == 5.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_what_is_not_finite_changes_neither_parameters_nor_moments(bad, where):
    config = OptimizerConfig()
    parameters = {"weight": jnp.array([1.0, 2.0]), "other": jnp.array([3.0])}
    good = {"weight": jnp.array([0.1, 0.2]), "other": jnp.array([0.3])}
    parameters, state, _ = _step(config, parameters, good)
    gradients = good | ({"other": jnp.array([bad])} if where == "gradient" else {})
    loss = jnp.float32(bad if where == "loss" else 0.0)
    after, kept, applied = _step(config, parameters, gradients, state, loss)
    assert not applied.finite
    jax.tree.map(np.testing.assert_array_equal, (after, kept), (parameters, state))
    _, _, applied = _step(config, parameters, good, state)
    assert applied.finite


def test_bfloat16_parameters_have_float32_masters_that_keep_small_steps():
    config = OptimizerConfig(max_grad_norm=None)
    parameters = {"weight": jnp.array([1.0], jnp.bfloat16)}
    state, seen, changed = initial_state(config, parameters), [], []
    for _ in range(8):
        gradients = {"weight": jnp.array([1.0])}
        parameters, state, applied = _step(config, parameters, gradients, state, rate=jnp.float32(1e-3))
        seen.append(float(parameters["weight"][0]))
        changed.append(float(applied.changed_fraction))
    assert parameters["weight"].dtype == jnp.bfloat16
    assert state.master["weight"].dtype == jnp.float32
    assert float(state.master["weight"][0]) == pytest.approx(0.992, abs=1e-4)
    assert seen[0] == 1.0 and seen[-1] < 1.0, "single steps are below bfloat16's last bit, their sum is not"
    # The master passes the middle between two bfloat16 numbers, 2^-8 apart below 1, at its 2nd and 6th step.
    assert changed == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_weight_of_a_hundredth_moves_after_many_updates_of_a_small_rate_as_far_as_the_master():
    config = OptimizerConfig(max_grad_norm=None)
    parameters = {"weight": jnp.full(1, 0.02, jnp.bfloat16)}  # its neighbours are 2^-13 = 1.2e-4 away
    start, state, first = float(parameters["weight"][0]), initial_state(config, parameters), 0
    for update in range(1, 101):
        parameters, state, applied = _step(config, parameters, {"weight": jnp.ones(1)}, state, rate=jnp.float32(1e-6))
        first = first or update * int(applied.changed_fraction)
    assert (first, start - float(parameters["weight"][0])) == (62, 2.0**-13)
    assert start - float(state.master["weight"][0]) == pytest.approx(1e-4, rel=1e-3)


def test_decay_is_of_the_master():
    config = OptimizerConfig(weight_decay=0.5, max_grad_norm=None)
    parameters = {"weight": jnp.ones(1, jnp.bfloat16)}
    state = initial_state(config, parameters)._replace(master={"weight": jnp.array([1.003])})
    _, kept, _ = _step(config, parameters, {"weight": jnp.zeros(1)}, state, rate=jnp.float32(1.0))
    assert float(kept.master["weight"][0]) == pytest.approx(0.5 * 1.003, rel=1e-6)


def test_the_share_of_elements_that_changed_is_of_those_that_train():
    config = OptimizerConfig(frozen=("embedding",))
    parameters = {"embedding": jnp.ones(6), "head": jnp.ones(4)}
    gradients = {"embedding": jnp.ones(6), "head": jnp.array([1.0, 0.0, 0.0, 0.0])}
    assert float(_step(config, parameters, gradients)[2].changed_fraction) == 0.25
    assert float(_step(config, parameters, gradients, loss=jnp.float32(jnp.nan))[2].changed_fraction) == 0.0


def test_float32_parameters_need_no_second_copy():
    assert initial_state(OptimizerConfig(), {"weight": jnp.zeros(2)}).master is None
    mixed = {"weight": jnp.zeros(2, jnp.bfloat16), "norm": jnp.zeros(2)}
    assert jax.tree.map(lambda leaf: leaf.dtype, initial_state(OptimizerConfig(), mixed).master) == {
        "weight": jnp.float32,
        "norm": jnp.float32,
    }


def test_frozen_arrays_stay_and_their_gradients_count_for_nothing():
    config = OptimizerConfig(frozen=("embedding", "layers.*"), weight_decay=0.1, max_grad_norm=1.0)
    parameters = {"embedding": jnp.ones(2), "layers": {"query": jnp.ones(2)}, "head": jnp.ones(2)}
    gradients = jax.tree.map(lambda leaf: 30.0 * leaf, parameters) | {"head": jnp.array([3.0, 4.0])}
    moved, _, applied = _step(config, parameters, gradients)
    np.testing.assert_array_equal(moved["embedding"], [1.0, 1.0])
    np.testing.assert_array_equal(moved["layers"]["query"], [1.0, 1.0])
    assert (np.asarray(moved["head"]) < 1.0).all()
    assert float(applied.grad_norm) == 5.0


def test_frozen_arrays_that_the_model_does_not_have_are_bad_input():
    with pytest.raises(ConfigError, match=r"learner.optimizer.frozen.*'head.\*'"):
        initial_state(OptimizerConfig(frozen=("head.*",)), {"embedding": jnp.ones(2)})


def test_wsd_stays_at_the_peak_and_falls_over_its_share() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="wsd", decay_fraction=0.4, final_fraction=0.2)
    rates = [config.rate_at(step, 10) for step in range(11)]
    np.testing.assert_allclose(rates, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_wsd_falls_over_what_a_long_warm_up_leaves() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, schedule="wsd", decay_fraction=1.0, final_fraction=0.0)
    rates = [config.rate_at(step, 6) for step in range(6)]
    np.testing.assert_allclose(rates, [1 / 3, 2 / 3, 1, 1, 0.5, 0])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_share_of_decay_without_wsd_is_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=f"decay_fraction is 0.5, which has no effect: schedule is '{schedule}'"):
        OptimizerConfig.model_validate({"schedule": schedule, "decay_fraction": 0.5})

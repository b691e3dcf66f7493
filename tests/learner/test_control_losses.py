import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner.control_config import PpoConfig
from penstock.learner.control_losses import (
    StepOutputs,
    StepTargets,
    explained_variance,
    kl_estimate,
    masked_mean,
    normalised,
    ppo_loss,
)

NOTHING = np.zeros(3, bool)


def array(*values: float) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def make_steps(**changes) -> StepTargets:
    """Four steps, the last with a fault; each number is different."""
    fields = {
        "advantages": array(2.0, -1.0, 0.5, 1e6),
        "targets": array(1.0, 2.0, -1.0, 1e6),
        "values": array(0.0, 0.0, 0.0, 1e6),
        "logprobs": array(-1.0, -1.0, -1.0, 0.0),
        "weights": array(1.0, 0.5, 2.0, 1e6),
        "trained": jnp.array([True, True, True, False]),
    }
    return StepTargets(**(fields | changes))


def make_outputs() -> StepOutputs:
    """Ratios 1.5, .5, 1 and e^5."""
    log_ratios = jnp.log(array(1.5, 0.5, 1.0, 1.0)) + array(0, 0, 0, 5.0)
    return StepOutputs(
        array(-1.0, -1.0, -1.0, 0.0) + log_ratios,
        array(0.5, 1.0, 1.0, -1e6),
        array(0.1, 0.2, 0.6, 1e6),
        array(1.0, 2.0, 3.0, 1e6),
    )


PLAIN = PpoConfig(normalize_advantages="none", entropy_coefficient=0.1, value_coefficient=0.5)


def test_a_mean_is_over_what_counts_and_zero_over_nothing():
    assert masked_mean(array(1.0, 5.0, np.nan), jnp.array([True, True, False])) == 3.0
    assert masked_mean(array(1.0, 5.0, np.nan), jnp.asarray(NOTHING)) == 0.0


def test_normalised_by_hand():
    np.testing.assert_allclose(normalised(array(1.0, 3.0, 9.0), jnp.array([True, True, False])), [-1.0, 1.0, 0.0])
    np.testing.assert_array_equal(normalised(array(7.0, 7.0, 1.0), jnp.array([True, True, False])), [0, 0, 0])


def test_kl_estimate_and_explained_variance_by_hand():
    np.testing.assert_allclose(kl_estimate(array(0.0, np.log(2.0))), [0.0, 1 - np.log(2.0)], rtol=1e-6)
    where = jnp.array([True, True, True, False])
    targets = array(0.0, 3.0, 6.0, 1e6)
    assert explained_variance(targets, targets, where) == 1.0
    assert explained_variance(array(5.0, 5.0, 5.0, 0.0), targets, where) == 0.0
    assert explained_variance(targets + 7, targets, where) == 1.0, "a constant error is no variance"
    np.testing.assert_allclose(explained_variance(array(1.0, 1.0, 4.0, 0.0), targets, where), 1 - 2 / 6)
    assert not np.isfinite(explained_variance(targets, array(1.0, 1.0, 1.0, 2.0), where))


def test_the_whole_loss_by_hand():
    """Surrogates 2.4, −.8, .5 times weights 1, .5, 2; value errors .125, .5, 2; entropy .3; KL 2."""
    loss, terms = ppo_loss(PLAIN, make_outputs(), make_steps(), jnp.float32(0.01))
    assert terms.policy_loss == pytest.approx(-(2.4 - 0.4 + 1.0) / 3)
    assert terms.value_loss == pytest.approx((0.125 + 0.5 + 2.0) / 3)
    assert terms.entropy == pytest.approx(0.3) and terms.reference_kl == pytest.approx(2.0)
    assert terms.clip_fraction == pytest.approx(2 / 3) and terms.ratio_mean == pytest.approx(1.0)
    expected_kl = ((0.5 - np.log(1.5)) + (-0.5 - np.log(0.5))) / 3
    assert terms.approx_kl == pytest.approx(expected_kl, rel=1e-5)
    assert loss == pytest.approx(-1.0 + 0.5 * 0.875 - 0.1 * 0.3 + 0.01 * 2.0, rel=1e-6)
    assert terms.loss == loss


def test_the_loss_has_a_dual_clip_and_clipped_values():
    config = PLAIN.model_copy(update={"dual_clip": 1.25, "value_clip": 0.25})
    steps = make_steps(advantages=array(-1.0, -1.0, 0.5, 1e6))
    _, terms = ppo_loss(config, make_outputs(), steps, jnp.float32(0.0))
    assert terms.policy_loss == pytest.approx(-(-1.25 * 1.0 - 0.8 * 0.5 + 0.5 * 2.0) / 3)
    assert terms.clip_fraction == pytest.approx(2 / 3)
    assert terms.value_loss == pytest.approx((0.75**2 / 2 + 1.75**2 / 2 + 2.0) / 3)


def test_normalisation_over_a_minibatch_is_of_its_trained_steps():
    config = PLAIN.model_copy(update={"normalize_advantages": "minibatch"})
    advantages = (np.array([2.0, -1.0, 0.5]) - 0.5) / np.std([2.0, -1.0, 0.5])
    surrogate = np.array([1.2 * advantages[0], 0.8 * advantages[1], advantages[2]])
    _, terms = ppo_loss(config, make_outputs(), make_steps(), jnp.float32(0.0))
    assert terms.policy_loss == pytest.approx(-(surrogate * [1.0, 0.5, 2.0]).mean(), rel=1e-5)


def test_nothing_flows_from_a_step_that_is_not_trained():
    def loss_of(outputs: StepOutputs) -> jax.Array:
        return ppo_loss(PLAIN, outputs, make_steps(), jnp.float32(0.01))[0]

    for gradient in jax.grad(loss_of)(make_outputs()):
        assert gradient[3] == 0.0 and np.isfinite(gradient).all() and np.any(np.asarray(gradient[:3]) != 0)


def test_the_warm_up_is_of_values_alone():
    def loss_of(outputs: StepOutputs) -> jax.Array:
        return ppo_loss(PLAIN, outputs, make_steps(), jnp.float32(0.01), values_only=True)[0]

    gradients = jax.grad(loss_of)(make_outputs())
    assert not np.any(gradients.logprobs) and not np.any(gradients.entropy) and not np.any(gradients.reference_kl)
    np.testing.assert_allclose(gradients.values[:3], 0.5 * np.array([-0.5, -1.0, 2.0]) / 3)

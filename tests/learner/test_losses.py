import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import LossConfig, PolicyLoss
from penstock.learner.losses import (
    cispo_surrogate,
    masked_weight,
    policy_token_loss,
    ppo_clipped,
    ppo_surrogate,
    reinforce_surrogate,
    supervised_token_loss,
    truncated_weight,
)
from penstock.types import ConfigError

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def array(*values: float) -> jax.Array:
    return jnp.array(values, jnp.float32)


RATIO = array(1.5, 1.5, 0.5, 0.5, 1.1, 1.0)
ADVANTAGE = array(1.0, -1.0, 1.0, -1.0, 2.0, 3.0)


def test_ppo_takes_the_worse_of_ratio_and_clip():
    values = ppo_surrogate(RATIO, ADVANTAGE, 0.2, 0.2)
    np.testing.assert_allclose(values, [1.2, -1.5, 0.5, -0.8, 2.2, 3.0], rtol=1e-6)
    assert ppo_clipped(RATIO, ADVANTAGE, 0.2, 0.2).tolist() == [True, False, False, True, False, False]
    assert float(ppo_surrogate(array(1.5), array(1.0), 0.2, 0.28)[0]) == pytest.approx(1.28)


def test_ppo_has_no_gradient_where_the_clip_decides():
    gradient = jax.grad(lambda r: ppo_surrogate(r, ADVANTAGE, 0.2, 0.2).sum())(RATIO)
    np.testing.assert_allclose(gradient, [0, -1, 1, 0, 2, 3])


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    logprobs = array(-1.0, -2.0)
    np.testing.assert_allclose(cispo_surrogate(array(2.0, 0.5), array(1, 1), logprobs, 0.28), [-1.28, -1.0])
    gradient = jax.grad(lambda ell: cispo_surrogate(jnp.exp(ell + 2), array(1, -1), ell, 0.28).sum())(logprobs)
    np.testing.assert_allclose(gradient, [1.28, -1.0], rtol=1e-6)


def test_reinforce_is_advantage_times_logprob():
    np.testing.assert_allclose(reinforce_surrogate(array(2, -1), array(-1, -3)), [-2, 3])


def test_corrections_truncate_or_mask():
    np.testing.assert_allclose(truncated_weight(array(0.5, 1, 3, np.inf), 2.0), [0.5, 1, 2, 2])
    np.testing.assert_allclose(masked_weight(array(0.4, 0.5, 1, 5, 6, np.inf), 0.5, 5.0), [0, 0.5, 1, 5, 0, 0])


@pytest.mark.parametrize("surrogate", ["ppo", "reinforce", "cispo"])
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"kind": "truncate", "cap": 2.0}, [1.0, np.exp(-1.0), 2.0, 2.0]),
        ({"kind": "mask", "low": 0.5, "high": 5.0}, [1.0, 0.0, np.exp(1.0), 0.0]),
        ({"kind": "none"}, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_with_one_step_per_batch_the_gradient_is_reinforce_with_one_bounded_ratio(surrogate, correction, weights):
    """The off-policy ratio must appear once: in the bounded weight, never again in the surrogate."""
    config = LossConfig(surrogate=surrogate, correction=correction)
    logprobs, behaviour = array(-1, -2, -1, -1), array(-1, -1, -2, -90)
    advantage = array(1, -2, 0.5, -1)
    gradient = jax.grad(lambda ell: policy_token_loss(config, ell, behaviour, advantage).loss.sum())(logprobs)
    np.testing.assert_allclose(gradient, -np.array(weights) * np.asarray(advantage), rtol=1e-6)


def test_with_one_step_per_batch_the_clip_never_acts_and_the_bound_is_reported():
    behaviour = array(-1, -1, -5, -9)
    terms = policy_token_loss(LossConfig(), array(-1, -2, -1, -1), behaviour, array(1, 1, 1, -1))
    assert not terms.clipped.any()
    assert terms.bounded.tolist() == [False, False, True, True]
    np.testing.assert_allclose(terms.loss, [-1, -np.exp(-1.0), -2, 2], rtol=1e-6)
    unbounded = policy_token_loss(LossConfig(correction={"kind": "none"}), array(-1), array(-9), array(1))
    assert not unbounded.bounded.any()


def test_a_behaviour_probability_of_nearly_nothing_gives_no_nan():
    config = LossConfig()
    gradient = jax.grad(lambda ell: policy_token_loss(config, ell, array(-1e4), array(1)).loss.sum())(array(-1.0))
    np.testing.assert_allclose(gradient, [-2.0])


def test_the_supervised_loss_is_cross_entropy():
    np.testing.assert_allclose(supervised_token_loss(array(-1, -3), array(9, 9), array(7, 7)).loss, [1, 3])


def test_the_loss_module_gives_advantages_and_losses():
    from penstock.types import Rollout, RolloutGroup

    one, zero = np.ones(1, np.int32), np.zeros(1, np.float32)
    group = RolloutGroup("k", tuple(Rollout("e", "x", one, one, zero, np.float32([r]), r) for r in (0.0, 1.0, 0.0)))
    module = PolicyLoss(LossConfig())
    np.testing.assert_allclose(module.compute_advantages(group), [-0.5, 1, -0.5])
    assert module.loss(array(-1), array(-1), array(3)).loss.tolist() == [-3]
    with pytest.raises(ConfigError, match="whole batch"):
        PolicyLoss(LossConfig(advantage="reinforce_pp")).compute_advantages(group)
    with pytest.raises(ConfigError, match="one number per token"):
        PolicyLoss(LossConfig(advantage="turn")).compute_advantages(group)

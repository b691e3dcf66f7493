import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import CorrectionConfig, LossConfig, PolicyLoss
from penstock.learner.losses import (
    LossInputs,
    cispo_surrogate,
    correction_weight,
    policy_token_loss,
    ppo_clipped,
    ppo_surrogate,
    sequence_ratio,
    supervised_token_loss,
)
from penstock.types import ConfigError

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def array(*values: float) -> jax.Array:
    return jnp.array(values, jnp.float32)


def inputs(logprobs: jax.Array, behaviour: jax.Array, advantage: jax.Array, **more: jax.Array) -> LossInputs:
    """Of one optimiser step per update, every token a sequence of its own, unless `more` says otherwise."""
    n = len(logprobs)
    given = {
        "proximal_logprobs": jax.lax.stop_gradient(logprobs),
        "entropy": jnp.zeros(n),
        "sequence": jnp.arange(n, dtype=jnp.int32),
        "real": jnp.ones(n, bool),
    }
    return LossInputs(logprobs=logprobs, behaviour_logprobs=behaviour, advantage=advantage, **(given | more))


RATIO = array(1.5, 1.5, 0.5, 0.5, 1.1, 1.0)
ADVANTAGE = array(1.0, -1.0, 1.0, -1.0, 2.0, 3.0)


def test_ppo_takes_the_worse_of_ratio_and_clip():
    values = ppo_surrogate(RATIO, ADVANTAGE, 0.2, 0.2)
    np.testing.assert_allclose(values, [1.2, -1.5, 0.5, -0.8, 2.2, 3.0], rtol=1e-6)
    assert ppo_clipped(RATIO, ADVANTAGE, 0.2, 0.2).tolist() == [True, False, False, True, False, False]
    assert float(ppo_surrogate(array(1.5), array(1.0), 0.2, 0.28)[0]) == pytest.approx(1.28)
    assert not ppo_clipped(array(0.5, 1.5, 0.5, 9.0), array(0.5, 0, 0, 0), 0.2, 0.2, 3.0).any()


def test_ppo_has_no_gradient_where_the_clip_decides():
    gradient = jax.grad(lambda r: ppo_surrogate(r, ADVANTAGE, 0.2, 0.2).sum())(RATIO)
    np.testing.assert_allclose(gradient, [0, -1, 1, 0, 2, 3])


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    logprobs = array(-1.0, -2.0)
    np.testing.assert_allclose(cispo_surrogate(array(2.0, 0.5), array(1, 1), logprobs, 0.28), [-1.28, -1.0])
    gradient = jax.grad(lambda ell: cispo_surrogate(jnp.exp(ell + 2), array(1, -1), ell, 0.28).sum())(logprobs)
    np.testing.assert_allclose(gradient, [1.28, -1.0], rtol=1e-6)


def test_reinforce_is_advantage_times_logprob():
    terms = policy_token_loss(LossConfig(surrogate="reinforce"), inputs(array(-1, -3), array(-1, -3), array(2, -1)))
    np.testing.assert_allclose(terms.loss, [2, -3])


def test_corrections_truncate_or_mask():
    truncate, mask = CorrectionConfig(kind="truncate", cap=2.0), CorrectionConfig(kind="mask", low=0.5, high=5.0)
    np.testing.assert_allclose(correction_weight(truncate, array(0.5, 1, 3, np.inf)), [0.5, 1, 2, 2])
    np.testing.assert_allclose(correction_weight(mask, array(0.4, 0.5, 1, 5, 6, np.inf)), [0, 0.5, 1, 5, 0, 0])


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
    gradient = jax.grad(lambda ell: policy_token_loss(config, inputs(ell, behaviour, advantage)).loss.sum())(logprobs)
    np.testing.assert_allclose(gradient, -np.array(weights) * np.asarray(advantage), rtol=1e-6)


def test_with_one_step_per_batch_the_clip_never_acts_and_the_bound_is_reported():
    behaviour = array(-1, -1, -5, -9)
    terms = policy_token_loss(LossConfig(), inputs(array(-1, -2, -1, -1), behaviour, array(1, 1, 1, -1)))
    assert not terms.clipped.any()
    assert terms.bounded.tolist() == [False, False, True, True]
    np.testing.assert_allclose(terms.loss, [-1, -np.exp(-1.0), -2, 2], rtol=1e-6)
    unbounded = policy_token_loss(LossConfig(correction={"kind": "none"}), inputs(array(-1), array(-9), array(1)))
    assert not unbounded.bounded.any()


def test_a_behaviour_probability_of_nearly_nothing_gives_no_nan():
    config = LossConfig()
    gradient = jax.grad(lambda ell: policy_token_loss(config, inputs(ell, array(-1e4), array(1))).loss.sum())(
        array(-1.0)
    )
    np.testing.assert_allclose(gradient, [-2.0])


def test_the_supervised_loss_is_cross_entropy():
    np.testing.assert_allclose(supervised_token_loss(inputs(array(-1, -3), array(9, 9), array(7, 7))).loss, [1, 3])


def test_the_loss_module_gives_advantages_and_losses():
    from penstock.types import Rollout, RolloutGroup

    one, zero = np.ones(1, np.int32), np.zeros(1, np.float32)
    group = RolloutGroup("k", tuple(Rollout("e", "x", one, one, zero, np.float32([r]), r) for r in (0.0, 1.0, 0.0)))
    module = PolicyLoss(LossConfig())
    np.testing.assert_allclose(module.compute_advantages(group), [-0.5, 1, -0.5])
    assert module.loss(inputs(array(-1), array(-1), array(3))).loss.tolist() == [-3]
    with pytest.raises(ConfigError, match="whole batch"):
        PolicyLoss(LossConfig(advantage="reinforce_pp")).compute_advantages(group)
    with pytest.raises(ConfigError, match="one number per token"):
        PolicyLoss(LossConfig(advantage="turn")).compute_advantages(group)


TWO = {"sequence": jnp.array([0, 0, 1, 0], jnp.int32), "real": jnp.array([True, True, True, False])}
"""Sequences of two tokens and one, and an entry of padding."""


def weights(correction, behaviour=(-1.1, -2.3, -1.0, -9.0), logprobs=(-1.0, -2.0, -4.0, 5.0)):
    """−loss of tokens whose surrogate is 1; ℓ_p − ℓ_b is [.1, .3], [−3]."""
    config = LossConfig(correction=correction)
    terms = policy_token_loss(config, inputs(array(*logprobs), array(*behaviour), array(1, 1, 1, 1), **TWO))
    return np.asarray(-terms.loss[:3]), np.asarray(terms.bounded)[:3].tolist()


def test_corrections_are_of_the_token_the_sequence_or_its_geometric_mean():
    for scope, expected in {
        "token": [np.exp(0.1), np.exp(0.3), np.exp(-3.0)],
        "sequence": [np.exp(0.4), np.exp(0.4), np.exp(-3.0)],
        "sequence_mean": [np.exp(0.2), np.exp(0.2), np.exp(-3.0)],
    }.items():
        values, bounded = weights({"scope": scope})
        np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert bounded == [False] * 3
    assert weights({"scope": "sequence", "cap": 1.3})[1] == [True, True, False]
    values, bounded = weights({"kind": "mask", "scope": "sequence_mean", "low": 0.5, "high": 1.2})
    assert values.tolist() == [0, 0, 0] and bounded == [True] * 3
    values, _ = weights({"kind": "mask", "scope": "sequence", "low": 0.04, "high": 1.5})
    np.testing.assert_allclose(values, [np.exp(0.4), np.exp(0.4), np.exp(-3.0)], rtol=1e-6)


def test_a_veto_leaves_out_whole_sequences_with_one_outlying_token():
    behaviour = (-1.1, -1.0, -1.0, -9.0)
    logprobs = (-1.0, -11.0, -1.5, 9.0)  # ℓ_p − ℓ_b: [.1, −10], [−.5]
    for kind, first in {"truncate": np.exp(-0.5), "none": 1.0}.items():
        values, bounded = weights({"kind": kind, "veto": 1e-4}, behaviour, logprobs)
        np.testing.assert_allclose(values, [0, 0, first], rtol=1e-6)
        assert bounded == [True, True, False]
    values, _ = weights({"veto": 1e-5}, behaviour, logprobs)
    np.testing.assert_allclose(values, np.exp([0.1, -10.0, -0.5]), rtol=1e-5)


def test_a_sequences_ratio_is_its_geometric_mean_and_each_token_has_its_own_gradient():
    proximal = array(-1.1, -2.3, -1.0, 0.0)
    logprobs = array(-1.0, -2.0, -4.0, 50.0)
    found = inputs(logprobs, proximal, array(1, 1, 1, 1), **TWO)
    np.testing.assert_allclose(sequence_ratio(logprobs - proximal, found)[:3], np.exp([0.2, 0.2, -3.0]), rtol=1e-6)
    gradient = jax.grad(lambda ell: sequence_ratio(ell - proximal, found)[0])(logprobs)
    np.testing.assert_allclose(gradient, [np.exp(0.2), 0, 0, 0], rtol=1e-6)


def test_the_dual_clip_bounds_what_a_negative_advantage_may_cost():
    ratio, advantage = array(5.0, 2.0, 5.0, 0.5), array(-1.0, -1.0, 1.0, -1.0)
    np.testing.assert_allclose(ppo_surrogate(ratio, advantage, 0.2, 0.2, 3.0), [-3, -2, 1.2, -0.8])
    assert ppo_clipped(ratio, advantage, 0.2, 0.2, 3.0).tolist() == [True, False, True, True]
    assert ppo_surrogate(array(0.5), array(0.5), 0.2, 0.2, 3.0).tolist() == [0.25]
    far = inputs(array(-1.0), array(-3.0), array(-1.0), proximal_logprobs=array(-3.0))
    terms = policy_token_loss(LossConfig(dual_clip=3.0), far)
    assert terms.loss.tolist() == [3.0] and terms.clipped.tolist() == [True]
    gradient = jax.grad(lambda r: ppo_surrogate(r, advantage, 0.2, 0.2, 3.0).sum())(ratio)
    np.testing.assert_allclose(gradient, [0, -1, 0, 0])


def test_against_the_proximal_weights_the_two_ratios_multiply_to_the_whole():
    """ρ = exp(ℓ_θ − ℓ_p) and w = exp(ℓ_p − ℓ_b), so that an unclipped token has exp(ℓ_θ − ℓ_b) once."""
    ell, proximal, behaviour = array(-1.0), array(-1.1), array(-1.5)
    terms = policy_token_loss(LossConfig(), inputs(ell, behaviour, array(1.0), proximal_logprobs=proximal))
    np.testing.assert_allclose(terms.loss, -np.exp(0.5), rtol=1e-6)
    terms = policy_token_loss(LossConfig(), inputs(ell, behaviour, array(1.0), proximal_logprobs=behaviour))
    np.testing.assert_allclose(terms.loss, [-1.2], rtol=1e-6)
    assert terms.clipped.tolist() == [True] and terms.bounded.tolist() == [False]


def test_no_ratio_is_infinite():
    far = inputs(array(-1.0), array(-1e4), array(-1.0), proximal_logprobs=array(-1e4))
    assert policy_token_loss(LossConfig(), far).loss.tolist() == pytest.approx([np.exp(20.0)])


def test_the_entropy_bonus_is_subtracted_whatever_the_correction_says():
    given = inputs(array(-1), array(-9), array(3), entropy=array(2.5))
    plain = policy_token_loss(LossConfig(), given).loss
    bonus = policy_token_loss(LossConfig(entropy_coefficient=0.1), given).loss
    np.testing.assert_allclose(plain - bonus, [0.25], rtol=1e-6)

"""Golden numbers are SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from penstock.model.control import ControlModelConfig
from penstock.model.control.distributions import Bernoulli, Categorical, DiagonalGaussian, Distribution
from penstock.model.control.policy import ActionHead
from penstock.types import ConfigError, LeafSpace

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((2, 5)).astype(np.float32)
OTHER = RNG.standard_normal((2, 5)).astype(np.float32)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def head_for(leaf, **fields):
    return ActionHead.draw(np.random.default_rng(0), ControlModelConfig(policy_gain=1.0, **fields), leaf, 6)


FEATURES = jnp.asarray(np.random.default_rng(7).standard_normal((3, 4, 6)), jnp.float32)
LEAVES = {
    "discrete": LeafSpace("a", "discrete", (), "int64", (5,)),
    "multi_discrete": LeafSpace("a", "multi_discrete", (2,), "int64", (3, 5)),
    "even": LeafSpace("a", "multi_discrete", (2, 2), "int64", (3, 3, 3, 3)),
    "multi_binary": LeafSpace("a", "multi_binary", (4,), "int8"),
    "box": LeafSpace("a", "box", (2, 1), "float32"),
    "scalar": LeafSpace("a", "box", (), "float32"),
}


@pytest.fixture(params=LEAVES)
def leaf(request):
    return LEAVES[request.param]


def test_a_categorical_agrees_with_scipy():
    p, q = softmax(LOGITS), softmax(OTHER)
    mine, other = Categorical.of(jnp.asarray(LOGITS), 0), Categorical.of(jnp.asarray(OTHER), 0)
    np.testing.assert_allclose(mine.log_prob(jnp.array([3, 0])), np.log([p[0, 3], p[1, 0]]), rtol=1e-5)
    np.testing.assert_allclose(mine.entropy(), stats.entropy(p, axis=1), rtol=1e-5)
    np.testing.assert_allclose(mine.kl(other), stats.entropy(p, q, axis=1), rtol=1e-4)
    np.testing.assert_allclose(jnp.exp(mine.logprobs).sum(-1), [1, 1], rtol=1e-6)
    assert mine.mode().tolist() == LOGITS.argmax(1).tolist()


def test_a_coin_agrees_with_scipy():
    p, q = 1 / (1 + np.exp(-LOGITS)), 1 / (1 + np.exp(-OTHER))
    mine, other = Bernoulli(jnp.asarray(LOGITS), 1), Bernoulli(jnp.asarray(OTHER), 1)
    coins = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 1, 1]], np.int8)
    np.testing.assert_allclose(mine.log_prob(jnp.asarray(coins)), stats.bernoulli(p).logpmf(coins).sum(1), rtol=1e-5)
    np.testing.assert_allclose(mine.entropy(), stats.bernoulli(p).entropy().sum(1), rtol=1e-5)
    kl = stats.entropy(np.stack([p, 1 - p]), np.stack([q, 1 - q])).sum(1)
    np.testing.assert_allclose(mine.kl(other), kl, rtol=1e-4)
    assert mine.mode().tolist() == (LOGITS > 0).astype(int).tolist()


def test_a_gaussian_agrees_with_scipy():
    std = np.exp(OTHER)
    mine = DiagonalGaussian(jnp.asarray(LOGITS), jnp.asarray(OTHER), 1)
    x = RNG.standard_normal((2, 5)).astype(np.float32)
    np.testing.assert_allclose(mine.log_prob(jnp.asarray(x)), stats.norm(LOGITS, std).logpdf(x).sum(1), rtol=1e-4)
    np.testing.assert_allclose(mine.entropy(), stats.norm(LOGITS, std).entropy().sum(1), rtol=1e-5)
    assert (mine.mode() == LOGITS).all()


def test_the_divergence_of_gaussians_is_the_mean_log_ratio():
    one = DiagonalGaussian(jnp.array([0.3]), jnp.array([-0.5]), 1)
    other = DiagonalGaussian(jnp.array([-0.2]), jnp.array([0.4]), 1)
    grid = np.linspace(-8, 8, 20001)
    p, q = stats.norm(0.3, np.exp(-0.5)), stats.norm(-0.2, np.exp(0.4))
    integral = np.trapezoid(p.pdf(grid) * (p.logpdf(grid) - q.logpdf(grid)), grid)
    np.testing.assert_allclose(one.kl(other), integral, rtol=1e-4)


def test_elements_with_different_numbers_of_choices_never_choose_what_they_lack():
    distribution = head_for(LEAVES["multi_discrete"])(FEATURES)
    logits = np.asarray(FEATURES @ head_for(LEAVES["multi_discrete"]).dense.weight)
    first, second = softmax(logits[..., :3]), softmax(logits[..., 3:])
    np.testing.assert_allclose(
        distribution.entropy(), stats.entropy(first, axis=-1) + stats.entropy(second, axis=-1), rtol=1e-5
    )
    expected = np.log(first[..., 2]) + np.log(second[..., 4])
    np.testing.assert_allclose(distribution.log_prob(jnp.tile(jnp.array([2, 4]), (3, 4, 1))), expected, rtol=1e-5)
    samples = np.asarray(jax.jit(jax.vmap(distribution.sample))(jax.random.split(jax.random.key(0), 50)))
    assert samples[..., 0].max() == 2 and samples[..., 1].max() == 4


def test_shapes_and_dtypes_follow_the_leaf(leaf):
    distribution = head_for(leaf)(FEATURES)
    dtype = {"box": np.float32, "multi_binary": np.int8}.get(leaf.kind, np.int32)
    for action in (distribution.sample(jax.random.key(0)), distribution.mode()):
        assert action.shape == (3, 4, *leaf.shape) and action.dtype == dtype
    for numbers in (distribution.entropy(), distribution.log_prob(distribution.mode()), distribution.kl(distribution)):
        assert numbers.shape == (3, 4) and numbers.dtype == np.float32


def test_the_divergence_from_itself_is_zero_and_gradients_are_finite(leaf):
    head = head_for(leaf)
    np.testing.assert_array_equal(head(FEATURES).kl(head(FEATURES)), np.zeros((3, 4)))

    moved = head(FEATURES + 1)

    def score(head):
        distribution = head(FEATURES)
        return (distribution.entropy() + distribution.log_prob(moved.mode()) - moved.kl(distribution)).sum()

    gradient = jax.jit(jax.grad(score))(head)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(gradient))
    assert np.abs(np.asarray(gradient.dense.weight)).max() > 0


def test_samples_have_the_probabilities_that_log_prob_says(leaf):
    distribution = head_for(leaf)(jnp.broadcast_to(FEATURES[0, 0], (4000, 6)))
    samples = distribution.sample(jax.random.key(3))
    surprise = -np.asarray(distribution.log_prob(samples))
    error = surprise.std() / np.sqrt(len(surprise))
    assert abs(surprise.mean() - float(distribution.entropy()[0])) < 4 * error + 1e-6


def test_the_joint_is_the_product_of_its_leaves():
    leaves = tuple(head_for(LEAVES[name])(FEATURES) for name in ("discrete", "box"))
    joint, moved = Distribution(leaves, ("turn", "push")), Distribution(leaves[::-1], ("push", "turn"))
    actions = joint.sample(jax.random.key(0))
    assert list(actions) == ["turn", "push"]
    expected = leaves[0].log_prob(actions["turn"]) + leaves[1].log_prob(actions["push"])
    np.testing.assert_allclose(joint.log_prob(actions), expected, rtol=1e-6)
    np.testing.assert_allclose(moved.log_prob(actions), expected, rtol=1e-5)
    np.testing.assert_allclose(joint.entropy(), leaves[0].entropy() + leaves[1].entropy(), rtol=1e-6)
    np.testing.assert_array_equal(joint.kl(joint), np.zeros((3, 4)))


def test_leaves_of_the_same_form_are_sampled_independently():
    coin = Categorical.of(jnp.zeros((200, 2)), 0)
    actions = Distribution((coin, coin), ("a", "b")).sample(jax.random.key(0))
    assert 0.35 < float((actions["a"] == actions["b"]).mean()) < 0.65


def test_the_deviation_is_learned_or_depends_on_the_state_and_stays_in_its_range():
    learned = head_for(LEAVES["box"], initial_log_std=-1.0)
    np.testing.assert_allclose(learned(FEATURES).log_std, np.full((3, 4, 2, 1), -1.0))
    depends = head_for(LEAVES["box"], initial_log_std=-1.0, state_dependent_std=True)
    assert depends.log_std is None and depends.dense.weight.shape == (6, 4)
    spread = np.asarray(depends(FEATURES).log_std)
    assert spread.std() > 0.1 and abs(spread.mean() + 1) < 1
    narrow = head_for(LEAVES["box"], log_std_range=(-0.1, 0.1), state_dependent_std=True)
    assert np.abs(np.asarray(narrow(FEATURES).log_std)).max() == pytest.approx(0.1)


@pytest.mark.parametrize(
    "leaf",
    [LeafSpace("say", "text", (6,), "int32"), LeafSpace("say", "box", (6,), "uint8")],
    ids=lambda leaf: leaf.kind,
)
def test_actions_that_no_distribution_covers_are_refused(leaf):
    with pytest.raises(ConfigError, match="action 'say' is .* wrap the simulator"):
        head_for(leaf)

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner.head import HeadInputs, HeadOutputs, tiled_logprobs, tiled_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")

K, HIDDEN, VOCAB = 20, 6, 33


@pytest.fixture
def problem():
    """Hidden states, output matrix, labels, temperatures and a cotangent."""
    keys = jax.random.split(jax.random.key(1), 5)
    hidden = jax.random.normal(keys[0], (K, HIDDEN))
    matrix = jax.random.normal(keys[1], (VOCAB, HIDDEN)) * 0.7
    labels = jax.random.randint(keys[2], (K,), 0, VOCAB)
    temperature = jax.random.uniform(keys[3], (K,), minval=0.5, maxval=1.5)
    return hidden, matrix, labels, temperature, jax.random.normal(keys[4], (K,))


def plain(hidden, matrix, labels, temperature):
    scores = jax.nn.log_softmax(hidden @ matrix.T / temperature[:, None], axis=-1)
    entropy = -(jnp.exp(scores) * scores).sum(axis=-1)
    return jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0], entropy


def inputs(labels, temperature, count=K):
    return HeadInputs(labels, temperature, jnp.int32(count))


@pytest.mark.parametrize("tile", [1, 7, K, 64])
def test_values_and_gradients_equal_the_plain_log_softmax(problem, tile):
    hidden, matrix, labels, temperature, weight = problem

    def tiled_sum(hidden, matrix):
        return (tiled_logprobs(hidden, matrix, inputs(labels, temperature), tile).logprobs * weight).sum()

    def plain_sum(hidden, matrix):
        return (plain(hidden, matrix, labels, temperature)[0] * weight).sum()

    outputs = tiled_logprobs(hidden, matrix, inputs(labels, temperature), tile)
    expected, entropy = plain(hidden, matrix, labels, temperature)
    np.testing.assert_allclose(outputs.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(outputs.entropy, entropy, atol=1e-5)
    for ours, theirs in zip(
        jax.grad(tiled_sum, (0, 1))(hidden, matrix), jax.grad(plain_sum, (0, 1))(hidden, matrix), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("count", [0, 7, 8])
def test_only_the_tiles_that_hold_real_positions_are_computed(problem, count):
    hidden, matrix, labels, temperature, weight = problem
    real = jnp.arange(K) < count

    def tiled_sum(hidden, matrix):
        outputs = tiled_logprobs(hidden, matrix, inputs(labels, temperature, count), 7)
        return jnp.where(real, outputs.logprobs * weight, 0).sum()

    def plain_sum(hidden, matrix):
        return jnp.where(real, plain(hidden, matrix, labels, temperature)[0] * weight, 0).sum()

    outputs = tiled_logprobs(hidden, matrix, inputs(labels, temperature, count), 7)
    np.testing.assert_allclose(outputs.logprobs[:count], plain(*problem[:4])[0][:count], atol=1e-5)
    beyond = -(-count // 7) * 7
    assert (outputs.logprobs[beyond:] == 0).all(), "a tile beyond the last real position was computed"
    for ours, theirs in zip(
        jax.grad(tiled_sum, (0, 1))(hidden, matrix), jax.grad(plain_sum, (0, 1))(hidden, matrix), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_very_large_scores_overflow_nowhere(problem):
    hidden, matrix, labels, temperature, _ = problem

    def total(hidden):
        return tiled_logprobs(hidden * 1e4, matrix, inputs(labels, temperature), 7).logprobs.sum()

    value, gradient = jax.value_and_grad(total)(hidden)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


def test_no_gradient_flows_through_the_entropy(problem):
    hidden, matrix, labels, temperature, _ = problem
    gradient = jax.grad(lambda h: tiled_logprobs(h, matrix, inputs(labels, temperature), 7).entropy.sum())(hidden)
    assert (gradient == 0).all()


@pytest.mark.parametrize(("tile", "count"), [(7, K), (K, K), (7, 9)])
def test_the_entropy_has_its_true_gradient_where_it_is_asked_for(problem, tile, count):
    hidden, matrix, labels, temperature, weight = problem
    real = jnp.arange(K) < count

    def total(outputs):
        return jnp.where(real, outputs[0] * weight - outputs[1] * weight[::-1], 0).sum()

    def tiled_sum(hidden, matrix):
        return total(tiled_logprobs(hidden, matrix, inputs(labels, temperature, count), tile, entropy_gradient=True))

    def plain_sum(hidden, matrix):
        return total(plain(hidden, matrix, labels, temperature))

    for ours, theirs in zip(
        jax.grad(tiled_sum, (0, 1))(hidden, matrix), jax.grad(plain_sum, (0, 1))(hidden, matrix), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_bfloat16_scores_are_float32(problem):
    hidden, matrix, labels, temperature, _ = problem
    half = (hidden.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))
    outputs = tiled_logprobs(*half, inputs(labels, temperature), 7)
    assert outputs.logprobs.dtype == jnp.float32
    widened = plain(*(x.astype(jnp.float32) for x in half), labels, temperature)[0]
    np.testing.assert_allclose(outputs.logprobs, widened, atol=1e-4)
    gradients = jax.grad(lambda h, m: tiled_logprobs(h, m, inputs(labels, temperature), 7).logprobs.sum(), (0, 1))(
        *half
    )
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]


def _largest(jaxpr) -> int:
    """Size of the largest array that any equation makes, sub-computations included."""
    sizes = [var.aval.size for equation in jaxpr.eqns for var in equation.outvars]
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for each in value if isinstance(value, tuple) else (value,):  # the branches of a choice
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    sizes.append(_largest(inner))
    return max(sizes, default=0)


def test_no_array_of_tokens_by_vocabulary_exists_in_either_pass():
    k, vocab, tile = 64, 128, 8
    hidden, matrix = jnp.ones((k, HIDDEN)), jnp.ones((vocab, HIDDEN))
    asked = HeadInputs(jnp.zeros(k, jnp.int32), jnp.ones(k), jnp.int32(k))
    for entropy in (False, True):
        total = lambda h, m, e=entropy: sum(map(jnp.sum, tiled_logprobs(h, m, asked, tile, e)))  # noqa: B023, E731
        alone = lambda h, m, e=entropy: tiled_loss(h, m, asked, tile, of_outputs, jnp.ones(k), e)[0]  # noqa: B023, E731
        for loss in (total, alone):
            largest = _largest(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, matrix).jaxpr)
            assert largest == tile * vocab, (
                f"expected the tile's {tile * vocab} scores to be the largest, got {largest}"
            )


# --- a loss of each position by itself ---


def of_outputs(outputs, weight):
    """Bends in both, so that the slopes are not those of any other position."""
    return weight * (outputs.logprobs**2 - jnp.exp(outputs.entropy * 0.3) * outputs.logprobs)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("tile", "count"), [(1, K), (7, K), (64, K), (7, 0), (7, 9)])
def test_a_loss_made_tile_by_tile_is_that_of_the_plain_log_softmax_and_so_is_its_gradient(
    problem, tile, count, entropy
):
    hidden, matrix, labels, temperature, weight = problem
    weight, asked = jnp.where(jnp.arange(K) < count, weight, 0.0), inputs(labels, temperature, count)

    def tiled(hidden, matrix):
        total, outputs = tiled_loss(hidden, matrix, asked, tile, of_outputs, weight, entropy)
        return 3.0 * total + outputs.logprobs.sum(), outputs  # nothing flows through the outputs

    def whole(hidden, matrix):
        logprobs, of_distribution = plain(hidden, matrix, labels, temperature)
        fixed = of_distribution if entropy else jax.lax.stop_gradient(of_distribution)
        outputs = HeadOutputs(logprobs, fixed)
        return 3.0 * of_outputs(outputs, weight).sum(), outputs

    ours, (value, outputs) = grads_and_values(tiled, hidden, matrix)
    theirs, (expected, plainly) = grads_and_values(whole, hidden, matrix)
    np.testing.assert_allclose(value - outputs.logprobs.sum(), expected, rtol=1e-5, atol=1e-5)
    for name in HeadOutputs._fields:
        np.testing.assert_allclose(getattr(outputs, name)[:count], getattr(plainly, name)[:count], atol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


def grads_and_values(function, *arguments):
    value, gradients = jax.value_and_grad(function, (0, 1), has_aux=True)(*arguments)
    return gradients, value


def test_its_value_without_a_gradient_is_the_same_and_it_costs_three_products_in_place_of_four(problem):
    hidden, matrix, labels, temperature, weight = problem
    asked = inputs(labels, temperature)

    def alone(hidden, matrix):
        return tiled_loss(hidden, matrix, asked, 7, of_outputs, weight)[0]

    def after(hidden, matrix):
        return of_outputs(tiled_logprobs(hidden, matrix, asked, 7), weight).sum()

    np.testing.assert_allclose(alone(hidden, matrix), jax.value_and_grad(alone)(hidden, matrix)[0], rtol=1e-6)
    assert len(products_of(alone, hidden, matrix)) == 3 and len(products_of(after, hidden, matrix)) == 4


def products_of(function, *arguments, platform="cpu"):
    """The shapes of its gradients' products, on a platform."""
    text = jax.jit(jax.grad(function, (0, 1))).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"dot_general .*-> tensor<(\w+)xf32>", text)


def test_on_cpus_the_gradient_of_the_matrix_is_added_up_across(problem):
    """There a product of two first axes, [tile, vocab] by [tile, hidden], takes up to twice as long."""
    hidden, matrix, labels, temperature, weight = problem

    def alone(hidden, matrix):
        return tiled_loss(hidden, matrix, inputs(labels, temperature), 7, of_outputs, weight)[0]

    def after(hidden, matrix):
        return of_outputs(tiled_logprobs(hidden, matrix, inputs(labels, temperature), 7), weight).sum()

    for function in (alone, after):
        for platform, shape in (("cpu", f"{HIDDEN}x{VOCAB}"), ("cuda", f"{VOCAB}x{HIDDEN}")):
            products = products_of(function, hidden, matrix, platform=platform)
            assert products.count(shape) == 1 and set(products) == {shape, f"7x{HIDDEN}", f"7x{VOCAB}"}


def test_its_gradients_have_the_types_of_what_they_are_of(problem):
    hidden, matrix, labels, temperature, weight = problem
    half = hidden.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)

    def alone(hidden, matrix):
        return tiled_loss(hidden, matrix, inputs(labels, temperature), 7, of_outputs, weight)[0]

    gradients = jax.grad(alone, (0, 1))(*half)
    assert [each.dtype for each in gradients] == [jnp.bfloat16, jnp.bfloat16]
    expected = jax.grad(alone, (0, 1))(*(each.astype(jnp.float32) for each in half))
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.02 * float(jnp.abs(other).max()))

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.control.layers import Conv, Dense, Mlp, orthogonal


@pytest.mark.parametrize(("rows", "columns"), [(7, 3), (3, 7), (5, 5)])
def test_orthogonal_matrices_have_orthogonal_rows_or_columns_of_length_gain(rows, columns):
    matrix = orthogonal(np.random.default_rng(0), rows, columns, 2.0)
    assert (matrix.shape, matrix.dtype) == ((rows, columns), np.float32)
    small = matrix.T @ matrix if rows >= columns else matrix @ matrix.T
    np.testing.assert_allclose(small, 4 * np.eye(min(rows, columns)), atol=1e-5)


def test_a_dense_layer_multiplies_the_last_axis():
    layer = Dense(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), jnp.array([0.5, 0.0, -0.5]))
    assert layer(jnp.array([[[1.0, 1.0]], [[0.0, 2.0]]])).tolist() == [[[5.5, 7.0, 8.5]], [[8.5, 10.0, 11.5]]]


def test_an_mlp_has_its_activation_after_every_layer():
    mlp = Mlp.draw(np.random.default_rng(0), 3, (4, 2), "tanh")
    x = np.array([[1.0, -2.0, 0.5]], np.float32)
    hidden = np.tanh(x @ np.asarray(mlp.layers[0].weight))
    np.testing.assert_allclose(mlp(jnp.asarray(x)), np.tanh(hidden @ np.asarray(mlp.layers[1].weight)), atol=1e-6)


def test_a_convolution_is_the_sum_over_patches():
    conv = Conv.draw(np.random.default_rng(0), 2, 3, 4, stride=2, padding="VALID")
    image = np.random.default_rng(1).standard_normal((1, 4, 4, 3)).astype(np.float32)
    kernel = np.asarray(conv.kernel)
    expected = [[np.einsum("hwi,hwio->o", image[0, r : r + 2, c : c + 2], kernel) for c in (0, 2)] for r in (0, 2)]
    np.testing.assert_allclose(conv(jnp.asarray(image))[0], expected, atol=1e-5)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.language.decoder import linear, rms_norm, rotary_tables


def test_rms_norm_divides_by_the_root_mean_square_and_scales():
    out = rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), eps=0.0)
    root = np.sqrt((9 + 16) / 2)
    np.testing.assert_allclose(np.asarray(out), [[3 / root, 8 / root]], rtol=1e-6)


def test_rms_norm_adds_eps_to_the_mean_square():
    out = rms_norm(jnp.array([1.0, 1.0]), jnp.ones(2), eps=3.0)
    np.testing.assert_allclose(np.asarray(out), [0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_linear_multiplies_the_last_axis(batch):
    rng = np.random.default_rng(0)
    x, matrix = rng.standard_normal((*batch, 4), np.float32), rng.standard_normal((4, 3), np.float32)
    found = np.asarray(linear(jnp.asarray(x), jnp.asarray(matrix)))
    np.testing.assert_allclose(found, x @ matrix, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_one_position_alone_is_computed_as_inside_a_batch(tiny_decoder, model_type):
    decoder = tiny_decoder(model_type=model_type)
    layer = decoder.layers_apart()[1]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 16), np.float32))
    cos, sin = rotary_tables(decoder.config, jnp.array([[0, 1, 2], [5, 6, 7]]))
    project = jax.jit(lambda layer, *arrays: layer.project(*arrays))
    finish = jax.jit(lambda layer, *arrays: layer.finish(*arrays))
    whole = project(layer, x, cos, sin)
    alone = project(layer, x[1, 2], cos[1, 2], sin[1, 2])
    assert [a.shape for a in alone] == [(4, 6), (2, 6), (2, 6)]
    for one, many in zip(alone, whole, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(many[1, 2]), atol=1e-5)
    finished, one = finish(layer, x, whole[0]), finish(layer, x[1, 2], alone[0])
    np.testing.assert_allclose(np.asarray(one), np.asarray(finished[1, 2]), atol=1e-5)


def test_values_are_not_rotated_and_keys_are(tiny_decoder):
    decoder = tiny_decoder()
    layer, x = decoder.layers_apart()[0], jnp.ones((2, 16))
    _, keys, values = layer.project(x, *rotary_tables(decoder.config, jnp.array([0, 9])))
    np.testing.assert_array_equal(np.asarray(values[0]), np.asarray(values[1]))
    assert np.abs(np.asarray(keys[0] - keys[1])).max() > 0.1

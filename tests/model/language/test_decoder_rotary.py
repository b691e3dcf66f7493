import math

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.language.config import RopeScaling, YarnScaling
from penstock.model.language.decoder import inverse_frequencies, rotary_tables, rotate


def test_frequencies_fall_from_one_by_powers_of_theta(tiny_config):
    config = tiny_config(head_dim=4, rope_theta=100.0)
    np.testing.assert_allclose(inverse_frequencies(config), [1.0, 0.1], rtol=1e-6)


def test_dimension_i_is_paired_with_i_plus_half(tiny_config):
    config = tiny_config(head_dim=4, rope_theta=100.0)
    cos, sin = rotary_tables(config, jnp.array([0, 1]))
    turned = np.asarray(rotate(jnp.array([[[1.0, 0.0, 0.0, 0.0]], [[1.0, 2.0, 0.0, 0.0]]]), cos, sin))
    np.testing.assert_allclose(turned[0, 0], [1, 0, 0, 0])
    expected = [math.cos(1), 2 * math.cos(0.1), math.sin(1), 2 * math.sin(0.1)]
    np.testing.assert_allclose(turned[1, 0], expected, rtol=1e-6)


def test_inner_products_depend_on_the_distance_only(tiny_config):
    config = tiny_config(head_dim=6)
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 6)), jnp.float32) for _ in range(2))

    def product(query_position, key_position):
        turned = [
            rotate(x, *rotary_tables(config, jnp.array([position])))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(jnp.vdot(*turned))

    assert product(7, 3) == pytest.approx(product(40, 36), abs=1e-5)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)


def test_bfloat16_heads_stay_bfloat16_and_tables_float32(tiny_config):
    cos, sin = rotary_tables(tiny_config(), jnp.arange(3))
    assert cos.dtype == sin.dtype == jnp.float32
    assert rotate(jnp.ones((3, 4, 6), jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def test_llama3_scaling_divides_long_wavelengths_keeps_short_ones_and_blends_between(tiny_config):
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    plain = tiny_config(head_dim=6, rope_theta=1000.0)
    stretched = inverse_frequencies(plain.model_copy(update={"rope_scaling": scaling}))
    base = [1.0, 0.1, 0.01]  # 10.2, 1.02 and 0.102 turns within the original context
    blend = (64 * 0.1 / (2 * math.pi) - 1) / 3
    np.testing.assert_allclose(
        stretched, [base[0], (1 - blend) * base[1] / 8 + blend * base[1], base[2] / 8], rtol=1e-5
    )


def test_yarn_keeps_what_turns_often_divides_what_turns_seldom_and_ramps_between(tiny_config):
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=200, attention_factor=1.25, beta_fast=8)
    plain = tiny_config(head_dim=8, rope_theta=10000.0)
    config = plain.model_copy(update={"rope_scaling": scaling})
    # of the four pairs, those that turn 8 times and once in 200 positions: 0.6 and 1.5, outwards 0 and 2
    base = [1.0, 0.1, 0.01, 0.001]
    expected = [base[0], (base[1] + base[1] / 4) / 2, base[2] / 4, base[3] / 4]
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-6)
    cos, sin = rotary_tables(config, jnp.array([3]))
    np.testing.assert_allclose(np.hypot(cos, sin), 1.25, rtol=1e-6)


def test_yarn_s_ramp_may_begin_and_end_within_a_pair(tiny_config):
    scaling = YarnScaling(
        factor=4.0, original_max_position_embeddings=200, attention_factor=1.0, beta_fast=8, truncate=False
    )
    config = tiny_config(head_dim=8, rope_theta=10000.0).model_copy(update={"rope_scaling": scaling})
    first, last = (4 * math.log(200 / (turns * 2 * math.pi)) / math.log(1e4) for turns in (8, 1))
    slow = (1 - first) / (last - first)
    assert 0 < slow < 1
    assert inverse_frequencies(config)[1] == pytest.approx(slow * 0.1 / 4 + (1 - slow) * 0.1)


def test_yarn_leaves_layers_with_a_base_of_their_own_as_they_are(tiny_config):
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=200, attention_factor=1.25)
    gemma = tiny_config(head_dim=8, rope_scaling=scaling, rope_local_theta=100.0, sliding_window=16)
    plain = tiny_config(head_dim=8, rope_theta=100.0)
    found, expected = rotary_tables(gemma, jnp.arange(4), 16), rotary_tables(plain, jnp.arange(4))
    np.testing.assert_array_equal(found, expected)  # neither slower nor, by YaRN's factor, longer
    assert rotary_tables(gemma, jnp.arange(4))[0][0, 0] == 1.25

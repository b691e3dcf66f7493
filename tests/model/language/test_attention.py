import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.language.attention import grouped_attention, packed_mask, ragged_attention, reaches


def test_packed_mask_is_causal_inside_each_segment_and_padding_sees_padding_only():
    mask = np.asarray(packed_mask(jnp.array([[1, 1, 2, 2, 0]]))).astype(int)[0]
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert mask.tolist() == expected


def test_matches_attention_written_out_per_head():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 3, 4, 6), np.float32)
    key, value = (rng.standard_normal((2, 2, 5, 6), np.float32) for _ in range(2))
    mask = rng.random((2, 3, 5)) < 0.6
    mask[..., 0] = True
    found = np.asarray(grouped_attention(*map(jnp.asarray, (query, key, value, mask))))
    for b in range(2):
        for head in range(4):
            scores = query[b, :, head] @ key[b, head // 2].T / np.sqrt(6)
            weights = np.exp(scores) * mask[b]
            weights /= weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(found[b, :, head], weights @ value[b, head // 2], atol=1e-5)


def test_a_query_that_may_see_nothing_gives_finite_values_and_gradients():
    query, key = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 1, 3, 4))
    mask = jnp.zeros((1, 2, 3), bool)
    values, gradient = jax.jit(jax.value_and_grad(lambda q: grouped_attention(q, key, key, mask).sum()))(query)
    assert np.isfinite(values)
    assert np.isfinite(np.asarray(gradient)).all()


def test_large_scores_do_not_overflow():
    query = jnp.full((1, 1, 1, 4), 200.0)
    key = jnp.stack([jnp.full((4,), 200.0), jnp.full((4,), -200.0)])[None, None]
    value = jnp.array([[[[1.0] * 4, [2.0] * 4]]])
    out = grouped_attention(query, key, value, jnp.ones((1, 1, 2), bool))
    np.testing.assert_allclose(np.asarray(out), 1.0)


def test_a_row_reads_few_lengths():
    assert reaches(50) == [50] and reaches(300) == [64, 128, 192, 256, 300]
    assert reaches(2048) == [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]


def test_ragged_rows_are_weighted_by_what_each_sees():
    keys, values = jnp.zeros((2, 1, 192, 4)), jnp.repeat(jnp.array([1.0, 2.0, 4.0]), 64)[None, None, :, None]
    values = jnp.broadcast_to(values, keys.shape).at[1].multiply(10)  # one number for each 64 positions of each slot
    seen, slots, query = jnp.array([192, 80], jnp.int32), jnp.arange(2, dtype=jnp.int32), jnp.ones((2, 1, 4))
    found = ragged_attention(query, keys, values, slots, seen)[:, 0, 0]
    np.testing.assert_allclose(found, [7 / 3, 10 * (64 * 1 + 16 * 2) / 80], rtol=1e-6)
    newest = ragged_attention(query, keys, values, slots, seen, window=96)[:, 0, 0]
    np.testing.assert_allclose(newest, [(32 * 2 + 64 * 4) / 96, 12], rtol=1e-6)
    there = jnp.pad(keys, ((0, 1), *[(0, 0)] * 3)), jnp.pad(values[::-1], ((0, 1), *[(0, 0)] * 3))
    found = ragged_attention(query, *there, slots[::-1], seen)[:, 0, 0]
    np.testing.assert_allclose(found, [7 / 3, 12], rtol=1e-6)


def test_ragged_rows_read_no_more_than_the_least_reach_that_holds_what_they_see():
    """Whatever is not a number there would show."""
    keys = jnp.zeros((2, 1, 300, 4)).at[:, :, 192:].set(jnp.nan)
    seen, slots, query = jnp.array([130, 192], jnp.int32), jnp.arange(2, dtype=jnp.int32), jnp.ones((2, 1, 4))
    assert np.isfinite(ragged_attention(query, keys, keys, slots, seen)).all()
    assert not np.isfinite(ragged_attention(query, keys, keys, slots, seen + 1)[1]).any()


@pytest.mark.parametrize(("window", "lengths"), [(None, 10), (100, 2), (64, 1)])
def test_a_window_needs_no_more_reaches_than_hold_it(window, lengths):
    """Of the ten of 2,048 positions; each is a branch with two products."""
    query, keys = jax.ShapeDtypeStruct((2, 1, 4), jnp.float32), jax.ShapeDtypeStruct((2, 1, 2048, 4), jnp.float32)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    lowered = jax.jit(ragged_attention, static_argnums=5).lower(query, keys, keys, rows, rows, window)
    assert lowered.as_text().count("dot_general") == 2 * lengths


@pytest.mark.parametrize("window", [None, 100, 3])
@pytest.mark.parametrize(
    "length", [300, pytest.param(256, marks=pytest.mark.slow), 90, pytest.param(50, marks=pytest.mark.slow)]
)
def test_ragged_rows_give_what_the_whole_cache_gives(window, length):
    rng = np.random.default_rng(length)
    keys, values = (jnp.asarray(rng.normal(size=(5, 2, length, 8)), jnp.float32) for _ in range(2))
    slots, positions = (
        jnp.array([3, 0, 4, 1], jnp.int32),
        jnp.array([length - 1, 0, min(88, length - 2), length // 2], jnp.int32),
    )
    query = jnp.asarray(rng.normal(size=(4, 6, 8)), jnp.float32)
    at = jnp.arange(length)
    seen = (at <= positions[:, None]) & (at > positions[:, None] - (window or length))
    expected = grouped_attention(query[:, None], keys[slots], values[slots], seen[:, None])[:, 0]
    found = ragged_attention(query, keys, values, slots, positions + 1, window)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    row = jnp.arange(4) == 2
    other = jnp.where(row, positions, length // 3)
    among_others = ragged_attention(query, keys, values, slots, other + 1, window)  # its neighbours are nothing to it
    np.testing.assert_array_equal(among_others[2], found[2])
    none = ragged_attention(query, keys, values, slots, jnp.where(row, 0, positions + 1), window)
    np.testing.assert_array_equal(none[jnp.array([0, 1, 3])], found[jnp.array([0, 1, 3])])
    assert not np.any(none[2])


def test_ragged_rows_round_weights_of_bfloat16_as_the_whole_cache_does():
    """Where each rounds them in its own way, half of the results differ in their last bit."""
    rng = np.random.default_rng(0)
    query, keys, values = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((4, 4, 16), (4, 2, 256, 16), (4, 2, 256, 16))
    )
    slots, positions = jnp.arange(4, dtype=jnp.int32), jnp.array([255, 40, 130, 64], jnp.int32)
    dense = grouped_attention(query[:, None], keys, values, (jnp.arange(256) <= positions[:, None])[:, None])[:, 0]
    found = ragged_attention(query, keys, values, slots, positions + 1)
    assert np.mean(np.asarray(found != dense)) < 1e-2

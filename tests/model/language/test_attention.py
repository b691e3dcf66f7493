import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.language.attention import Pages, grouped_attention, packed_mask, paged_attention


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


def test_pages_are_listed_row_by_row():
    pages = Pages.of(jnp.array([0, 129, 128, 256], jnp.int32), 300)
    assert pages.counts.tolist() == [0, 2, 1, 2]
    assert len(pages.rows) == 16  # four rows of three pages, in eights
    assert pages.rows.tolist()[:5] == [1, 1, 2, 3, 3] and pages.numbers.tolist()[:5] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("window", [None, 100, 3])
@pytest.mark.parametrize("length", [300, pytest.param(256, marks=pytest.mark.slow), 90])
def test_pages_give_what_the_whole_cache_gives(window, length):
    rng = np.random.default_rng(length)
    keys, values = (jnp.asarray(rng.normal(size=(5, 2, length, 8)), jnp.float32) for _ in range(2))
    slots, positions = jnp.array([3, 0, 4, 1], jnp.int32), jnp.array([length - 1, 0, 88, length // 2], jnp.int32)
    query = jnp.asarray(rng.normal(size=(4, 6, 8)), jnp.float32)
    at = jnp.arange(length)
    seen = (at <= positions[:, None]) & (at > positions[:, None] - (window or length))
    expected = grouped_attention(query[:, None], keys[slots], values[slots], seen[:, None])[:, 0]
    pages = Pages.of(positions + 1, length)
    found = paged_attention(query, keys, values, slots, positions, pages, window)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    alone = paged_attention(
        query[2:3], keys, values, slots[2:3], positions[2:3], Pages.of(positions[2:3] + 1, length), window
    )
    np.testing.assert_array_equal(alone[0], found[2])  # a row's neighbours are nothing to it
    none = Pages.of(jnp.where(jnp.arange(4) == 2, 0, positions + 1), length)
    assert not np.any(paged_attention(query, keys, values, slots, positions, none, window)[2])

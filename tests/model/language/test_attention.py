import jax
import jax.numpy as jnp
import numpy as np

from penstock.model.language.attention import grouped_attention, packed_mask


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

import jax
import jax.numpy as jnp
import numpy as np

from penstock.inference.decoding import append, create_cache, fork, insert, resize
from penstock.model.language import ModelConfig

MODEL = ModelConfig(
    vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4,
)  # fmt: skip


def numbered(slots, window):
    """Every entry is a number of its own."""
    count = iter(range(1000))
    return jax.tree.map(
        lambda a: next(count) * 10_000.0 + jnp.arange(a.size, dtype=jnp.float32).reshape(a.shape),
        create_cache(MODEL, slots, window),
    )


def test_layout_is_slot_head_position_dim_per_layer():
    cache = create_cache(MODEL, 5, 16)
    assert len(cache.keys) == len(cache.values) == 3
    assert {a.shape for a in (*cache.keys, *cache.values)} == {(5, 2, 16, 4)}


def test_append_writes_each_row_into_its_slot_at_its_own_position_and_nothing_beyond_the_window():
    before = numbered(3, 4).keys[0]
    entry = -jnp.arange(1.0, 25.0).reshape(3, 2, 4)
    after = append(before, entry, jnp.array([2, 0, 1], jnp.int32), jnp.array([2, 4, 0], jnp.int32))
    expected = np.array(before)
    expected[2, :, 2], expected[1, :, 0] = entry[0], entry[2]
    np.testing.assert_array_equal(after, expected)


def test_resize_keeps_what_fits_and_adds_zeros():
    before = numbered(2, 4).keys[1]
    grown = resize(before, 6)
    np.testing.assert_array_equal(resize(grown, 4), before)
    assert grown.shape == (2, 2, 6, 4) and not np.any(grown[:, :, 4:])


def test_insert_gives_all_samples_of_a_prompt_the_same_row_and_leaves_the_rest():
    before, rows = numbered(4, 6).values[2], -numbered(2, 3).values[2]
    after = insert(before, rows, jnp.array([1, -1, 1, 0], jnp.int32))
    expected = np.array(before)
    expected[0, :, :3], expected[2, :, :3], expected[3, :, :3] = rows[1], rows[1], rows[0]
    np.testing.assert_array_equal(after, expected)


def test_fork_reads_before_it_writes():
    before = numbered(3, 4).keys[0]
    after = fork(before, jnp.array([1, 0, 2], jnp.int32))
    np.testing.assert_array_equal(after, np.asarray(before)[[1, 0, 2]])

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.inference.decoding import append, create_cache, fork, insert, moves_of, resize
from penstock.inference.model_runner import ONE_DEVICE
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


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_insert_gives_all_samples_of_a_prompt_the_same_row_and_leaves_the_rest():
    before, prefilled = numbered(4, 6), jax.tree.map(jnp.negative, numbered(2, 3))
    after = insert(before, prefilled, jnp.asarray(moves_of({0: (1, 3), 2: (1, 3), 3: (0, 3)}, 4, 3)))
    expected = jax.tree.map(np.array, before)
    for array, rows in zip(jax.tree.leaves(expected), jax.tree.leaves(prefilled), strict=True):
        array[0, :, :3], array[2, :, :3], array[3, :, :3] = rows[1], rows[1], rows[0]
    assert_equal(after, expected)


def test_long_prompts_are_copied_by_pages_the_last_of_which_may_be_short():
    before, prefilled = numbered(2, 300), jax.tree.map(jnp.negative, numbered(1, 290))
    moves = moves_of({1: (0, 290)}, 2, 290)
    assert moves[1].tolist() == [1] * 5 + [-1] * 5 and moves[2, :5].tolist() == [0, 64, 128, 192, 256]
    expected = jax.tree.map(np.array, before)
    for array, rows in zip(jax.tree.leaves(expected), jax.tree.leaves(prefilled), strict=True):
        array[1, :, :290] = rows[0]
    assert_equal(insert(before, prefilled, jnp.asarray(moves)), expected)


def test_fork_copies_the_pages_that_are_asked_for_and_nothing_else():
    before = numbered(3, 300)
    after = fork(before, jnp.asarray(moves_of({1: (0, 129), 2: (0, 5)}, 3, 300)))
    expected = jax.tree.map(np.array, before)
    for array in jax.tree.leaves(expected):
        array[1, :, :192], array[2, :, :64] = array[0, :, :192], array[0, :, :64]
    assert_equal(after, expected)
    assert_equal(fork(before, jnp.asarray(moves_of({}, 3, 300))), before)


@pytest.mark.parametrize("program", ["fork", "insert"])
def test_what_moves_entries_writes_into_the_donated_cache_and_copies_none(program):
    cache, prefilled = numbered(4, 300), numbered(2, 130)
    lowered = {
        "fork": lambda: ONE_DEVICE.fork.lower(cache, moves_of({}, 4, 300)),
        "insert": lambda: ONE_DEVICE.insert.lower(cache, prefilled, moves_of({}, 4, 130)),
    }[program]()
    compiled = lowered.compile()
    held = sum(array.nbytes for array in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    assert compiled.memory_analysis().temp_size_in_bytes < held // 2  # pages, not a copy
    assert compiled.as_text().count(" while(") == 1  # which asks the host at each turn, on GPUs

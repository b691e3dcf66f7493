import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.inference.decoding import Moves, append, create_cache, fork, insert, resize
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


def test_insert_gives_all_samples_of_a_prompt_the_same_row_and_leaves_the_rest():
    before, rows = numbered(4, 6).values[2], -numbered(2, 3).values[2]
    after = insert(before, rows, Moves.of({0: (1, 3), 2: (1, 3), 3: (0, 3)}, 4, 3))
    expected = np.array(before)
    expected[0, :, :3], expected[2, :, :3], expected[3, :, :3] = rows[1], rows[1], rows[0]
    np.testing.assert_array_equal(after, expected)


def test_long_prompts_are_copied_by_pages_the_last_of_which_may_be_short():
    before, rows = numbered(2, 300).keys[1], -numbered(1, 290).keys[1]
    moves = Moves.of({1: (0, 290)}, 2, 290)
    assert int(moves.count) == 5 and moves.starts.tolist() == [0, 64, 128, 192, 256, 0, 0, 0, 0, 0]
    expected = np.array(before)
    expected[1, :, :290] = rows[0]
    np.testing.assert_array_equal(insert(before, rows, moves), expected)


def test_fork_copies_the_pages_that_are_asked_for_and_nothing_else():
    before = numbered(3, 300).keys[0]
    after = fork(before, Moves.of({1: (0, 129), 2: (0, 5)}, 3, 300))
    expected = np.array(before)
    expected[1, :, :192], expected[2, :, :64] = expected[0, :, :192], expected[0, :, :64]
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(fork(before, Moves.of({}, 3, 300)), before)


@pytest.mark.parametrize("program", ["fork", "insert"])
def test_what_moves_entries_writes_into_the_donated_array_and_copies_none(program):
    cached, prefilled = numbered(4, 300).keys[0], numbered(2, 130).keys[0]
    lowered = {
        "fork": lambda: ONE_DEVICE.fork.lower(cached, Moves.of({}, 4, 300)),
        "insert": lambda: ONE_DEVICE.insert.lower(cached, prefilled, Moves.of({}, 4, 130)),
    }[program]()
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes == cached.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < cached.nbytes // 2  # a page, not a copy of the array

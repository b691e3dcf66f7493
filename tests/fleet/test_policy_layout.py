import jax
import numpy as np
import pytest

from penstock.fleet.policy_layout import InputLayout, OutputLayout, aligned_zeros
from penstock.types import ConfigError, LeafSpace

LEAVES = (
    LeafSpace("position", "box", (2, 3), "float64"),
    LeafSpace("held", "discrete", (), "int64", (9,)),
    LeafSpace("map", "box", (3,), "uint8"),
    LeafSpace("image", "box", (32, 32, 3), "uint8"),
)
RNG = np.random.default_rng(0)
BATCH = {
    "position": RNG.standard_normal((3, 2, 3)),
    "held": np.array([8, 0, 3]),
    "map": RNG.integers(0, 256, (3, 3)).astype(np.uint8),
    "image": RNG.integers(0, 256, (3, 32, 32, 3)).astype(np.uint8),
}
FIRST = np.array([True, False, True])


def test_what_is_packed_is_unpacked_on_the_device():
    layout = InputLayout(LEAVES, rows=5, padding_slot=99)
    block, whole = layout.pack(np.array([4, 0, 2]), BATCH, FIRST)
    assert [array.shape for array in whole] == [(5, 32, 32, 3)]  # the image alone is not packed
    slots, first, observations = jax.jit(layout.unpack)(block, whole)
    assert slots.tolist() == [4, 0, 2, 99, 99]
    assert first.tolist() == [True, False, True, False, False]
    assert set(observations) == {leaf.name for leaf in LEAVES}
    for name, array in observations.items():
        np.testing.assert_array_equal(array[:3], BATCH[name].astype(np.float32 if name == "position" else np.int64))
    assert observations["position"].dtype == np.float32 and observations["image"].dtype == np.uint8


def test_the_block_is_a_copy_and_a_full_batch_of_large_leaves_is_not():
    layout = InputLayout(LEAVES, rows=3, padding_slot=9)
    batch = {name: array.copy() for name, array in BATCH.items()}
    block, whole = layout.pack(np.arange(3), batch, FIRST)
    assert whole[0] is batch["image"]
    batch["held"][:] = 7
    assert jax.jit(layout.unpack)(block, whole)[2]["held"].tolist() == [8, 0, 3]


def test_answers_come_back_in_the_spaces_dtypes():
    leaves = (
        LeafSpace("turn", "discrete", (), "int64", (5,)),
        LeafSpace("push", "box", (2,), "float64"),
        LeafSpace("hold", "multi_binary", (2,), "int8"),
    )
    layout = OutputLayout(leaves, rows=4)
    actions = {
        "push": np.arange(8, dtype=np.float32).reshape(4, 2) / 8,
        "turn": np.array([4, 3, 2, 1], np.int32),
        "hold": np.array([[0, 1], [1, 1], [0, 0], [1, 0]], np.int8),
    }
    logprobs, values = np.float32([-1.5, -2.5, -3.5, -4.5]), np.float32([0.1, 0.2, 0.3, np.nan])
    block = np.asarray(jax.jit(layout.join)(actions, logprobs, values))
    found, found_logprobs, found_values = layout.split(block, 3)
    assert {name: array.dtype.name for name, array in found.items()} == {
        "turn": "int64", "push": "float64", "hold": "int8"
    }  # fmt: skip
    for name, array in found.items():
        np.testing.assert_array_equal(array, actions[name][:3])
        assert array.flags.writeable and array.flags.owndata
    np.testing.assert_array_equal(found_logprobs, logprobs[:3])
    np.testing.assert_array_equal(found_values, values[:3])


@pytest.mark.parametrize("shape", [(3,), (32, 64, 3)])
def test_memory_begins_where_the_device_can_use_it(shape):
    array = aligned_zeros(shape, np.uint8)
    assert array.shape == shape and array.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"held": None}, "'held' is missing"), ({"held": np.zeros((3, 1))}, r"'held' is float64\[3, 1\]: .* int64\[3\]")],
)
def test_observations_of_another_form_are_named(change, message):
    batch = {name: array for name, array in (BATCH | change).items() if array is not None}
    with pytest.raises(ConfigError, match=message):
        InputLayout(LEAVES, rows=3, padding_slot=9).pack(np.arange(3), batch, FIRST)

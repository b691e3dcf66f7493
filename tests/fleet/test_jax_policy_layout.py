import jax
import numpy as np
import pytest

from penstock.fleet.jax_policy import InputLayout, OutputLayout
from penstock.model.control import ControlModelConfig, make_control_policy
from penstock.types import ConfigError, LeafSpace, Spaces

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


EDGES = {
    "small": (LeafSpace("small", "box", (2,), "uint32"), [0, 2**32 - 1], "uint32"),
    "large": (LeafSpace("large", "box", (512,), "uint32"), [0, 2**31] * 256, "uint32"),
    "narrow": (LeafSpace("narrow", "box", (2,), "int64", low=-(2**31), high=2**31 - 1), [-(2**31), 2**31 - 1], "int32"),
    "high": (LeafSpace("high", "box", (2,), "int64", low=0, high=2**32 - 1), [0, 2**32 - 1], "uint32"),
    "wide": (LeafSpace("wide", "box", (512,), "uint64", low=0, high=2**32 - 1), [2**31, 2**32 - 1] * 256, "uint32"),
    "most": (LeafSpace("most", "discrete", (), "int64", n=(2**31,)), 2**31 - 1, "int32"),
    "flags": (LeafSpace("flags", "box", (3,), "bool"), [True, False, True], "int32"),
    "half": (LeafSpace("half", "box", (2,), "float16"), [0.5, -65504.0], "float32"),
    "least": (LeafSpace("least", "box", (2,), "int8"), [-128, 127], "int32"),
}


def test_integers_reach_the_device_as_they_are():
    leaves = [leaf for leaf, _, _ in EDGES.values()]
    layout = InputLayout(leaves, rows=4, padding_slot=9)
    batch = {name: np.array([values] * 3, leaf.dtype) for name, (leaf, values, _) in EDGES.items()}
    _, _, observations = jax.jit(layout.unpack)(*layout.pack(np.arange(3), batch, FIRST))
    for name, (_, values, dtype) in EDGES.items():
        assert observations[name].dtype == dtype, name
        assert np.asarray(observations[name][:3]).tolist() == [values] * 3, name


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (LeafSpace("x", "box", (2,), "int64", low=-1, high=2**31), r"box 'x' is int64 between -1 and 2147483648"),
        (LeafSpace("x", "box", (2,), "uint64", low=0, high=2**32), r"box 'x' is uint64 between 0 and 4294967296"),
        (LeafSpace("x", "box", (2,), "int64", low=0), r"box 'x' is int64 without bounds"),
        (LeafSpace("x", "discrete", (), "int64", n=(2**32 + 1,)), r"discrete 'x' is int64 between 0 and 4294967296"),
        (LeafSpace("x", "box", (2,), "complex64"), r"box 'x' is complex64, which a policy's device does not have"),
    ],
)
def test_what_the_device_cannot_hold_is_refused_before_anything_is_packed(leaf, message):
    with pytest.raises(ConfigError, match=message):
        InputLayout([leaf], rows=4, padding_slot=9)
    spaces = Spaces((leaf,), (LeafSpace("", "discrete", (), "int64", (2,)),))
    with pytest.raises(ConfigError, match=message):
        make_control_policy(ControlModelConfig(hidden_sizes=(4,)), spaces, 0)


def test_the_block_is_a_copy_and_a_full_batch_of_large_leaves_is_not():
    layout = InputLayout(LEAVES, rows=3, padding_slot=9)
    batch = {name: array.copy() for name, array in BATCH.items()}
    block, whole = layout.pack(np.arange(3), batch, FIRST)
    assert np.shares_memory(whole[0], batch["image"])
    batch["held"][:] = 7
    assert jax.jit(layout.unpack)(block, whole)[2]["held"].tolist() == [8, 0, 3]


def test_rows_after_a_batch_serve_as_its_padding_where_there_are_enough():
    room = {name: np.concatenate([array, array]) for name, array in BATCH.items()}
    for rows, shared in [(3, True), (5, True), (6, True), (8, False)]:
        layout = InputLayout(LEAVES, rows=rows, padding_slot=9)
        block, whole = layout.pack(np.arange(3), room, FIRST)
        slots, first, observations = jax.jit(layout.unpack)(block, whole)
        assert np.shares_memory(whole[0], room["image"]) == shared and len(whole[0]) == rows
        assert slots.tolist() == [0, 1, 2] + [9] * (rows - 3) and first[:3].tolist() == FIRST.tolist()
        for name, array in BATCH.items():
            np.testing.assert_allclose(observations[name][:3], array, rtol=1e-6)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [({"held": None}, "'held' is missing"), ({"held": np.zeros((3, 1))}, r"'held' is float64\[3, 1\]: .* int64\[3\]")],
)
def test_observations_of_another_form_are_named(change, message):
    batch = {name: array for name, array in (BATCH | change).items() if array is not None}
    with pytest.raises(ConfigError, match=message):
        InputLayout(LEAVES, rows=3, padding_slot=9).pack(np.arange(3), batch, FIRST)

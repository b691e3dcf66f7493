"""Digests of arrays as a device holds them, against the same sums in Python's own integers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.model.arrays import digests_of, joined_digests


def finalised(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


def plain_digest(array: np.ndarray) -> str:
    words = array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}").tolist()
    lanes = []
    for seed in (0x9E3779B9, 0x7F4A7C15):
        terms = [finalised(i + seed & 0xFFFFFFFF) * finalised(word) for i, word in enumerate(words)]
        lanes.append(f"{sum(terms) % 2**32:08x}")
    return "".join(lanes)


def normal(shape: tuple[int, ...], seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 4), (0, 6)])
def test_a_digest_is_the_sum_over_places_and_bits(shape, dtype):
    array = np.asarray(8 * normal(shape)).astype(dtype)
    assert digests_of({"a": array}) == {"a": plain_digest(array)}


def test_two_digests_that_never_change():
    """They travel between processes, which may be of different versions of JAX."""
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1, -1], ml_dtypes.bfloat16)}
    assert digests_of(arrays) == {"a": "358484a273881c0e", "b": "6fd9195e06f3eb6e"}


def test_an_array_in_parts_has_the_digest_of_the_whole():
    stack, single = normal((4, 3, 5)), normal((2, 2), 1)
    layers = [{"layers": jnp.asarray(layer)} for layer in stack]
    joined = joined_digests([(0, {"single": single, "layers": stack[:0]}), *enumerate(layers)])
    assert joined == digests_of({"single": single, "layers": stack})
    swapped = joined_digests(enumerate([layers[1], layers[0], *layers[2:]]))
    assert swapped["layers"] != joined["layers"]


def flipped(array: np.ndarray, *places: int) -> np.ndarray:
    return np.where(np.isin(np.arange(array.size), places), -array, array)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: flipped(a, 11, 40),  # the highest bit of two words: a sum of bare words times odd numbers is blind
        lambda a: np.roll(a, 1),
        lambda a: a[::-1],
        lambda a: np.concatenate((a[32:], a[:32])),
        lambda a: np.where(np.arange(64) == 63, np.nextafter(a, np.float32(9)), a),
        lambda a: np.zeros_like(a),
    ],
    ids=["two signs", "moved by one", "backwards", "halves swapped", "one last bit", "zeros"],
)
def test_what_differs_has_another_digest(change):
    array = normal((64,))
    assert digests_of({"a": change(array).astype(np.float32)}) != digests_of({"a": array})


def test_no_two_of_many_neighbours_agree_in_either_lane():
    """Each differs from the first by one unit in the last place of one element."""
    array = normal((256,), dtype=ml_dtypes.bfloat16)
    bits = array.view(np.uint16)
    neighbours = [(bits + (np.arange(256) == place)).astype(np.uint16).view(ml_dtypes.bfloat16) for place in range(256)]
    found = [digests_of({"a": each})["a"] for each in [array, *neighbours]]
    assert len({digest[:8] for digest in found}) == len({digest[8:] for digest in found}) == 257


def test_zeros_of_both_signs_and_numbers_that_are_none_are_told_apart():
    arrays = {
        "plus": np.zeros(3, np.float32),
        "minus": -np.zeros(3, np.float32),
        "none": np.full(3, np.nan, np.float32),
    }
    assert len(set(digests_of(arrays).values())) == 3


@pytest.mark.slow
def test_names_and_shapes_of_one_model_need_one_program(monkeypatch):
    from penstock.model import arrays as module

    traced = []
    monkeypatch.setattr(module, "_lanes", lambda array, first: traced.append(array.shape) or jnp.zeros(2, jnp.uint32))
    jax.clear_caches()
    for seed in range(3):
        digests_of({"a": normal((5, 2), seed), "b": normal((3,), seed)})
    monkeypatch.undo()
    jax.clear_caches()
    assert traced == [(5, 2), (3,)]

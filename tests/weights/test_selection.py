import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.types import WeightsError
from penstock.weights import merged_arrays, trained_arrays


def model() -> dict[str, jnp.ndarray]:
    return {"embedding": jnp.ones((2, 2)), "layers.query": jnp.zeros(3), "layers.key": jnp.zeros(3)}


def test_frozen_arrays_are_left_out():
    assert list(trained_arrays(model(), [])) == ["embedding", "layers.query", "layers.key"]
    assert list(trained_arrays(model(), ["embedding", "*.key"])) == ["layers.query"]


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(WeightsError, match=r"\['head'\] match no name"):
        trained_arrays(model(), ["head", "embedding"])


def test_freezing_everything_is_an_error():
    with pytest.raises(WeightsError, match="nothing would train"):
        trained_arrays(model(), ["*"])


def test_fetched_arrays_meet_the_clients_own_in_its_dtype():
    base = model()
    merged = merged_arrays(base, {"layers.key": np.full(3, 0.5, ml_dtypes.bfloat16)})
    assert merged["embedding"] is base["embedding"] and list(merged) == list(base)
    assert merged["layers.key"].dtype == jnp.float32
    np.testing.assert_array_equal(merged["layers.key"], [0.5, 0.5, 0.5])
    assert merged["layers.key"].sharding == base["layers.key"].sharding


def test_unknown_and_misshaped_arrays_are_refused_by_name():
    fetched = {"head": np.zeros(1, np.float32), "layers.key": np.zeros(4, np.float32)}
    with pytest.raises(WeightsError, match=r"unknown \['head'\], misshaped \['layers.key is \(4,\), not \(3,\)'\]"):
        merged_arrays(model(), fetched)


def test_merged_arrays_own_their_memory():
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # aligned: JAX would refer to it
    fetched = memory[start : start + 4096].view(np.float32)
    merged = merged_arrays({"layers.query": jnp.ones(1024)}, {"layers.query": fetched})
    fetched[:] = 7.0
    np.testing.assert_array_equal(merged["layers.query"], np.zeros(1024))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from penstock.weights.host import host_arrays


def test_arrays_come_to_the_host_as_they_are():
    arrays = {"jax": jnp.arange(6.0).reshape(2, 3), "numpy": np.arange(3), "scalar": jnp.array(2.0)}
    found = host_arrays(arrays, bfloat16=False)
    assert all(isinstance(array, np.ndarray) and array.flags.c_contiguous for array in found.values())
    assert [(array.shape, str(array.dtype)) for array in found.values()] == [
        ((2, 3), "float32"),
        ((3,), "int64"),
        ((), "float32"),
    ]
    assert found["numpy"] is arrays["numpy"]


def test_transposed_arrays_are_put_in_order():
    array = np.arange(6.0).reshape(2, 3).T
    found = host_arrays({"x": array}, bfloat16=False)["x"]
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, array)


def test_only_float32_is_cast_and_on_its_device():
    device = jax.devices()[0]
    arrays = {"w": jax.device_put(jnp.array([1.0, 1 / 3]), device), "n": jnp.arange(2), "h": jnp.ones(1, jnp.float16)}
    found = host_arrays(arrays, bfloat16=True)
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "w": "bfloat16",
        "n": "int32",
        "h": "float16",
    }
    assert found["w"][1] == np.float32(1 / 3).astype(ml_dtypes.bfloat16) == 0.333984375

import jax
import numpy as np

from penstock.fleet.steps import aligned_zeros


def test_memory_begins_where_a_device_on_this_processor_can_read_it():
    for shape, dtype in [((3,), np.uint8), ((5, 7), np.float64), ((1, 4), np.int32), ((2, 100, 100, 3), np.uint8)]:
        array = aligned_zeros(shape, dtype)
        assert (array.shape, array.dtype, array.ctypes.data % 64) == (shape, np.dtype(dtype), 0)
        assert array.flags.writeable and not array.any()


def test_the_device_takes_it_as_it_is():
    array = aligned_zeros((4, 1024), np.float32)
    taken = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
    assert taken.unsafe_buffer_pointer() == array.ctypes.data

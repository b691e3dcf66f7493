"""Memory comes back exactly when nobody refers to it any more."""

import gc

import numpy as np

from penstock.weights.warm_memory import WarmMemory, plain_memory

SIZE = 1 << 20


def address(array):
    return array.ctypes.data


def test_memory_is_used_again_after_the_last_view_is_gone():
    memory = WarmMemory()
    first = memory.take(SIZE)
    place, view = address(first), first.view(np.float32).reshape(512, 512)[3:]
    view.flags.writeable = False
    del first
    gc.collect()
    second = memory.take(SIZE)  # the view is still there
    assert address(second) != place and memory.free_bytes == 0
    del view
    gc.collect()
    assert memory.free_bytes == SIZE
    assert address(memory.take(SIZE)) == place


def test_other_sizes_get_memory_of_their_own():
    memory = WarmMemory()
    memory.take(SIZE)
    gc.collect()
    assert len(memory.take(SIZE + 8)) == SIZE + 8
    assert memory.free_bytes == SIZE + SIZE + 8
    memory.clear()
    assert memory.free_bytes == 0


def test_arrays_outlive_the_memory_that_gave_them():
    memory = WarmMemory()
    array = memory.take(SIZE)
    array[:] = 7
    memory.clear()
    del memory
    gc.collect()
    assert int(array.sum()) == 7 * SIZE


def test_all_arrays_are_aligned_and_small_ones_are_not_kept():
    memory = WarmMemory()
    assert memory.take(0).shape == (0,)
    for size in (1, 63, 4097, SIZE, SIZE + 1):
        array = memory.take(size)
        assert array.shape == (size,) and array.dtype == np.uint8 and address(array) % 64 == 0
        del array
    assert address(plain_memory(100)) % 64 == 0
    gc.collect()
    assert memory.free_bytes == 2 * SIZE + 1

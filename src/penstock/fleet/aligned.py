"""Host memory that XLA reads where it lies, instead of copying it first."""

import math

import numpy as np

_ALIGNMENT = 64  # bytes: XLA uses memory of its caller only where it begins at a multiple of this


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeros that XLA can use without a copy of its own."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + nbytes].view(dtype).reshape(shape)

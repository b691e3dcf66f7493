"""NumPy arrays of different lengths to Arrow list columns and back, without a Python object per element."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def list_column(arrays: Sequence[np.ndarray | None], value_type: pa.DataType) -> pa.Array:
    """One list per array; None becomes null.

    Args:
        arrays: One-dimensional.
        value_type: Arrow type of the elements.
    """
    lengths = np.array([0 if array is None else len(array) for array in arrays], np.int64)
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} elements do not fit one list column: write fewer rows per file")
    present = [array for array in arrays if array is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    nulls = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        pa.array(flat).cast(value_type),
        mask=nulls if len(present) < len(arrays) else None,
    )


def arrays_from_column(column: pa.ChunkedArray, dtype: type) -> list[np.ndarray | None]:
    """One NumPy array per list, None for null.

    Arrays are read-only views of the column where its element type allows.

    Args:
        column: Of lists.
        dtype: Of the arrays; elements are converted where the file's type differs.
    """
    arrays: list[np.ndarray | None] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy(zero_copy_only=False)
        values = chunk.values.to_numpy(zero_copy_only=False)
        if values.dtype == np.uint8 and dtype is np.bool_:
            values = values.view(np.bool_)  # messages keep a byte per flag, so that it can be a view
        values = values.astype(dtype, copy=False)
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        for row in range(len(chunk)):
            arrays.append(values[offsets[row] : offsets[row + 1]] if valid[row] else None)
    return arrays

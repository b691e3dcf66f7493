"""Named arrays of any shape and dtype as one Arrow column: a list of leaves per row.

A leaf is a struct of `name`, `dtype` (NumPy's), `shape`, and `data`, the elements in C order. So the schema does not
depend on what a simulator's observations look like; ``np.frombuffer(data, dtype).reshape(shape)`` gives an array back.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.columns import flattened, nested_column
from penstock.types import InvalidRolloutError
from penstock.types.spaces import dtype_named

_LEAF = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int32()), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)
LEAVES = pa.list_(_LEAF)
"""Arrow type of the column."""

_NUMBERS = "biufc"
"""Kinds of dtypes that can be stored."""


def leaves_column(rows: Sequence[Mapping[str, np.ndarray] | None]) -> pa.Array:
    """One list of leaves per row, null for None; each array is copied once.

    Raises:
        InvalidRolloutError: an array holds Python objects, text or records.
    """
    lists = [() if row is None else tuple(row) for row in rows]
    names = flattened(lists)
    arrays = [_plain(array, name) for row in rows if row is not None for name, array in row.items()]
    structs = pa.StructArray.from_arrays(
        [
            pa.array(names, pa.string()),
            pa.array([array.dtype.str for array in arrays], pa.string()),
            pa.array([array.shape for array in arrays], pa.list_(pa.int32())),
            _bytes_column(arrays),
        ],
        fields=list(_LEAF),
    )
    column = nested_column(lists, structs)
    if None not in rows:
        return column
    missing = pa.array([row is None for row in rows])
    return pa.ListArray.from_arrays(column.offsets, column.values, type=LEAVES, mask=missing)


def _plain(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.kind not in _NUMBERS:
        raise InvalidRolloutError(f"leaf {name!r} is of dtype {array.dtype}: only numbers and flags can be stored")
    return array


def _bytes_column(arrays: Sequence[np.ndarray]) -> pa.Array:
    """The arrays' elements in C order, end to end."""
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    target = pa.allocate_buffer(int(offsets[-1]))
    flat = np.frombuffer(target, np.uint8)
    for array, start, stop in zip(arrays, offsets, offsets[1:], strict=False):
        if stop > start:
            flat[start:stop].view(array.dtype).reshape(array.shape)[...] = array
    return pa.Array.from_buffers(pa.large_binary(), len(arrays), [None, pa.py_buffer(offsets), target])


def leaves_from_column(column: pa.Array) -> list[dict[str, np.ndarray]]:
    """By row, read-only arrays by name; none for null.

    Raises:
        ValueError: bytes, dtype and shape of a leaf do not go together.
        TypeError: a dtype is none that NumPy knows.
    """
    structs = column.values
    names, dtypes, shapes = (structs.field(name).to_pylist() for name in ("name", "dtype", "shape"))
    arrays = [
        _array(piece, _dtype(dtype), shape)
        for piece, dtype, shape in zip(_pieces(structs.field("data")), dtypes, shapes, strict=True)
    ]
    cuts = column.offsets.to_pylist()
    return [
        dict(zip(names[start:stop], arrays[start:stop], strict=True))
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]


def _pieces(column: pa.Array) -> list[np.ndarray]:
    """uint8 views of a column of bytes."""
    if not len(column):
        return []
    if column.null_count:
        raise ValueError("a leaf has no data")
    _, offsets, content = column.buffers()
    cuts = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    flat = np.frombuffer(content if content is not None and content.size else b"", np.uint8)
    flat.flags.writeable = False
    return [flat[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]


@cache
def _dtype(text: str) -> np.dtype[Any]:
    dtype = dtype_named(text)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"a leaf is of dtype {text!r}, which is no number")
    return dtype


def _array(piece: np.ndarray, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray:
    if piece.ctypes.data % dtype.alignment:
        piece = piece.copy()
        piece.flags.writeable = False
    return piece.view(dtype).reshape(shape)

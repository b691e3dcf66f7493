"""NumPy arrays and Python values to Arrow columns and back, whole columns at a time.

Rows become columns without a dictionary per row, columns become rows without an Arrow scalar per value. Lists of
numbers are copied once on the way in and are read-only views on the way out, where the element types agree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import chain
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow as pa

from penstock.types import InvalidRolloutError, RolloutMetadata, RunDirectoryError
from penstock.types.experience import Experience

_ARROW: Mapping[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int32(),
    float: pa.float64(),
    tuple[int, ...]: pa.list_(pa.int32()),
    tuple[str, ...]: pa.list_(pa.string()),
}
"""Arrow's types by the annotations of a record's fields."""

_FIRST = ("worker_id", "timestamp", "lineage", "weight_step")
"""Columns of metadata that every file has, in this order, behind its own `schema_version`."""


def columns_of(record: type) -> list[pa.Field]:
    """A column for each field of a dataclass, in its order; it may hold nulls where the annotation allows None."""
    return [pa.field(name, *_arrow_of(hint)) for name, hint in get_type_hints(record).items()]


def _arrow_of(hint: Any) -> tuple[pa.DataType, bool]:
    """An annotation's Arrow type, and whether None is allowed."""
    if not isinstance(hint, UnionType):
        return _ARROW[hint], False
    (kind,) = (each for each in get_args(hint) if each is not NoneType)
    return _ARROW[kind], True


def fields_from_columns(record: type, column: Callable[[str], pa.Array]) -> list[list[Any]]:
    """The values of a dataclass's fields, in its order, each for all rows; null is the default where that is not None.

    Args:
        record: The dataclass; the columns are those of `columns_of`.
        column: Gives a column of that name.
    """
    return [_values(column(field.name), field.default) for field in fields(record)]


def _values(column: pa.Array, default: Any) -> list[Any]:
    if pa.types.is_list(column.type):
        return list(map(tuple, slices(values_from_column(column.values), column.offsets)))
    values = values_from_column(column)
    if column.null_count and default not in (None, MISSING):
        return [default if value is None else value for value in values]
    return values


METADATA_COLUMNS: list[pa.Field] = sorted(
    (column for column in columns_of(RolloutMetadata) if column.name != "schema_version"),
    key=lambda column: _FIRST.index(column.name) if column.name in _FIRST else len(_FIRST),
)
"""Columns of `RolloutMetadata`; a file that was written before there was one of them reads as its field's default."""

_ADDED = {
    field.name: field.default for field in fields(RolloutMetadata) if field.name not in (*_FIRST, "schema_version")
}


def metadata_values(members: Sequence[Experience], kind: str) -> dict[str, list[Any]]:
    """What the columns of metadata hold, `schema_version` among them.

    Raises:
        InvalidRolloutError: a member, which is of this kind, has no metadata.
    """
    for member in members:
        if member.metadata is None:
            raise InvalidRolloutError(f"{kind} {member.rollout_id!r} has no metadata: it cannot be stored")
    return {field.name: [getattr(one.metadata, field.name) for one in members] for field in fields(RolloutMetadata)}


def metadata_from_columns(batch: pa.RecordBatch) -> list[RolloutMetadata]:
    """The metadata of every row."""
    return list(map(RolloutMetadata, *fields_from_columns(RolloutMetadata, batch.column)))


def conformed(table: pa.Table, schema: pa.Schema, name: str, kind: str, flags_as_bytes: str = "") -> pa.Table:
    """The columns of a schema, whatever their order and widths in a table.

    Args:
        table: As read by `penstock.rundir.read_parquet`.
        schema: Whose columns are wanted.
        name: Of the table, for errors.
        kind: What its rows should be, for errors.
        flags_as_bytes: The column whose flags may have a byte each, as in messages, and keep it.

    Raises:
        RunDirectoryError: a column is missing, or of a type that does not fit.
    """
    columns: list[pa.ChunkedArray | pa.Array] = []
    for field in schema:
        if field.name not in table.column_names:
            if field.name not in _ADDED:
                raise RunDirectoryError(f"{name} has no column {field.name}: it holds no {kind}")
            columns.append(pa.array([_ADDED[field.name]] * table.num_rows, field.type))
            continue
        column = table.column(field.name)
        flags = field.name == flags_as_bytes and column.type == pa.list_(pa.uint8())
        try:
            columns.append(column if flags else column.cast(field.type))
        except pa.ArrowException as error:
            raise RunDirectoryError(
                f"{name}: column {field.name} is {column.type}, it must be {field.type}: {error}"
            ) from error
    return pa.Table.from_arrays(columns, names=schema.names)


def list_column(arrays: Sequence[np.ndarray | None], value_type: pa.DataType) -> pa.ListArray:
    """One list per array; None becomes null.

    Args:
        arrays: One-dimensional.
        value_type: Arrow type of the elements.

    Raises:
        ValueError: there are more elements than one column can hold.
    """
    missing = [array is None for array in arrays]
    present = [array for array in arrays if array is not None]
    lengths = [0 if array is None else len(array) for array in arrays] if any(missing) else list(map(len, present))
    values = _end_to_end(present, sum(lengths), value_type)
    return pa.ListArray.from_arrays(offsets_of(lengths), values, mask=pa.array(missing) if any(missing) else None)


def _end_to_end(arrays: Sequence[np.ndarray], length: int, value_type: pa.DataType) -> pa.Array:
    """All elements in one Arrow array, in memory of Arrow's pool, which keeps its pages for the next column."""
    dtype = arrays[0].dtype if arrays else np.dtype(np.float64)
    if not arrays or dtype == np.bool_ or pa.from_numpy_dtype(dtype) != value_type:
        return pa.array(np.concatenate(arrays) if arrays else np.zeros(0)).cast(value_type)
    buffer = pa.allocate_buffer(length * dtype.itemsize)
    np.concatenate(arrays, out=np.frombuffer(buffer, dtype), casting="no")
    return pa.Array.from_buffers(value_type, length, [None, buffer])


def nested_column(lists: Sequence[Sequence[Any]], values: pa.Array) -> pa.ListArray:
    """One list per member of `lists`; only their lengths are looked at, `values` are all their elements end to end."""
    return pa.ListArray.from_arrays(offsets_of(list(map(len, lists))), values)


def offsets_of(lengths: Sequence[int]) -> pa.Array:
    """Arrow's int32 offsets for lists of these lengths.

    Raises:
        ValueError: together they are longer than one column can be.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} elements do not fit one list column: write fewer rows per file")
    return pa.array(offsets.astype(np.int32))


def flattened(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """All elements end to end."""
    return list(chain.from_iterable(lists))


def shared_column(values: Sequence[Any], column: Callable[[list[Any]], pa.Array]) -> pa.Array:
    """A column of objects that many rows share: each is converted once.

    Args:
        values: Row by row.
        column: Makes an Arrow array of a list of different objects.
    """
    known: dict[int, int] = {}
    rows = [known.setdefault(id(value), len(known)) for value in values]
    different = dict(zip(rows, values, strict=True))
    return column([different[row] for row in range(len(known))]).take(pa.array(rows, pa.int32()))


def arrays_from_column(column: pa.ChunkedArray | pa.Array, dtype: type) -> list[np.ndarray | None]:
    """One NumPy array per list, None for null.

    Arrays are read-only views of the column where its element type allows.

    Args:
        column: Of lists.
        dtype: Of the arrays; elements are converted where the file's type differs.
    """
    arrays: list[np.ndarray | None] = []
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        values, offsets = flat_values(chunk, dtype), chunk.offsets.to_pylist()
        views = [values[start:stop] for start, stop in zip(offsets, offsets[1:], strict=False)]
        if chunk.null_count:
            valid = chunk.is_valid().to_pylist()
            views = [view if there else None for view, there in zip(views, valid, strict=True)]
        arrays += views
    return arrays


def flat_values(lists: pa.ListArray, dtype: type) -> np.ndarray:
    """The elements behind a column of lists, read-only; `lists.offsets` point into them.

    Raises:
        ValueError: an element is null.
    """
    if lists.values.null_count:
        raise ValueError("there is a null among the elements of its lists")
    values = lists.values.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint8 and dtype is np.bool_:
        values = values.view(np.bool_)  # messages keep a byte per flag, so that it can be a view
    values = values.astype(dtype, copy=False)
    values.flags.writeable = False  # where Arrow had to copy, as for packed flags
    return values


def values_from_column(column: pa.Array) -> list[Any]:
    """Python values of a column of strings or numbers, None for null."""
    if column.null_count:
        return column.to_pylist()
    return column.to_numpy(zero_copy_only=False).tolist()


def slices(values: Sequence[Any], offsets: pa.Array) -> Iterable[Sequence[Any]]:
    """`values` cut at Arrow's offsets."""
    cuts = offsets.to_pylist()
    return (values[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False))

"""Parquet files of records, and NumPy arrays and Python values as Arrow columns and back.

Files have zstd, dictionary-encoded strings and one schema version each. They are written aside and renamed, so a reader
that finds one finds all of it. Any Parquet reader opens them; `read_parquet` also refuses files of a newer Penstock,
whose columns may mean something else by now.

Rows become columns without a dictionary per row, columns become rows without an Arrow scalar per value. Lists of
numbers are copied once on the way in and are read-only views on the way out, where the element types agree.

Named arrays of any shape and dtype are one column, a list of leaves per row. A leaf is a struct of `name`, `dtype`
(NumPy's), `shape`, and `data`, the elements in C order. So the schema does not depend on what a simulator's
observations look like; ``np.frombuffer(data, dtype).reshape(shape)`` gives an array back.
"""

import json
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.rundir.storage import replaced_atomically
from penstock.types import InvalidRolloutError, PenstockError, RolloutMetadata, RunDirectoryError, SchemaVersionError
from penstock.types.rollouts import ONE_SAMPLE, SCHEMA_VERSION, Experience
from penstock.types.spaces import dtype_named

VERSION_KEY = b"penstock.schema_version"
"""Where a file's key-value metadata says its schema version; a file without it is of version 0."""
REPLACES_KEY = b"penstock.replaces"
"""In the metadata of a file made by merging others: their names, as a JSON list. Where both are there, the merged one
counts."""


class WithoutPandas:
    """For the start of `sys.meta_path`: a process imports no pandas.

    Arrow would, wherever it is installed, to ask it nothing: for a quarter of a second and 28 MB.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """As where it is not installed."""
        if name == "pandas":
            raise ModuleNotFoundError("this process has no use for pandas", name=name)


def write_parquet(path: Path, table: pa.Table, compression: str = "zstd") -> None:
    """Writes a table durably; the file appears under its name only when it is whole.

    Strings are dictionary-encoded and floats stored byte-split, which packs log-probabilities smaller.

    Args:
        path: Target file.
        table: With a schema made by `versioned`.
        compression: Any codec that Parquet knows.
    """
    with replaced_atomically(path) as temporary, parquet_writer(temporary, table.schema, compression) as writer:
        writer.write_table(table)


def parquet_writer(path: Path, schema: pa.Schema, compression: str = "zstd") -> pq.ParquetWriter:
    """A writer with the settings of all our files; neither atomic nor durable by itself.

    Statistics are of plain columns only: nobody asks for a list's least element, and small files were a third longer.
    """
    strings = [field.name for field in schema if pa.types.is_string(field.type)]
    lists = [field for field in schema if pa.types.is_list(field.type)]
    floats = [f"{field.name}.list.element" for field in lists if pa.types.is_floating(field.type.value_type)]
    scalars = [field.name for field in schema if not pa.types.is_nested(field.type)]
    return pq.ParquetWriter(
        path,
        schema,
        compression=compression,
        write_page_checksum=True,
        use_dictionary=strings,  # pyright: ignore[reportArgumentType]  # a list of columns is allowed too
        use_byte_stream_split=floats,  # pyright: ignore[reportArgumentType]
        write_statistics=scalars,  # pyright: ignore[reportArgumentType]
    )


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a file, or those of the named columns that it has.

    Raises:
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is missing or not a Parquet file.
    """
    try:
        with opened_parquet(path, str(path)) as file:
            return read_columns(file, columns)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} cannot be read as Parquet: {error}") from error


@contextmanager
def opened_parquet(source: "Path | BinaryIO", name: str) -> Generator[pq.ParquetFile, None, None]:
    """Opens a file of any version up to the present one; what goes wrong inside the block is named too.

    Args:
        source: Path or opened file.
        name: For errors.

    Raises:
        FileNotFoundError: it is missing.
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is not a Parquet file.
    """
    try:
        with pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True) as file:
            version = schema_version(file.schema_arrow)
            if version > SCHEMA_VERSION:
                raise SchemaVersionError(
                    f"{name} has schema version {version}, this Penstock reads up to {SCHEMA_VERSION}: "
                    "read it with the Penstock that wrote it, or a newer one"
                )
            yield file
    except (FileNotFoundError, PenstockError):
        raise
    except (OSError, pa.ArrowException, ValueError) as error:  # names and metadata may be no text, numbers no numbers
        raise RunDirectoryError(f"{name} cannot be read as Parquet: {error}") from error


def read_columns(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of an opened file: all columns, or those of the named ones that it has.

    Raises:
        pyarrow.ArrowException: the columns are damaged: text that is no UTF-8, lists that reach outside their values.
    """
    present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
    table = file.read(columns=present)
    table.validate(full=True)
    return table


def versioned(fields: Sequence[pa.Field]) -> pa.Schema:
    """A schema that carries the present schema version."""
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


def schema_version(schema: pa.Schema) -> int:
    """The version that a file's schema carries; 0 for the original form, which carried none.

    Raises:
        RunDirectoryError: it carries something else.
    """
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    text = metadata.get(VERSION_KEY, b"0")
    if not text.isdigit() or len(text) > 9:
        raise RunDirectoryError(f"the schema version of a file of rollouts is {text[:40]!r}, which is no number")
    return int(text)


def replacing(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The schema of a file that takes the place of the named ones."""
    return schema.with_metadata({**(schema.metadata or {}), REPLACES_KEY: json.dumps(list(names)).encode()})


def replaced_names(schema: pa.Schema) -> tuple[str, ...]:
    """Names of the files whose rows a file with this schema holds as well."""
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    return tuple(str(name) for name in json.loads(metadata.get(REPLACES_KEY, b"[]")))


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

_ADDED: dict[str, Any] = {
    field.name: field.default for field in fields(RolloutMetadata) if field.name not in (*_FIRST, "schema_version")
} | {"sample_starts": ONE_SAMPLE, "rewards_by_function": (), "timings": ()}


def metadata_values(members: Sequence[Experience], kind: str) -> dict[str, list[Any]]:
    """What the columns of metadata hold, `schema_version` among them.

    Raises:
        InvalidRolloutError: a member, which is of this kind, has no metadata.
    """
    stamps = [member.metadata for member in members]
    for member, stamp in zip(members, stamps, strict=True):
        if stamp is None:
            raise InvalidRolloutError(f"{kind} {member.rollout_id!r} has no metadata: it cannot be stored")
    return {field.name: [getattr(stamp, field.name) for stamp in stamps] for field in fields(RolloutMetadata)}


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


def table_of(values: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """A table of a schema.

    Args:
        values: By column, its Arrow array, or what makes one of the schema's type.
        schema: What columns there are, in which order.
    """
    columns = [
        value if isinstance(value := values[field.name], pa.Array) else pa.array(value, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


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


def text_column(texts: Sequence[str]) -> pa.Array:
    """Strings; half of a surrogate pair, which is no character, is written as its escape, as tokenizers read it."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a tool's answer or a problem of somebody's file may hold one
        return pa.array([text.encode("utf-8", "backslashreplace").decode() for text in texts], pa.string())


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


PAIRS = pa.map_(pa.string(), pa.float64())
"""Arrow type of a column of named numbers."""


def pairs_column(rows: Sequence[Collection[tuple[str, float | None]]]) -> pa.MapArray:
    """The named numbers of each row, in their order."""
    pairs = flattened(rows)
    keys = pa.array([key for key, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.float64())
    return pa.MapArray.from_arrays(offsets_of(list(map(len, rows))), keys, values)


def pairs_from_column(maps: pa.MapArray) -> list[tuple[tuple[str, float | None], ...]]:
    """By row, the named numbers; none for null."""
    if not len(maps.keys):
        return [()] * len(maps)
    pairs = list(zip(values_from_column(maps.keys), values_from_column(maps.items), strict=True))
    return list(map(tuple, slices(pairs, maps.offsets)))


def arrays_from_column(column: pa.ChunkedArray | pa.Array, dtype: type) -> list[np.ndarray | None]:
    """One NumPy array per list, None for null.

    Arrays are read-only views of the column where its element type allows.

    Args:
        column: Of lists.
        dtype: Of the arrays; elements are converted where the file's type differs.
    """
    arrays: list[np.ndarray | None] = []
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        views: list[np.ndarray | None] = list(slices(flat_values(chunk, dtype), chunk.offsets))
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


def slices(values: Any, offsets: pa.Array) -> Iterable[Any]:
    """A sequence or array cut at Arrow's offsets."""
    cuts = offsets.to_pylist()
    return (values[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False))


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
    rows = zip(slices(names, column.offsets), slices(arrays, column.offsets), strict=True)
    return [dict(zip(*row, strict=True)) for row in rows]


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

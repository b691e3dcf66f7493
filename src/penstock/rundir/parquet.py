"""Parquet files of records: zstd, dictionary-encoded strings, one schema version per file.

Files are written aside and renamed, so a reader that finds one finds all of it. Any Parquet reader opens them;
`read_parquet` also refuses files of a newer Penstock, whose columns may mean something else by now.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.rundir.atomic import replaced_atomically
from penstock.types import PenstockError, RunDirectoryError, SchemaVersionError
from penstock.types.rollouts import SCHEMA_VERSION

VERSION_KEY = b"penstock.schema_version"
"""Where a file's key-value metadata says its schema version; a file without it is of version 0."""
REPLACES_KEY = b"penstock.replaces"
"""In the metadata of a file made by merging others: their names, as a JSON list. Where both are there, the merged one
counts."""


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
    strings, floats = _leaf_paths(schema)
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


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Some columns of a file as Python values, row by row; columns that it lacks are left out.

    Raises:
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is missing or not a Parquet file.
    """
    return read_parquet(path, columns).to_pylist()


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


def _leaf_paths(schema: pa.Schema) -> tuple[list[str], list[str]]:
    """Parquet paths of the top-level string columns, and of the columns that are lists of floats."""
    strings = [field.name for field in schema if pa.types.is_string(field.type)]
    floats = [
        f"{field.name}.list.element"
        for field in schema
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
    return strings, floats

"""Reading a user's JSONL or Parquet files as rows, with errors that name the file, the line and the column.

Paths may be fsspec URLs and may hold ``*``. All rows are read into memory.
"""

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.types import ConfigError
from penstock.types.importing import nearest

Row = Mapping[str, Any]


def read_rows(paths: str | Sequence[str], field: str) -> list[Row]:
    """The rows of one or more files, in order.

    Args:
        paths: Files ending in ``.parquet``, or else read as one JSON object a line.
        field: The config field, for the message.

    Raises:
        ConfigError: a file is missing, unreadable or malformed, or there are no rows.
    """
    rows: list[Row] = []
    for path in _expanded([paths] if isinstance(paths, str) else paths, field):
        rows.extend(_read_parquet(path, field) if path.endswith(".parquet") else _read_jsonl(path, field))
    if not rows:
        raise ConfigError(f"{field} {paths!r} holds no rows")
    return rows


def column(row: Row, name: str, field: str, source: str) -> Any:
    """A row's value.

    Raises:
        ConfigError: the row has no such column, or null in it.
    """
    if row.get(name) is None:
        known = ", ".join(row)
        problem = "is null" if name in row else f"does not exist{nearest(name, row)}: there are {known}"
        raise ConfigError(f"{field} {name!r}: in {source} this column {problem}")
    return row[name]


def _expanded(paths: Sequence[str], field: str) -> list[str]:
    found: list[str] = []
    for path in paths:
        if "://" in path:
            found.append(path)
            continue
        local = str(Path(path).expanduser())
        matches = sorted(glob.glob(local)) if "*" in local else [local]
        if not matches or not Path(matches[0]).is_file():
            folder = Path(local).parent
            siblings = [other.name for other in folder.glob("*")] if folder.is_dir() else []
            raise ConfigError(f"{field} {path!r}: no such file{nearest(Path(local).name, siblings)}")
        found.extend(matches)
    return found


def _read_jsonl(path: str, field: str) -> list[Row]:
    import fsspec

    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            return list(_parsed(file, path, field))
    except (OSError, UnicodeDecodeError, ImportError) as error:
        raise ConfigError(f"{field} {path!r} cannot be read: {error}") from error


def _parsed(lines: Any, path: str, field: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{field} {path!r}, line {number} is not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{field} {path!r}, line {number} is a {type(row).__name__}: expected a JSON object")
        yield row


def _read_parquet(path: str, field: str) -> list[Row]:
    import fsspec
    import pyarrow.parquet
    from pyarrow import ArrowInvalid

    try:
        with fsspec.open(path, "rb") as file:
            return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ArrowInvalid, ImportError) as error:
        raise ConfigError(f"{field} {path!r} cannot be read as Parquet: {error}") from error

"""The answer to a query: an Arrow table, and its rows as Python values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.types import ConfigError


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a query gave.

    Attributes:
        table: Its rows.
        more: Whether there were more rows than asked for.
    """

    table: pa.Table
    more: bool = False

    @property
    def columns(self) -> list[str]:
        """Names of the columns; two may have the same."""
        return list(self.table.column_names)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows as Python values; maps are dictionaries.

        Raises:
            ConfigError: a value is none that Python has, such as a date after the year 9999.
        """
        for batch in self.table.to_batches():
            yield from zip(*map(_values, self.columns, batch.columns), strict=True)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows by column name, which must differ."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows()]


def _values(name: str, column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist(maps_as_pydicts="strict")
    except (OverflowError, ValueError) as error:
        raise ConfigError(
            f"column {name!r} holds a {column.type} that Python cannot express ({error}): "
            "take it as text, by CAST(… AS VARCHAR)"
        ) from error

"""The answer to a query, as a table or as JSON lines."""

import datetime
import json
from decimal import Decimal
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dashboard.safe_text import printable, shortened
from penstock.rundir import QueryResult, RunViews

LINES_AROUND = 4
"""Lines of a screen that are not rows."""

_CELL_WIDTH = 400
_READABLE_WIDTH = 16
_GAP = 2


def print_query(views: RunViews, sql: str, limit: int | None, console: Console) -> None:
    """Runs a query and prints as many of its rows as fit a screen, or as many as asked for.

    Raises:
        ConfigError: the query does more than read, or cannot be answered.
    """
    result = views.select(sql, limit=limit if limit is not None else max(console.height - LINES_AROUND, 5))
    rows = [[_cell(value) for value in row] for row in result.rows()]
    console.print(_rows_across(result, rows) if _fits(result, rows, console.width) else _rows_down(result, rows))
    if result.more:
        console.print(f"{result.table.num_rows} rows; there are more: --limit N, or --json for all", style="dim")


def print_query_json(views: RunViews, sql: str, limit: int | None) -> None:
    """Prints one JSON object per row and line; columns of the same name are told apart by number.

    Raises:
        ConfigError: the query does more than read, or cannot be answered.
    """
    result = views.select(sql, limit=limit)
    names = _distinct(result)
    for row in result.rows():
        print(json.dumps(dict(zip(names, map(_plain, row), strict=True))))


def _fits(result: QueryResult, rows: list[list[str]], width: int) -> bool:
    """Whether each column can have a readable width."""
    widths = [max(map(cell_len, column)) for column in zip(result.columns, *rows, strict=True)]
    return sum(min(natural, _READABLE_WIDTH) + _GAP for natural in widths) - _GAP <= width


def _rows_across(result: QueryResult, rows: list[list[str]]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in result.table.schema:
        numeric = str(column.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(Text(printable(column.name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _rows_down(result: QueryResult, rows: list[list[str]]) -> Table:
    """One line per value: for rows with more columns than the screen has room for."""
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, row in enumerate(rows, start=1):
        table.add_row(Text(f"row {number}", style="bold"))
        for name, value in zip(result.columns, row, strict=True):
            table.add_row(Text(printable(name)), Text(value))
    return table


def _distinct(result: QueryResult) -> list[str]:
    names: list[str] = []
    for name in result.columns:
        count = 2
        given = name
        while given in names:
            given, count = f"{name}_{count}", count + 1
        names.append(given)
    return names


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return shortened(value, _CELL_WIDTH)
    if isinstance(value, float):
        return str(_rounded(value))
    plain = _rounded(_plain(value))
    return shortened(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False), _CELL_WIDTH)


def _rounded(value: Any) -> Any:
    """Floats to six digits, Unix seconds to the millisecond."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.6g}")


def _plain(value: Any) -> Any:
    """What JSON knows: numbers that are not finite become null, dates ISO text, anything else its own text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, str | bool | int) else str(value)

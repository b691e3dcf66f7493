"""The answer to a query, as a table or as JSON lines."""

import datetime
import json
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dashboard.safe_text import shortened
from penstock.rundir.views import QueryResult, RunViews

LINES_AROUND = 4
"""Lines of a screen that are not rows."""

_CELL_WIDTH = 400


def print_query(views: RunViews, sql: str, limit: int | None, console: Console) -> None:
    """Runs a query and prints as many of its rows as fit a screen, or as many as asked for.

    Raises:
        ConfigError: the query does more than read, or cannot be answered.
    """
    result = views.select(sql, limit=limit if limit is not None else max(console.height - LINES_AROUND, 5))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in result.table.schema:
        numeric = str(column.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(Text(shortened(column.name, 60)), justify="right" if numeric else "left", overflow="fold")
    for row in result.rows():
        table.add_row(*(Text(_cell(value)) for value in row))
    console.print(table)
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
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return shortened(value, _CELL_WIDTH)
    plain = _plain(value)
    return shortened(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False), _CELL_WIDTH)


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

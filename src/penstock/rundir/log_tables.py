"""The JSON-lines logs of a run as Arrow tables, for queries over many lines.

A last line without its end is being written: it is left out. Keys that a schema does not name are left out too, and
keys that a line lacks are null. JSON may hold half of a surrogate pair, which is no character: it is shown by its
escape. `penstock.rundir.logs` has the readers that yield Python rows.
"""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from penstock.rundir.logs import has_log, read_events, read_json_lines
from penstock.types import RunDirectoryError

TICKET_SCHEMA = pa.schema(
    [
        ("ticket_id", pa.string()),
        ("lesson_id", pa.string()),
        ("index", pa.int64()),
        ("rollouts", pa.int64()),
        ("admitted_step", pa.int64()),
        ("deadline_step", pa.int64()),
        ("lineage", pa.int64()),
        ("time", pa.float64()),
    ]
)
FATE_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("fate", pa.string()),
        ("reason", pa.string()),
        ("step", pa.int64()),
        ("lineage", pa.int64()),
        ("time", pa.float64()),
    ]
)
_METRIC_KEYS = pa.schema([("step", pa.int64()), ("time", pa.float64())])
_EVENT_SCHEMA = pa.schema([("time", pa.float64()), ("event", pa.string()), ("details", pa.string())])
_LEAST_BLOCK_BYTES = 1 << 20


def read_log_table(path: Path, schema: pa.Schema) -> pa.Table:
    """The finished lines of a log, in order, as columns of a schema; no rows where the file is missing.

    Raises:
        RunDirectoryError: a finished line is not such a JSON object.
    """
    return _read(path, schema, "ignore")


def read_fate_table(path: Path) -> pa.Table:
    """``fates.jsonl`` with the number of each line, since a rollout's last line counts."""
    table = read_log_table(path, FATE_SCHEMA)
    return table.append_column("line", pa.array(range(1, table.num_rows + 1), pa.int64()))


def read_metric_table(path: Path) -> pa.Table:
    """``metrics.jsonl`` with one column per metric; null where a line does not have it."""
    table = _read(path, _METRIC_KEYS, "infer")
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):  # null on every line: it has no type of its own yet
            typed = field.with_type(pa.float64())
            table = table.set_column(index, typed, pa.nulls(table.num_rows, typed.type))
    return table


def read_event_table(path: Path) -> pa.Table:
    """``events.jsonl``: time, event, and what belongs to it as one JSON object, for it differs from event to event."""
    rows = [
        {
            "time": event.get("time"),
            "event": event.get("event"),
            "details": json.dumps({key: value for key, value in event.items() if key not in ("time", "event")}),
        }
        for event in map(_cleaned, read_events(path))
    ]
    return _table(path, rows, _EVENT_SCHEMA, _EVENT_SCHEMA.names)


def _read(path: Path, schema: pa.Schema, unexpected: str) -> pa.Table:
    content = path.read_bytes() if has_log(path) else b""
    content = content[: content.rfind(b"\n") + 1]
    if not content.strip():
        return schema.empty_table()
    if not _is_flat(content):
        return _read_slowly(path, schema, unexpected)
    # No line may be longer than a block.
    block_bytes = max(_LEAST_BLOCK_BYTES, 1 + max(map(len, io.BytesIO(content))))
    try:
        content.decode()  # Arrow's reader takes bytes that are no text
        return pj.read_json(
            io.BytesIO(content),
            read_options=pj.ReadOptions(block_size=block_bytes),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
        )
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return _read_slowly(path, schema, unexpected)


def _is_flat(content: bytes) -> bool:
    """Whether each line is one object with no other in it; Arrow's reader dies of a null, and of deep nesting."""
    lines = content.count(b"\n")
    braces = content.count(b"{") == content.count(b"}") == lines
    ends = content.startswith(b"{") and content.count(b"\n{") == lines - 1 and content.count(b"}\n") == lines
    return braces and ends and b"[" not in content


def _read_slowly(path: Path, schema: pa.Schema, unexpected: str) -> pa.Table:
    """By Python's reader, which takes what Arrow's does not: half of a surrogate pair, a key that comes twice."""
    rows = list(map(_cleaned, read_json_lines(path)))
    names = dict.fromkeys(schema.names)
    if unexpected == "infer":
        names |= dict.fromkeys(name for row in rows for name in row)
    return _table(path, rows, schema, names)


def _table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema, names: Iterable[str]) -> pa.Table:
    known = {field.name: field.type for field in schema}
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows], known.get(name)) for name in names})
    except (pa.ArrowException, OverflowError) as error:
        raise RunDirectoryError(f"{path} has a line that is not a JSON object of this log: {error}") from error


def _cleaned(value: Any) -> Any:
    """With escapes for what cannot be encoded."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value

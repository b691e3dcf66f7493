"""SQL over a run directory: DuckDB views of its files, read-only, on a live run and on a dead one.

The views show the run at the moment they were opened: Parquet through Arrow datasets, logs as Arrow tables. So DuckDB
itself opens no file at all, and its access to files, extensions and Python variables is off and locked: a statement can
neither write nor reach outside the run. (The type of a statement alone is no protection: in DuckDB 2 a SELECT may hold
a ``COPY … TO``.) It has no folder for what does not fit into memory either, so such a statement fails. Files that are
merged or expire meanwhile are looked up anew.

Of the JSON-lines logs a last line without its end is being written: it is left out. Keys that a schema does not name
are left out too, and keys that a line lacks are null. JSON may hold half of a surrogate pair, which is no character: it
is shown by its escape. `penstock.rundir.logs` has the readers that yield Python rows.

A broken status.json counts as none, since it is only a note on the moment: everything else of the run can be read
without it. Broken ``lineages.jsonl`` are refused, for without it nobody knows which updates count.

Not covered: following a run as it grows; open the views again for that.
"""

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.json as pj

from penstock.rundir.directory import NO_FORK, RunDirectory, read_forks
from penstock.rundir.live_files import FilesVanished, RunFiles
from penstock.rundir.logs import encodable, has_log, parse_lines, read_events, read_status
from penstock.types import ConfigError, Mode, RunDirectoryError


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
        ("epoch", pa.int64()),
        ("position", pa.int64()),
        ("problem", pa.int64()),
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
    return read_log_block(path, schema)[0]


def read_log_block(path: Path, schema: pa.Schema, offset: int = 0, limit: int | None = None) -> tuple[pa.Table, int]:
    """Finished lines of a log from a byte on, and the byte after the last of them, for a reader who comes again.

    Args:
        path: The log; it may be missing.
        schema: The columns; keys that it does not name are left out.
        offset: In bytes, where a line begins.
        limit: In bytes, about so much; one line at least. None reads to the end.

    Raises:
        RunDirectoryError: a finished line is not such a JSON object.
    """
    return _read(path, schema, "ignore", offset, limit)


def read_fate_table(path: Path) -> pa.Table:
    """``fates.jsonl`` with the number of each line, since a rollout's last line counts."""
    table = read_log_table(path, FATE_SCHEMA)
    return table.append_column("line", pa.array(range(1, table.num_rows + 1), pa.int64()))


def read_metric_table(path: Path) -> pa.Table:
    """``metrics.jsonl`` with one column per metric; null where a line does not have it."""
    return read_metric_block(path)[0]


def read_metric_block(path: Path, offset: int = 0, limit: int | None = None) -> tuple[pa.Table, int]:
    """Lines of ``metrics.jsonl`` from a byte on, and where they end, as `read_log_block` does it."""
    table, end = _read(path, _METRIC_KEYS, "infer", offset, limit)
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):  # null on every line: it has no type of its own yet
            typed = field.with_type(pa.float64())
            table = table.set_column(index, typed, pa.nulls(table.num_rows, typed.type))
    return table, end


def read_event_table(path: Path) -> pa.Table:
    """``events.jsonl``: time, event, and what belongs to it as one JSON object, for it differs from event to event."""
    rows = [
        {
            "time": event.get("time"),
            "event": event.get("event"),
            "details": json.dumps({key: value for key, value in event.items() if key not in ("time", "event")}),
        }
        for event in map(encodable, read_events(path))
    ]
    return _table(path, rows, _EVENT_SCHEMA, _EVENT_SCHEMA.names)


def _read(
    path: Path, schema: pa.Schema, unexpected: str, offset: int = 0, limit: int | None = None
) -> tuple[pa.Table, int]:
    content = _finished_lines(path, offset, limit) if has_log(path) else b""
    end = offset + len(content)
    if not content.strip():
        return schema.empty_table(), end
    if not _is_flat(content):
        return _read_slowly(path, content, offset, schema, unexpected), end
    # No line may be longer than a block.
    block_bytes = max(_LEAST_BLOCK_BYTES, 1 + max(map(len, io.BytesIO(content))))
    try:
        content.decode()  # Arrow's reader takes bytes that are no text
        table = pj.read_json(
            io.BytesIO(content),
            read_options=pj.ReadOptions(block_size=block_bytes),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
        )
        return table, end
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return _read_slowly(path, content, offset, schema, unexpected), end


def _finished_lines(path: Path, offset: int, limit: int | None) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(-1 if limit is None else limit)
        if limit is not None and len(content) == limit and b"\n" not in content:
            content += file.readline()
    return content[: content.rfind(b"\n") + 1]


def _is_flat(content: bytes) -> bool:
    """Whether each line is one object with no other in it; Arrow's reader dies of a null, and of deep nesting."""
    lines = content.count(b"\n")
    braces = content.count(b"{") == content.count(b"}") == lines
    ends = content.startswith(b"{") and content.count(b"\n{") == lines - 1 and content.count(b"}\n") == lines
    return braces and ends and b"[" not in content


def _read_slowly(path: Path, content: bytes, offset: int, schema: pa.Schema, unexpected: str) -> pa.Table:
    """By Python's reader, which takes what Arrow's does not: half of a surrogate pair, a key that comes twice."""
    rows = list(map(encodable, parse_lines(path, content, offset)))
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


def known_status(directory: RunDirectory) -> dict[str, Any] | None:
    """The last status.json; None before the first, and an empty one where the file is broken."""
    status = read_status(directory.status_path)
    return {} if status is None and directory.status_path.exists() else status


def next_step(directory: RunDirectory) -> int | None:
    """The update that is next, as status.json says; None where it does not."""
    step = (known_status(directory) or {}).get("step")
    if not isinstance(step, int | float) or not math.isfinite(step) or abs(step) > NO_FORK:
        return None
    return int(step)


def horizons(directory: RunDirectory) -> pa.Table:
    """For the newest life of the run and those it descends from: the update from which on theirs do not count.

    Update u makes version u + 1, which survives a fork at step f where u + 1 ≤ f.

    Raises:
        RunDirectoryError: a line of ``lineages.jsonl`` is no fork.
    """
    forks = read_forks(directory.lineages_path)
    lineage, before = max(forks, default=0), NO_FORK
    found = {lineage: before}
    while lineage in forks:  # parents are older, so this ends
        lineage, step = forks[lineage]
        before = min(before, step)
        found[lineage] = before
    return pa.table({"lineage": pa.array(found.keys(), pa.int32()), "before": pa.array(found.values(), pa.int64())})


VIEWS = ("rollouts", "turns", "evaluations", "batches", "uses", "fragments", "fates", "tickets", "metrics", "events")
"""What can be queried; docs/rollouts.md describes the columns."""

Answer = TypeVar("Answer")

_LOOK_AGAIN = 8
_BATCH_ROWS = 8192

_BASE_VIEWS = """
CREATE VIEW evaluations AS SELECT * FROM _evaluations;
CREATE VIEW fates AS SELECT * FROM _fates;
CREATE VIEW tickets AS SELECT * FROM _tickets;
CREATE VIEW metrics AS SELECT * FROM _metrics;
CREATE VIEW events AS SELECT time, event, details::JSON AS details FROM _events;
CREATE VIEW batches AS
    SELECT b.*, coalesce(b.step < h.before, false) AS survives FROM _batches b LEFT JOIN _horizons h USING (lineage);
CREATE VIEW uses AS
    SELECT unnest(rollout_ids) AS rollout_id, batch_id, step, lineage, survives, rollout_advantage AS advantage
    FROM batches;
"""

# What has no fate waits, unless the update that is next (or a later one) has it in its batch.
_FATE_VIEW = """
CREATE VIEW {view} AS
    WITH last_fates AS (
        SELECT rollout_id, arg_max(fate, line) AS fate, arg_max(step, line) AS fate_step,
               arg_max(reason, line) AS fate_reason
        FROM _fates GROUP BY rollout_id
    ), used AS (
        SELECT rollout_id, count(*) AS uses, max(step) AS trained_step{advantage_of_use}
        FROM uses WHERE survives GROUP BY rollout_id
    )
    SELECT r.*, coalesce(u.uses, 0) AS uses, u.trained_step{advantage},
           nullif(f.fate, 'waiting') AS fate,
           CASE WHEN f.fate <> 'waiting' THEN f.fate_step END AS fate_step,
           CASE WHEN f.fate <> 'waiting' THEN f.fate_reason END AS fate_reason,
           CASE WHEN f.fate <> 'waiting' THEN f.fate
                WHEN u.trained_step >= (SELECT step FROM _current) THEN 'training'
                ELSE 'waiting' END AS state
    FROM _{view} r LEFT JOIN last_fates f USING (rollout_id) LEFT JOIN used u USING (rollout_id);
"""
_FRAGMENT_VIEWS = _FATE_VIEW.format(view="fragments", advantage_of_use="", advantage="")
_TRAINED_VIEW = _FATE_VIEW.format(
    view="rollouts", advantage_of_use=", arg_max(advantage, step) AS advantage", advantage=", u.advantage"
)
# Nobody trains them; the step that they belong to is that of the version which was evaluated.
_EVALUATED_VIEW = """
CREATE VIEW rollouts AS
    SELECT *, 0::BIGINT AS uses, NULL::BIGINT AS trained_step, NULL::DOUBLE AS advantage, NULL::VARCHAR AS fate,
           weight_step::BIGINT AS fate_step, NULL::VARCHAR AS fate_reason, evaluation AS state
    FROM _rollouts;
"""
_TURNS_VIEW = """
CREATE VIEW turns AS
    SELECT rollout_id, group_id, position AS index, turn.role, turn.content, turn.start, turn.stop, turn.timings
    FROM (SELECT rollout_id, group_id, unnest(turns) AS turn, generate_subscripts(turns, 1) - 1 AS position
          FROM _rollouts);
"""


class RunViews:
    """Views over one run; a context manager.

    Args:
        path: The run directory, or any folder in which a `rollouts` or a `fragments` folder is.
        trust: Connect to a store in the network, ``replay.store.url``, whoever may have written its URL into the run's
            config; by default only where nobody but the user could.
        mode: Whose rollouts the views `rollouts` and `turns` show: those of training, or those of evaluations.

        memory_bytes: Most that a query may take; None: DuckDB's own limit, four fifths of the machine's memory.

    Raises:
        ConfigError: ``replay.store.url`` names a place that is not opened, that cannot be read, or is silent.
        RunDirectoryError: there is no such folder, or one of its files is broken.
        SchemaVersionError: a newer Penstock wrote a file.
    """

    def __init__(
        self, path: str | Path, trust: bool = False, mode: Mode = "train", memory_bytes: int | None = None
    ) -> None:
        self.directory = RunDirectory(path)
        self.mode: Mode = mode
        self._trust = trust
        self._memory_bytes = memory_bytes
        _check_is_a_run(self.directory)
        self._connection, self.files = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the connection."""
        self._connection.close()

    def interrupt(self) -> None:
        """Ends the query that another thread is waiting for, by an error there; nothing where there is none."""
        self._connection.interrupt()

    def reopen(self) -> None:
        """Looks at the files anew."""
        self.close()
        self._connection, self.files = self._open()

    def select(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None, limit: int | None = None
    ) -> QueryResult:
        """Runs one SELECT, or what reads like one: FROM, WITH, VALUES, DESCRIBE, SUMMARIZE, SHOW.

        Args:
            sql: One statement over `VIEWS`.
            parameters: For ``?`` or ``$name`` in it.
            limit: Most rows to take; None takes all.

        Raises:
            ConfigError: it is another kind of statement, or DuckDB cannot answer it.
            RunDirectoryError: a file that it reads is damaged.
        """
        return self.look(lambda: self._answer(sql, parameters, limit))

    def look(self, read: Callable[[], Answer]) -> Answer:
        """Reads something of the run; again, from files listed anew, where some of them vanish meanwhile."""
        for _ in range(_LOOK_AGAIN):
            try:
                return read()
            except FilesVanished:
                self.reopen()
        raise RunDirectoryError(f"{self.directory.path}: its files change faster than they can be read: try again")

    def _answer(self, sql: str, parameters: Any, limit: int | None) -> QueryResult:
        try:
            self._check(sql)
            return self._run(sql, parameters, limit)
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            if self.files.vanished:
                raise FilesVanished(str(error)) from error
            if isinstance(error, duckdb.InterruptException):
                raise ConfigError("the query was ended before it had its answer: take fewer rows or columns") from error
            if isinstance(error, duckdb.OutOfMemoryException):  # DuckDB's own advice is on settings that are locked
                raise ConfigError("the query needs more memory than there is: take fewer rows or columns") from error
            reason = _without_excerpt(str(error))
            if "IOError" in reason and (damaged := self.files.first_damaged()):  # as Arrow says
                raise RunDirectoryError(damaged) from error
            raise ConfigError(f"the query cannot be answered: {reason}") from error

    def _check(self, sql: str) -> None:
        if not _is_unicode(sql):
            raise ConfigError(f"the query is {ascii(sql)}, which is not Unicode text: leave the broken characters out")
        statements = self._connection.extract_statements(sql)
        kinds = [statement.type for statement in statements]
        if kinds != [duckdb.StatementType.SELECT]:
            named = ", ".join(kind.name for kind in kinds) or "nothing"
            raise ConfigError(
                f"the query is {named}: it must be one statement that reads, such as SELECT, over {', '.join(VIEWS)}"
            )

    def _run(self, sql: str, parameters: Any, limit: int | None) -> QueryResult:
        found = self._connection.sql(sql) if parameters is None else self._connection.sql(sql, params=parameters)
        reader = found.to_arrow_reader(_BATCH_ROWS)
        if limit is None:
            return QueryResult(reader.read_all())
        batches: list[pa.RecordBatch] = []
        taken = 0
        for batch in reader:
            batches.append(batch)
            taken += batch.num_rows
            if taken > limit:
                break
        table = pa.Table.from_batches(batches, reader.schema)
        return QueryResult(table.slice(0, limit), taken > limit)

    def _open(self) -> tuple[duckdb.DuckDBPyConnection, RunFiles]:
        # Files first: then some rollouts may have a fate but no row yet, but none whose row is there lacks its fate.
        files = RunFiles.list_now(self.directory, self._trust, self.mode)
        connection = duckdb.connect()
        connection.register("_rollouts", files.rollouts)
        connection.register("_evaluations", files.evaluations)
        connection.register("_batches", files.batches)
        connection.register("_fragments", files.fragments)
        connection.register("_fates", read_fate_table(self.directory.fates_path))
        connection.register("_tickets", read_log_table(self.directory.tickets_path, TICKET_SCHEMA))
        connection.register("_metrics", read_metric_table(self.directory.metrics_path))
        connection.register("_events", read_event_table(self.directory.events_path))
        connection.register("_horizons", horizons(self.directory))
        rollouts = _TRAINED_VIEW if self.mode == "train" else _EVALUATED_VIEW
        connection.execute(_BASE_VIEWS + _current_step(self.directory) + rollouts + _TURNS_VIEW + _FRAGMENT_VIEWS)
        for setting in (
            *(() if self._memory_bytes is None else (f"memory_limit = '{self._memory_bytes}B'",)),
            "temp_directory = ''",
            "enable_external_access = false",
            "python_enable_replacements = false",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")
        return connection, files


def _check_is_a_run(directory: RunDirectory) -> None:
    if not directory.path.is_dir():
        raise RunDirectoryError(f"{directory.path}: there is no such directory")
    folders = (directory.rollouts, directory.path / "fragments")
    if not directory.config_path.is_file() and not any(folder.is_dir() for folder in folders):
        raise RunDirectoryError(
            f"{directory.path} is not a run directory: it has no config.yaml and no rollouts: "
            "give the directory that penstock train wrote, such as runs/cats-1"
        )


def _current_step(directory: RunDirectory) -> str:
    """A view of the update that is next: what status.json says, or else that of the newest batch."""
    step = next_step(directory)
    known = "(SELECT max(step) FROM uses WHERE survives)" if step is None else str(step)
    return f"CREATE VIEW _current AS SELECT {known} AS step;\n"


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which is how Python passes on bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_excerpt(message: str) -> str:
    """DuckDB's message without the statement and its arrow, which make no sense in one line."""
    return " ".join(message.partition("\n\nLINE ")[0].split())

"""SQL over a run directory: DuckDB views of its files, read-only, on a live run and on a dead one.

The views show the run at the moment they were opened: Parquet through Arrow datasets, logs as Arrow tables. So DuckDB
itself opens no file at all, and its access to files, extensions and Python variables is off and locked: a statement can
neither write nor reach outside the run. (The type of a statement alone is no protection: in DuckDB 2 a SELECT may hold
a ``COPY … TO``.) It has no folder for what does not fit into memory either, so such a statement fails. Files that are
merged or expire meanwhile are looked up anew. Not covered: following a run as it grows; open the views again for that.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import duckdb
import pyarrow as pa

from penstock.rundir.directory import RunDirectory
from penstock.rundir.log_tables import (
    TICKET_SCHEMA,
    read_event_table,
    read_fate_table,
    read_log_table,
    read_metric_table,
)
from penstock.rundir.query_result import QueryResult
from penstock.rundir.run_files import FilesVanished, RunFiles
from penstock.rundir.run_state import horizons, next_step
from penstock.types import ConfigError, RunDirectoryError

VIEWS = ("rollouts", "turns", "batches", "uses", "fragments", "fates", "tickets", "metrics", "events")
"""What can be queried; docs/rollouts.md describes the columns."""

Answer = TypeVar("Answer")

_LOOK_AGAIN = 8
_BATCH_ROWS = 8192

_BASE_VIEWS = """
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
_ROLLOUT_VIEWS = (
    _FATE_VIEW.format(
        view="rollouts",
        advantage_of_use=", arg_max(advantage, step) AS advantage",
        advantage=", u.advantage",
    )
    + """
CREATE VIEW turns AS
    SELECT rollout_id, group_id, position AS index, turn.role, turn.content, turn.start, turn.stop
    FROM (SELECT rollout_id, group_id, unnest(turns) AS turn, generate_subscripts(turns, 1) - 1 AS position
          FROM _rollouts);
"""
)


class RunViews:
    """Views over one run; a context manager.

    Args:
        path: The run directory, or any folder in which a `rollouts` or a `fragments` folder is.
        trust: Connect to a store in the network, ``replay.store.url``, whoever may have written its URL into the run's
            config; by default only where nobody but the user could.

    Raises:
        ConfigError: ``replay.store.url`` names a place that is not opened, that cannot be read, or is silent.
        RunDirectoryError: there is no such folder, or one of its files is broken.
        SchemaVersionError: a newer Penstock wrote a file.
    """

    def __init__(self, path: str | Path, trust: bool = False) -> None:
        self.directory = RunDirectory(path)
        self._trust = trust
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
            if isinstance(error, duckdb.OutOfMemoryException):  # DuckDB's own advice is on settings that are locked
                raise ConfigError("the query needs more memory than there is: take fewer rows or columns") from error
            raise ConfigError(f"the query cannot be answered: {_without_excerpt(str(error))}") from error

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
        files = RunFiles.list_now(self.directory, self._trust)
        connection = duckdb.connect()
        connection.register("_rollouts", files.rollouts)
        connection.register("_batches", files.batches)
        connection.register("_fragments", files.fragments)
        connection.register("_fates", read_fate_table(self.directory.fates_path))
        connection.register("_tickets", read_log_table(self.directory.tickets_path, TICKET_SCHEMA))
        connection.register("_metrics", read_metric_table(self.directory.metrics_path))
        connection.register("_events", read_event_table(self.directory.events_path))
        connection.register("_horizons", horizons(self.directory))
        connection.execute(_BASE_VIEWS + _current_step(self.directory) + _ROLLOUT_VIEWS + _FRAGMENT_VIEWS)
        for setting in (
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

"""An index of a run's rollouts: narrow rows in a DuckDB file of the user's cache, so that a list of millions is quick.

The run directory is the only truth: nothing is written there, and an index that is deleted is made again. It holds no
text and no tokens but where they are: the part and the row. Parts are read once each, logs from the byte where the last
look ended. A part that was merged into another gives its rollouts' places over to that; one that has expired leaves
rows without a place. A rollout that has a fate but was never stored has a row, too: what was thrown away is not hidden.

`step` is that of ``metrics.jsonl``: of what was trained the version that its update made, of what was thrown away the
update that was next, of an evaluation the version that was evaluated.

An index belongs to a run by its path and the first line of ``events.jsonl``. Where another process has it open, or its
folder cannot be written, it is made in memory, and `where` says why. One thread writes (`read_on`); `select` may be
called from any.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from penstock.rundir.directory import RunDirectory
from penstock.rundir.live_files import UNREADABLE, open_run_storage, opened_part
from penstock.rundir.parquet import PAIRS, replaced_names, schema_version
from penstock.rundir.rollout_rows import records_from_table, table_from_records
from penstock.rundir.storage import LocalStorage, Storage
from penstock.rundir.views import FATE_SCHEMA, TICKET_SCHEMA, horizons, read_log_block
from penstock.types import PenstockError

Answer = TypeVar("Answer")
pc: Any = pyarrow.compute  # its functions are made when it is imported, and have no types

VERSION = 3
"""Of the tables below; an index of another version is made again."""
LOG_BYTES = 4 << 20
"""So much of a log is read at once."""
FILES = 256
"""At most so many files are entered at once."""
PORTION_BYTES = 4 << 20
ROWS = 4096
"""Of a part whose timings are read at once: as they are stored they take more memory than all that is kept."""
MEMORY, IN_MEMORY = "80MB", "4GB"
"""What DuckDB may hold of an index that has a file, and of one that has none."""
THREADS = 2

STAGES = {
    "wait_s": "wait_ms", "prefill_s": "prefill_ms", "decode_s": "decode_ms", "policy_s": "decode_ms",
    "tool_s": "tool_ms", "simulate_s": "tool_ms", "reward_s": "reward_ms",
}  # fmt: skip
"""Columns of the timings of rollouts and fragments, by key: whole ms, which take a third of the room of fractions."""
_COLUMNS = tuple(dict.fromkeys(STAGES.values()))
_STAGES = ", ".join(_COLUMNS)
OF_TURN = ("rest_s", "wait_s", "prefill_s", "decode_s", "tool_s")
"""What `rollouts.turns` has of each response, one after the other: ms before it, of it, and of tools behind it."""

_TABLES = f"""
CREATE TABLE about (key VARCHAR, value VARCHAR);
CREATE TABLE parts (part INTEGER, name VARCHAR, bytes BIGINT);
CREATE TABLE groups (
    g INTEGER, group_id VARCHAR, lesson VARCHAR, problem UBIGINT, evaluation VARCHAR, admitted DOUBLE,
    deadline INTEGER);
CREATE TABLE rollouts (
    g INTEGER, position INTEGER, reward FLOAT, tokens INTEGER, weight_step INTEGER, newest INTEGER, lineage SMALLINT,
    time DOUBLE, seconds FLOAT, {", ".join(f"{name} INTEGER" for name in _COLUMNS)}, turns INTEGER[], worker VARCHAR,
    finish VARCHAR, part INTEGER, row INTEGER, state VARCHAR, step INTEGER, ended DOUBLE, reason VARCHAR,
    advantage FLOAT);
"""
AGE = """CASE WHEN r.step >= r.weight_step
    THEN r.step - r.weight_step - (r.state IS NULL OR r.state = 'trained')::INTEGER END"""
"""Updates from the oldest weights of a rollout to the version that it met; null where a resume went back further."""

_NEW_GROUPS = """
INSERT INTO groups
SELECT (SELECT coalesce(max(g), -1) FROM groups) + row_number() OVER (ORDER BY part, row), group_id, lesson, problem,
       evaluation, NULL, NULL
FROM (SELECT group_id, any_value(lesson) AS lesson, any_value(problem) AS problem, any_value(evaluation) AS evaluation,
             min(part) AS part, min(row) AS row
      FROM incoming WHERE NOT EXISTS (FROM groups old WHERE old.group_id = incoming.group_id) GROUP BY group_id)
"""
_KNOWN_GROUPS = """
UPDATE groups SET lesson = i.lesson, problem = i.problem, evaluation = i.evaluation
FROM (SELECT group_id, any_value(lesson) AS lesson, any_value(problem) AS problem, any_value(evaluation) AS evaluation
      FROM incoming GROUP BY group_id) i
WHERE groups.group_id = i.group_id AND groups.problem IS NULL
"""
_NUMBERED = """
CREATE OR REPLACE TEMP TABLE numbered AS SELECT g.g, i.* FROM incoming i JOIN groups g USING (group_id)
"""
_KNOWN_ROWS = f"""
UPDATE rollouts SET reward = n.reward, tokens = n.tokens, weight_step = n.weight_step, newest = n.newest,
       lineage = n.lineage, time = n.time, seconds = n.seconds, worker = n.worker, finish = n.finish,
       part = n.part, row = n.row, turns = n.turns, {", ".join(f"{name} = n.{name}" for name in _COLUMNS)}
FROM numbered n WHERE rollouts.g = n.g AND rollouts.position = n.position
"""
_NEW_ROWS = f"""
INSERT INTO rollouts
SELECT g, position, reward, tokens, weight_step, newest, lineage, time, seconds, {_STAGES}, turns, worker, finish,
       part, row, evaluation, CASE WHEN evaluation IS NULL THEN NULL ELSE weight_step END, NULL, NULL, NULL
FROM numbered n WHERE NOT EXISTS (FROM rollouts r WHERE r.g = n.g AND r.position = n.position) ORDER BY part, row
"""
_SPLIT = """
SELECT regexp_replace(rollout_id, '/[0-9]+$', '') AS group_id,
       coalesce(try_cast(regexp_extract(rollout_id, '/([0-9]+)$', 1) AS INTEGER), 0) AS position, *
"""
_FATES = (
    "CREATE OR REPLACE TEMP TABLE decided AS "
    + _SPLIT
    + """
FROM (SELECT rollout_id, arg_max(fate, line) AS fate, arg_max(time, line) AS time, arg_max(reason, line) AS reason,
             arg_max(step + (fate = 'trained')::INTEGER, line) AS met FROM fates GROUP BY rollout_id)
""",
    """
INSERT INTO groups
SELECT (SELECT coalesce(max(g), -1) FROM groups) + row_number() OVER (ORDER BY group_id), group_id,
       regexp_replace(group_id, '-[0-9]+-[0-9]+$', ''), NULL, NULL, NULL, NULL
FROM (SELECT DISTINCT group_id FROM decided
      WHERE NOT EXISTS (FROM groups old WHERE old.group_id = decided.group_id))
""",
    """
UPDATE rollouts SET state = nullif(d.fate, 'waiting'), step = CASE WHEN d.fate <> 'waiting' THEN d.met END,
       ended = CASE WHEN d.fate <> 'waiting' THEN d.time END,
       reason = CASE WHEN d.fate NOT IN ('waiting', 'trained') THEN d.reason END,
       advantage = CASE WHEN d.fate = 'trained' THEN advantage END
FROM (SELECT g.g, d.* FROM decided d JOIN groups g USING (group_id)) d
WHERE rollouts.g = d.g AND rollouts.position = d.position
""",
    """
INSERT INTO rollouts (g, position, state, step, ended, reason)
SELECT g.g, d.position, nullif(d.fate, 'waiting'), d.met, d.time, CASE WHEN d.fate <> 'trained' THEN d.reason END
FROM decided d JOIN groups g USING (group_id)
WHERE NOT EXISTS (FROM rollouts r WHERE r.g = g.g AND r.position = d.position) ORDER BY g.g, d.position
""",
)
_TICKETS = (
    """
INSERT INTO groups
SELECT (SELECT coalesce(max(g), -1) FROM groups) + row_number() OVER (ORDER BY time, group_id), group_id, lesson_id,
       NULL, NULL, time, deadline_step
FROM (SELECT ticket_id AS group_id, any_value(lesson_id) AS lesson_id, min(time) AS time,
             max(deadline_step) AS deadline_step
      FROM tickets GROUP BY 1) new WHERE NOT EXISTS (FROM groups old WHERE old.group_id = new.group_id)
""",
    """
UPDATE groups SET admitted = t.time, deadline = t.deadline_step
FROM (SELECT ticket_id, min(time) AS time, max(deadline_step) AS deadline_step FROM tickets GROUP BY 1) t
WHERE groups.group_id = t.ticket_id
""",
)
_USES = (
    "CREATE OR REPLACE TEMP TABLE used AS "
    + _SPLIT
    + """
FROM (SELECT rollout_id, max(step) AS step, arg_max(advantage, step) AS advantage FROM uses GROUP BY 1)
""",
    """
UPDATE rollouts SET advantage = u.advantage,
       step = coalesce(rollouts.step, u.step + 1)
FROM (SELECT g.g, u.* FROM used u JOIN groups g USING (group_id)) u
WHERE rollouts.g = u.g AND rollouts.position = u.position
""",
)
_PLAIN = {
    "group_id": ("group_id", pa.string()), "rollout_id": ("rollout_id", pa.string()),
    "group_key": ("group_key", pa.string()), "evaluation": ("evaluation", pa.string()),
    "reward": ("episode_reward", pa.float32()), "weight_step": ("weight_step", pa.int32()),
    "newest": ("newest_weight_step", pa.int32()), "lineage": ("lineage", pa.int16()),
    "time": ("timestamp", pa.float64()), "worker": ("worker_id", pa.string()), "finish": ("finish_reason", pa.string()),
}  # fmt: skip
"""Columns that are kept as a part has them, by their names here."""
_NARROW = (*(stored for stored, _ in _PLAIN.values()), "lesson_id", "task", "response_mask", "steps")
_SPENT = {"timings": "timings", "turns": "turns.list.element.timings"}
"""Columns of what rollouts took, and what of them is read."""
_TURNS = pa.list_(pa.struct([("timings", PAIRS)]))


class RunIndex:
    """The rollouts of one run.

    Args:
        directory: That of the run whose rollouts it holds.
        cache: Where the file is to be; None keeps it in memory.
        trust: As in `RunFiles.list_now`.

    Raises:
        ConfigError: the run's store is not opened.
    """

    def __init__(self, directory: RunDirectory, cache: Path | None, trust: bool = False) -> None:
        self._directory = directory
        self.storage = open_run_storage(directory, trust)
        """Where parts and batches are."""
        self._lock = threading.Lock()
        self.where, self._connection = _open(directory, cache)
        self.damaged: dict[str, str] = {}
        """File → why it cannot be read; it is left out."""
        self.version = 0
        """Grows with each change; what was asked before may have changed."""
        self.waiting = 0
        """Files that were found and not read yet."""
        self._listed, self._ends, self._lives = dict[str, dict[str, int]](), dict[str, int](), ""

    def close(self) -> None:
        """Frees the file."""
        self._connection.close()

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """The answer to a query of our own over `groups`, `rollouts` and `parts`."""
        with self._connection.cursor() as cursor:
            found = cursor.execute(sql, parameters or None)
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def columns(self, sql: str, parameters: Mapping[str, Any]) -> list[np.ndarray]:
        """The columns of such an answer, which are of numbers."""
        with self._connection.cursor() as cursor:
            return [np.asarray(column) for column in cursor.execute(sql, parameters or None).fetchnumpy().values()]

    def read_on(self) -> Iterator[str]:
        """Reads what is new, piece by piece; yields what was read, in words, so that a caller may stop in between."""
        self._look_at_lives()
        # Parts first: then some rollouts may have a fate but no row yet, but none whose row is there lacks its fate.
        for storage, folder in (
            (self.storage, "rollouts"),
            (self.storage, "fragments"),
            (LocalStorage(self._directory.path), "evaluations"),
        ):
            yield from self._read_parts(storage, folder)
        yield from self._read_log("tickets", self._directory.tickets_path, TICKET_SCHEMA, _TICKETS)
        yield from self._read_log("fates", self._directory.fates_path, FATE_SCHEMA, _FATES)
        yield from self._read_batches()

    def part_of(self, group_id: str) -> list[dict[str, Any]]:
        """The rows of a group in their order, with the names of the files that hold them."""
        return self.rows(
            """SELECT g.group_id, g.lesson, g.evaluation, g.admitted, g.deadline, r.*, p.name
            FROM groups g JOIN rollouts r USING (g) LEFT JOIN parts p USING (part)
            WHERE g.group_id = ? ORDER BY position""",
            [group_id],
        )

    def size_of(self, name: str) -> int:
        """Bytes of a file as it was found; 0 of one that is not known."""
        found = self.rows("SELECT bytes FROM parts WHERE name = ?", [name])
        return int(found[0]["bytes"]) if found else 0

    def _read_parts(self, storage: Storage, folder: str) -> Iterator[str]:
        files = {file.name: file.size_bytes for file in storage.files(folder)}
        if files == self._listed.get(folder):
            return
        known = {
            row["name"]: row
            for row in self.rows("SELECT * FROM parts WHERE starts_with(name, ?)", [f"{folder}/"])
        }  # fmt: skip
        changed = [name for name, size in files.items() if name in known and known[name]["bytes"] != size]
        gone = [name for name in known if name not in files and known[name]["bytes"] >= 0]
        new = [name for name in files if name not in known] + changed
        for names in _portions(sorted(new), files):
            self.waiting = len(new)
            found: dict[str, pa.Table] = {}
            for name in names:
                new.remove(name)
                read = self._read(storage, name, lambda file, name=name: (_kept(file, name), file.schema_arrow))
                if read is not None:
                    found[name] = read[0]
                    gone += [f"{folder}/{old}" for old in replaced_names(read[1])]
            if found:
                self._add_parts(found, files)
                yield f"{len(found)} files of {folder}"
        self.waiting = 0
        if gone:
            self._change("UPDATE rollouts SET part = NULL WHERE part IN (SELECT part FROM parts WHERE name IN "
                         "(SELECT unnest(?)))", [gone])  # fmt: skip
            self._change("UPDATE parts SET bytes = -1 WHERE name IN (SELECT unnest(?))", [gone])
        self._note_listed(folder, files)

    def _note_listed(self, folder: str, files: dict[str, int]) -> None:
        """Until its files are others there is nothing to read in it, unless one could not be read."""
        if not self.damaged:
            self._listed[folder] = files

    def _read(self, storage: Storage, name: str, read: Callable[[pq.ParquetFile], Answer]) -> Answer | None:
        """None of a file that is gone since it was listed, or cannot be read."""
        try:
            with opened_part(storage, name) as file:
                self.damaged.pop(name, None)
                return read(file)
        except FileNotFoundError:
            return None
        except (*UNREADABLE, PenstockError) as error:
            self.damaged[name] = str(error)
            return None

    def _add_parts(self, found: Mapping[str, pa.Table], files: Mapping[str, int]) -> None:
        with self._writing() as cursor:
            highest = cursor.execute("SELECT coalesce(max(part), 0) FROM parts").fetchone()
            first = int(highest[0]) + 1 if highest else 1
            cursor.execute("DELETE FROM parts WHERE name IN (SELECT unnest(?))", [list(found)])
            _add_files(cursor, range(first, first + len(found)), list(found), files)
            cursor.register("incoming", _joined(found.values(), first))
            for sql in (_NEW_GROUPS, _KNOWN_GROUPS, _NUMBERED, _KNOWN_ROWS, _NEW_ROWS):
                cursor.execute(sql)
            cursor.unregister("incoming")

    def _read_log(self, name: str, path: Path, schema: pa.Schema, statements: Sequence[str]) -> Iterator[str]:
        while True:
            offset = self._ends.get(name) or int(self._about(f"{name}_offset") or 0)
            if path.is_file() and path.stat().st_size < offset:
                offset = 0
            table, end = read_log_block(path, schema, offset, LOG_BYTES)
            if end == offset:
                return
            with self._writing() as cursor:
                numbered = table.append_column("line", pa.array(range(table.num_rows), pa.int64()))
                cursor.register(name, numbered)
                for sql in statements:
                    cursor.execute(sql)
                cursor.unregister(name)
                _note(cursor, f"{name}_offset", str(end))
            self._ends[name] = end
            yield f"{name} to byte {end}"

    def _read_batches(self) -> Iterator[str]:
        files = {file.name: file.size_bytes for file in self.storage.files("batches")}
        if files == self._listed.get("batches"):
            return
        known = {row["name"] for row in self.rows("SELECT name FROM parts WHERE starts_with(name, 'batches/')")}
        before = dict(zip(*horizons(self._directory).to_pydict().values(), strict=True))
        for names in _portions(sorted(set(files) - known, key=lambda name: name.rpartition("_")[2]), files):
            tables = {name: table for name in names if (table := self._read(self.storage, name, _uses)) is not None}
            if not tables:
                continue
            with self._writing() as cursor:
                steps = [table.column("step")[0].as_py() if table.num_rows else -1 for table in tables.values()]
                _add_files(cursor, [-1 - step for step in steps], list(tables), files)
                uses = _by_rollout(pa.concat_tables(tables.values()))
                lives = zip(*(uses.column(name).to_pylist() for name in ("step", "lineage")), strict=True)
                survives = pa.array([step < before.get(lineage, 0) for step, lineage in lives], pa.bool_())
                cursor.register("uses", uses.filter(survives))
                for sql in _USES:
                    cursor.execute(sql)
                cursor.unregister("uses")
            yield f"{len(tables)} batches"
        self._note_listed("batches", files)

    def _look_at_lives(self) -> None:
        """What was in the batch of an update that a resume made anew has no fate that says so: it waits again."""
        path = self._directory.lineages_path
        forks = hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
        if forks != self._lives and (before := self._about("lives")) != forks:
            with self._writing() as cursor:
                if before is not None:
                    cursor.execute("UPDATE rollouts SET advantage = NULL, step = NULL WHERE state IS NULL")
                _note(cursor, "lives", forks)
        self._lives = forks

    def _about(self, key: str) -> str | None:
        found = self.rows("SELECT value FROM about WHERE key = ?", [key])
        return found[0]["value"] if found else None

    def _change(self, sql: str, parameters: Sequence[Any]) -> None:
        with self._writing() as cursor:
            cursor.execute(sql, parameters or None)

    @contextmanager
    def _writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A transaction: all of it, or nothing where it fails."""
        self.version += 1
        with self._lock, self._connection.cursor() as cursor:
            cursor.execute("BEGIN")
            try:
                yield cursor
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
            cursor.execute("COMMIT")


def _open(directory: RunDirectory, cache: Path | None) -> tuple[str, duckdb.DuckDBPyConnection]:
    """Where the index is, in words, and a connection to it."""
    reason = "it was asked for"
    if cache is not None:
        path = cache / f"index-{directory.identity}.duckdb"
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            return str(path), _connected(path)
        except (OSError, duckdb.Error) as error:
            reason = " ".join(str(error).split())
    return f"in memory ({reason})", _connected(None)


def _connected(path: Path | None) -> duckdb.DuckDBPyConnection:
    # A file that no DuckDB of today can read, or of other tables, is deleted: it is made again.
    for _ in range(2):
        try:
            connection = duckdb.connect(":memory:" if path is None else str(path))
        except duckdb.IOException as error:
            if path is None or "lock" in str(error).lower() or not path.is_file():
                raise
            path.unlink()
            continue
        connection.execute(f"SET memory_limit = '{MEMORY if path else IN_MEMORY}'; SET threads = {THREADS}")
        spill = "" if path is None else f"{path}.spill".replace("'", "''")  # used by queries of very many rows
        connection.execute(f"SET temp_directory = '{spill}'; SET max_temp_directory_size = '2GB'")
        connection.execute("SET enable_external_access = false; SET python_enable_replacements = false")
        connection.execute("SET preserve_insertion_order = true")
        if not connection.execute("SELECT 1 FROM duckdb_tables()").fetchall():
            connection.execute(_TABLES)
            connection.execute("INSERT INTO about VALUES ('version', ?)", [str(VERSION)])
            return connection
        with suppress(duckdb.Error):
            if connection.execute("SELECT value FROM about WHERE key = 'version'").fetchall() == [(str(VERSION),)]:
                return connection
        connection.close()
        assert path is not None
        path.unlink()
    raise duckdb.IOException(f"{path} cannot be made anew")


def _add_files(
    cursor: duckdb.DuckDBPyConnection, parts: Sequence[int], names: list[str], files: Mapping[str, int]
) -> None:
    sizes = [files[name] for name in names]
    cursor.execute("INSERT INTO parts SELECT unnest(?), unnest(?), unnest(?)", [list(parts), names, sizes])


def _note(cursor: duckdb.DuckDBPyConnection, key: str, value: str) -> None:
    cursor.execute("DELETE FROM about WHERE key = ?", [key])
    cursor.execute("INSERT INTO about VALUES (?, ?)", [key, value])


def _kept(file: pq.ParquetFile, name: str) -> pa.Table:
    """What the index keeps of a part; of a small one what that is worked out from, for many of them are so at once."""
    schema = file.schema_arrow  # made anew each time that it is asked for
    is_old, is_small = schema_version(schema) == 0, file.metadata.num_rows <= ROWS
    if is_old:
        table = table_from_records(records_from_table(file.read(), Path(name).stem)).drop_columns("turns")
    else:
        table = file.read(columns=[*_NARROW, *(_SPENT.values() if is_small else ())], use_threads=False)
    count, have = table.num_rows, set(table.column_names)

    def column(name: str, kind: pa.DataType) -> pa.ChunkedArray:
        return table.column(name).cast(kind) if name in have else pa.chunked_array([pa.nulls(count, kind)])

    plain = {name: column(stored, kind) for name, (stored, kind) in _PLAIN.items()}
    plain["lesson"] = column("lesson_id" if "lesson_id" in have else "task", pa.string())
    of_answers = "response_mask" in have
    plain["tokens"] = pc.list_value_length(table.column("response_mask")) if of_answers else column("steps", pa.int32())
    plain["row"] = pa.array(range(count), pa.int32())
    if is_old or is_small:
        plain |= {"timings": column("timings", PAIRS), "turns": column("turns", _TURNS)}
    kept = pa.table(plain)
    kept.validate(full=True)
    return kept if is_old or is_small else _worked_out(kept, _pieces(file, "timings"), _pieces(file, "turns"))


def _joined(tables: Iterable[pa.Table], first_part: int) -> pa.Table:
    """Rows for `rollouts` of what was `_kept` of parts with numbers from `first_part` on.

    Of a rollout in a merged part and in one that it replaces, the later counts.
    """
    numbered = [table.append_column("part", pa.repeat(pa.scalar(part, pa.int32()), table.num_rows))
                for part, table in enumerate(tables, first_part)]  # fmt: skip
    small = [table for table in numbered if "timings" in table.column_names]
    made = [table for table in numbered if "timings" not in table.column_names]
    if small:
        whole = pa.concat_tables(small).combine_chunks()
        made.append(_worked_out(whole, *(iter(whole.column(name).chunks) for name in _SPENT)))
    joined = pa.concat_tables(table.select(made[0].column_names) for table in made)
    groups = joined.column("group_id").combine_chunks().dictionary_encode().indices.to_numpy()
    keys = groups.astype(np.int64) << 32 | joined.column("position").to_numpy()
    order = np.lexsort((joined.column("part").to_numpy(), keys))
    is_latest = np.append(np.diff(keys[order]) != 0, True)
    return joined if is_latest.all() else joined.take(order[is_latest])


def _worked_out(table: pa.Table, timings: Iterator[pa.MapArray], turns: Iterator[pa.ListArray]) -> pa.Table:
    """With the columns that are not stored as the index has them, in place of those that they follow from."""
    position = pc.struct_field(pc.extract_regex(table.column("rollout_id"), r"/(?P<n>[0-9]{1,9})$"), "n")
    made = {
        "position": pc.fill_null(position.cast(pa.int32()), 0),
        "problem": _problems(table.column("group_key")),
        **_seconds(table.num_rows, timings),
        "turns": _turns(table.num_rows, turns),
    }
    kept = {name: table.column(name) for name in table.column_names if name not in (*_SPENT, "rollout_id", "group_key")}
    return pa.table({**kept, **made})


def _uses(file: pq.ParquetFile) -> pa.Table:
    """What the index keeps of a batch: by row, the rollouts that an update trained, and with which advantage."""
    kinds = {"step": pa.int32(), "lineage": pa.int32(), "rollout_ids": pa.list_(pa.string())}
    kinds["rollout_advantage"] = pa.float32()
    found = file.read(columns=list(kinds), use_threads=False)
    count, have = found.num_rows, found.column_names
    table = pa.table({n: found.column(n).cast(k) if n in have else pa.nulls(count, k) for n, k in kinds.items()})
    table.validate(full=True)
    return table


def _by_rollout(uses: pa.Table) -> pa.Table:
    """A row for each rollout of them."""
    ids = uses.column("rollout_ids").combine_chunks()
    parents = pc.list_parent_indices(ids)
    flat = {name: uses.column(name).take(parents) for name in ("step", "lineage", "rollout_advantage")}
    return pa.table({"rollout_id": pc.list_flatten(ids), **flat}).rename_columns({"rollout_advantage": "advantage"})


def _portions(names: list[str], files: Mapping[str, int]) -> Iterator[list[str]]:
    """At most `FILES` at once, and about `PORTION_BYTES`: what is not committed yet is held in memory."""
    portion: list[str] = []
    room = PORTION_BYTES
    for name in names:
        if portion and (len(portion) == FILES or files[name] > room):
            yield portion
            portion, room = [], PORTION_BYTES
        portion.append(name)
        room -= files[name]
    if portion:
        yield portion


def _pieces(file: pq.ParquetFile, name: str) -> Iterator[pa.Array]:
    """A column of `_SPENT` in pieces of `ROWS`; none where the file has no such column."""
    leaves = (file.schema.column(number).path for number in range(len(file.schema)))
    if any(leaf.startswith(f"{_SPENT[name]}.") for leaf in leaves):
        yield from (batch.column(0) for batch in file.iter_batches(ROWS, columns=[_SPENT[name]]))


def _seconds(count: int, pieces: Iterator[pa.MapArray]) -> dict[str, pa.Array]:
    """The columns of what so many rollouts took, from pieces of their timings; null where nobody said."""
    found = {name: np.full(count, np.nan) for name in ("seconds", *STAGES.values())}
    names, start = {"generate_s": "seconds", **STAGES}, 0
    for piece in pieces:
        for key, rows, values in _by_key(piece):
            if key in names:
                found[names[key]][rows + start] = values
        start += len(piece)
    seconds = pa.array(found.pop("seconds").astype(np.float32), from_pandas=True)
    spent = {name: pa.array(_ms(each), from_pandas=True).cast(pa.int32()) for name, each in found.items()}
    return {"seconds": seconds} | spent


def _turns(count: int, pieces: Iterator[pa.ListArray]) -> pa.ChunkedArray:
    """`OF_TURN` of the responses of so many rollouts, from pieces of their turns; null where nobody said."""
    found: list[pa.Array] = []
    for piece in pieces:
        structs = piece.flatten()
        entries = [each for each in _by_key(structs.field(0)) if each[0] in OF_TURN]
        answered = np.zeros(len(structs), np.bool_)
        for key, turns, _ in entries:
            answered[turns] |= key == "decode_s"
        rollouts = pc.list_parent_indices(piece).to_numpy()
        number = np.cumsum(answered) - 1  # of the response that a turn is, or comes after
        ms = np.zeros((int(answered.sum()), len(OF_TURN)))
        for key, turns, values in entries:
            own = number[turns] >= 0
            own[own] = rollouts[answered][number[turns][own]] == rollouts[turns][own]
            ms[number[turns[own]], OF_TURN.index(key)] = values[own]
        responses = np.bincount(rollouts[answered], minlength=len(piece))
        offsets = np.append(0, np.cumsum(len(OF_TURN) * responses)).astype(np.int32)
        flat = pa.array(_ms(ms).ravel().astype(np.int32))
        found.append(pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(responses == 0)))
    kind = pa.list_(pa.int32())
    return pa.chunked_array(found or [pa.nulls(count, kind)], kind)


def _by_key(maps: pa.MapArray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """By key, in which rows it stands, and its values there."""
    lists = maps.cast(pa.list_(pa.struct([("key", maps.type.key_type), ("value", maps.type.item_type)])))
    pairs = lists.flatten()  # without what stands behind a null
    keys, values = pairs.field(0).dictionary_encode(), pairs.field(1).to_numpy(zero_copy_only=False)
    rows, codes = pc.list_parent_indices(lists).to_numpy(), keys.indices.to_numpy()
    for code, key in enumerate(keys.dictionary.to_pylist()):
        yield key, rows[codes == code], values[codes == code]


def _ms(seconds: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(1e3 * seconds, 0, 2**31 - 1))


def _problems(keys: pa.ChunkedArray) -> pa.Array:
    """A number for each key, by which answers to one problem are found."""
    known = keys.combine_chunks().dictionary_encode()
    numbers = pa.array(map(_hashed, known.dictionary.to_pylist()), pa.uint64())
    return pc.fill_null(numbers.take(known.indices), _hashed(None))


def _hashed(text: str | None) -> int:
    return int.from_bytes(hashlib.blake2b((text or "").encode("utf-8", "backslashreplace"), digest_size=8).digest())

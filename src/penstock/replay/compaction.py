"""Small files are merged: a run that seals every few seconds would otherwise leave tens of thousands of them.

The oldest small files are copied, row group by row group, into one that names them in its metadata (`REPLACES_KEY`) and
appears by one rename. They are deleted when `GRACE_S` has passed, by whichever round comes then. In between readers of
ours skip them; others may see a rollout twice but never not at all, and find the files that they have just listed.
A process killed in between leaves both; `finish` deletes the replaced ones when the next writer starts.

Rows keep their order, files their time, and groups stay in one file. Files of an older schema are left as they are.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import threading
from collections.abc import Iterator, Sequence

import pyarrow as pa

from penstock.replay.inventory import Entry, Inventory, State
from penstock.rundir.live_files import read_live
from penstock.rundir.parquet import opened_parquet, parquet_writer, replaced_names, replacing
from penstock.rundir.part_names import PartNames
from penstock.rundir.storage import Storage, StoredFile
from penstock.types import Clock

GRACE_S = 10.0
"""How long a replaced file stays: longer than a reader takes from its listing to opening the last file."""

_ROW_GROUP_ROWS = 1024
_ROW_GROUP_BYTES = 64 << 20


class Compactor:
    """Merges the parts of one folder. One round at a time; sealing and reading go on meanwhile.

    Args:
        storage: Where they are.
        folder: Of the parts.
        schema: Of the files that may be merged.
        inventory: Of the writer.
        names: For the merged files.
        compression: Of the merged files.
        parts: So many small files are worth a round; 0 never.
        rollouts: A file with fewer is small.
        clock: Unix seconds.
        grace_s: See `GRACE_S`.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        schema: pa.Schema,
        inventory: Inventory,
        names: PartNames,
        compression: str,
        parts: int,
        rollouts: int,
        clock: Clock,
        grace_s: float = GRACE_S,
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._schema = schema
        self._inventory = inventory
        self._names = names
        self._compression = compression
        self._parts = parts
        self._rollouts = rollouts
        self._clock = clock
        self._grace_s = grace_s
        self._round = threading.Lock()
        self._leaving: list[tuple[float, str]] = []
        self._closed = False

    def run(self) -> None:
        """One round: what was replaced long enough ago is deleted, and small files are merged if they are enough."""
        if not self._round.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._delete_replaced(self._clock() - self._grace_s)
            chosen = [] if self._closed else self._choose()
            if chosen:
                self._merge(chosen)
        finally:
            self._round.release()

    def finish(self) -> None:
        """Deletes what a killed writer had merged but not deleted; for the process that writes from here on."""
        replaced = read_live(self._storage, self._folder, lambda file, _: replaced_names(file.schema_arrow))
        for names in replaced.values():
            for name in names:
                self._storage.delete(f"{self._folder}/{name}")

    def close(self) -> None:
        """Deletes what is replaced without further grace, lest a finished run show rollouts twice for ever.

        A round that is under way is abandoned first, at its next row group.
        """
        self._closed = True
        with self._round:
            self._delete_replaced(float("inf"))

    def _delete_replaced(self, made_before_s: float) -> None:
        while self._leaving and self._leaving[0][0] <= made_before_s:
            _, name = self._leaving.pop(0)
            self._storage.delete(name)
            self._inventory.remove(name)

    def _choose(self) -> list[Entry]:
        """The oldest small files whose rows make one that is no longer small, or all small ones; none if too few."""
        if not self._parts or len(self._inventory) < self._parts:
            return []
        small = [entry for entry in self._inventory.kept() if self._is_small(entry)]
        if len(small) < self._parts:
            return []
        rows = 0
        chosen: list[Entry] = []
        for entry in small:
            if rows >= self._rollouts:
                break
            chosen.append(entry)
            rows += entry.rows or 0
        return chosen if len(chosen) > 1 else []

    def _is_small(self, entry: Entry) -> bool:
        if not entry.name.startswith(f"{self._folder}/"):
            return False
        if entry.rows is None:
            with (
                self._storage.opened(entry.name) as source,
                opened_parquet(source, self._storage.locate(entry.name)) as file,
            ):
                entry.rows = int(file.metadata.num_rows)
                entry.mergeable = file.schema_arrow.remove_metadata().equals(self._schema.remove_metadata()) and (
                    self._metadata(file.schema_arrow) == self._metadata(self._schema)
                )
        return entry.mergeable and entry.rows < self._rollouts

    @staticmethod
    def _metadata(schema: pa.Schema) -> dict[bytes, bytes]:
        """What a file says of itself, except for whom it replaces."""
        return {key: value for key, value in (schema.metadata or {}).items() if key.startswith(b"penstock.schema")}

    def _merge(self, entries: Sequence[Entry]) -> None:
        names = [entry.name for entry in entries]
        self._inventory.mark(names, State.MERGING)
        target = self._names.like(names[-1])
        schema = replacing(self._schema, [name.rpartition("/")[2] for name in names])
        rows = 0
        try:
            with self._storage.writing(target) as path:
                with parquet_writer(path, schema, self._compression) as writer:
                    for table in self._row_groups(names):
                        writer.write_table(table.cast(schema) if table.schema != schema else table)
                        rows += table.num_rows
                size = path.stat().st_size
        except _Abandoned:
            self._inventory.mark(names, State.KEPT)
            return
        except BaseException:
            self._inventory.mark(names, State.KEPT)
            raise
        now = self._clock()
        self._inventory.add(StoredFile(target, size, now), rows, replaces=names)
        self._leaving += [(now, name) for name in names]

    def _row_groups(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of files in order, in pieces that are worth a row group and fit the memory."""
        pending: list[pa.Table] = []
        for name in names:
            with self._storage.opened(name) as source, opened_parquet(source, self._storage.locate(name)) as file:
                for index in range(file.num_row_groups):
                    if self._closed:
                        raise _Abandoned
                    pending.append(file.read_row_group(index).replace_schema_metadata(None))
                    rows = sum(table.num_rows for table in pending)
                    if rows >= _ROW_GROUP_ROWS or sum(table.nbytes for table in pending) >= _ROW_GROUP_BYTES:
                        yield pa.concat_tables(pending)
                        pending = []
        if pending:
            yield pa.concat_tables(pending)


class _Abandoned(Exception):
    """The store was closed in the middle of a round."""

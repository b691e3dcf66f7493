"""Small files are merged: a run that seals every few seconds would otherwise leave tens of thousands of them.

The oldest small files are copied, row group by row group, into one that names them in its metadata (`REPLACES_KEY`)
and appears by one rename. They are deleted together when `GRACE_S` has passed, by whichever round comes then. Meanwhile
readers of ours skip them; others may see a rollout twice, but never not at all. A reader that has listed a file and
opens it after that moment gets an error, which no order of steps can spare it; ours list the folder again. (Emptying a
file before it is deleted would, but then a slow reader would silently miss rows.) A process killed in between leaves
both; `finish` deletes the replaced ones when the next writer starts.

Rows keep their order, files their time, and groups stay in one file. Files of an older schema, and those that
cannot be read, are left as they are.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.replay.config import StoreConfig
from penstock.replay.formats import ExperienceFormat
from penstock.replay.inventory import Entry, Inventory, State
from penstock.rundir.live_files import UNREADABLE, opened_part, read_live
from penstock.rundir.parquet import parquet_writer, replaced_names, replacing, schema_version
from penstock.rundir.storage import PartNames, Storage, StoredFile
from penstock.types import Clock, RunDirectoryError

GRACE_S = 2.0
"""How long a replaced file stays: longer than a listing takes, which then has it or the merged one, or both."""

LARGE_BYTES = 256 << 20
"""A file that large is not small, however few rows it has: fragments with images take megabytes each."""

_LOOK_S = 1.0
"""All files are looked through this often, where they must be some minutes old before they are merged."""
_ROW_GROUP_ROWS = 1024
_ROW_GROUP_BYTES = 64 << 20


class Compactor:
    """Merges the parts of one folder. One round at a time; sealing and reading go on meanwhile.

    Args:
        storage: Where they are.
        experience: Which they are; files of another schema are left alone.
        inventory: Of the writer.
        names: For the merged files.
        config: What is small, and how many are worth a round.
        clock: Unix seconds.
        grace_s: See `GRACE_S`.
        on_damage: Told of files that cannot be read when a writer starts; None makes that an error.
    """

    def __init__(
        self,
        storage: Storage,
        experience: ExperienceFormat,
        inventory: Inventory,
        names: PartNames,
        config: StoreConfig,
        clock: Clock,
        grace_s: float = GRACE_S,
        on_damage: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._storage = storage
        self._folder = experience.folder
        self._schema = experience.to_table(()).schema
        self._inventory = inventory
        self._names = names
        self._compression = config.compression
        self._parts = config.compact_parts
        self._rollouts = config.compact_rollouts
        self._after_s = config.compact_after_s
        self._clock = clock
        self._grace_s = grace_s
        self._on_damage = on_damage
        self._round = threading.Lock()
        self._leaving: list[tuple[float, str]] = []
        self._looked_at = float("-inf")
        self._finished = False
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
        """Deletes what a killed writer had merged but not deleted; once, by the process that writes from here on."""
        if self._finished:
            return

        def read(file: pq.ParquetFile, _: str) -> tuple[str, ...]:
            return replaced_names(file.schema_arrow)

        found = read_live(self._storage, self._folder, read, self._on_damage)
        replaced = {f"{self._folder}/{name}" for names in found.values() for name in names}
        for file in self._storage.files(self._folder):
            if file.name in replaced:
                self._storage.delete(file.name)
                self._inventory.remove(file.name)
        self._finished = True

    def close(self) -> None:
        """Deletes what is replaced without further grace, lest a finished run show rollouts twice for ever.

        A round that is under way is abandoned first, at its next row group.
        """
        self._closed = True
        with self._round:
            self._delete_replaced(float("inf"))

    def _delete_replaced(self, replaced_before_s: float) -> None:
        while self._leaving and self._leaving[0][0] <= replaced_before_s:
            self._storage.delete(self._leaving[0][1])
            self._inventory.remove(self._leaving.pop(0)[1])

    def _choose(self) -> list[Entry]:
        """The oldest small files, as many as make one that is not small any more; none if there are too few."""
        if not self._parts or self._inventory.count(self._folder) < self._parts:
            return []
        now = self._clock()
        if self._looked_at <= now < self._looked_at + min(_LOOK_S, self._after_s / 10):
            return []  # a run that writes ten files per second must not sort thousands as often
        self._looked_at = now
        self.finish()
        latest = self._clock() - self._after_s
        kept = self._inventory.kept([self._folder])
        old = [entry for entry in kept if entry.made_at_s <= latest] if self._after_s else kept
        small = [entry for entry in old if len(old) >= self._parts and self._is_small(entry)]
        if len(small) < self._parts:
            return []
        rows = accumulate((entry.rows or 0 for entry in small), initial=0)
        size_bytes = accumulate((entry.size_bytes for entry in small), initial=0)
        before = zip(small, rows, size_bytes, strict=False)
        return [entry for entry, rows, size_bytes in before if rows < self._rollouts and size_bytes < LARGE_BYTES]

    def _is_small(self, entry: Entry) -> bool:
        if entry.rows is None and entry.mergeable:
            self._look_into(entry)
        small = entry.rows is not None and entry.rows < self._rollouts and entry.size_bytes < LARGE_BYTES
        return entry.mergeable and small

    def _look_into(self, entry: Entry) -> None:
        try:
            with opened_part(self._storage, entry.name) as file:
                entry.rows = int(file.metadata.num_rows)
                same_version = schema_version(file.schema_arrow) == schema_version(self._schema)
                entry.mergeable = same_version and bool(file.schema_arrow.equals(self._schema))
        except FileNotFoundError:
            self._inventory.remove(entry.name)
        except RunDirectoryError:  # readers say so, and how to go on; the files beside it can be merged all the same
            entry.mergeable = False

    def _merge(self, entries: Sequence[Entry]) -> None:
        names = self._inventory.change([entry.name for entry in entries], State.MERGING, only=State.KEPT)
        if len(names) < len(entries):  # one was offered for deletion just now
            self._inventory.change(names, State.KEPT)
            return
        target = self._names.like(names[-1])
        copied = False
        try:
            with self._storage.writing(target) as path:
                self._copy(names, path)
                size_bytes, copied = path.stat().st_size, True
        except BaseException as error:
            # A file that may have appeared, in spite of the error, holds these rows: they are not merged again.
            if not copied:
                self._inventory.change(names, State.KEPT)
            if isinstance(error, _Unreadable):
                self._leave_alone(entries, error.name)
            if isinstance(error, _Abandoned):
                return
            raise
        now = self._clock()
        rows = sum(entry.rows or 0 for entry in entries)
        self._inventory.add(StoredFile(target, size_bytes, now), rows, replaces=names)
        self._leaving += [(now, name) for name in names]

    def _leave_alone(self, entries: Sequence[Entry], name: str) -> None:
        """A file turned out to be damaged: a resume puts it aside; those beside it can be merged all the same."""
        for entry in entries:
            if entry.name == name:
                entry.mergeable = False

    def _copy(self, names: Sequence[str], path: Path) -> None:
        schema = replacing(self._schema, [name.rpartition("/")[2] for name in names])
        with parquet_writer(path, schema, self._compression) as writer:
            for table in self._row_groups(names):
                writer.write_table(table, row_group_size=table.num_rows)

    def _row_groups(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of files in order, in pieces that are worth a row group and fit the memory."""
        pieces: list[pa.Table] = []
        rows = size_bytes = 0
        for piece in self._pieces(names):
            pieces.append(piece)
            rows += piece.num_rows
            size_bytes += piece.nbytes
            if rows >= _ROW_GROUP_ROWS or size_bytes >= _ROW_GROUP_BYTES:
                yield pa.concat_tables(pieces)
                pieces, rows, size_bytes = [], 0, 0
        if pieces:
            yield pa.concat_tables(pieces)

    def _pieces(self, names: Sequence[str]) -> Iterator[pa.Table]:
        for name in names:
            with opened_part(self._storage, name) as file:
                for index in range(file.num_row_groups):
                    if self._closed:
                        raise _Abandoned
                    yield _read_row_group(file, index, name)


def _read_row_group(file: pq.ParquetFile, index: int, name: str) -> pa.Table:
    try:
        return file.read_row_group(index).replace_schema_metadata(None)
    except UNREADABLE as error:
        raise _Unreadable(name) from error


class _Abandoned(Exception):
    """The round cannot be finished: the store was closed in the middle of it."""


class _Unreadable(_Abandoned):
    """Or one of the files is damaged."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

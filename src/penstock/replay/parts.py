"""What the writer does with files that are written: counts them, merges small ones, lets old ones go. Thread-safe.

**Inventory.** Each folder is listed once, before the writer's first file; from then on the writer's own doings are
counted. A file is in one of four states: *kept*; *merging*, while its rows are copied; *replaced*, when they are in
another file and it only waits to be deleted; *offered*, when it may go at the next checkpoint. Only kept files are
merged or offered, so the two never meet, and a merged file is touched by neither as long as one that it replaces is
still there.

**Compaction.** A run that seals every few seconds would otherwise leave tens of thousands of small files. The oldest
are copied, row group by row group, into one that names them in its metadata (`REPLACES_KEY`) and appears by one rename.
They are deleted together when `GRACE_S` has passed, by whichever round comes then. Meanwhile readers of ours skip them;
others may see a rollout twice, but never not at all. A reader that has listed a file and opens it after that moment
gets an error, which no order of steps can spare it; ours list the folder again. (Emptying a file before it is deleted
would, but then a slow reader would silently miss rows.) A process killed in between leaves both; `Compactor.finish`
deletes the replaced ones when the next writer starts. Rows keep their order, files their time, and groups stay in one
file. Files of an older schema, and those that cannot be read, are left as they are.

**Retention.** Where the disk budget is spent, the oldest files go, and only those that no checkpoint needs again. The
choice is made when a checkpoint's state is taken, and carried out when the checkpoint is there. A file whose groups are
all settled in that state is needed by no resume from it. A file goes whole or not at all, so one live group keeps what
was merged with it. What was chosen is not merged until it is gone or chosen anew. Where batches only name what they
trained on (`ExperienceFormat.batches_refer`), a file of experience goes together with every batch that names any of it,
and not before they may go.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.replay.config import StoreConfig
from penstock.replay.history import ExperienceFormat, groups_of_batch, groups_of_part
from penstock.rundir.live_files import UNREADABLE, opened_part, read_live
from penstock.rundir.parquet import parquet_writer, replaced_names, replacing, schema_version
from penstock.rundir.storage import PartNames, Storage, StoredFile, made_at_s
from penstock.types import Clock, RunDirectoryError


class State(Enum):
    """What somebody plans with a file; the module says what each means."""

    KEPT = auto()
    MERGING = auto()
    REPLACED = auto()
    OFFERED = auto()


@dataclass(slots=True)
class Entry:
    """One file.

    Attributes:
        name: Folder and file name.
        size_bytes: Its size.
        made_at_s: Unix seconds.
        rows: How many; None while nobody has looked.
        mergeable: Whether it may be merged with others; False for rows of another schema.
        state: See the module.
        replaces: Files whose rows it holds too and that are still there.
        groups: Its groups, where somebody had to look and the file stayed.
        readable: False where somebody looked and it was not a Parquet file of ours.
    """

    name: str
    size_bytes: int
    made_at_s: float
    rows: int | None = None
    mergeable: bool = True
    state: State = State.KEPT
    replaces: set[str] = field(default_factory=set[str])
    groups: frozenset[str] | None = None
    readable: bool = True


class Inventory:
    """The writer's files.

    Args:
        folders: That are counted.
        list_files: Lists a folder; called once for each.
    """

    def __init__(self, folders: Sequence[str], list_files: Callable[[str], Iterable[StoredFile]]) -> None:
        self._folders = folders
        self._list_files = list_files
        self._lock = threading.RLock()
        self._listed: dict[str, dict[str, Entry]] | None = None
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What all files take."""
        with self._lock:
            self._by_folder()
            return self._bytes

    def begin(self) -> None:
        """Lists what is there, unless that is done; before the first write.

        So a file whose write failed, though it may have appeared, is unknown here until another try has written it
        anew: nobody merges or deletes it meanwhile.
        """
        with self._lock:
            self._by_folder()

    def add(self, file: StoredFile, rows: int | None = None, replaces: Collection[str] = ()) -> None:
        """A file was written; those that it replaces only wait to be deleted."""
        with self._lock:
            self.remove(file.name)
            entries = self._siblings(file.name)
            waiting = {name for name in replaces if name in entries}
            entries[file.name] = Entry(file.name, file.size_bytes, made_at_s(file), rows, replaces=waiting)
            self._bytes += file.size_bytes
            for name in waiting:
                entries[name].state = State.REPLACED

    def remove(self, name: str) -> None:
        """A file was deleted, or is there no more."""
        with self._lock:
            entries = self._siblings(name)
            entry = entries.pop(name, None)
            if entry is None:
                return
            self._bytes -= entry.size_bytes
            if entry.state is State.REPLACED:
                for other in entries.values():
                    other.replaces.discard(name)

    def change(self, names: Iterable[str], state: State, only: State | None = None) -> list[str]:
        """Files change their state, all or those in one state; names that are gone are passed over.

        Returns:
            The names of those that did.
        """
        with self._lock:
            known = [entry for name in names if (entry := self._siblings(name).get(name)) is not None]
            changed = [entry for entry in known if only is None or entry.state is only]
            for entry in changed:
                entry.state = state
            return [entry.name for entry in changed]

    def kept(self, folders: Sequence[str]) -> list[Entry]:
        """Files of some folders that nobody has plans for, the oldest first."""
        with self._lock:
            entries = [entry for folder in folders for entry in self._by_folder()[folder].values()]
            free = [entry for entry in entries if entry.state is State.KEPT and not entry.replaces]
        return sorted(free, key=lambda entry: (entry.made_at_s, entry.name))

    def in_state(self, state: State) -> list[Entry]:
        """Files in a state."""
        with self._lock:
            return [e for entries in self._by_folder().values() for e in entries.values() if e.state is state]

    def names(self, folder: str) -> list[str]:
        """Names of the files that a folder has."""
        with self._lock:
            return list(self._by_folder()[folder])

    def count(self, folder: str) -> int:
        """How many files a folder has."""
        with self._lock:
            return len(self._by_folder()[folder])

    def _siblings(self, name: str) -> dict[str, Entry]:
        return self._by_folder()[name.partition("/")[0]]

    def _by_folder(self) -> dict[str, dict[str, Entry]]:
        if self._listed is None:
            files = {folder: list(self._list_files(folder)) for folder in self._folders}
            self._listed = {
                folder: {file.name: Entry(file.name, file.size_bytes, made_at_s(file)) for file in found}
                for folder, found in files.items()
            }
            self._bytes = sum(file.size_bytes for found in files.values() for file in found)
        return self._listed


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


_NO_BATCHES: Mapping[str, Sequence[Entry]] = MappingProxyType({})


class Retention:
    """Keeps a run's files within `StoreConfig.max_bytes`.

    Args:
        storage: Where they are.
        experience: Which they are.
        inventory: Of the writer.
        config: The limits.
        clock: Unix seconds.
    """

    def __init__(
        self, storage: Storage, experience: ExperienceFormat, inventory: Inventory, config: StoreConfig, clock: Clock
    ) -> None:
        self._storage = storage
        self._experience = experience
        self._inventory = inventory
        self._config = config
        self._clock = clock

    @property
    def is_exceeded(self) -> bool:
        """Whether the files take more than they may."""
        return self._config.max_bytes is not None and self._inventory.bytes > self._config.max_bytes

    def offer(self, live_groups: Collection[str], made_before_s: float) -> tuple[str, ...]:
        """Names of files that may go, the oldest first; what was offered before is not any more."""
        self._inventory.change([entry.name for entry in self._inventory.in_state(State.OFFERED)], State.KEPT)
        if self._config.max_bytes is None or not self.is_exceeded:
            return ()
        kept = self._inventory.kept((self._experience.folder, self._experience.batch_folder))
        leaving = sum(entry.size_bytes for entry in self._inventory.in_state(State.REPLACED))
        chosen = choose_expendable(
            kept,
            self._inventory.bytes - leaving - self._config.max_bytes,
            live_groups,
            min(made_before_s, self._clock() - self._config.retention_s),
            self._groups_of,
            self._batches_by_group(kept),
        )
        # A round of compaction may have begun meanwhile; it keeps what it is copying.
        return tuple(self._inventory.change([entry.name for entry in chosen], State.OFFERED, only=State.KEPT))

    def delete(self, names: Collection[str]) -> None:
        """Deletes those of the named files that are still offered."""
        for name in self._inventory.change(names, State.OFFERED, only=State.OFFERED):
            self._storage.delete(name)
            self._inventory.remove(name)

    def _batches_by_group(self, kept: Iterable[Entry]) -> dict[str, list[Entry]]:
        """Which batches name a group; none where batches are worth something by themselves."""
        batches: dict[str, list[Entry]] = {}
        if self._experience.batches_refer:
            for entry in kept:
                if entry.name.startswith(f"{self._experience.batch_folder}/"):
                    for group_id in self._groups_of(entry) or ():
                        batches.setdefault(group_id, []).append(entry)
        return batches

    def _groups_of(self, entry: Entry) -> frozenset[str] | None:
        if entry.groups is None and entry.readable:
            of = groups_of_part if entry.name.startswith(f"{self._experience.folder}/") else groups_of_batch
            try:
                with opened_part(self._storage, entry.name) as file:
                    entry.groups = frozenset(of(file))
            except FileNotFoundError:  # merged since it was listed: `change` passes it over
                entry.groups = frozenset()
            except RunDirectoryError:  # it may hold groups that are needed, and somebody may be able to repair it
                entry.readable = False
        return entry.groups


def choose_expendable(
    oldest_first: Iterable[Entry],
    excess_bytes: int,
    live_groups: Collection[str],
    made_before_s: float,
    groups_of: Callable[[Entry], Collection[str] | None],
    batches_by_group: Mapping[str, Sequence[Entry]] = _NO_BATCHES,
) -> list[Entry]:
    """The oldest files that together take the excess, or all that may go.

    Args:
        oldest_first: Files.
        excess_bytes: What should go.
        live_groups: Groups that are still needed.
        made_before_s: No younger file goes; Unix seconds.
        groups_of: Looks a file's groups up; None where it cannot be read, which keeps it.
        batches_by_group: Batches that are worth nothing without a group: they go with it, before it, or it stays.
    """
    live = frozenset(live_groups)
    chosen: dict[str, Entry] = {}

    def may_go(entry: Entry) -> bool:
        groups = groups_of(entry)
        return entry.made_at_s <= made_before_s and groups is not None and live.isdisjoint(groups)

    for entry in oldest_first:
        if excess_bytes <= 0 or entry.made_at_s > made_before_s:
            break
        if entry.name in chosen or not may_go(entry):
            continue
        named = {batch.name: batch for group in groups_of(entry) or () for batch in batches_by_group.get(group, ())}
        if entry.name in named:  # a batch itself, which takes nothing with it
            named = {}
        if all(map(may_go, named.values())):
            going = {**named, entry.name: entry}
            excess_bytes -= sum(each.size_bytes for name, each in going.items() if name not in chosen)
            chosen |= going
    return list(chosen.values())

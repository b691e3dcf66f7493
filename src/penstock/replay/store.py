"""The durable side of replay: sealed groups, training batches, starts and fates, as files of the run directory.

A group is durable once the file that holds it has been renamed into place (or uploaded, where `StoreConfig.url` names
an object store); files are never changed afterwards. They may be merged into larger ones and deleted once nobody needs
them (`parts`). One process writes; any other may read at any time. docs/run_directory.md describes the files.

In front of the store, the `Sealer` collects delivered groups until a file is worth writing, and writes it outside the
pool's lock. Files hold whole groups in ingest order, and appear in that order: one thread writes at a time. A thread of
its own writes files that are due although nobody comes by, and has small ones merged; it wakes when files were written,
and every few seconds for what falls due by time. A failure in it ends the run with an error that says so.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.replay.config import StoreConfig
from penstock.replay.history import (
    LANGUAGE,
    ExperienceFormat,
    History,
    groups_of_part,
    ids_of_part,
    read_history,
    stem_of,
)
from penstock.replay.ledger import RECHECK_S, DiskSpace, Ledger, Lineages
from penstock.replay.parts import GRACE_S, Compactor, Inventory, Retention
from penstock.replay.repair import DamagedFiles, OnDamage, repair_logs
from penstock.rundir import JsonLinesLog, RunDirectory
from penstock.rundir.live_files import opened_part, read_live
from penstock.rundir.parquet import parquet_writer, read_columns
from penstock.rundir.storage import PartNames, StoredFile, open_storage
from penstock.types import Clock, ConfigError, Experience, RolloutRecord, RunDirectoryError, RunFailed, TrainingExample

_DEFAULTS = StoreConfig()


class ExperienceStore(Protocol):
    """What the replay buffer needs of a store; implemented by `RolloutStore`."""

    @property
    def lineages(self) -> Lineages:
        """The run's lives."""
        ...

    def open_ledger(self, lineage: int = 0) -> Ledger:
        """Makes this process the run's writer."""
        ...

    def seal(self, records: Sequence[RolloutRecord[Experience]]) -> None:
        """Makes whole groups durable."""
        ...

    def write_batch(self, batch_id: str, examples: Sequence[TrainingExample], step: int, lineage: int) -> None:
        """Makes the batch of update `step` durable."""
        ...

    def read_records(self, group_ids: Collection[str] | None = None) -> list[RolloutRecord[Any]]:
        """Sealed rollouts: of some groups, or all."""
        ...

    def history(self) -> History:
        """What the files say about every rollout."""
        ...

    def expendable(self, live_groups: Collection[str], made_before_s: float = math.inf) -> tuple[str, ...]:
        """Files that may be deleted once the checkpoint that is being made is there."""
        ...

    def expire(self, names: Collection[str]) -> None:
        """Deletes files that `expendable` named."""
        ...

    def maintain(self) -> None:
        """One round of compaction."""
        ...

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of the files."""
        ...


class RolloutStore:
    """Files of one run. Sealing, reading, compaction and retention may go on in different threads.

    Args:
        directory: Of the run, or any path: then the folders are made where they are missing.
        config: Where files go, and how long they stay.
        clock: Stamps names and lines; files age by it.
        experience: The row format.
        grace_s: How long a file that was merged into another stays for those who read it.
        on_damage: Files and log lines that cannot be read any more are put aside in ``damaged/``, and this is told
            where, and why; for the run's one writer. None makes them errors.
        writing: Entered around each write, by whoever counts the time.

    Raises:
        ConfigError: ``replay.store.url`` needs a package that is not installed, or is no URL that fsspec knows;
            ``replay.store.observations`` is false where none are stored anyway.
        RunDirectoryError: the folders cannot be made.
    """

    def __init__(
        self,
        directory: RunDirectory | str | Path,
        config: StoreConfig = _DEFAULTS,
        clock: Clock = time.time,
        experience: ExperienceFormat = LANGUAGE,
        grace_s: float = GRACE_S,
        on_damage: OnDamage | None = None,
        writing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._writing = writing
        self._directory = directory if isinstance(directory, RunDirectory) else RunDirectory(directory)
        self._config = config
        self._clock = clock
        self._experience = experience = _as_configured(experience, config)
        self._folders = (experience.folder, experience.batch_folder)
        self._storage = open_storage(self._directory.path, config.url)
        if not isinstance(directory, RunDirectory):
            try:
                for folder in self._folders if config.url is None else ():
                    (self._directory.path / folder).mkdir(parents=True, exist_ok=True)
                self._directory.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunDirectoryError(f"no rollouts can be stored in {directory}: {error}: choose another") from error
        self._inventory = Inventory(self._folders, self._storage.files)
        self._damaged = (
            None if on_damage is None else DamagedFiles(self._storage, experience, self._inventory, on_damage)
        )
        self._set_aside = None if self._damaged is None else self._damaged.set_aside
        self._names = PartNames(experience.folder, clock, lambda: self._inventory.names(experience.folder))
        self._unsure: dict[str, frozenset[str]] = {}
        self._compactor = Compactor(
            self._storage, experience, self._inventory, self._names, config, clock, grace_s, self._set_aside
        )
        self._retention = Retention(self._storage, experience, self._inventory, config, clock)
        self._logs: list[JsonLinesLog] = []
        if on_damage is not None:
            repair_logs(self._directory, on_damage)
        self.lineages = Lineages(self._directory.lineages_path)

    def open_ledger(self, lineage: int = 0) -> Ledger:
        """Makes this process the run's writer: a ledger that writes ``tickets.jsonl`` and ``fates.jsonl``.

        What a killed writer left unfinished is deleted, and a merge that it had not finished is. `close` closes the
        logs.

        Raises:
            ConfigError: the files cannot be written where ``replay.store.url`` says.
            RunDirectoryError: another run's files are there.
        """
        self._storage.prepare(self._folders)
        self._refuse_foreign_files()
        self._storage.remove_unfinished(self._folders)  # ours: another run's writer may be in the middle of a file
        self._compactor.finish()
        path = self._directory.tickets_path
        past = str(self._directory.path) if path.exists() and path.stat().st_size else ""
        tickets = JsonLinesLog(path)
        fates = JsonLinesLog(self._directory.fates_path)
        self._logs += [tickets, fates]
        return Ledger(lineage, tickets, fates, self._clock, past, DiskSpace(self._config.full_disk_s))

    def close(self) -> None:
        """Ends a round of compaction that is under way; flushes and closes the logs."""
        self._compactor.close()
        while self._logs:
            self._logs.pop().close()

    # --- writing -------------------------------------------------------------------------------------------------

    def seal(self, records: Sequence[RolloutRecord[Experience]]) -> None:
        """Writes a part; when this returns the rollouts are durable.

        A write that failed may have made its file all the same. So the next part with the same groups, and perhaps
        more, takes that one's name, and no rollout is in two files.
        """
        with self._writing():
            table = self._experience.to_table(records)
            groups = frozenset(table.column("group_id").to_pylist())
            tried = next((name for name, held in self._unsure.items() if held <= groups), None)
            name = self._names.next() if tried is None else tried
            self._unsure[name] = groups  # until it is certain
            self._write(name, table)
            del self._unsure[name]

    def write_batch(self, batch_id: str, examples: Sequence[TrainingExample], step: int, lineage: int) -> None:
        """Writes ``batches/<batch_id>.parquet``."""
        with self._writing():
            table = self._experience.batch_to_table(examples, batch_id, step, lineage)
            self._write(f"{self._experience.batch_folder}/{batch_id}.parquet", table)

    def _write(self, name: str, table: pa.Table) -> None:
        self._inventory.begin()
        try:
            with self._storage.writing(name) as path:
                with parquet_writer(path, table.schema, self._config.compression) as writer:
                    writer.write_table(table)
                size_bytes = path.stat().st_size
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror or str(error), self._storage.locate(name)) from error
        self._inventory.add(StoredFile(name, size_bytes, self._clock()), table.num_rows)

    # --- reading -------------------------------------------------------------------------------------------------

    def read_records(self, group_ids: Collection[str] | None = None) -> list[RolloutRecord[Any]]:
        """Sealed rollouts in the order of sealing, each once; of some groups, or all.

        Raises:
            SchemaVersionError: a newer Penstock wrote a file.
            RunDirectoryError: a file is not one of ours.
        """
        wanted = None if group_ids is None else frozenset(group_ids)

        def read(file: pq.ParquetFile, name: str) -> list[tuple[str, Any]]:
            if wanted is not None and wanted.isdisjoint(groups_of_part(file)):
                return []
            table = read_columns(file)
            return list(zip(ids_of_part(table, name), self._experience.from_table(table, stem_of(name)), strict=True))

        parts = read_live(self._storage, self._experience.folder, read, self._set_aside)
        first: dict[str, Any] = {}
        for rollout_id, record in chain.from_iterable(parts.values()):
            if wanted is None or record.group_id in wanted:
                first.setdefault(rollout_id, record)
        return list(first.values())

    def read_batch(self, batch_id: str) -> list[Any]:
        """The examples of one update.

        Raises:
            SchemaVersionError: a newer Penstock wrote it.
            RunDirectoryError: there is no such batch, or no more.
        """
        name = f"{self._experience.batch_folder}/{batch_id}.parquet"
        try:
            with opened_part(self._storage, name) as file:
                return self._experience.batch_from_table(read_columns(file), batch_id)
        except FileNotFoundError as error:
            where = self._storage.locate(name)
            raise RunDirectoryError(f"{where} is missing: no such batch was written, or it has expired") from error

    def history(self) -> History:
        """What the files say about every rollout; safe while the run goes on.

        Raises:
            SchemaVersionError: a newer Penstock wrote a file.
            RunDirectoryError: a file is not one of ours.
        """
        history = read_history(self._directory, self._storage, self._experience, self._set_aside)
        return history if self._damaged is None else replace(history, damage=self._damaged.damage)

    # --- keeping house -------------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """One round of compaction; returns at once where there is nothing to do, or another thread is at it.

        Raises:
            RunDirectoryError: a part is not Parquet.
        """
        self._compactor.run()

    def expendable(self, live_groups: Collection[str], made_before_s: float = math.inf) -> tuple[str, ...]:
        """Files that may go once the checkpoint whose state is being taken is there, the oldest first.

        None where `StoreConfig.max_bytes` is not exceeded. Until they expire, or this is asked again, they are not
        merged.

        Args:
            live_groups: Groups that a kept checkpoint may bring back: waiting, in flight, or to be used again.
            made_before_s: When the oldest kept checkpoint was made, in Unix seconds: younger files it may need too.
        """
        if self.over_cap:
            self._compactor.finish()
        return self._retention.offer(live_groups, made_before_s)

    def expire(self, names: Collection[str]) -> None:
        """Deletes files that the last `expendable` named; names that are gone, or not offered any more, are ignored."""
        self._retention.delete(names)

    @property
    def bytes(self) -> int:
        """What rollouts and batches take; listed once, counted from then on."""
        return self._inventory.bytes

    @property
    def over_cap(self) -> bool:
        """Whether that is more than `StoreConfig.max_bytes`: no more files may go, or no checkpoint came since."""
        return self._retention.is_exceeded

    def metrics(self) -> dict[str, float]:
        """``replay/store_bytes``, and ``replay/store_over_cap``: 1 where `over_cap`."""
        return {"replay/store_bytes": float(self.bytes), "replay/store_over_cap": float(self.over_cap)}

    def _refuse_foreign_files(self) -> None:
        """Two runs at one URL would mix their ledgers; a run that has handed out no ticket owns no file."""
        tickets = self._directory.tickets_path
        if self._config.url is None or (tickets.exists() and tickets.stat().st_size):
            return
        for folder in self._folders:
            files = self._storage.files(folder)
            if files:
                raise RunDirectoryError(
                    f"replay.store.url is {self._config.url!r}, where another run has {len(files)} files in {folder}/: "
                    "give each run a url of its own"
                )


def _as_configured(experience: ExperienceFormat, config: StoreConfig) -> ExperienceFormat:
    if config.observations:
        return experience
    if experience.frugal is None:
        raise ConfigError(
            f"replay.store.observations is false, but {experience.folder} have none: leave it out, it is for simulators"
        )
    return experience.frugal


_LONGEST_SLEEP_S = 5.0


class Sealer:
    """The queue in front of the store. Thread-safe.

    Args:
        store: Where groups go.
        ledger: Lines of its logs for which there was no room are written by the thread.
        changed: Held while the queue is touched, never while a file is written.
        config: When a file is due, and how long a full disk is waited for.
        groups: Of a batch.
        clock: Unix seconds.
        on_sealed: Told which groups are durable now, the lock held.

    Attributes:
        space: Says when a file for which there was no room may be tried again; what should be in it stays queued.
    """

    def __init__(
        self,
        store: ExperienceStore,
        ledger: Ledger,
        config: StoreConfig,
        groups: int,
        clock: Clock,
        on_sealed: Callable[[list[str]], None],
    ) -> None:
        self.space, self._space_to_merge = (DiskSpace(config.full_disk_s) for _ in range(2))
        self._store = store
        self._ledger = ledger
        self._changed = ledger.changed
        self._config = config
        self._groups = groups
        self._clock = clock
        self._on_sealed = on_sealed
        self._writing = threading.RLock()
        self._records: list[RolloutRecord[Experience]] = []
        self._group_ids: list[str] = []
        self._unsealed: set[str] = set()
        self._oldest = 0.0
        self._at_boundary: Counter[int] = Counter()
        self._news = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Groups that are in no file yet: queued, or being written by some thread."""
        return len(self._unsealed)

    def add(self, group_id: str, records: Sequence[RolloutRecord[Experience]]) -> None:
        """Queues a group."""
        with self._changed:
            if not self._group_ids:
                self._oldest = self._clock()
            self._group_ids.append(group_id)
            self._unsealed.add(group_id)
            self._records += records

    def holds(self, group_id: str) -> bool:
        """Whether a group is queued, or its file is being written."""
        return group_id in self._unsealed

    @property
    def due(self) -> bool:
        """Whether a file should be written although nobody waits for it."""
        with self._changed:
            waited = self._clock() - self._oldest
            most, queued = self._config.buffer_size, len(self._group_ids)
            full = queued >= self._groups if most is None else len(self._records) >= most
            return bool(queued) and (full or waited >= self._config.seal_s)

    @property
    def overdue(self) -> int:
        """Groups whose file is due or being written; none while a full disk is waited for."""
        with self._changed:
            queued = len(self._group_ids)
            return 0 if self.space.retry_in_s else len(self._unsealed) - (0 if self.due else queued)

    def seal(self, blocking: bool = True) -> None:
        """Writes what is queued, and wakes the thread; writes nothing while the disk is full.

        Args:
            blocking: Wait for a write that is under way; if not, leave the rest to its thread.

        Raises:
            OSError: the disk refuses it for another reason; what is queued stays so.
            RunFailed: the disk has been full for too long.
        """
        self._write(blocking)
        self._news.set()

    def _write(self, blocking: bool = True) -> None:
        if self.space.retry_in_s or not self._writing.acquire(blocking):
            return
        try:
            with self._changed:
                group_ids, self._group_ids = self._group_ids, []
                records, self._records = self._records, []
            try:
                if records:
                    self._store.seal(records)
                    self.space.note_written()
            except BaseException as error:
                with self._changed:  # they wait for the next try, before what came meanwhile
                    self._group_ids = group_ids + self._group_ids
                    self._records = records + self._records
                if not isinstance(error, OSError):
                    raise
                self.space.note(error)
                return
            if group_ids:
                with self._changed:
                    self._unsealed.difference_update(group_ids)
                    self._on_sealed(group_ids)
        finally:
            self._writing.release()

    def note_delivery(self, hurry: bool = False) -> None:
        """A group was added: its file is written where it is due, or where nothing else can come before it is."""
        if hurry or self.due:
            self.seal()
        self._start()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def await_entry(self) -> None:
        """Waits, the lock held, while another thread has everything written for a checkpoint.

        Raises:
            Stopped: the buffer was closed.
        """
        self._changed.raise_if_over()
        while self._at_boundary and threading.get_ident() not in self._at_boundary:
            self._changed.wait(RECHECK_S)
            self._changed.raise_if_over()

    @contextmanager
    def boundary(self) -> Generator[None, None, None]:
        """The lock, with nothing left to write: what was added is stored, and nothing is added inside.

        Whoever delivers waits meanwhile (`await_entry`), so that files are written without the lock and yet an end of
        it is in sight. A full disk is waited for.

        Raises:
            RunFailed: the disk has been full for too long.
        """
        while True:
            with self._entry_closed():
                self.seal()
                with self._writing, self._changed:  # in this order everywhere, so nobody deadlocks
                    if not len(self) and self._ledger.write_backlog():
                        yield
                        return
            time.sleep(min(max(self.space.retry_in_s, self._ledger.space.retry_in_s), RECHECK_S))

    @contextmanager
    def _entry_closed(self) -> Generator[None, None, None]:
        me = threading.get_ident()
        with self._changed:
            self._at_boundary[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_boundary[me] -= 1
                self._at_boundary += Counter()  # drops who is at 0
                self._changed.notify_all()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._changed:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="replay-maintenance", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end, without waiting: closing the store abandons a merge that is under way."""
        self._stopping = True
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait(min(_LONGEST_SLEEP_S, self._config.seal_s))
            self._news.clear()
            if self._stopping:
                return
            try:
                self._maintain()
            except Exception as error:  # whatever it is, the run must not go on without
                self._changed.end_with(RunFailed(f"keeping the rollout files in order failed: {error}"))
                return

    def _maintain(self) -> None:
        if self.due:
            self._write()
        self._ledger.write_backlog()
        if self._space_to_merge.retry_in_s:
            return
        try:
            self._store.maintain()
            self._space_to_merge.note_written()
        except OSError as error:
            self._space_to_merge.note(error)

"""The durable side of replay: sealed groups, training batches, starts and fates, as files of the run directory.

A group is durable once the file that holds it has been renamed into place (or uploaded, where `StoreConfig.url` names
an object store); files are never changed afterwards. They may be merged into larger ones (`compaction`) and deleted
once nobody needs them (`retention`). One process writes; any other may read at any time. docs/formats.md describes the
files.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.replay.compaction import GRACE_S, Compactor
from penstock.replay.config import StoreConfig
from penstock.replay.damage import DamagedFiles
from penstock.replay.disk_space import DiskSpace
from penstock.replay.formats import LANGUAGE, ExperienceFormat
from penstock.replay.history import History
from penstock.replay.inventory import Inventory
from penstock.replay.ledger import Ledger
from penstock.replay.lineages import Lineages
from penstock.replay.retention import Retention
from penstock.replay.salvage import OnDamage, repair_logs
from penstock.replay.stored_rows import groups_of_part, ids_of_part, read_history, stem_of
from penstock.rundir import JsonLinesLog, RunDirectory
from penstock.rundir.live_files import opened_part, read_live
from penstock.rundir.parquet import parquet_writer, read_columns
from penstock.rundir.part_names import PartNames
from penstock.rundir.storage import StoredFile, open_storage
from penstock.types import Clock, ConfigError, Experience, RolloutRecord, RunDirectoryError, TrainingExample

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
            for folder in self._folders if config.url is None else ():
                (self._directory.path / folder).mkdir(parents=True, exist_ok=True)
            self._directory.path.mkdir(parents=True, exist_ok=True)
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

"""Rollout storage for processes that share nothing but a file system: a folder of Arrow files, read in turn.

Needs of the file system only that a rename within a folder is atomic: no locks, no appending, no notification (a
network file system has none of them reliably). So the reader polls. Each writer has a folder, each batch a file, sorted
by age: ``w-<writer id>/<incarnation>-<random>-<sequence>-<groups>.arrow``. Writer ids are host names as often as not,
so any text makes a safe folder name, and two of them never the same, also where capitals count as small letters.

Invariants: a file is written under a name that readers pass over and renamed into its own, so it appears whole, and
sequence numbers appear in their order; it is deleted only when it was acknowledged; one that cannot be read is moved to
``quarantine/``; the reader holds the names that wait, never the rollouts. A gap in a writer's sequence is looked at
twice (a listing taken during a rename may miss an older file and hold a newer one) and then passed: its file was
acknowledged or quarantined. Files are not flushed to the disk one by one: what a power loss tears is found by its
checksum, and its tickets are issued again.

Not covered: two readers in different processes. They would both be given the same files.
"""

import hashlib
import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.replay.messages import batch_from_buffer, batch_to_buffer
from penstock.replay.queue import (
    Backpressure,
    Delivery,
    FairQueue,
    MemoryRolloutStorage,
    OnQuarantine,
    RolloutStorage,
    RolloutStorageConfig,
)
from penstock.rundir.storage import UNFINISHED_PATTERN, replaced_atomically
from penstock.types import (
    ConfigError,
    InvalidRolloutError,
    RolloutBatch,
    RunFailed,
    SchemaVersionError,
    Stopped,
    TransferError,
)

SUFFIX = ".arrow"
FOLDER_PATTERN = "w-*"
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")
_LONGEST = 150
"""Bytes of an encoded id; file systems allow 255 for a name."""
_FILE = re.compile(r"(\d{20})-([0-9a-f]{12})-(\d{12})-(\d{6,})\.arrow")


def writer_folder(writer_id: str) -> str:
    """The folder of a writer: its id, percent-encoded; a very long one is cut and told apart by a hash."""
    raw = writer_id.encode("utf-8", "surrogatepass")
    encoded = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    if len(encoded) > _LONGEST:
        encoded = f"{encoded[:80]}~{hashlib.sha256(raw).hexdigest()}"
    return f"w-{encoded}"


class BatchName(NamedTuple):
    """The name of one batch's file; sorts as its writer wrote.

    Attributes:
        incarnation: Nanoseconds since 1970 at which the writer began, or one more than the newest it found.
        unique: Random, so that two processes under one id cannot overwrite each other's files.
        sequence: Counts from 0.
        groups: In the batch: what waits can be counted without opening a file.
    """

    incarnation: int
    unique: str
    sequence: int
    groups: int

    @property
    def life(self) -> tuple[int, str]:
        """Whose sequence it is."""
        return self.incarnation, self.unique

    @property
    def file_name(self) -> str:
        """As it stands in the folder."""
        return f"{self.incarnation:020d}-{self.unique}-{self.sequence:012d}-{self.groups:06d}{SUFFIX}"

    @classmethod
    def parse(cls, file_name: str) -> "BatchName | None":
        """None for whatever else lies in a folder: unfinished files, a file system's own."""
        match = _FILE.fullmatch(file_name)
        if match is None:
            return None
        incarnation, unique, sequence, groups = match.groups()
        return cls(int(incarnation), unique, int(sequence), int(groups))


UNFINISHED_S = 3600.0
"""An unfinished file that old is nobody's any more: its writer was killed."""


class FileWriter:
    """Implements `penstock.types.RolloutSink`. Thread-safe. Made by `FileRolloutStorage.writer`.

    Args:
        root: The storage's folder.
        writer_id: Any text.
        config: Capacity and limits.
        backpressure: Counts the waits.
        closed: Set when the storage is closed.
        on_written: Called after each file.
    """

    def __init__(
        self,
        root: Path,
        writer_id: str,
        config: RolloutStorageConfig,
        backpressure: Backpressure,
        closed: threading.Event,
        on_written: Callable[[], None],
    ) -> None:
        self._writer_id = writer_id
        self._config = config
        self._backpressure = backpressure
        self._closed = closed
        self._on_written = on_written
        self._folder = root / writer_folder(writer_id)
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self._folder)
        self._incarnation = max([time.time_ns(), *(name.incarnation + 1 for name in list_batches(self._folder))])
        self._unique = uuid.uuid4().hex[:12]
        self._sequence = 0
        self._waiting_at_most = self._count_waiting()
        self._writing = threading.Lock()

    def add_batches(self, batches: Sequence[RolloutBatch]) -> None:
        """See `RolloutStorage.writer`. Batches without groups carry nothing and are passed over.

        Raises:
            RunFailed: the folder cannot be written.
        """
        for batch in batches:
            if batch.groups:
                message = memoryview(batch_to_buffer(batch))
                if not self._try_write(message, len(batch.groups)):
                    self._write_when_room(message, len(batch.groups))
                self._on_written()

    def _write_when_room(self, message: memoryview, groups: int) -> None:
        full = f"{self._waiting_at_most} of {self._config.capacity_groups} groups wait in {self._folder}"
        with self._backpressure.blocked(self._writer_id, full) as left_s:
            while not self._try_write(message, groups):
                self._closed.wait(min(left_s(), self._config.poll_s))

    def _try_write(self, message: memoryview, groups: int) -> bool:
        with self._writing:  # one at a time, so that sequence numbers appear in their order
            if self._closed.is_set():
                raise Stopped("the rollout storage is closed")
            if not self._has_room(groups):
                return False
            name = BatchName(self._incarnation, self._unique, self._sequence, groups)
            path = self._folder / name.file_name
            try:
                with replaced_atomically(path, durable=False) as unfinished:
                    unfinished.write_bytes(message)
            except OSError as error:
                raise RunFailed(f"{path} cannot be written: {error}; rollout.storage.path says where") from error
            self._sequence += 1
            self._waiting_at_most += groups
            return True

    def _has_room(self, groups: int) -> bool:
        """Looks into the folder only where what was written since the last look might fill it."""
        if self._waiting_at_most + groups > self._config.capacity_groups:
            self._waiting_at_most = self._count_waiting()
        return self._waiting_at_most == 0 or self._waiting_at_most + groups <= self._config.capacity_groups

    def _count_waiting(self) -> int:
        return sum(name.groups for name in list_batches(self._folder))


def list_batches(folder: Path) -> list[BatchName]:
    """The batches that lie in a writer's folder, oldest first."""
    names = (BatchName.parse(file_name) for file_name in os.listdir(folder))
    return sorted(name for name in names if name is not None)


def remove_unfinished(folder: Path) -> None:
    """Deletes what writers that were killed long ago left behind."""
    for path in folder.glob(UNFINISHED_PATTERN):
        try:
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()
        except FileNotFoundError:  # finished, or deleted by another process, in the meantime
            continue


QUARANTINE = "quarantine"
READ_ATTEMPTS = 5
"""A file that the system does not give out is tried so often, once per look, before it is put aside."""


class FileRolloutStorage:
    """Implements `penstock.replay.RolloutStorage`.

    Args:
        path: The folder; made where it is missing.
        config: Capacity, limits and polling.
        on_quarantine: Told of files that were put aside.
    """

    def __init__(
        self,
        path: str | Path,
        config: RolloutStorageConfig | None = None,
        on_quarantine: OnQuarantine = lambda source, reason: None,
    ) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._config = config or RolloutStorageConfig(kind="file")
        self._on_quarantine = on_quarantine
        self._backpressure = Backpressure(str(self.path), self._config.write_timeout_s)
        self._closed = threading.Event()
        self._news = threading.Event()
        self._reading = threading.RLock()
        self._lines: FairQueue[BatchName] = FairQueue()
        self._known: set[tuple[str, BatchName]] = set()
        self._next: dict[tuple[str, tuple[int, str]], int] = {}
        self._attempts: Counter[Path] = Counter()
        self._looked_at = -float("inf")
        self._depth = 0
        self._counts: Counter[str] = Counter()

    def writer(self, writer_id: str) -> FileWriter:
        """See `RolloutStorage.writer`. Another process makes its own storage on the same path and asks that."""
        return FileWriter(self.path, writer_id, self._config, self._backpressure, self._closed, self._news.set)

    def receive(self, timeout_s: float) -> Delivery | None:
        """See `RolloutStorage.receive`; looks into the folders every `poll_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._backpressure.note_reader()
            told = self._news.is_set()
            self._news.clear()
            delivery = self._next_delivery(told)
            if delivery is not None:
                return delivery
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._news.wait(min(left, self._config.poll_s))

    def redeliver(self) -> None:
        """What was received without being acknowledged is delivered again."""
        with self._reading:
            self._lines.clear()
            self._known.clear()
            self._next.clear()
            self._depth = 0
            self._looked_at = -float("inf")
            for folder in self._folders():
                remove_unfinished(folder)

    def close(self) -> None:
        """Everybody gets `Stopped`, also those who wait."""
        self._closed.set()
        self._news.set()

    def metrics(self) -> dict[str, float]:
        """See `RolloutStorage.metrics`; `depth` is that of the last look, the waits are those of this process."""
        return self._backpressure.metrics(self._depth, self._counts)

    def count_files(self) -> int:
        """Batches that lie in the folder, received or not."""
        return sum(len(list_batches(folder)) for folder in self._folders())

    # --- reading -------------------------------------------------------------------------------------------------

    def _next_delivery(self, told: bool) -> Delivery | None:
        with self._reading:
            if self._closed.is_set():
                self._news.set()  # for another reader thread, whose wake-up this one may have taken
                raise Stopped("the rollout storage is closed")
            if told or time.monotonic() - self._looked_at >= self._config.poll_s:
                self._look()
            unreadable: list[tuple[str, BatchName]] = []
            delivery = None
            while delivery is None and (taken := self._lines.take()) is not None:
                delivery = self._read(*taken, unreadable)
            for folder, name in reversed(unreadable):
                self._lines.put_back(folder, name)
            return delivery

    def _look(self) -> None:
        """Puts new files into their writers' lines."""
        for folder in self._folders():
            names = self._list(folder)
            if self._has_gap(folder.name, names):
                newest = max(names)
                names = [name for name in self._list(folder) if name <= newest]
            for name in names:
                self._known.add((folder.name, name))
                self._lines.append(folder.name, name)
                self._depth += name.groups
                self._next[folder.name, name.life] = name.sequence + 1
        self._looked_at = time.monotonic()

    def _folders(self) -> list[Path]:
        return sorted(folder for folder in self.path.glob(FOLDER_PATTERN) if folder.is_dir())

    def _list(self, folder: Path) -> list[BatchName]:
        try:
            return [name for name in list_batches(folder) if (folder.name, name) not in self._known]
        except FileNotFoundError:  # somebody tidied up by hand
            return []
        except OSError as error:
            raise RunFailed(f"{folder} cannot be listed: {error}; rollout.storage.path says where it is") from error

    def _has_gap(self, folder: str, names: Iterable[BatchName]) -> bool:
        expected = dict[tuple[int, str], int]()
        for name in names:
            if name.sequence != expected.get(name.life, self._next.get((folder, name.life), 0)):
                return True
            expected[name.life] = name.sequence + 1
        return False

    def _read(self, folder: str, name: BatchName, unreadable: list[tuple[str, BatchName]]) -> Delivery | None:
        path = self.path / folder / name.file_name
        try:
            batch = batch_from_buffer(path.read_bytes())
        except FileNotFoundError:  # an old listing, or somebody tidied up by hand
            self._forget(folder, name)
        except OSError as error:
            self._attempts[path] += 1
            if self._attempts[path] < READ_ATTEMPTS:
                unreadable.append((folder, name))
                return None
            self._set_aside(folder, name, f"cannot be read: {error}")
        except (TransferError, SchemaVersionError, InvalidRolloutError) as error:
            self._set_aside(folder, name, str(error))
        else:
            self._counts["received"] += 1
            self._depth -= name.groups
            self._attempts.pop(path, None)
            quarantine = partial(self.set_aside, folder, name)
            return Delivery(str(path), (batch,), partial(self.delete, folder, name), quarantine)
        self._depth -= name.groups
        return None

    # --- what becomes of a file ----------------------------------------------------------------------------------

    def delete(self, folder: str, name: BatchName) -> None:
        """The reader has acknowledged a file."""
        path = self.path / folder / name.file_name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunFailed(f"{path} was read but cannot be deleted: {error}; make its folder writable") from error
        self._forget(folder, name)

    def set_aside(self, folder: str, name: BatchName, reason: str) -> None:
        """The reader cannot use a file."""
        with self._reading:
            if (folder, name) in self._known:
                self._set_aside(folder, name, reason)

    def _set_aside(self, folder: str, name: BatchName, reason: str) -> None:
        path, target = self.path / folder / name.file_name, self.path / QUARANTINE / folder / name.file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            path.rename(target)
            target.with_name(f"{target.name}.reason").write_text(f"{reason}\n")
        except OSError as error:
            raise RunFailed(
                f"{path} is of no use ({reason}) and cannot be moved to {target}: {error}; move it by hand"
            ) from error
        self._forget(folder, name)
        self._counts["quarantined"] += 1
        self._on_quarantine(str(target), reason)

    def _forget(self, folder: str, name: BatchName) -> None:
        self._known.discard((folder, name))
        self._attempts.pop(self.path / folder / name.file_name, None)


def open_rollout_storage(
    config: RolloutStorageConfig,
    default_path: str | Path,
    on_quarantine: OnQuarantine = lambda source, reason: None,
    *,
    new_run: bool = False,
) -> RolloutStorage:
    """Makes the storage that a run's configuration asks for.

    Args:
        config: Its kind and limits.
        default_path: Folder of its files where the configuration names none.
        on_quarantine: Told of what was put aside, and why.
        new_run: Nothing was generated yet: what waits in the folder is another run's, whose ticket ids may be the same.

    Raises:
        ConfigError: rollouts of another run wait there.
    """
    if config.kind == "memory":
        return MemoryRolloutStorage(config, on_quarantine)
    storage = FileRolloutStorage(config.path or default_path, config, on_quarantine)
    if new_run and (waiting := storage.count_files()):
        raise ConfigError(
            f"rollout.storage.path {storage.path} holds {waiting} files of another run: name another folder, or "
            "delete its w-* folders"
        )
    return storage

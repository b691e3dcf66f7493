"""The writing end of a file storage: one worker, one folder, one file per batch.

A file is written under a name that readers pass over and renamed into its own, so it appears whole, and sequence
numbers appear in their order. Files are not flushed to the disk one by one: what a power loss tears is found by its
checksum, and its tickets are issued again.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.replay.backpressure import Backpressure
from penstock.replay.messages import batch_to_buffer
from penstock.replay.spool_names import BatchName, writer_folder
from penstock.replay.storage import RolloutStorageConfig
from penstock.rundir.atomic import UNFINISHED_PATTERN, replaced_atomically
from penstock.types import RolloutBatch, RunFailed, Stopped

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

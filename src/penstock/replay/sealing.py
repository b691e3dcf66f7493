"""Collects delivered groups until a file is worth writing, and writes it outside the buffer's lock.

Files hold whole groups in ingest order, and appear in that order: one thread writes at a time.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager

from penstock.replay.disk_space import DiskSpace
from penstock.replay.store import ExperienceStore
from penstock.types import Clock, Experience, RolloutRecord


class Sealer:
    """The queue in front of the store.

    Args:
        store: Where groups go.
        lock: Held while the queue is touched, never while a file is written.
        buffer_size: A file is due when so many rollouts are queued.
        seal_s: Or when the oldest of them has been queued so long.
        clock: Unix seconds.
        space: Says when a file for which there was no room may be tried again; what should be in it stays queued.
    """

    def __init__(
        self,
        store: ExperienceStore,
        lock: AbstractContextManager[object],
        buffer_size: int,
        seal_s: float,
        clock: Clock,
        space: DiskSpace,
    ) -> None:
        self._store = store
        self._lock = lock
        self._buffer_size = buffer_size
        self._seal_s = seal_s
        self._clock = clock
        self._space = space
        self._writing = threading.RLock()
        self._records: list[RolloutRecord[Experience]] = []
        self._group_ids: list[str] = []
        self._unsealed: set[str] = set()
        self._oldest = 0.0

    def __len__(self) -> int:
        """Groups that are in no file yet: queued, or being written by some thread."""
        return len(self._unsealed)

    def add(self, group_id: str, records: Sequence[RolloutRecord[Experience]]) -> None:
        """Queues a group."""
        with self._lock:
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
        with self._lock:
            waited = self._clock() - self._oldest
            return bool(self._group_ids) and (len(self._records) >= self._buffer_size or waited >= self._seal_s)

    @property
    def overdue(self) -> int:
        """Groups whose file is due or being written; none while a full disk is waited for."""
        with self._lock:
            queued = len(self._group_ids)
            return 0 if self._space.retry_in_s else len(self._unsealed) - (0 if self.due else queued)

    def seal(self, sealed: Callable[[list[str]], None], blocking: bool = True) -> None:
        """Writes what is queued, then calls `sealed` with the group ids, the lock held; nothing while the disk is full.

        Args:
            sealed: Told which groups are durable now.
            blocking: Wait for a write that is under way; if not, leave the rest to its thread.

        Raises:
            OSError: the disk refuses it for another reason; what is queued stays so.
            RunFailed: the disk has been full for too long.
        """
        if self._space.retry_in_s or not self._writing.acquire(blocking):
            return
        try:
            with self._lock:
                group_ids, self._group_ids = self._group_ids, []
                records, self._records = self._records, []
            try:
                if records:
                    self._store.seal(records)
                    self._space.note_written()
            except BaseException as error:
                with self._lock:  # they wait for the next try, before what came meanwhile
                    self._group_ids = group_ids + self._group_ids
                    self._records = records + self._records
                if not isinstance(error, OSError):
                    raise
                self._space.note(error)
                return
            if group_ids:
                with self._lock:
                    self._unsealed.difference_update(group_ids)
                    sealed(group_ids)
        finally:
            self._writing.release()

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """No other thread writes, and the lock is held. Taken in this order everywhere, so nobody deadlocks."""
        with self._writing, self._lock:
            yield

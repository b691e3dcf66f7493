"""Collects delivered groups until a file is worth writing, writes it outside the pool's lock, and keeps files in order.

Files hold whole groups in ingest order, and appear in that order: one thread writes at a time. A thread of the queue's
own writes files that are due although nobody comes by, and has small ones merged; it wakes when files were written, and
every few seconds for what falls due by time. A failure in it ends the run with an error that says so.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from penstock.replay.condition import RECHECK_S, NotifyingCondition
from penstock.replay.config import StoreConfig
from penstock.replay.disk_space import DiskSpace
from penstock.replay.ledger import Ledger
from penstock.replay.store import ExperienceStore
from penstock.types import Clock, Experience, RolloutRecord, RunFailed

_LONGEST_SLEEP_S = 5.0


class Sealer:
    """The queue in front of the store. Thread-safe.

    Args:
        store: Where groups go.
        ledger: Lines of its logs for which there was no room are written by the thread.
        changed: Held while the queue is touched, never while a file is written.
        config: When a file is due, and how long a full disk is waited for.
        clock: Unix seconds.
        on_sealed: Told which groups are durable now, the lock held.

    Attributes:
        space: Says when a file for which there was no room may be tried again; what should be in it stays queued.
    """

    def __init__(
        self,
        store: ExperienceStore,
        ledger: Ledger,
        changed: NotifyingCondition,
        config: StoreConfig,
        clock: Clock,
        on_sealed: Callable[[list[str]], None],
    ) -> None:
        self.space, self._space_to_merge = (DiskSpace(config.full_disk_s) for _ in range(2))
        self._store = store
        self._ledger = ledger
        self._changed = changed
        self._config = config
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
            full = len(self._records) >= self._config.buffer_size
            return bool(self._group_ids) and (full or waited >= self._config.seal_s)

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

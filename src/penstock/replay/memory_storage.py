"""Rollout storage for threads of one process: batches are handed over by reference."""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.replay.backpressure import Backpressure
from penstock.replay.lines import FairQueue
from penstock.replay.storage import OnQuarantine, RolloutStorageConfig, check_metadata
from penstock.types import RolloutBatch, Stopped

KEPT_ASIDE = 16
"""So many quarantined batches stay in memory to be looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    writer_id: str
    batch: RolloutBatch

    @property
    def groups(self) -> int:
        return len(self.batch.groups)


class MemoryRolloutStorage:
    """Implements `penstock.replay.RolloutStorage`.

    Args:
        config: Capacity and limits.
        on_quarantine: Told of batches that the reader could not use.
    """

    def __init__(
        self, config: RolloutStorageConfig | None = None, on_quarantine: OnQuarantine = lambda source, reason: None
    ) -> None:
        self._config = config or RolloutStorageConfig()
        self._on_quarantine = on_quarantine
        self._changed = threading.Condition()
        self._backpressure = Backpressure("memory", self._config.write_timeout_s)
        self._lines: FairQueue[_Entry] = FairQueue()
        self._received: dict[_Entry, None] = {}
        self._held: Counter[str] = Counter()
        self._depth = 0
        self._closed = False
        self._counts: Counter[str] = Counter()
        self.quarantined: deque[tuple[RolloutBatch, str]] = deque(maxlen=KEPT_ASIDE)

    def writer(self, writer_id: str) -> "MemoryWriter":
        """The writing end for one worker, by its name."""
        return MemoryWriter(self, writer_id)

    def put(self, writer_id: str, batch: RolloutBatch) -> None:
        """Takes one batch of a writer; see `RolloutStorage.writer`."""
        check_metadata(batch)
        entry = _Entry(writer_id, batch)
        with self._changed:
            self._raise_if_closed()
            if not self.has_room(writer_id, entry.groups):
                self._wait_for_room(entry)
            self._keep(entry)

    def offer(self, writer_id: str, batch: RolloutBatch) -> bool:
        """`put` without waiting; returns whether there was room."""
        check_metadata(batch)
        entry = _Entry(writer_id, batch)
        with self._changed:
            self._raise_if_closed()
            if not self.has_room(writer_id, entry.groups):
                return False
            self._keep(entry)
            return True

    def has_room(self, writer_id: str, groups: int) -> bool:
        """Whether `offer` would take so many groups of a writer now."""
        with self._changed:
            held = self._held[writer_id]
            return held == 0 or held + groups <= self._config.capacity_groups

    def receive(self, timeout_s: float) -> "MemoryDelivery | None":
        """The next batch of the writer whose turn it is; None at the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_if_closed()
                self._backpressure.note_reader()
                taken = self._lines.take()
                if taken is not None:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            _, entry = taken
            self._received[entry] = None
            self._depth -= entry.groups
            self._counts["received"] += 1
        return MemoryDelivery(self, entry)

    def redeliver(self) -> None:
        """What was received without being acknowledged is delivered again."""
        with self._changed:
            for entry in reversed(self._received):
                self._lines.put_back(entry.writer_id, entry)
                self._depth += entry.groups
            self._received.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Everybody gets `Stopped`, also those who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """``rollout_storage/…`` numbers of this moment."""
        with self._changed:
            return {
                "rollout_storage/depth": float(self._depth),
                "rollout_storage/received": float(self._counts["received"]),
                "rollout_storage/quarantined": float(self._counts["quarantined"]),
                **self._backpressure.metrics(),
            }

    def finish(self, entry: _Entry) -> bool:
        """A received entry is done with; False where it was before, or is about to be delivered again."""
        with self._changed:
            if entry not in self._received:
                return False
            del self._received[entry]
            self._held[entry.writer_id] -= entry.groups
            self._changed.notify_all()
            return True

    def set_aside(self, entry: _Entry, reason: str) -> None:
        """A received entry is of no use."""
        if self.finish(entry):
            self.quarantined.append((entry.batch, reason))
            self._counts["quarantined"] += 1
            self._on_quarantine(entry.writer_id, reason)

    def _keep(self, entry: _Entry) -> None:
        self._held[entry.writer_id] += entry.groups
        self._depth += entry.groups
        self._lines.append(entry.writer_id, entry)
        self._changed.notify_all()

    def _wait_for_room(self, entry: _Entry) -> None:
        full = f"{self._held[entry.writer_id]} of {self._config.capacity_groups} groups wait"
        with self._backpressure.blocked(entry.writer_id, full) as left_s:
            while not self.has_room(entry.writer_id, entry.groups):
                self._changed.wait(left_s())
                self._raise_if_closed()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Stopped("the rollout storage is closed")


class MemoryWriter:
    """Implements `penstock.types.RolloutSink`; made by `MemoryRolloutStorage.writer`."""

    def __init__(self, storage: MemoryRolloutStorage, writer_id: str) -> None:
        self._storage = storage
        self._writer_id = writer_id

    def add_batches(self, batches: Sequence[RolloutBatch]) -> None:
        """See `RolloutStorage.writer`. Batches without groups carry nothing and are passed over."""
        for batch in batches:
            if batch.groups:
                self._storage.put(self._writer_id, batch)


class MemoryDelivery:
    """Implements `penstock.replay.Delivery`."""

    def __init__(self, storage: MemoryRolloutStorage, entry: _Entry) -> None:
        self._storage = storage
        self._entry = entry

    @property
    def source(self) -> str:
        """The writer."""
        return self._entry.writer_id

    @property
    def batches(self) -> tuple[RolloutBatch, ...]:
        """One batch."""
        return (self._entry.batch,)

    def acknowledge(self) -> None:
        """The reader has them: they are forgotten."""
        self._storage.finish(self._entry)

    def quarantine(self, reason: str) -> None:
        """The reader cannot use them: they are put aside and counted."""
        self._storage.set_aside(self._entry, reason)

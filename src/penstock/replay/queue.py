"""What lies between rollout workers and the replay buffer: the protocol, its configuration, and the storage in memory.

A storage takes batches from any number of writers and gives them to one reader, which acknowledges each once it is
safe. Every kind keeps these promises (tests/replay/test_rollout_storage.py holds all of them to it):

- a writer's batches arrive in the order in which it wrote them; writers are served in turn, so that one with much to
  give delays the others by one item at a time (`FairQueue`);
- a batch that was not acknowledged is delivered again after `redeliver`, so each arrives at least once. That it counts
  once is the replay buffer's business: it takes one delivery per ticket and refuses the others;
- a writer waits while its share is full, for a limited time, and that it waits can be seen (`Backpressure`);
- what cannot be read or used is put aside and counted, never deleted, and holds up nothing else;
- after `close` everybody gets `Stopped`, also those who wait.

`MemoryRolloutStorage` is for threads of one process: batches are handed over by reference.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.types import InvalidRolloutError, NoProgressError, RolloutBatch, RolloutSink, Stopped, refuse_idle

OnQuarantine = Callable[[str, str], None]
"""Told what was put aside, and why."""


class RolloutStorageConfig(BaseModel):
    """Where finished rollouts wait for the learner; docs/replay.md.

    Attributes:
        kind: `memory` for threads of one process; `file` for processes that share only a file system.
        capacity_groups: Most groups of one writer that wait; then it waits itself. A larger batch passes alone.
        write_timeout_s: Longest such wait.
        path: Folder of the files; None means ``rollout_storage`` in the run directory.
        poll_s: How often a folder is looked into; what the same process wrote is seen at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["memory", "file"] = "memory"
    capacity_groups: int = Field(default=64, ge=1)
    write_timeout_s: float = Field(default=300.0, gt=0)
    path: str | None = None
    poll_s: float = Field(default=0.2, gt=0, le=60)

    @model_validator(mode="after")
    def _every_key_acts(self) -> Self:
        if self.kind == "memory":
            refuse_idle(self, ("path", "poll_s"), "kind is 'memory', which has no files")
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Batches that were received; exactly one of `acknowledge` and `quarantine` ends it.

    Attributes:
        source: Where it came from, in words.
        batches: What was written together.
        acknowledge: The reader has them: they need not be kept. A second call changes nothing.
        quarantine: The reader cannot use them, for that reason: they are put aside and counted.
    """

    source: str
    batches: tuple[RolloutBatch, ...]
    acknowledge: Callable[[], object]
    quarantine: Callable[[str], object]


@runtime_checkable
class RolloutStorage(Protocol):
    """Between rollout workers and the replay buffer. Thread-safe."""

    def writer(self, writer_id: str) -> RolloutSink:
        """The writing end for one worker.

        Its `add_batches` raises `NoProgressError` when there was no room for too long, saying who does not read,
        `Stopped` after `close`, and `InvalidRolloutError` for a rollout without metadata.

        Args:
            writer_id: Any text, unique among the workers that run at one time.
        """
        ...

    def receive(self, timeout_s: float) -> Delivery | None:
        """The next delivery; None at the timeout.

        Raises:
            Stopped: after `close`.
        """
        ...

    def redeliver(self) -> None:
        """A reader begins: what an earlier one received without acknowledging it is delivered again."""
        ...

    def close(self) -> None:
        """Wakes everybody with `Stopped`. What waits stays where it is: in files for the next reader, or gone."""
        ...

    def metrics(self) -> dict[str, float]:
        """``rollout_storage/…`` numbers of this moment; never waits for a disk.

        `depth` (groups that wait to be received), `blocked_writers` (now), `blocked_s` (all waits so far),
        `received` and `quarantined` (batches since the start).
        """
        ...


def check_metadata(batch: RolloutBatch) -> None:
    """Refuses a batch that no reader could judge.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    for rollout in batch.rollouts():
        if rollout.metadata is None:
            raise InvalidRolloutError(f"rollout {rollout.rollout_id!r} has no metadata: it cannot be handed over")


Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out for each writer; round robin among them."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        """How many items wait, of all writers."""
        return sum(len(line) for line in self._lines.values())

    def append(self, writer: str, item: Item) -> None:
        """Puts an item at the end of a writer's line."""
        self._line(writer).append(item)

    def put_back(self, writer: str, item: Item) -> None:
        """Puts an item at the front again."""
        self._line(writer).appendleft(item)

    def take(self) -> tuple[str, Item] | None:
        """The first item of the writer whose turn it is; None where nothing waits."""
        if not self._turns:
            return None
        writer = self._turns.popleft()
        line = self._lines[writer]
        item = line.popleft()
        if line:
            self._turns.append(writer)
        else:
            del self._lines[writer]
        return writer, item

    def clear(self) -> None:
        """Forgets everything."""
        self._lines.clear()
        self._turns.clear()

    def _line(self, writer: str) -> deque[Item]:
        if writer not in self._lines:
            self._lines[writer] = deque()
            self._turns.append(writer)
        return self._lines[writer]


class Backpressure:
    """Counts waiting writers and ends waits that last too long. Thread-safe; never waits itself.

    Args:
        place: Where the rollouts go, in words.
        timeout_s: Longest wait.
        clock: Monotonic seconds.
    """

    def __init__(self, place: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}
        self._ended_s = 0.0
        self._last_read: float | None = None

    def note_reader(self) -> None:
        """The reader asked for something."""
        self._last_read = self._clock()

    @contextmanager
    def blocked(self, writer_id: str, full: str) -> Generator[Callable[[], float], None, None]:
        """A writer waits inside. Gives a function that says how many seconds are left.

        Args:
            writer_id: Who waits.
            full: What is full, in words.

        Raises:
            NoProgressError: by that function, when none is left.
        """
        token, started = object(), self._clock()
        with self._lock:
            self._since[token] = started

        def left_s() -> float:
            left = started + self._timeout_s - self._clock()
            if left <= 0:
                raise NoProgressError(self._message(writer_id, full))
            return left

        try:
            yield left_s
        finally:
            with self._lock:
                self._ended_s += self._clock() - self._since.pop(token)

    def metrics(self, depth: int, counts: Counter[str]) -> dict[str, float]:
        """`RolloutStorage.metrics` of a storage that counted so; seconds waited are with those of writers that wait."""
        with self._lock:
            now = self._clock()
            waiting_s = sum(now - since for since in self._since.values())
            return {
                "rollout_storage/depth": float(depth),
                "rollout_storage/received": float(counts["received"]),
                "rollout_storage/quarantined": float(counts["quarantined"]),
                "rollout_storage/blocked_writers": float(len(self._since)),
                "rollout_storage/blocked_s": self._ended_s + waiting_s,
            }

    def _message(self, writer_id: str, full: str) -> str:
        read = "no reader has asked yet" if self._last_read is None else _ago(self._clock() - self._last_read)
        return (
            f"{writer_id} waited {self._timeout_s:g} s (rollout.storage.write_timeout_s) to hand rollouts over: {full} "
            f"and nobody takes them out of {self._place}; in this process {read}. See that the learner's rollout "
            "receiver runs and reads the same place"
        )


def _ago(seconds: float) -> str:
    return f"the reader last asked {seconds:.0f} s ago"


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

    def receive(self, timeout_s: float) -> Delivery | None:
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
            writer_id, entry = taken
            self._received[entry] = None
            self._depth -= entry.groups
            self._counts["received"] += 1
        return Delivery(writer_id, (entry.batch,), partial(self.finish, entry), partial(self.set_aside, entry))

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
            return self._backpressure.metrics(self._depth, self._counts)

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

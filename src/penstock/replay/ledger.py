"""The ledger: every rollout that was started is in exactly one state, and the books close at every step.

States are `in_flight` (a generator has it), `waiting` (delivered, from ingest until its last use) and the terminal
fates. What was started is counted apart, where generators begin, and is compared with the sum over the states.
Starts and fates are appended to ``tickets.jsonl`` and ``fates.jsonl``, from which the ledger is rebuilt after a crash
(`penstock.replay.recovery`). Memory grows with the live groups only: rollout i of a group is bit i of two integers.
Lines for which the disk has no room are kept and tried again, within a limit (`DiskSpace`).

Each resume begins the next lineage. A version is (lineage, step): a lineage forks from a parent at a step, and at that
step and before its weights *are* the parent's. So two versions hold the same weights exactly if they lead to the same
version when each is followed back past all its forks, and a rollout is valid in a lineage exactly if its version does
that with the lineage's own version of the same step. ``lineages.jsonl`` holds one line per resume, flushed to the disk
before the lineage generates anything.

The lock of a buffer, which all its parts share, is its ledger's: `NotifyingCondition`, with what ends every wait in it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.rundir import JsonLinesLog
from penstock.rundir.directory import read_forks
from penstock.rundir.storage import is_full_disk
from penstock.types import CheckpointError, Clock, Fate, PenstockError, RunFailed, Stopped, Ticket, WeightVersion

RECHECK_S = 1.0
"""Longest sleep of who waits for news before asking the clocks (stragglers, staleness, a full disk) again."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class NotifyingCondition(threading.Condition):
    """A re-entrant condition that others can listen to without waiting in it, and that can be ended for good.

    Attributes:
        on_notify: Called at every `notify_all`, with the lock held; it must return at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_notify: Callable[[], None] = _ignore
        self._closed = False
        self._failure: PenstockError | None = None

    def notify_all(self) -> None:
        """Wakes all that wait, and calls `on_notify`."""
        super().notify_all()
        self.on_notify()

    @property
    def is_over(self) -> bool:
        """Whether `raise_if_over` would raise."""
        return self._closed or self._failure is not None

    def raise_if_over(self) -> None:
        """Ends whoever asks.

        Raises:
            Stopped: after `close`.
            PenstockError: after `end_with`, what that was given.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Stopped("the replay buffer is closed")

    def end_with(self, failure: PenstockError) -> None:
        """Every wait ends with this error, now and later; the first one stays."""
        with self:
            self._failure = self._failure or failure
            self.notify_all()

    def close(self) -> None:
        """Ends every wait, now and later, with `Stopped`."""
        with self:
            self._closed = True
            self.notify_all()


def _ignore() -> None:
    """Nobody listens."""


class DiskSpace:
    """Says when a write that found no room may be tried again. Thread-safe.

    Args:
        limit_s: So long a full disk is waited for; 0 makes it an error at once.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._retry_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._reason = ""

    def note(self, error: OSError) -> None:
        """A write failed; to be called where the error is handled.

        Raises:
            OSError: the error itself, where it says something else than that there is no room.
            RunFailed: there has been none for longer than the limit.
        """
        if not is_full_disk(error) or self._limit_s <= 0:
            raise error
        with self._lock:
            now = self._clock()
            self._since = now if self._since is None else self._since
            self._retry_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._reason = str(error)
            if now - self._since > self._limit_s:
                raise RunFailed(
                    f"{error}: there has been no room for {now - self._since:.0f} s (replay.store.full_disk_s = "
                    f"{self._limit_s:g}): make room and resume the run"
                ) from error

    def note_written(self) -> None:
        """A write succeeded."""
        if self._since is not None:
            with self._lock:
                self._since, self._retry_at, self._pause_s = None, 0.0, _FIRST_PAUSE_S

    @property
    def retry_in_s(self) -> float:
        """Seconds until a write may be tried again; 0 now."""
        return max(0.0, self._retry_at - self._clock()) if self._since is not None else 0.0

    def describe(self) -> str:
        """In words, how long there has been no room, and where; empty where there is."""
        since = self._since
        return "" if since is None else f"no room on the disk for {self._clock() - since:.0f} s: {self._reason}"


LiveState = Literal["in_flight", "waiting"]
FATES: tuple[Fate, ...] = get_args(Fate)
STATES: tuple[str, ...] = (*get_args(LiveState), *FATES)
TicketKey = tuple[str, int]
"""Lesson and index of a group: its name in every lineage."""


def rollout_ids(group_id: str, size: int) -> list[str]:
    """The ids of a group's rollouts: ``<group_id>/<index>``."""
    return [f"{group_id}/{index}" for index in range(size)]


@dataclass(slots=True)
class _Live:
    """The live rollouts of one group, a bit for each index."""

    in_flight: int = 0
    waiting: int = 0


class Ledger:
    """Counts rollouts by state. Thread-safe.

    Args:
        lineage: Written beside each fate.
        tickets: Takes a line per group that was started; None keeps no record.
        fates: Takes a line per fate; None keeps no record.
        clock: Stamps the lines.
        past: Where an earlier life wrote, if one did: until `rebuild` the books know nothing of it.
        space: Says how long a full disk is waited for; lines for which there is no room are written later.

    Attributes:
        changed: The lock of the buffer whose books these are, and of whoever admits for it; notified of all news.
        update: The next update without a batch, in an open buffer the current version: who settles a rollout logs it.
    """

    def __init__(
        self,
        lineage: int = 0,
        tickets: JsonLinesLog | None = None,
        fates: JsonLinesLog | None = None,
        clock: Clock = time.time,
        past: str = "",
        space: DiskSpace | None = None,
    ) -> None:
        self.changed = NotifyingCondition()
        self.update = 0
        self.past = past
        self.space = space or DiskSpace()
        self._backlog: list[tuple[JsonLinesLog, tuple[Mapping[str, Any], ...]]] = []
        # Reentrant, because a signal handler may look at the ledger while its own thread is inside it.
        self._lock = threading.RLock()
        self.lineage = lineage
        self._tickets = tickets
        self._fates = fates
        self._clock = clock
        self._started = 0
        self._live: dict[str, _Live] = {}
        self._counts: Counter[str] = Counter()

    def count_started(self, ticket: Ticket, size: int) -> None:
        """The generators' side: `size` rollouts of a group were begun."""
        if self._tickets is not None:
            row = {
                "ticket_id": ticket.ticket_id,
                "lesson_id": ticket.lesson_id,
                "index": ticket.index,
                "rollouts": size,
                "admitted_step": ticket.admitted_step,
                "deadline_step": ticket.deadline_step,
                "lineage": self.lineage,
                "time": self._clock(),
            }
            if ticket.epoch is not None:
                row |= {"epoch": ticket.epoch, "position": ticket.position, "problem": ticket.problem}
            self._append(self._tickets, (row,))
        with self._lock:
            self._started += size

    def open(self, group_id: str, size: int) -> None:
        """The rollouts of a group are in flight from now on."""
        with self._lock:
            if group_id in self._live:
                raise RunFailed(f"the ledger is wrong: {group_id} was started twice")
            self._live[group_id] = _Live(in_flight=(1 << size) - 1)
            self._counts["in_flight"] += size

    def reopen(self, group_id: str, size: int, step: int) -> None:
        """A group that a resume had counted as aborted comes after all: in flight again."""
        with self._lock:
            self._counts["aborted"] -= size
            self.open(group_id, size)
            ids = rollout_ids(group_id, size)
            self.log_fates(((i, "waiting", "delivered by a storage that outlived the crash") for i in ids), step)

    def deliver(self, group_id: str) -> None:
        """What is in flight of a group is waiting from now on."""
        with self._lock:
            live = self._live.get(group_id)
            if live is None or not live.in_flight:
                raise RunFailed(f"the ledger is wrong: {group_id} is not in flight (never started, or delivered twice)")
            count = live.in_flight.bit_count()
            live.waiting |= live.in_flight
            live.in_flight = 0
            self._counts["in_flight"] -= count
            self._counts["waiting"] += count

    def live_groups(self) -> list[str]:
        """Groups with a rollout in flight or waiting."""
        with self._lock:
            return list(self._live)

    def is_live(self, group_id: str) -> bool:
        """Whether any rollout of a group is in flight or waiting."""
        return group_id in self._live

    def settle(self, ids: Iterable[str], fate: Fate, step: int, reason: str) -> None:
        """Live rollouts meet their fate, which is logged.

        Args:
            ids: In flight or waiting.
            fate: How they ended.
            step: The update that was next when it was decided; for `trained`, the update that used them last.
            reason: In words.
        """
        with self._lock:
            ids = list(ids)
            for rollout_id in ids:
                self._leave(rollout_id)
            self._counts[fate] += len(ids)
            self.log_fates(((rollout_id, fate, reason) for rollout_id in ids), step)

    def log_fates(self, decisions: Iterable[tuple[str, str, str]], step: int) -> None:
        """Appends (rollout id, fate or `waiting`, reason) to the fate log, and counts nothing."""
        if self._fates is None:
            return
        stamp = {"step": step, "lineage": self.lineage, "time": self._clock()}
        rows = ({"rollout_id": i, "fate": fate, "reason": reason, **stamp} for i, fate, reason in decisions)
        self._append(self._fates, tuple(rows))

    def rebuild(self, started: int, fates: Mapping[Fate, int], waiting: Iterable[str]) -> None:
        """Starts from what the files of an earlier life say."""
        with self._lock:
            self.past = ""
            self._started = started
            self._live, count = _by_group(waiting)
            self._counts = Counter[str](waiting=count)
            self._counts.update({str(fate): count for fate, count in fates.items()})

    def snapshot(self) -> dict[str, int]:
        """``started`` and the number of rollouts in each state."""
        with self._lock:
            return {"started": self._started, **{state: self._counts[state] for state in STATES}}

    def check(self, expected_live: Iterable[str] | None = None) -> None:
        """Compares the books.

        Args:
            expected_live: Ids that should be live, each once, from who holds them; None compares numbers only.

        Raises:
            RunFailed: they do not close; the message names rollouts.
        """
        with self._lock:
            total = sum(self._counts.values())
            if total != self._started:
                raise RunFailed(
                    f"the ledger does not close: {self._started} rollouts were started, {total} are accounted for "
                    f"({self._describe()}); live are {_some(list(self._ids()))}"
                )
            if expected_live is None:
                return
            expected, live = set(expected_live), set(self._ids())
            missing, extra = expected - live, live - expected
            if missing or extra:
                raise RunFailed(
                    f"the ledger does not close: held but not live {_some(missing)}, "
                    f"live but held by nobody {_some(extra)}"
                )

    def write_backlog(self) -> bool:
        """Writes the lines for which there was no room; returns whether none is left.

        Raises:
            OSError: the disk refuses them for another reason.
            RunFailed: the disk has been full for too long.
        """
        with self._lock:
            if self._backlog and self.space.retry_in_s:
                return False
            while self._backlog:
                log, rows = self._backlog[0]
                try:
                    log.append(*rows)
                except OSError as error:
                    self.space.note(error)
                    return False
                self._backlog.pop(0)
                self.space.note_written()
            return True

    def sync(self) -> None:
        """Flushes both logs to the disk."""
        for log in (self._tickets, self._fates):
            if log is not None:
                log.sync()

    def _append(self, log: JsonLinesLog, rows: tuple[Mapping[str, Any], ...]) -> None:
        """Lines are written in order; a log that takes none at present gets them later."""
        with self._lock:
            self._backlog.append((log, rows))
            try:
                self.write_backlog()
            except BaseException:
                self._backlog.pop()  # as if nothing had been said
                raise

    def _leave(self, rollout_id: str) -> None:
        group_id, bit = _split(rollout_id)
        live = self._live.get(group_id)
        if live is not None and live.waiting & bit:
            live.waiting ^= bit
            self._counts["waiting"] -= 1
        elif live is not None and live.in_flight & bit:
            live.in_flight ^= bit
            self._counts["in_flight"] -= 1
        else:
            raise RunFailed(f"the ledger is wrong: {rollout_id} is not live (never started, or settled twice)")
        if not live.waiting and not live.in_flight:
            del self._live[group_id]

    def _ids(self) -> Iterator[str]:
        for group_id, live in self._live.items():
            bits = live.in_flight | live.waiting
            yield from (f"{group_id}/{index}" for index in range(bits.bit_length()) if bits >> index & 1)

    def _describe(self) -> str:
        return ", ".join(f"{state} {self._counts[state]}" for state in STATES if self._counts[state])


def _split(rollout_id: str) -> tuple[str, int]:
    """The group, and the bit of the index."""
    group_id, _, index = rollout_id.rpartition("/")
    return group_id, 1 << int(index)


def _by_group(ids: Iterable[str]) -> tuple[dict[str, _Live], int]:
    groups: dict[str, _Live] = {}
    count = 0
    for rollout_id in ids:
        group_id, bit = _split(rollout_id)
        groups.setdefault(group_id, _Live()).waiting |= bit
        count += 1
    return groups, count


def _some(ids: Collection[str]) -> str:
    shown = sorted(ids)[:5]
    more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
    return f"[{', '.join(shown)}{more}]"


class Lineages:
    """The forks of one run.

    Args:
        path: The run's ``lineages.jsonl``; it may be missing: then there is lineage 0 only.

    Raises:
        RunDirectoryError: a line of it is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forks = {lineage: WeightVersion(*fork) for lineage, fork in read_forks(path).items()}

    @property
    def newest(self) -> int:
        """The latest lineage that was begun."""
        return max(self._forks, default=0)

    def begin(self, lineage: int, parent: int, step: int) -> None:
        """Records durably that `lineage` continues from version (`parent`, `step`).

        Raises:
            CheckpointError: the number was used before, or the parent is unknown.
        """
        if lineage in self._forks or lineage <= parent:
            raise CheckpointError(f"lineage {lineage} of {self._path} cannot begin from lineage {parent}")
        self._forks[lineage] = WeightVersion(parent, step)
        log = JsonLinesLog(self._path)
        log.append({"lineage": lineage, "parent": parent, "step": step})
        log.close()

    def survives(self, version: WeightVersion, lineage: int) -> bool:
        """Whether `lineage` has, or will have, exactly these weights at that step."""
        return self._origin(version) == self._origin(WeightVersion(lineage, version.step))

    def _origin(self, version: WeightVersion) -> WeightVersion:
        fork = self._forks.get(version.lineage)
        while fork is not None and version.step <= fork.step:
            version = WeightVersion(fork.lineage, version.step)
            fork = self._forks.get(version.lineage)
        return version

"""The ledger: every rollout that was started is in exactly one state, and the books close at every step.

States are `in_flight` (its ticket was handed to a generator), `waiting` (delivered, from ingest until its last use)
and the terminal fates. What was started is counted apart, where tickets are handed out, and is compared with
the sum over the states. Starts and fates are appended to ``tickets.jsonl`` and ``fates.jsonl``, from which the
ledger is rebuilt after a crash (`penstock.replay.recovery`). Memory grows with the live rollouts only.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

from penstock.rundir import JsonLinesLog
from penstock.types import Clock, Fate, RunFailed, Ticket

LiveState = Literal["in_flight", "waiting"]
FATES: tuple[Fate, ...] = get_args(Fate)
STATES: tuple[str, ...] = (*get_args(LiveState), *FATES)


def rollout_ids(ticket_id: str, size: int) -> list[str]:
    """The ids of a group's rollouts."""
    return [f"{ticket_id}/{index}" for index in range(size)]


class Ledger:
    """Counts rollouts by state. Thread-safe.

    Args:
        lineage: Written beside each fate.
        tickets: Takes a line per ticket handed out; None keeps no record.
        fates: Takes a line per fate; None keeps no record.
        clock: Stamps the lines.
    """

    def __init__(
        self,
        lineage: int = 0,
        tickets: JsonLinesLog | None = None,
        fates: JsonLinesLog | None = None,
        clock: Clock = time.time,
    ) -> None:
        # Reentrant, because a signal handler may look at the ledger while its own thread is inside it.
        self._lock = threading.RLock()
        self._lineage = lineage
        self._tickets = tickets
        self._fates = fates
        self._clock = clock
        self._started = 0
        self._live: dict[str, LiveState] = {}
        self._counts: Counter[str] = Counter()

    def count_started(self, ticket: Ticket, size: int) -> None:
        """The generators' side: a ticket for `size` rollouts was handed out."""
        if self._tickets is not None:
            self._tickets.append(
                {
                    "ticket_id": ticket.ticket_id,
                    "lesson_id": ticket.lesson_id,
                    "index": ticket.index,
                    "rollouts": size,
                    "admitted_step": ticket.admitted_step,
                    "deadline_step": ticket.deadline_step,
                    "lineage": self._lineage,
                    "time": self._clock(),
                }
            )
        with self._lock:
            self._started += size

    def open(self, ids: Iterable[str]) -> None:
        """Rollouts are in flight from now on."""
        with self._lock:
            for rollout_id in ids:
                if rollout_id in self._live:
                    raise RunFailed(f"the ledger is wrong: {rollout_id} was started twice")
                self._live[rollout_id] = "in_flight"
                self._counts["in_flight"] += 1

    def deliver(self, ids: Iterable[str]) -> None:
        """Rollouts in flight are waiting from now on."""
        with self._lock:
            for rollout_id in ids:
                self._leave(rollout_id)
                self._live[rollout_id] = "waiting"
                self._counts["waiting"] += 1

    def settle(self, ids: Iterable[str], fate: Fate, step: int, reason: str) -> None:
        """Live rollouts meet their fate, which is logged.

        Args:
            ids: In flight or waiting.
            fate: Which.
            step: The update that was next when it was decided; for `trained`, the update that used them last.
            reason: In words.
        """
        with self._lock:
            ids = list(ids)
            for rollout_id in ids:
                self._leave(rollout_id)
                self._counts[fate] += 1
            self.log_fates(((rollout_id, fate, reason) for rollout_id in ids), step)

    def log_fates(self, decisions: Iterable[tuple[str, str, str]], step: int) -> None:
        """Appends (rollout id, fate or `waiting`, reason) to the fate log, and counts nothing."""
        if self._fates is None:
            return
        stamp = {"step": step, "lineage": self._lineage, "time": self._clock()}
        self._fates.append(
            *({"rollout_id": i, "fate": fate, "reason": reason, **stamp} for i, fate, reason in decisions)
        )

    def rebuild(self, started: int, fates: Mapping[Fate, int], waiting: Iterable[str]) -> None:
        """Starts from what the files of an earlier life say."""
        with self._lock:
            self._started = started
            self._live = dict.fromkeys(waiting, "waiting")
            self._counts = Counter[str](waiting=len(self._live))
            self._counts.update({str(fate): count for fate, count in fates.items()})

    def snapshot(self) -> dict[str, int]:
        """``started`` and the number of rollouts in each state."""
        with self._lock:
            return {"started": self._started, **{state: self._counts[state] for state in STATES}}

    def check(self, expected_live: Collection[str] | None = None) -> None:
        """Compares the books.

        Args:
            expected_live: Ids that should be live, from who holds them; None compares numbers only.

        Raises:
            RunFailed: they do not close; the message names rollouts.
        """
        with self._lock:
            total = sum(self._counts.values())
            if total != self._started:
                raise RunFailed(
                    f"the ledger does not close: {self._started} rollouts were started, {total} are accounted for "
                    f"({self._describe()}); live are {_some(self._live)}"
                )
            if expected_live is None:
                return
            expected = set(expected_live)
            missing, extra = expected - self._live.keys(), self._live.keys() - expected
            if missing or extra:
                raise RunFailed(
                    f"the ledger does not close: held but not live {_some(missing)}, "
                    f"live but held by nobody {_some(extra)}"
                )

    def sync(self) -> None:
        """Flushes both logs to the disk."""
        for log in (self._tickets, self._fates):
            if log is not None:
                log.sync()

    def _leave(self, rollout_id: str) -> None:
        state = self._live.pop(rollout_id, None)
        if state is None:
            raise RunFailed(f"the ledger is wrong: {rollout_id} is not live (never started, or settled twice)")
        self._counts[state] -= 1

    def _describe(self) -> str:
        return ", ".join(f"{state} {self._counts[state]}" for state in STATES if self._counts[state])


def _some(ids: Collection[str]) -> str:
    shown = sorted(ids)[:5]
    more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
    return f"[{', '.join(shown)}{more}]"

"""Tickets for other processes: who holds which, who waits for one, and which version serves.

Every method may be called again with the same arguments, because the answer to the first call was lost, and does
nothing twice. Messages of another lineage than the run's present one are of no use: a worker that has not heard yet of
the new lineage gets no tickets.

A worker numbers its requests, and has one in line at a time. The last answer is kept until the next request, so that a
request whose answer was lost can be repeated: it gets the same tickets. What an incarnation of a worker holds is handed
out again, as it is, once that one is known to be dead: it was released, or a newer one has spoken.

Nobody in line has a thread: requests are futures, served by one thread, and `acquire` is a coroutine. With many in
line, each gets its share of what is free. Locks are taken in one order everywhere: the issuer's condition, then the
service's own. Not covered: how calls get here (`penstock.types.Caller`), and what comes of the tickets (`service`).
"""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.replay.ledger import RECHECK_S
from penstock.replay.tickets import TicketIssuer
from penstock.types import CurriculumRecord, RolloutBatchStats, Stopped, SupersededError, Ticket


@dataclass(slots=True, eq=False)
class _Request:
    worker: str
    number: int
    most: int
    lessons: tuple[str, ...] | None
    tickets: Future[list[Ticket]] = field(default_factory=Future[list[Ticket]])

    def __post_init__(self) -> None:
        self.tickets.set_running_or_notify_cancel()  # who gives up waiting must not cancel what is handed out just then


@dataclass(slots=True)
class _Worker:
    incarnation: int
    answered: int = 0
    tickets: list[Ticket] = field(default_factory=list[Ticket])


class TicketService:
    """Hands tickets out to workers by name and incarnation. `start` it, and `stop` it.

    Args:
        issuer: Of the present lineage; restored, where the run resumes.
        curriculum: Where evaluations are recorded, and whose state travels in checkpoints.
        needs_clearance: A version serves only when the evaluator has cleared it (staleness zero).

    Attributes:
        reissued: Tickets of dead workers that were handed out again.
    """

    def __init__(self, issuer: TicketIssuer, curriculum: CurriculumRecord, needs_clearance: bool = False) -> None:
        self._issuer = issuer
        self._curriculum = curriculum
        self._versions = ServingVersions(issuer, needs_clearance)
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._line: dict[str, _Request] = {}
        self._dead: list[str] = []
        self._evaluations: dict[str, tuple[int, RolloutBatchStats]] = {}
        self._counts: Counter[str] = Counter()
        self._news = threading.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self.reissued = 0
        issuer.changed.on_notify = self._news.set

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="replay-tickets", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Everybody in line gets `Stopped`; returns whether the thread ended within the limit."""
        self._stopping = True
        self._news.set()
        thread = self._thread
        if thread is None:
            self._end(Stopped("the ticket service is closed"))
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    @property
    def failure(self) -> Exception | None:
        """What ended the thread; None while it runs, and after `stop`."""
        return None if isinstance(self._failure, Stopped) else self._failure

    @property
    def waiting(self) -> int:
        """Workers in line."""
        return len(self._line)

    def check(self, worker: str, incarnation: int) -> None:
        """Takes note of who speaks.

        Raises:
            SupersededError: that incarnation was released, or replaced.
        """
        with self._lock:
            self._known(worker, incarnation)

    def ask(
        self, worker: str, incarnation: int, number: int, most: int, lessons: Collection[str] | None
    ) -> Future[list[Ticket]]:
        """Puts a request in line; never blocks. One of the same worker that is in line already is replaced.

        Args:
            worker: Its name.
            incarnation: Which life of it.
            number: Grows from 1; a number that was answered gets the same answer.
            most: Tickets at once.
            lessons: Only of these; None means any.

        Returns:
            Between 1 and `most` tickets, once there are any; none where the request was replaced.

        Raises:
            SupersededError: that incarnation was released, or replaced.
            Stopped: the service is closed.
        """
        request = _Request(worker, number, most, None if lessons is None else tuple(lessons))
        with self._lock:
            known = self._known(worker, incarnation)
            if self._failure is not None:
                raise self._failure
            before = self._line.pop(worker, None)
            if before is not None:
                before.tickets.set_result([])
            if number <= known.answered:
                request.tickets.set_result(list(known.tickets) if number == known.answered else [])
            else:
                self._line[worker] = request
        self._news.set()
        return request.tickets

    def withdraw(self, worker: str, number: int) -> list[Ticket]:
        """A request waited long enough: it leaves the line, with what it was given in the last moment."""
        with self._lock:
            request = self._line.get(worker)
            if request is not None and request.number == number:
                del self._line[worker]
            known = self._workers.get(worker)
            return list(known.tickets) if known is not None and known.answered == number else []

    def release(self, worker: str, incarnation: int) -> None:
        """An incarnation is dead, and those before it: what it holds goes to others, what it says is refused."""
        with self._lock:
            known = self._workers.get(worker)
            if known is None or known.incarnation <= incarnation:
                self._replace(worker, incarnation + 1)
        self._reissue()

    # --- for rollout workers of other processes ------------------------------------------------------------------

    async def acquire(
        self,
        worker: str,
        incarnation: int,
        lineage: int,
        number: int,
        most: int,
        timeout_s: float,
        lessons: Collection[str] | None = None,
    ) -> list[Ticket]:
        """Between 1 and `most` tickets; none at the timeout.

        Args:
            worker: Who asks.
            incarnation: Which life of it.
            lineage: Of the run, as the worker knows it.
            number: Counts the worker's requests from 1; repeated until it was answered.
            most: Tickets at once.
            timeout_s: Longest wait.
            lessons: Only of these; None means any.

        Raises:
            SupersededError: that incarnation was released, or replaced.
            Stopped: the service is closed.
        """
        if lineage != self._issuer.lineage:
            self.check(worker, incarnation)
            self._count("refused")
            await asyncio.sleep(timeout_s)
            return []
        future = asyncio.wrap_future(self.ask(worker, incarnation, number, most, lessons))
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        return future.result() if done else self.withdraw(worker, number)

    def fail(
        self, worker: str, incarnation: int, lineage: int, ticket: Ticket, fate: Literal["invalid", "aborted"],
        reason: str,
    ) -> None:  # fmt: skip
        """A group did not come about; a ticket that the worker does not hold (any more) is left alone.

        Raises:
            SupersededError: that incarnation was released, or replaced.
        """
        self.check(worker, incarnation)
        with self._issuer.changed:
            held = ticket.ticket_id in self._issuer.held_by(holder_of(worker, incarnation))
            if held and lineage == self._issuer.lineage:
                self._issuer.fail(ticket, fate, reason)
                return
        self._count("refused")

    # --- for inference servers and the evaluator -----------------------------------------------------------------

    def server_holds(self, server: str, incarnation: int, lineage: int, step: int, held_back: bool = False) -> bool:
        """A server holds a version now; tickets are stamped with the oldest that any server holds.

        Args:
            server: Its name.
            incarnation: Which life of it.
            lineage: Of the version.
            step: Of the version.
            held_back: An evaluation keeps it there; nobody waits for it while there are other servers.

        Returns:
            Whether it counts; one of another lineage does not.

        Raises:
            SupersededError: a newer incarnation of the server has spoken.
        """
        return self._versions.hold(server, incarnation, lineage, step, held_back)

    def forget_server(self, server: str, incarnation: int) -> None:
        """An incarnation of a server is dead: nobody waits for its version any more."""
        self._versions.forget(server, incarnation)

    def cleared(self, lineage: int, step: int) -> bool:
        """Nothing is to be evaluated at this version, or nothing any more; returns whether it counts."""
        return self._versions.clear(lineage, step)

    def update_evaluation(self, stats: RolloutBatchStats, step: int) -> None:
        """A full evaluation of one lesson; the same one again changes nothing."""
        with self._lock:
            repeated = self._evaluations.get(stats.lesson_id) == (step, stats)
            self._evaluations[stats.lesson_id] = (step, stats)
        if repeated:
            self._count("repeated")
        else:
            self._curriculum.update_evaluation(stats, step)

    # --- how it is -----------------------------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """What belongs into a checkpoint beside the buffer's state: ``curriculum`` and ``issuer``."""
        return {"curriculum": self._curriculum.state(), "issuer": self._issuer.state()}

    def metrics(self) -> dict[str, float]:
        """``curriculum/…`` and ``replay/…`` numbers; of messages, those that a `ReplayService` counts of its own."""
        return {
            **self._curriculum.metrics(),
            "replay/waiting_workers": float(self.waiting),
            "replay/reissued_tickets": float(self.reissued),
            "replay/refused_messages": float(self._counts["refused"]),
            "replay/repeated_messages": float(self._counts["repeated"]),
        }

    def status(self) -> dict[str, Any]:
        """For status.json."""
        return {
            "lineage": self._issuer.lineage,
            "update": self._issuer.update,
            "serving_step": self._issuer.serving_step,
            "servers": self._versions.describe(),
            "ledger": self._issuer.ledger.snapshot(),
            "lessons": self._curriculum.describe(),
            "waiting_workers": self.waiting,
        }

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._news.wait(RECHECK_S)
                self._news.clear()
                self._reissue()
                self._serve()
            self._end(Stopped("the ticket service is closed"))
        except Exception as error:  # whatever it is, those in line and later ones are told
            self._end(error)

    def _serve(self) -> None:
        with self._issuer.changed, self._lock:
            without: set[tuple[str, ...] | None] = set()
            for request in list(self._line.values()):
                if request.lessons in without:
                    continue
                known = self._workers[request.worker]
                share = math.ceil(self._issuer.available / len(self._line))
                most = max(1, min(request.most, share))
                holder = holder_of(request.worker, known.incarnation)
                tickets = self._issuer.offer(most, request.lessons, holder)
                if not tickets:
                    without.add(request.lessons)
                    if request.lessons is None:
                        return
                    continue
                del self._line[request.worker]
                known.answered, known.tickets = request.number, tickets
                request.tickets.set_result(list(tickets))

    def _reissue(self) -> None:
        with self._lock:
            dead, self._dead = self._dead, []
        for holder in dead:
            self.reissued += len(self._issuer.reissue(holder))

    def _end(self, failure: Exception) -> None:
        with self._lock:
            self._failure = failure
            line, self._line = self._line, {}
        for request in line.values():
            request.tickets.set_exception(failure)

    def _known(self, worker: str, incarnation: int) -> _Worker:
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = _Worker(incarnation)
        elif incarnation < known.incarnation:
            raise SupersededError(
                f"{holder_of(worker, incarnation)} was replaced: messages are taken from #{known.incarnation} on"
            )
        elif incarnation > known.incarnation:
            self._replace(worker, incarnation)
            self._news.set()
            known = self._workers[worker]
        return known

    def _replace(self, worker: str, incarnation: int) -> None:
        known = self._workers.get(worker)
        if known is not None:
            self._dead += [holder_of(worker, dead) for dead in range(known.incarnation, incarnation)]
        request = self._line.pop(worker, None)
        if request is not None:
            request.tickets.set_result([])
        self._workers[worker] = _Worker(incarnation)


def holder_of(worker: str, incarnation: int) -> str:
    """Names one life of a worker."""
    return f"{worker}#{incarnation}"


@dataclass(frozen=True, slots=True)
class _Held:
    incarnation: int
    step: int
    held_back: bool


class ServingVersions:
    """Tells the issuer of the version that all servers have reached; it never goes back. Thread-safe.

    One that an evaluation holds back does not count while others do: it is given no new groups once those have left its
    version. At staleness zero all count, since nothing is trained there while a version is evaluated. A server that
    joins late with an older version holds nothing up that was admitted already, and does not answer for
    it: requests say which version their ticket was admitted at.

    Args:
        issuer: Stamps tickets with the version.
        needs_clearance: A version serves only when the evaluator has cleared it (staleness zero).
    """

    def __init__(self, issuer: TicketIssuer, needs_clearance: bool) -> None:
        self._issuer = issuer
        self._needs_clearance = needs_clearance
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._dead: dict[str, int] = {}
        self._cleared: int | None = None

    def hold(self, server: str, incarnation: int, lineage: int, step: int, held_back: bool = False) -> bool:
        """A server holds a version now; held back, it is kept there by an evaluation.

        Returns:
            Whether it counts; one of another lineage does not.

        Raises:
            SupersededError: a newer incarnation of the server has spoken.
        """
        with self._lock:
            known = self._held.get(server)
            if incarnation <= self._dead.get(server, -1):  # it would hold the serving version up for ever
                raise SupersededError(f"{server}#{incarnation} is dead")
            if known is not None and incarnation < known.incarnation:
                raise SupersededError(f"{server}#{incarnation} was replaced by #{known.incarnation}")
            if lineage != self._issuer.lineage:
                return False
            self._held[server] = _Held(incarnation, step, held_back)
            self._tell()
            return True

    def forget(self, server: str, incarnation: int) -> None:
        """An incarnation of a server is dead, and those before it."""
        with self._lock:
            self._dead[server] = max(incarnation, self._dead.get(server, -1))
            known = self._held.get(server)
            if known is not None and known.incarnation <= incarnation:
                del self._held[server]
                self._tell()

    def clear(self, lineage: int, step: int) -> bool:
        """Nothing is to be evaluated any more at this version; returns whether it counts."""
        with self._lock:
            if lineage != self._issuer.lineage:
                return False
            self._cleared = step if self._cleared is None else max(step, self._cleared)
            self._tell()
            return True

    def describe(self) -> dict[str, int]:
        """The version that each server holds."""
        with self._lock:
            return {server: held.step for server, held in self._held.items()}

    def _tell(self) -> None:
        if not self._held or (self._needs_clearance and self._cleared is None):
            return
        free = [held for held in self._held.values() if self._needs_clearance or not held.held_back]
        step = min(held.step for held in free or self._held.values())
        if self._needs_clearance and self._cleared is not None:
            step = min(step, self._cleared)
        serving = self._issuer.serving_step
        if serving is None or step > serving:
            self._issuer.set_serving_step(step)

"""Where workers of other processes wait for tickets: one line, served by one thread.

A worker numbers its requests, and has one in line at a time. The last answer is kept until the next request, so that a
request whose answer was lost can be repeated: it gets the same tickets. What an incarnation of a worker holds is handed
out again, as it is, once that one is known to be dead: it was released, or a newer one has spoken.

Nobody in line has a thread: requests are futures. With many in line, each gets its share of what is free. Locks are
taken in one order everywhere: the issuer's condition, then the desk's own.
"""

import math
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.replay.issuer import TicketIssuer
from penstock.types import Stopped, SupersededError, Ticket

_NAP_S = 1.0
"""Longest sleep of the thread between two looks; news wake it at once."""


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


class TicketDesk:
    """Hands tickets out to workers by name and incarnation.

    Args:
        issuer: Admits them.
    """

    def __init__(self, issuer: TicketIssuer) -> None:
        self._issuer = issuer
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._line: dict[str, _Request] = {}
        self._dead: list[str] = []
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
            self._end(Stopped("the ticket desk is closed"))
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
            worker: Who asks.
            incarnation: Which life of it.
            number: Grows from 1; a number that was answered gets the same answer.
            most: Tickets at once.
            lessons: Only of these; None means any.

        Returns:
            Between 1 and `most` tickets, once there are any; none where the request was replaced.

        Raises:
            SupersededError: that incarnation was released, or replaced.
            Stopped: the desk is closed.
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

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._news.wait(_NAP_S)
                self._news.clear()
                self._reissue()
                self._serve()
            self._end(Stopped("the ticket desk is closed"))
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

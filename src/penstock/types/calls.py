"""How one component calls another, wherever that runs, and calls that are repeated while the other side is silent.

`Caller` is one attempt. `RetryingCaller` repeats it within a limit that has a name. `in_background` is for calls that
may hang, and `DaemonThreads` for many of them. `CompiledProgram` is what a component says of its start, whichever part
of it compiles.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.types.errors import NoProgressError, PenstockError, Stopped, UnreachableError

_Found = TypeVar("_Found")


def in_background(function: Callable[[], _Found], name: str = "background") -> Future[_Found]:
    """Runs a function in a daemon thread of its own, so that one that hangs keeps no process from ending.

    Args:
        function: What it raises is raised where the future is read.
        name: Of the thread.
    """
    future: Future[_Found] = Future()
    threading.Thread(target=_settle, args=(future, function), name=name, daemon=True).start()
    return future


def _settle(future: Future[_Found], function: Callable[..., _Found], *args: Any) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:  # handed to whoever reads the future
        future.set_exception(error)


class DaemonThreads:
    """As many daemon threads as there are calls at a time; each stays for a later call, until `close`. Thread-safe.

    Whoever starts a thread waits until it runs, which on a busy interpreter takes longer than a short call does.

    Args:
        name: Of each thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._changing = threading.Lock()  # guards what follows
        self._idle = 0
        self._closed = False

    def submit(self, function: Callable[..., _Found], *args: Any) -> Future[_Found]:
        """Runs a function at once, whatever others do; what it raises is raised where the future is read."""
        future: Future[_Found] = Future()
        with self._changing:
            is_free = self._idle > 0
            self._idle -= is_free
        self._calls.put((future, function, *args))
        if not is_free:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads, those that run a call when that ends. Waits for none."""
        with self._changing:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            _settle(*call)
            del call  # nothing of it is kept while this waits
            with self._changing:
                if self._closed:
                    return
                self._idle += 1


class Caller(Protocol):
    """Calls the methods of one other component. Thread-safe.

    Arguments and results are plain values, records and bytes. A call may have been carried out although it raised
    `UnreachableError`: whoever repeats one relies on the other side to notice.
    """

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method and waits for its result.

        Raises:
            UnreachableError: nobody of that name lives, it died, or it did not answer within the limit.
            SupersededError: the caller itself was replaced: it should end.
            PenstockError: what the method raised, by its own type.
        """
        ...


class CompiledProgram(NamedTuple):
    """One more program is compiled.

    Attributes:
        name: What it is for.
        number: How many are, with it.
        of: How many are to be.
        seconds: That it took.
    """

    name: str
    number: int
    of: int
    seconds: float


_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class RetryingCaller:
    """Repeats calls to one component until they succeed. Thread-safe; the other side must bear repeats.

    Args:
        caller: Makes the calls.
        name: Of the component, for errors.
        limit_s: So long it may be out of reach.
        clock: Monotonic seconds.
    """

    def __init__(
        self, caller: Caller, name: str, limit_s: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._caller = caller
        self._name = name
        self._limit_s = limit_s
        self._clock = clock
        self._stopping = threading.Event()
        self._silent_since: float | None = None
        self.repeats = 0

    def stop(self) -> None:
        """Ends every wait, now and later, with `Stopped`."""
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    @property
    def silent(self) -> bool:
        """Whether the last call was not answered."""
        return self._silent_since is not None

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """`Caller.call`, repeated while nobody answers.

        Raises:
            NoProgressError: nobody has answered for `limit_s`.
            Stopped: `stop` was called.
            SupersededError: the caller itself was replaced.
            PenstockError: what the method raised.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self.attempt(method, *args, timeout_s=timeout_s)
            except UnreachableError:
                self.pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def attempt(self, method: str, *args: Any, timeout_s: float) -> Any:
        """One try.

        Raises:
            UnreachableError: nobody answered; `call` tries again, and so may the caller.
            NoProgressError: nobody has answered any call for `limit_s`.
            Stopped: `stop` was called.
            PenstockError: what the method raised.
        """
        if self._stopping.is_set():
            raise Stopped(f"the connection to {self._name} was closed")
        started = self._clock()
        try:
            answer = self._caller.call(method, *args, timeout_s=timeout_s)
        except UnreachableError as error:
            self._count_silence(started, method, error)
            raise
        except PenstockError:
            self._silent_since = None  # that is an answer, too
            raise
        self._silent_since = None
        return answer

    def pause(self, pause_s: float) -> None:
        """Waits between two tries.

        Raises:
            Stopped: `stop` was called.
        """
        if self._stopping.wait(pause_s):
            raise Stopped(f"the connection to {self._name} was closed")

    def _count_silence(self, started: float, method: str, error: UnreachableError) -> None:
        self.repeats += 1
        since = self._silent_since
        if since is None:
            self._silent_since = since = started
        silent_s = self._clock() - since
        if silent_s >= self._limit_s:
            raise NoProgressError(
                f"{self._name} has not answered for {silent_s:.0f} s (limit {self._limit_s:g} s), last asked for "
                f"{method!r}: {error}"
            ) from error

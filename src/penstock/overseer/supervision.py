"""Watching threads: an exception in any of them ends the run with that error, and silence ends it too.

A thread that hangs cannot be killed. When progress stops for longer than the limit, `Watchdog.check` writes every
thread's stack to a file and raises an error that names who owes the progress. Should the supervising thread itself
hang, on a lock that another one never releases, `abort_when_hung` ends the process: `faulthandler` needs no cooperation
of any Python thread.
"""

import faulthandler
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.rundir.logs import open_unlinked
from penstock.types import NoProgressError


class ThreadGroup:
    """The threads of a run. The first exception of any of them is kept and re-raised by `raise_if_failed`."""

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self.wake = threading.Event()

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Runs `target` in a thread called `name`."""

        def guarded() -> None:
            try:
                target()
            except BaseException as error:  # kept, and raised where the run is supervised
                with self._lock:
                    self._failure = self._failure or error
            finally:
                self.wake.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The first failure, if there was one."""
        with self._lock:
            return self._failure

    def raise_if_failed(self) -> None:
        """Raises the first failure, if there was one."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def alive(self, name: str) -> bool:
        """Whether a thread was started and still runs."""
        return name in self._threads and self._threads[name].is_alive()

    def join(self, timeout_s: float, names: Collection[str] | None = None) -> list[str]:
        """Waits for threads, all by default, within one limit; returns the names of those that still run."""
        deadline = time.monotonic() + timeout_s
        chosen = {name: thread for name, thread in self._threads.items() if names is None or name in names}
        for thread in chosen.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [name for name, thread in chosen.items() if thread.is_alive()]


class Watchdog:
    """Raises when nothing has moved for `limit_s`.

    Args:
        limit_s: Longest silence.
        progress: Component → a counter that grows as it works.
        owes: Says in words who owes the progress.
        stacks_path: Where all threads' stacks are written.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], dict[str, float]],
        owes: Callable[[], str],
        stacks_path: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._progress = progress
        self._owes = owes
        self._stacks_path = stacks_path
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._moved = clock()

    def check(self) -> None:
        """Looks once.

        Raises:
            NoProgressError: nothing moved for longer than the limit.
        """
        now, counters = self._clock(), self._progress()
        if counters != self._seen:
            self._seen, self._moved = counters, now
        elif now - self._moved > self._limit_s:
            with open(self._stacks_path, "a", opener=open_unlinked) as stacks:
                faulthandler.dump_traceback(stacks, all_threads=True)
            raise NoProgressError(
                f"nothing moved for {self._limit_s:g} s (overseer.no_progress_s): {self._owes()}; "
                f"every thread's stack is in {self._stacks_path}"
            )


LAST_RESORT_S = 60.0
"""How much longer than the watchdog the last resort waits."""


@contextmanager
def abort_when_hung(limit_s: float, stacks_path: Path) -> Iterator[Callable[[], None]]:
    """Gives a function to call often; when it is not called for `limit_s`, the process ends with exit code 1."""
    with open(stacks_path, "w", opener=open_unlinked) as stacks:

        def alive() -> None:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)

        alive()
        try:
            yield alive
        finally:
            faulthandler.cancel_dump_traceback_later()
    with suppress(FileNotFoundError):  # somebody deleted the run directory
        if stacks_path.stat().st_size == 0:
            stacks_path.unlink()

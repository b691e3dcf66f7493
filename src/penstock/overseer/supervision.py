"""Watching threads: an exception in any of them ends the run with that error, and silence ends it too.

A thread that hangs cannot be killed. When progress stops for longer than the limit, `Watchdog.check` writes every
thread's stack to a file and raises an error that names who owes the progress. Should the supervising thread itself
hang, on a lock that another one never releases, `abort_when_hung` ends the process: `faulthandler` needs no cooperation
of any Python thread.

`Overseer` has a run in a thread of its own. The main thread only supervises: it raises the first failure of any thread,
runs the watchdog, writes status.json, draws the view, and hears Ctrl-C, SIGTERM and SIGHUP. A stop request ends the run
at the next update boundary with a checkpoint; a second one ends the process. Ctrl-Z stops it like any process,
for as long as one likes.
"""

import faulthandler
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.rundir.logs import open_unlinked
from penstock.rundir.storage import is_full_disk
from penstock.types import NoProgressError, RunFailed
from penstock.types.errors import shortened

if TYPE_CHECKING:
    from penstock.overseer.run import Run
    from penstock.overseer.terminal import TerminalView


class ThreadGroup:
    """The threads of a run. The first exception of any of them is kept and re-raised by `raise_if_failed`.

    Args:
        whole: Of which this is a part: its first failure is that one's, too.
    """

    def __init__(self, whole: "ThreadGroup | None" = None) -> None:
        self._whole = whole
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
                self.fail(error)
            finally:
                self.wake.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Ends all with an error, unless there was one before."""
        with self._lock:
            self._failure = self._failure or error
        if self._whole is not None:
            self._whole.fail(error)
            self._whole.wake.set()

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


UNWATCHED_S = 10.0
"""Between two looks of a watchdog; when it took longer, the process stood still."""


class Watchdog:
    """Raises when nothing has moved for `limit_s`; time in which the whole process was stopped is left out.

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
        self._moved = self._looked = clock()

    def check(self) -> None:
        """Looks once.

        Raises:
            NoProgressError: nothing moved for longer than the limit.
        """
        now, counters = self._clock(), self._progress()
        if now - self._looked > UNWATCHED_S:
            self._moved += now - self._looked
        self._looked = now
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
    """Gives a function to call often; when it is not called for `limit_s`, the process ends with exit code 1.

    Nobody waits while Ctrl-Z has it stopped; of SIGSTOP for longer than that it cannot know.
    """
    with open(stacks_path, "w", opener=open_unlinked) as stacks:
        due = 0.0

        def arm() -> None:
            nonlocal due
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
            due = time.monotonic() + min(1.0, limit_s / 10)

        def alive() -> None:
            if time.monotonic() >= due:  # each time it ends a thread and begins one, while all others wait
                arm()

        def stop(number: int, frame: object) -> None:
            faulthandler.cancel_dump_traceback_later()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # SIGCONT goes on here
            signal.signal(number, stop)
            arm()

        main = threading.current_thread() is threading.main_thread()
        heard = main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        arm()
        if heard:
            signal.signal(signal.SIGTSTP, stop)
        try:
            yield alive
        finally:
            if heard:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            faulthandler.cancel_dump_traceback_later()
    with suppress(FileNotFoundError):  # somebody deleted the run directory
        if stacks_path.stat().st_size == 0:
            stacks_path.unlink()


OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""At least, unless somebody wants none at all (0)."""


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Leaves out of every garbage collection what is there already: modules, mostly, a tenth of a second each time.

    Python's own limit, 700 more objects, is reached several times by an update of 128 short answers.
    """
    limit, *older = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(limit and max(limit, OBJECTS_BETWEEN_COLLECTIONS), *older)
    try:
        yield
    finally:
        gc.set_threshold(limit, *older)
        gc.unfreeze()


SUPERVISION_S = 0.2
MOST_CHARS_OF_FAILURE = 1_000
"""In status.json, which has only the room that is kept for it where the disk is full."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Overseer:
    """Supervises one run in one process.

    Args:
        run: What it watches.
        crew: Its threads.
        view: What the user sees.
    """

    def __init__(self, run: "Run", crew: ThreadGroup, view: "TerminalView") -> None:
        self._run = run
        self._crew = crew
        self._view = view
        self._log, self._config = run.log, run.config.overseer
        self._directory = run.tasks.settings.directory

    def run(self) -> None:
        """Runs to the last step, to a stop request, or to the first failure.

        Raises:
            PenstockError: the run failed; whatever any thread raised, unchanged.
        """
        self._log.event("start", pid=os.getpid(), lineage=self._run.lineage)
        with _seldom_collected():
            self._run_watched()

    def _run_watched(self) -> None:
        stacks_path = self._directory.path / "stacks.txt"
        limit_s = self._config.no_progress_s + self._config.stop_timeout_s + LAST_RESORT_S
        with self._interrupts():
            with abort_when_hung(limit_s, stacks_path) as alive:
                try:
                    with self._view:
                        self._crew.start("run", self._run.run)
                        self._supervise(stacks_path, alive)
                except BaseException as error:
                    self._fail(error)
                    if isinstance(error, Exception):
                        self._directory.check_is_there()  # otherwise that is what failed
                    raise
            left = self._crew.join(self._run.stop_limit_s)
            self._log.event("end", still_running=left)
            self._write_status("finished" if self._run.complete else "stopped")

    def _fail(self, error: BaseException) -> None:
        """Lets the threads that still work save the last update boundary before the run's files are closed."""
        self._run.stop()
        if isinstance(error, KeyboardInterrupt):  # a second stop request waits for nobody
            self._log.event("interrupted")
            self._write_status("stopped")
            return
        self._log.event("failure", error=type(error).__name__, message=str(error))
        try:
            self._crew.join(self._run.stop_limit_s)
        finally:
            with suppress(RunFailed):  # the directory is gone, which is told by whoever failed
                self._write_status("failed", failure=shortened(str(error), MOST_CHARS_OF_FAILURE))

    def _supervise(self, stacks_path: Path, alive: Callable[[], None]) -> None:
        watchdog = Watchdog(self._config.no_progress_s, self._run.counters, self._run.stalled_components, stacks_path)
        status_due = 0.0
        while self._crew.alive("run"):
            self._crew.wake.wait(SUPERVISION_S)
            self._crew.wake.clear()
            self._crew.raise_if_failed()
            watchdog.check()
            alive()
            self._run.refresh()
            self._view.tick()
            if time.monotonic() >= status_due:
                self._write_status("running")
                status_due = time.monotonic() + self._config.status_s
        self._crew.raise_if_failed()
        self._view.tick()

    def _write_status(self, state: str, **more: str) -> None:
        """One may be left out where the disk is full, and has been since before room could be kept: others follow."""
        self._directory.check_is_there()
        told = {"state": state, "time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        status = told | more | self._run.status()
        self._log.status(status)
        try:
            self._directory.write_status(status)
        except OSError as error:
            if not is_full_disk(error):
                raise
            self._log.progress.note(f"status.json could not be written: {error}")

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set[int]()  # as by nohup
        heard = [number for number in STOP_SIGNALS if number not in ignored]
        previous = {number: signal.signal(number, self._interrupted) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupted(self, number: int, frame: object) -> None:
        if self._run.stopping:
            if number == signal.SIGHUP:  # a terminal that closes sends it, and its shell once more
                return
            raise KeyboardInterrupt
        self._log.progress.note("stopping at the next update with a checkpoint; once more ends at once")
        self._run.stop()

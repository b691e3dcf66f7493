"""The overseer of a run: watches its threads, draws the view, hears Ctrl-C, SIGTERM and SIGHUP, ends the run.

The main thread only supervises: it raises the first failure of any thread, runs the watchdog, writes status.json
and draws the view. The run itself is the `Conductor`'s, in a thread of its own. A stop request ends the run at the
next update boundary with a checkpoint; a second one ends the process.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from penstock.overseer.config import OverseerConfig
from penstock.overseer.results import Results
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import LAST_RESORT_S, ThreadGroup, Watchdog, abort_when_hung
from penstock.overseer.terminal import TerminalView
from penstock.rundir import RunDirectory
from penstock.rundir.storage import is_full_disk
from penstock.types import RunFailed

SUPERVISION_S = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OverseenRun(Protocol):
    """Takes one run through its phases: `Conductor` in one process, `DistributedConductor` in many."""

    results: dict[str, Results]
    training_s: float

    def run(self) -> None:
        """Returns at the last step or after `stop`; what it raises ends the run."""
        ...

    def stop(self) -> None:
        """Asks the run to end at the next update boundary, with a checkpoint."""
        ...

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        ...

    @property
    def lineage(self) -> int:
        """Which life of the run this is."""
        ...

    @property
    def step(self) -> int:
        """The learner's version."""
        ...

    @property
    def lessons(self) -> dict[str, str]:
        """Each lesson's status in words."""
        ...

    @property
    def failed_groups(self) -> int:
        """Groups whose environment or reward function failed in this life of the run."""
        ...

    @property
    def last_failure(self) -> str:
        """What the last of them said."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the run reached its goal."""
        ...

    def refresh(self) -> None:
        """Brings the view up to date."""
        ...

    def counters(self) -> dict[str, float]:
        """What grows while the run makes progress."""
        ...

    def stalled_components(self) -> str:
        """In words, for the error that ends a silent run."""
        ...

    def status(self) -> dict[str, Any]:
        """For status.json."""
        ...


class Overseer:
    """Supervises one run in one process.

    Args:
        conductor: The run.
        crew: Its threads.
        directory: Where it is written.
        log: Its single writer.
        view: What the user sees.
        config: Limits and intervals.
    """

    def __init__(
        self,
        conductor: OverseenRun,
        crew: ThreadGroup,
        directory: RunDirectory,
        log: RunLog,
        view: TerminalView,
        config: OverseerConfig,
    ) -> None:
        self._conductor = conductor
        self._crew = crew
        self._directory = directory
        self._log = log
        self._view = view
        self._config = config

    def run(self) -> None:
        """Runs to the last step, to a stop request, or to the first failure.

        Raises:
            PenstockError: the run failed; whatever any thread raised, unchanged.
        """
        self._log.event("start", pid=os.getpid(), lineage=self._conductor.lineage)
        stacks_path = self._directory.path / "stacks.txt"
        limit_s = self._config.no_progress_s + self._config.stop_timeout_s + LAST_RESORT_S
        with self._interrupts():
            with abort_when_hung(limit_s, stacks_path) as alive:
                try:
                    with self._view:
                        self._crew.start("conductor", self._conductor.run)
                        self._supervise(stacks_path, alive)
                except BaseException as error:
                    self._fail(error)
                    if isinstance(error, Exception):
                        self._directory.check_is_there()  # otherwise that is what failed
                    raise
            left = self._crew.join(self._conductor.stop_limit_s)
            self._log.event("end", still_running=left)
            self._write_status("finished" if self._conductor.complete else "stopped")

    def _fail(self, error: BaseException) -> None:
        """Lets the threads that still work save the last update boundary before the run's files are closed."""
        self._conductor.stop()
        if isinstance(error, KeyboardInterrupt):  # a second stop request waits for nobody
            self._log.event("interrupted")
            self._write_status("stopped")
            return
        self._log.event("failure", error=type(error).__name__, message=str(error))
        try:
            self._crew.join(self._conductor.stop_limit_s)
        finally:
            with suppress(RunFailed):  # the directory is gone, which is told by whoever failed
                self._write_status("failed")

    def _supervise(self, stacks_path: Path, alive: Callable[[], None]) -> None:
        watchdog = Watchdog(
            self._config.no_progress_s, self._conductor.counters, self._conductor.stalled_components, stacks_path
        )
        status_due = 0.0
        while self._crew.alive("conductor"):
            self._crew.wake.wait(SUPERVISION_S)
            self._crew.wake.clear()
            self._crew.raise_if_failed()
            watchdog.check()
            alive()
            self._conductor.refresh()
            self._view.tick()
            if time.monotonic() >= status_due:
                self._write_status("running")
                status_due = time.monotonic() + self._config.status_s
        self._crew.raise_if_failed()
        self._view.tick()

    def _write_status(self, state: str) -> None:
        """One may be left out where the disk is full, and has been since before room could be kept: others follow."""
        self._directory.check_is_there()
        told = {"state": state, "time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        try:
            self._directory.write_status(told | self._conductor.status())
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
        if self._conductor.stopping:
            if number == signal.SIGHUP:  # a terminal that closes sends it, and its shell once more
                return
            raise KeyboardInterrupt
        self._log.progress.note("stopping at the next update with a checkpoint; once more ends at once")
        self._conductor.stop()

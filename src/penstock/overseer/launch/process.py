"""Ending a process for certain, stopped or hung as it may be; and starting one that ends with this.

A process is known by its number *and* the time it began, so that one which got the number of a dead one is left alone.
That time is read from ``/proc``, and waiting needs no parent where the system has pidfds: Linux. Elsewhere the number
must do, and a process counts as gone when nobody has its number any more.
"""

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class Process:
    """A process on one machine.

    Attributes:
        pid: Its number.
        began: Ticks after the machine's start at which it began; None where the system does not say.
    """

    pid: int
    began: int | None

    @classmethod
    def this(cls) -> "Process":
        """The one that asks."""
        return cls(os.getpid(), _began(os.getpid()))

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped; not when it only waits to be collected by its parent."""
        if self.began is not None:
            return _began(self.pid) == self.began
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def end(self, timeout_s: float) -> bool:
        """Sends SIGKILL and waits until it is gone.

        Returns:
            Whether it is.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self.began is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                self._end_by_descriptor(timeout_s)
        except ProcessLookupError:
            return True
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.alive

    def _end_by_descriptor(self, timeout_s: float) -> None:
        descriptor = os.pidfd_open(self.pid)
        try:
            if self.alive:  # the descriptor is of this very process, whatever becomes of the number
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)


def end_with_parent() -> None:
    """Has the system kill this process when its parent dies, even while it is stopped; nothing where it cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _began(pid: int) -> int | None:
    """Field 22 of ``/proc/<pid>/stat``; None for a process that is gone, or dead and not collected."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = content.rpartition(")")[2].split()  # its name, in brackets, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


_GUARD = """
import os, signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True)
def end(*_):
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
signal.signal(signal.SIGTERM, end)
import threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), end()), daemon=True).start()
status = child.wait()
end()
os._exit(status if status >= 0 else 1)
"""
"""Starts a command in a session of its own, and ends that whole session when its input closes: the system does that,
too, when the process that holds the other end dies."""

LAST_LINES = 5
LAST_ERRORS = 3
LONGEST_LINE = 400
_ERROR = re.compile(r"^(?:.*\] )?([A-Za-z_][\w.]*(?:Error|Exception): .*)(?:\n(?! +File )( +\S.*))?", re.MULTILINE)
"""A line that says what was raised, whatever a logger wrote before it; and the next one where that is indented, such as
pydantic's, whose first line only counts what is wrong."""


class GuardedProcess:
    """A command that runs until it is ended, or this process is, however that dies.

    Args:
        words: The command, word by word.
        environment: What it has beside this process's own.
        log: File that what it prints is added to.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        variables = {**os.environ, **environment}
        if shutil.which(words[0], path=variables.get("PATH")) is None:  # the guard would say so in its log alone
            raise FileNotFoundError(f"there is no program {words[0]!r}")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as said:
            self._begins = said.tell()  # behind what others said before
            self._child = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *words],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env=variables,
                start_new_session=True,  # Ctrl-C is this process's to handle
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child.poll() is None

    def last_words(self) -> str:
        """What it raised last, in one line, or else the last lines that it printed.

        A server of several processes ends with an error that says no more than that another has failed before.
        """
        try:
            printed = self._log.read_bytes()[self._begins :].decode(errors="replace")
        except OSError:
            printed = ""
        raised = [" ".join(part.strip() for part in match.groups("")).rstrip() for match in _ERROR.finditer(printed)]
        told = [*dict.fromkeys(raised)][-LAST_ERRORS:] or [line.strip() for line in printed.splitlines()[-LAST_LINES:]]
        said = " | ".join(line[:LONGEST_LINE] for line in told)
        return said or f"nothing (its exit status is {self._child.poll()})"

    def end(self, timeout_s: float) -> bool:
        """Ends it and all that it started, at once; whether they are gone within so many seconds."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

"""Ending a process for certain, stopped or hung as it may be.

A process is known by its number *and* the time it began, so that one which got the number of a dead one is left alone.
That time is read from ``/proc``, and waiting needs no parent where the system has pidfds: Linux. Elsewhere the number
must do, and a process counts as gone when nobody has its number any more.
"""

import ctypes
import os
import select
import signal
import sys
import time
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

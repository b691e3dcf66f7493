"""Processes below this one, and ties between a process and its parent, so that nothing outlives what started it.

Engines that simulators start and programs that reward functions start may begin sessions of their own; they are found
by their parents. Those whose parent died are found by a *subreaper* above them (`adopt_orphans`). Linux only.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_STOP_LIMIT_S = 1.0
# One that waits in the kernel, as a parent for the vfork whose child was stopped first, stops before it runs on.
_RUNS_NO_MORE = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)
_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent thread ends; ends it now where the parent is gone already.

    Args:
        parent: The parent's process id, read before the fork.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent died."""
    _prctl(_SET_SUBREAPER, 1)


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, their children, and so on; none where it is gone."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def command_line(pid: int) -> list[str]:
    """Words of a process's command line; none where it is gone."""
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def kill_trees(roots: Iterable[psutil.Process]) -> int:
    """Sends SIGKILL to those that still run, and to all below them; returns how many that were.

    Each is stopped before its children are looked for, so that none is born meanwhile and escapes.
    """
    found, waiting = dict[psutil.Process, None](), list(roots)
    while waiting:
        process = waiting.pop()
        if process not in found and _stop(process):
            found[process] = None
            with suppress(psutil.NoSuchProcess):
                waiting += process.children()
    return sum(_kill(process) for process in found)


def _stop(process: psutil.Process) -> bool:
    """Whether it was still there to be stopped."""
    with suppress(psutil.NoSuchProcess):
        if not _ended(process):
            process.suspend()
            end_s = time.monotonic() + _STOP_LIMIT_S
            while process.status() not in _RUNS_NO_MORE and not _ended(process) and time.monotonic() < end_s:
                time.sleep(0.001)
            return True
    return False


def _kill(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        if not _ended(process):
            process.kill()
            return True
    return False


def _ended(process: psutil.Process) -> bool:
    return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")

"""Processes below this one, from ``/proc``: engines that simulators start, some of them in sessions of their own.

A process is told from a later one of the same number by its start time. Where there is no ``/proc`` nothing is found.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ENDED = ("", "Z", "X")
_STOP_LIMIT_S = 1.0  # a process in the kernel's hands stops later; its children are then looked for too early


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process for good.

    Attributes:
        pid: Its number.
        started_ticks: When it started, in clock ticks since boot.
    """

    pid: int
    started_ticks: int


def descendants(pid: int) -> list[ProcessMark]:
    """Children of a process, their children, and so on; parents first."""
    children: dict[int, list[ProcessMark]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(ProcessMark(int(folder.name), int(fields[19])))
    found, waiting = list[ProcessMark](), [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [mark.pid for mark in below]
    return found


def command_line(pid: int) -> list[str]:
    """Words of a process's command line; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:
        return []


def kill_trees(marks: Iterable[ProcessMark]) -> int:
    """Sends SIGKILL to those that still run, and to all below them; returns how many that were.

    Each is stopped before its children are looked for, so that none is born meanwhile and escapes.
    """
    found, waiting = dict[ProcessMark, None](), list(marks)
    while waiting:
        mark = waiting.pop()
        if mark not in found and _signal(mark, signal.SIGSTOP):
            _wait_for_stop(mark)
            found[mark] = None
            waiting += descendants(mark.pid)
    return sum(_signal(mark, signal.SIGKILL) for mark in found)


def _signal(mark: ProcessMark, number: signal.Signals) -> bool:
    """Whether it was still there to get the signal."""
    if _state(mark) in _ENDED:
        return False
    try:
        os.kill(mark.pid, number)
    except ProcessLookupError:  # ended meanwhile
        return False
    return True


def _wait_for_stop(mark: ProcessMark) -> None:
    end_s = time.monotonic() + _STOP_LIMIT_S
    while _state(mark) not in ("T", "t", *_ENDED) and time.monotonic() < end_s:
        time.sleep(0.001)


def _state(mark: ProcessMark) -> str:
    """Its state as ``/proc`` has it; empty where it is gone."""
    fields = _stat(mark.pid)
    return fields[0] if fields is not None and int(fields[19]) == mark.started_ticks else ""


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the state on; the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None

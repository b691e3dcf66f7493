"""Finding what a process started, from /proc, so that nothing outlives it.

A simulator's own children usually share its process group and die with it. Those that left the group (a game engine
started in a session of its own) are found because the fork server is their *subreaper*: when their parent dies they
become its children. An environment variable, which programs inherit, tells whose they are.

Linux only. Not covered: a descendant that left its group and changed its own environment before it was executed.
"""

import os
import signal
from collections import defaultdict
from contextlib import suppress

OWNER_VARIABLE = "PENSTOCK_SIMULATOR"
"""Names the simulator process that a program was started by."""


def children_by_parent() -> dict[int, list[int]]:
    """Process ids of all living processes, by their parents'."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _living_parent(name)) is not None:
            children[parent].append(int(name))
    return children


def subtree(root: int, children: dict[int, list[int]]) -> list[int]:
    """A process and everything below it."""
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def owner_of(pid: int) -> str | None:
    """What `OWNER_VARIABLE` said when the program of `pid` was started; None where it is not set or unreadable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return None
    prefix = f"{OWNER_VARIABLE}=".encode()
    values = [entry[len(prefix) :].decode() for entry in environment.split(b"\0") if entry.startswith(prefix)]
    return values[0] if values else None


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """SIGKILL to a whole process group; one that is gone is fine."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_descendants_of_fork_server(fork_server: int) -> None:
    """SIGKILL to every program that simulator processes of a fork server that died started and left behind.

    It looks until it finds no more: what was being started at the first look shows no owner until it runs.
    """
    killed: set[int] = set()
    while found := _descendants_of_fork_server(fork_server) - killed:
        for pid in found:
            kill(pid)
        killed |= found


def _descendants_of_fork_server(fork_server: int) -> set[int]:
    pids = [pid for siblings in children_by_parent().values() for pid in siblings]
    return {pid for pid in pids if (owner_of(pid) or "").startswith(f"{fork_server}.")}


def _living_parent(pid: str) -> int | None:
    """Parent of a process; None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(parent)

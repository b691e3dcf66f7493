"""Whose a program is that a simulator process started, so that nothing outlives that.

A simulator's own children usually share its process group and die with it. Those that left the group (a game engine
started in a session of its own) are found because the fork server is their *subreaper*: when their parent dies they
become its children. An environment variable, which programs inherit, tells whose they are.

Linux only. Not covered: a descendant that left its group and changed its own environment before it was executed.
"""

import os
import signal
from contextlib import suppress

import psutil

OWNER_VARIABLE = "PENSTOCK_SIMULATOR"
"""Names the simulator process that a program was started by."""


def owner_of(process: psutil.Process) -> str | None:
    """What `OWNER_VARIABLE` said when its program was started; None where it is not set or unreadable."""
    with suppress(psutil.Error, OSError):
        return process.environ().get(OWNER_VARIABLE)
    return None


def kill_group(leader: int) -> None:
    """SIGKILL to a whole process group; one that is gone is fine."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_descendants_of_fork_server(fork_server: int) -> None:
    """SIGKILL to every program that simulator processes of a fork server that died started and left behind.

    It looks until it finds no more: what was being started at the first look shows no owner until it runs.
    """
    killed: set[psutil.Process] = set()
    while found := _descendants_of_fork_server(fork_server) - killed:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed |= found


def _descendants_of_fork_server(fork_server: int) -> set[psutil.Process]:
    return {each for each in psutil.process_iter() if (owner_of(each) or "").startswith(f"{fork_server}.")}

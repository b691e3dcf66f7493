"""Processes below this one are found across sessions, and only those that are meant are killed."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until

from penstock.environments.simulators.processes import command_line, descendants, kill_trees


@pytest.fixture
def family():
    """A shell in a session of its own, with a child that has a session of its own, too."""
    shell = subprocess.Popen(["sh", "-c", "setsid sleep 61 & sleep 61"], start_new_session=True)
    wait_until(lambda: len(descendants(shell.pid)) == 2)
    wait_until(lambda: all(command_line(mark.pid)[:2] == ["sleep", "61"] for mark in descendants(shell.pid)))
    yield shell
    kill_trees([mark for mark in descendants(os.getpid()) if mark.pid == shell.pid])
    shell.wait(10)


def test_all_descendants_are_found_and_killed(family):
    below = descendants(os.getpid())
    assert family.pid in {mark.pid for mark in below}
    shell, children = [mark for mark in below if mark.pid == family.pid], descendants(family.pid)
    assert kill_trees(shell) == 3
    assert family.wait(10) == -9
    wait_until(lambda: kill_trees([*shell, *children]) == 0)


def test_no_child_escapes_that_is_born_meanwhile():
    births = "for i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do sleep 61.25 & done; wait"
    for _ in range(4):
        shell = subprocess.Popen(["sh", "-c", births], start_new_session=True)
        kill_trees([mark for mark in descendants(os.getpid()) if mark.pid == shell.pid])
        assert shell.wait(10) == -9

    def left():
        return [folder for folder in Path("/proc").glob("[0-9]*") if command_line(int(folder.name))[1:2] == ["61.25"]]

    wait_until(lambda: left() == [])


def test_a_later_process_of_the_same_number_is_left_alone(family):
    other = psutil.Process(family.pid)
    other._ident = (family.pid, 12345)  # as if another process had had that number before
    assert kill_trees([other]) == 0
    assert family.poll() is None


def test_a_process_that_is_gone_has_no_command_line():
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    assert command_line(gone.pid) == [] and descendants(gone.pid) == []

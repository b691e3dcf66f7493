"""What processes started is known by its environment, and ended."""

import os
import subprocess
import sys

import psutil
from tests.fleet.driving import await_gone, lives
from tests.waiting import wait_until

from penstock.fleet.process_tree import OWNER_VARIABLE, end_descendants_of_fork_server, owner_of


def test_programs_are_found_by_their_owner_and_ended():
    environment = {**os.environ, OWNER_VARIABLE: "999999999.5"}
    sleeper = "import time; time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', '{sleeper}'])"
    code = f"import subprocess, sys, time; print({start}.pid, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", sleeper])
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        grandchild = int(child.stdout.readline())
        wait_until(lambda: owner_of(psutil.Process(grandchild)) == "999999999.5")  # not before its program runs
        assert owner_of(psutil.Process(child.pid)) == "999999999.5"
        assert owner_of(psutil.Process(other.pid)) is None
        end_descendants_of_fork_server(99999999)  # a number that begins like it is another
        assert lives(child.pid)
        end_descendants_of_fork_server(999999999)
        await_gone([child.pid, grandchild])
        assert lives(other.pid)
    other.kill()
    other.wait(5)
    child.wait(5)

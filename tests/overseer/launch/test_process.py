"""Ending processes for certain: running, stopped, gone, and another one under the same number."""

import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.overseer.launch import process as processes
from penstock.overseer.launch.process import GuardedProcess, Process
from tests.waiting import wait_until

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


@pytest.fixture
def sleeper():
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        yield child
        child.kill()


def process_of(child: subprocess.Popen[bytes]) -> Process:
    return Process(child.pid, processes._began(child.pid))


def test_this_process_is_alive():
    assert Process.this().pid == os.getpid()
    assert Process.this().alive


def test_a_process_is_ended(sleeper):
    process = process_of(sleeper)
    assert process.alive
    assert process.end(10)
    assert not process.alive, "though nobody has collected it"
    assert sleeper.wait(10) == -signal.SIGKILL


@pytest.mark.attack
def test_a_stopped_process_is_ended(sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    assert process_of(sleeper).end(10)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_one_that_is_gone_needs_no_end(sleeper):
    process = process_of(sleeper)
    sleeper.kill()
    sleeper.wait(10)
    assert not process.alive
    assert process.end(0)


@pytest.mark.attack
def test_another_process_under_the_same_number_is_left_alone(sleeper):
    if processes._began(os.getpid()) is None:
        pytest.skip("this system does not say when a process began")
    former = Process(sleeper.pid, processes._began(sleeper.pid) - 1)
    assert not former.alive
    assert former.end(1)
    assert sleeper.poll() is None


def test_where_the_system_does_not_say_when_a_process_began(sleeper):
    process = Process(sleeper.pid, None)
    assert process.alive
    assert not process.end(0.05), "its number is taken until its parent has collected it"
    assert sleeper.wait(10) == -signal.SIGKILL
    assert process.end(1)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import time
from penstock.overseer.launch.process import Process, end_with_parent
end_with_parent()
print(Process.this().pid, Process.this().began, flush=True)
time.sleep(60)
'''])
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_stopped_child_ends_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, began = map(int, parent.stdout.readline().split())
        child = Process(pid, began)
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        deadline = time.monotonic() + 10
        while child.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not child.alive


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "(Worker) ERROR [a.py:1]     raise ValueError(\n(Worker) ERROR [a.py:1] ValueError: no room for the cache\n"
            "(Worker) ERROR [a.py:9] ValueError: no room for the cache\nTraceback:\n  raise RuntimeError(\n"
            "RuntimeError: see above\nbye",
            "ValueError: no room for the cache | RuntimeError: see above",
        ),
        (
            "a.b.ValidationError: 1 validation error for ModelConfig\n  Value error, no sleep here [type=value_error]\n"
            "    For further information\nOSError: first\n  File a.py, line 3\n",
            "a.b.ValidationError: 1 validation error for ModelConfig Value error, no sleep here [type=value_error] | "
            "OSError: first",
        ),
        ("one\ntwo\nerror: unrecognized arguments: --flag", "one | two | error: unrecognized arguments: --flag"),
        ("WARNING: such as `OSError: [Errno 24]`", "WARNING: such as `OSError: [Errno 24]`"),
        ("", "nothing (its exit status is 3)"),
    ],
)
def test_a_command_that_ended_is_quoted_with_what_it_raised(tmp_path, printed, said):
    log = tmp_path / "server.out"
    log.write_text("OSError: of the one before\n")
    process = GuardedProcess(["sh", "-c", 'printf %s "$0"; exit 3', printed], {}, log)
    wait_until(lambda: not process.alive, "it ended")
    assert process.last_words() == said
    assert process.end(10)

"""Ending processes for certain: running, stopped, gone, and another one under the same number."""

import os
import platform
import resource
import signal
import subprocess
import sys
import time

import pytest

from penstock.overseer.launch import process as processes
from penstock.overseer.launch.process import Process

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


AGAIN = """
import ctypes, resource, sys
from penstock.overseer.launch.process import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "kept" else None)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.memset.argtypes, libc.free.argtypes = (
    ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), (ctypes.c_void_p,)
)
def take(size):
    at = libc.malloc(size)
    libc.memset(at, 1, size)
    libc.free(at)
take(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    take(2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_taking_again(way: str, **environment: str) -> list[str]:
    """What `AGAIN` prints: whether memory is kept, and pages faulted in by taking 64 MiB four times more."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", AGAIN, way]
    return subprocess.run(
        command, env=inherited | environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    ).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_that_is_kept_is_not_paged_in_again_and_the_environment_has_the_last_word():
    pages = 4 * 2**26 // resource.getpagesize()
    kept, faults = faults_of_taking_again("kept")
    assert kept == "True" and int(faults) < pages / 100
    assert int(faults_of_taking_again("not kept")[1]) > pages / 2
    kept, faults = faults_of_taking_again("kept", MALLOC_MMAP_THRESHOLD_="65536")
    assert kept == "False" and int(faults) > pages / 2

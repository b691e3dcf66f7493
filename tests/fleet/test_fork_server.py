"""The fork server as its parent sees it, and what its forks start with."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fleet.driving import QUICK, await_gone, config_of, driven, lives

from penstock.fleet import fork_client
from penstock.fleet.fork_client import ForkServerClient
from penstock.fleet.messages import READY, EnvWorkerSpec, packet_socketpair
from penstock.types import ConfigError, RunFailed

ROOT = Path(__file__).parents[2]
"""Of the repository, where `tests` are."""


def _spec(**kwargs):
    return EnvWorkerSpec("w0", 1, 0, 0, (0,), "t", "tests.fleet.toys:Counter", kwargs)


@pytest.fixture
def fork_server():
    link = ForkServerClient(["tests.fleet.toys:Counter", "no.such.module:Thing", "CartPole-v1"])
    yield link
    link.close()


def _answers(link, wanted, timeout_s=10.0):
    """Answers until one has the key `wanted`."""
    heard = []
    deadline_s = time.monotonic() + timeout_s
    while not any(wanted in answer.values for answer in heard):
        assert time.monotonic() < deadline_s, heard
        select.select([link], [], [], 0.2)
        heard += link.receive() or []
    return heard


def _spawned(link, ticket=7):
    mine, other = packet_socketpair()
    with other:
        assert link.spawn(ticket, _spec(), other)
    answer = next(answer for answer in _answers(link, "spawned") if "spawned" in answer.values)
    return mine, answer.values["pid"], answer.pidfd


def test_it_loads_modules_and_reports_those_that_it_cannot(fork_server):
    (answer,) = [one for one in _answers(fork_server, "preloaded") if "preloaded" in one.values]
    (name, trouble) = next(iter(answer.values["troubles"].items()))
    assert (name, len(answer.values["troubles"])) == ("no.such.module:Thing", 1)
    assert trouble.startswith("simulator 'no.such.module.Thing': no module named 'no': it must be installed, on PYTHON")


WORLDS = """
import os, sys, threading, time
from {package}tests_of_worlds import Counter

{trouble}
with open({log!r}, "a") as log:
    print(os.getpid(), file=log)

class World(Counter):
    pass
"""


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    """Writes a user's modules, one of which logs who imports it, and gives the working directory and that log."""

    def write(trouble=""):
        (tmp_path / "mypkg").mkdir()
        (tmp_path / "mypkg" / "__init__.py").touch()
        for folder, package in ((tmp_path, ""), (tmp_path / "mypkg", "mypkg.")):
            (folder / "worlds.py").write_text(
                WORLDS.format(package=package, trouble=trouble, log=str(tmp_path / "log"))
            )
            (folder / "tests_of_worlds.py").write_text("from tests.fleet.toys import Counter\n")
        return tmp_path / "log"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(ROOT)])  # of a console script: not the working one
    return write


def _imports(log):
    return log.read_text().split() if log.exists() else []


@pytest.mark.attack
@pytest.mark.parametrize("form", ["mypkg.worlds:World", "worlds.py:World", "{here}/worlds.py:World"])
def test_a_module_of_the_working_directory_is_imported_once_whatever_dies(form, worlds, tmp_path, capfd):
    log, events = worlds("print('Hello from an engine', flush=True)"), []
    config = config_of(4, 2, id=form.format(here=tmp_path))
    with driven(config, events=events) as driver:
        driver.steps(2)
        for process in (0, 3):
            os.kill(driver.pool.process_ids()[process], signal.SIGKILL)
            driver.run_until(lambda slot=2 * process: driver.faults(slot))
        driver.steps(2)
        assert driver.pool.counts()["restarts"] == 2
    assert len(_imports(log)) == 1 and capfd.readouterr() == ("", "")
    assert [fields["troubles"] for name, fields in events if name == "nursery_ready"] == [{}]


@pytest.mark.attack
def test_a_module_that_starts_threads_is_left_to_each_process(worlds):
    log, events = worlds("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"), []
    with driven(config_of(2, 1, id="worlds.py:World"), events=events) as driver:
        driver.steps(2)
        importers = _imports(log)
        assert len(importers) == 3 and {str(pid) for pid in driver.pool.process_ids()} == set(importers[1:])
    (troubles,) = [fields["troubles"] for name, fields in events if name == "nursery_ready"]
    assert troubles == {"worlds.py:World": "importing it starts 1 thread, which forks lack"}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("os._exit(3) if FIRST else None", "it ended"),
        pytest.param(
            "time.sleep(600) if FIRST else None",
            "it took longer than fleet.limits.spawn_timeout_s = 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_module_that_ends_its_fork_server_is_left_to_each_process(trouble, reason, worlds, tmp_path):
    mark = str(tmp_path / "mark")
    first = f"FIRST = not os.path.exists({mark!r})\nopen({mark!r}, 'w').close()\n"
    worlds(first + trouble)
    events, limits = [], QUICK.model_copy(update={"spawn_timeout_s": 2.0})
    with driven(config_of(1, 1, id="worlds.py:World", limits=limits), events=events) as driver:
        driver.steps(2)
    told = f"{reason}, while it imported simulator 'worlds.py:World'"
    assert [fields["reason"] for name, fields in events if name == "nursery_ended"] == [told]
    assert [fields["troubles"] for name, fields in events if name == "nursery_ready"] == [{"worlds.py:World": told}]


def test_a_module_that_cannot_be_imported_is_refused_at_once_and_in_full(worlds):
    worlds("raise RuntimeError('no licence')")
    with pytest.raises(ConfigError, match="importing worlds.py raised RuntimeError: no licence"):
        with driven(config_of(1, 1, id="worlds.py:World")):
            pass


def test_a_fork_comes_with_a_pidfd_and_its_end_with_its_status(fork_server):
    channel, pid, pidfd = _spawned(fork_server)
    with channel:
        channel.settimeout(10.0)
        assert channel.recv(1) == READY
        assert os.getsid(pid) == pid and not select.select([pidfd], [], [], 0)[0]
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        assert select.select([pidfd], [], [], 5.0)[0]
        os.close(pidfd)
        (answer,) = [one for one in _answers(fork_server, "exited") if "exited" in one.values]
        assert answer.values == {"exited": 7, "status": signal.SIGTERM, "output_tail": ""}


@pytest.mark.attack
def test_closing_it_ends_all_that_it_started():
    link = ForkServerClient([])
    channel, pid, pidfd = _spawned(link)
    os.close(pidfd)
    with channel:
        fork_server = link.pid
        link.close()
        assert not lives(pid) and not lives(fork_server)


@pytest.mark.attack
def test_a_killed_fork_server_takes_its_forks_along_and_says_so():
    link = ForkServerClient([])
    channel, pid, pidfd = _spawned(link)
    os.close(pidfd)
    with channel:
        channel.settimeout(10.0)
        assert channel.recv(1) == READY  # far beyond its start
        os.kill(link.pid, signal.SIGKILL)
        await_gone([pid])
        select.select([link], [], [], 5.0)
        assert link.receive() is None
        mine, other = packet_socketpair()
        with mine, other:
            assert not link.spawn(8, _spec(), other)
        link.close()


@pytest.mark.attack
@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_fork_server_that_does_not_end_is_told_within_the_limit(end, monkeypatch):
    link = ForkServerClient([], end_s=0.1)
    os.kill(link.pid, signal.SIGSTOP)  # with a SIGKILL that does nothing, as good as uninterruptible sleep
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        began_s = time.monotonic()
        assert getattr(link, end)() is False
        assert time.monotonic() - began_s < 5.0
    left = fork_client._LEFT_BEHIND[-1]
    os.kill(link.pid, signal.SIGKILL)
    await_gone([link.pid])
    ForkServerClient([]).close()
    assert left.returncode == -signal.SIGKILL and left not in fork_client._LEFT_BEHIND, "the next one reaps it"


@pytest.mark.attack
def test_arguments_that_are_too_long_are_refused_with_a_remedy(fork_server):
    mine, other = packet_socketpair()
    with mine, other, pytest.raises(RunFailed, match="put them into a file"):
        fork_server.spawn(1, _spec(text="x" * 1_000_000), other)


def test_forks_load_no_jax_and_draw_from_streams_of_their_own():
    def seen():
        with driven(config_of(2, 1, id="tests.fleet.toys:Drawing")) as driver:
            driver.steps(1)
            return [driver.rows[slot][0]["observation"][""].tolist() for slot in (0, 1)]

    one, other = seen()
    assert one[2:] == other[2:] == [0.0, 1.0]
    assert one[0] != other[0] and one[1] != other[1]
    assert [one, other] == seen()

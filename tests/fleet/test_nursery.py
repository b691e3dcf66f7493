"""The nursery as its parent sees it, and what its forks start with."""

import os
import select
import signal
import subprocess
import time

import pytest
from tests.fleet.driving import await_gone, config_of, driven, lives

from penstock.fleet import nursery_link
from penstock.fleet.messages import READY, EnvWorkerSpec, packet_socketpair
from penstock.fleet.nursery_link import NurseryLink
from penstock.types import RunFailed


def _spec(**kwargs):
    return EnvWorkerSpec("w0", 1, 0, 0, (0,), "t", "tests.fleet.toys:Counter", kwargs)


@pytest.fixture
def nursery():
    link = NurseryLink(["tests.fleet.toys:Counter", "no.such.module:Thing", "CartPole-v1"])
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


def test_it_loads_modules_and_reports_those_that_it_cannot(nursery):
    (answer,) = [one for one in _answers(nursery, "preloaded") if "preloaded" in one.values]
    assert list(answer.values["troubles"]) == ["no.such.module:Thing"]
    assert "ModuleNotFoundError" in answer.values["troubles"]["no.such.module:Thing"]


def test_a_fork_comes_with_a_pidfd_and_its_end_with_its_status(nursery):
    channel, pid, pidfd = _spawned(nursery)
    with channel:
        channel.settimeout(10.0)
        assert channel.recv(1) == READY
        assert os.getsid(pid) == pid and not select.select([pidfd], [], [], 0)[0]
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        assert select.select([pidfd], [], [], 5.0)[0]
        os.close(pidfd)
        (answer,) = [one for one in _answers(nursery, "exited") if "exited" in one.values]
        assert answer.values == {"exited": 7, "status": signal.SIGTERM, "last_words": ""}


def test_closing_it_ends_all_that_it_started():
    link = NurseryLink([])
    channel, pid, pidfd = _spawned(link)
    os.close(pidfd)
    with channel:
        nursery = link.pid
        link.close()
        assert not lives(pid) and not lives(nursery)


def test_a_killed_nursery_takes_its_forks_along_and_says_so():
    link = NurseryLink([])
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


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_nursery_that_does_not_end_is_told_within_the_limit(end, monkeypatch):
    link = NurseryLink([], end_s=0.1)
    os.kill(link.pid, signal.SIGSTOP)  # with a SIGKILL that does nothing, as good as uninterruptible sleep
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        began_s = time.monotonic()
        assert getattr(link, end)() is False
        assert time.monotonic() - began_s < 2.0
    left = nursery_link._LEFT_BEHIND[-1]
    os.kill(link.pid, signal.SIGKILL)
    await_gone([link.pid])
    NurseryLink([]).close()
    assert left.returncode == -signal.SIGKILL and left not in nursery_link._LEFT_BEHIND, "the next one reaps it"


def test_arguments_that_are_too_long_are_refused_with_a_remedy(nursery):
    mine, other = packet_socketpair()
    with mine, other, pytest.raises(RunFailed, match="put them into a file"):
        nursery.spawn(1, _spec(text="x" * 1_000_000), other)


def test_forks_load_no_jax_and_draw_from_streams_of_their_own():
    def seen():
        with driven(config_of(2, 1, id="tests.fleet.toys:Drawing")) as driver:
            driver.steps(1)
            return [driver.rows[slot][0]["observation"][""].tolist() for slot in (0, 1)]

    one, other = seen()
    assert one[2:] == other[2:] == [0.0, 1.0]
    assert one[0] != other[0] and one[1] != other[1]
    assert [one, other] == seen()

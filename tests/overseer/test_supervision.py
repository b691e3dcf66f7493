import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from penstock.overseer import supervision
from penstock.overseer.supervision import ThreadGroup, Watchdog, abort_when_hung
from penstock.types import NoProgressError
from tests.waiting import wait_until


def test_the_first_failure_of_any_thread_is_raised_unchanged():
    crew, release = ThreadGroup(), threading.Event()

    def fails() -> None:
        raise OSError("disk full")

    def fails_later() -> None:
        assert release.wait(30)
        raise ValueError("a consequence")

    crew.start("second", fails_later)
    crew.start("first", fails)
    assert crew.wake.wait(30)
    release.set()
    assert crew.join(30) == []
    with pytest.raises(OSError, match="disk full"):
        crew.raise_if_failed()


def test_joining_names_the_threads_that_still_run_and_is_bounded():
    crew, release = ThreadGroup(), threading.Event()
    crew.start("hanging", lambda: release.wait(30))
    crew.start("done", lambda: None)
    assert crew.join(0.05) == ["hanging"]
    assert crew.alive("hanging")
    release.set()
    assert crew.join(30) == []


def test_silence_past_the_limit_names_who_owes_progress_and_dumps_every_stack(tmp_path):
    now, counters = [0.0], {"learner": 0.0}
    stacks = tmp_path / "stacks.txt"
    watchdog = Watchdog(10.0, lambda: dict(counters), lambda: "rollout-worker-0 owes a batch", stacks, lambda: now[0])
    watchdog.check()
    now[0] = 9.0
    watchdog.check()
    counters["learner"] = 1.0
    watchdog.check()
    now[0] = 19.0
    watchdog.check()
    now[0] = 19.1
    with pytest.raises(NoProgressError, match=r"10 s \(overseer.no_progress_s\): rollout-worker-0 owes a batch"):
        watchdog.check()
    assert "test_silence_past_the_limit" in stacks.read_text()


def test_time_in_which_the_process_was_stopped_is_no_silence(tmp_path):
    now = [0.0]
    watchdog = Watchdog(30.0, lambda: {}, lambda: "a batch", tmp_path / "stacks.txt", lambda: now[0])
    for now[0] in (0.0, 9.0, 18.0, 5000.0, 5009.0, 5011.0):
        watchdog.check()
    now[0] = 5012.1
    with pytest.raises(NoProgressError, match="nothing moved for 30 s"):
        watchdog.check()


@pytest.mark.attack
def test_ctrl_z_stops_a_process_for_longer_than_its_last_resort_waits(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from penstock.overseer.supervision import abort_when_hung\n"
        "with abort_when_hung(1.0, Path(sys.argv[1])) as alive:\n"
        "    before = now = time.monotonic()\n"
        "    print('runs', flush=True)\n"
        "    while now - before < 1.5:  # until it was stopped for so long\n"
        "        alive(); time.sleep(0.01); before, now = now, time.monotonic()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "stacks.txt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as run:
        assert run.stdout is not None and run.stdout.readline() == b"runs\n"
        run.send_signal(signal.SIGTSTP)
        wait_until(lambda: os.WIFSTOPPED(os.waitpid(run.pid, os.WUNTRACED | os.WNOHANG)[1]))
        time.sleep(2.0)  # longer than the alarm would have let it live
        run.send_signal(signal.SIGCONT)
        assert run.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_abort_when_hung_ends_a_process_whose_supervisor_hangs(tmp_path):
    program = (
        "import sys, threading; from pathlib import Path; from penstock.overseer.supervision import abort_when_hung\n"
        "with abort_when_hung(0.2, Path(sys.argv[1])):\n"
        "    lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
    )
    stacks = tmp_path / "stacks.txt"
    ended = subprocess.run([sys.executable, "-c", program, str(stacks)], timeout=280, check=False)
    assert ended.returncode == 1
    assert "line 3" in stacks.read_text()


@pytest.mark.parametrize(("own", "within"), [(700, 10_000), (20_000, 20_000), (0, 0)])
def test_garbage_is_seldom_collected_while_a_run_is_watched(own, within):
    before = gc.get_threshold()
    try:
        gc.set_threshold(own, *before[1:])
        with pytest.raises(NoProgressError), supervision._seldom_collected():
            assert gc.get_threshold() == (within, *before[1:]) and gc.get_freeze_count() > 0
            raise NoProgressError("over")
        assert gc.get_threshold() == (own, *before[1:]) and gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*before)


def test_the_abort_when_hung_is_put_off_once_a_second_however_often_it_is_asked(tmp_path, monkeypatch):
    armed, now = list[float](), [100.0]
    monkeypatch.setattr(supervision.faulthandler, "dump_traceback_later", lambda limit_s, **_: armed.append(now[0]))
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now[0])
    with abort_when_hung(60.0, tmp_path / "stacks.txt") as alive:
        for _ in range(30):
            now[0] += 0.25
            alive()
    assert armed == [100.0 + second for second in range(8)]


def test_the_abort_when_hung_leaves_no_trace_of_a_run_that_ended_by_itself(tmp_path):
    with abort_when_hung(60.0, tmp_path / "stacks.txt") as alive:
        alive()
    assert list(tmp_path.iterdir()) == []

"""How a run ends: by signals, by a run directory that is gone, and what its status says then."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.dashboard import read_run_status
from penstock.learner import latest_checkpoint
from penstock.overseer import OverseerConfig, train
from penstock.overseer.progress import Progress
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import Overseer, ThreadGroup
from penstock.overseer.terminal import TerminalView
from penstock.rundir import RunDirectory, read_events, read_status
from penstock.types import RunFailed
from tests.overseer.conftest import tiny
from tests.small_disk import fill, small_disk
from tests.waiting import wait_until

LIMIT_S = 240.0


@pytest.fixture(autouse=True)
def hangup_is_heard() -> Iterator[None]:
    """These tests may run under nohup; and a SIGHUP that nobody handles is to fail a test, not to end all of them."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


class FakeRun:
    """Does what `work` does until it is stopped, or returns by itself."""

    results: dict[str, Any] = {}
    training_s, stop_limit_s, lineage, step, failed_groups, last_failure = 0.0, 5.0, 0, 0, 0, ""
    lessons: dict[str, str] = {}

    def __init__(self, work, directory: RunDirectory, log: RunLog) -> None:
        self.work, self.log = work, log
        self.config = SimpleNamespace(overseer=OverseerConfig(status_s=0.1))
        self.tasks = SimpleNamespace(settings=SimpleNamespace(directory=directory))
        self.stops = 0
        self.over = threading.Event()
        self.finished = False

    def run(self) -> None:
        self.work(self)

    def stop(self) -> None:
        self.stops += 1

    @property
    def stopping(self) -> bool:
        return self.stops > 0

    @property
    def complete(self) -> bool:
        return self.finished

    def refresh(self) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {"time": time.monotonic()}

    def stalled_components(self) -> str:
        return "nobody"

    def status(self) -> dict[str, Any]:
        return {"phase": "training"}


def oversee(run_dir: Path, work) -> FakeRun:
    config = tiny()
    directory, progress = RunDirectory.create(run_dir, config.dump()), Progress("test", 3, 1)
    log = RunLog(directory, config, progress)
    run = FakeRun(work, directory, log)
    try:
        Overseer(run, ThreadGroup(), TerminalView(progress, quiet=True)).run()
    finally:
        log.close()
    return run


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_a_stop(run_dir: Path, number: int):
    def work(run: FakeRun) -> None:
        send(number)
        wait_until(lambda: run.stopping)

    before = signal.getsignal(signal.SIGHUP)
    assert oversee(run_dir, work).stops == 1
    assert read_status(run_dir / "status.json")["state"] == "stopped"
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.attack
def test_a_hangup_that_comes_twice_still_waits_for_the_checkpoint(run_dir: Path):
    def work(run: FakeRun) -> None:
        send(signal.SIGHUP)
        wait_until(lambda: run.stopping)
        send(signal.SIGHUP)  # the shell's, after the kernel's
        time.sleep(0.5)  # the handler runs within it
        run.over.set()

    assert oversee(run_dir, work).over.is_set()
    assert read_status(run_dir / "status.json")["state"] == "stopped"


@pytest.mark.attack
def test_a_hangup_that_was_ignored_stays_so(run_dir: Path):
    def work(run: FakeRun) -> None:
        send(signal.SIGHUP)
        run.finished = True

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert oversee(run_dir, work).stops == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert read_status(run_dir / "status.json")["state"] == "finished"


@pytest.mark.attack
def test_a_second_interrupt_ends_at_once_and_the_run_is_stopped_not_failed(run_dir: Path):
    def work(run: FakeRun) -> None:
        send(signal.SIGINT)
        wait_until(lambda: run.stopping)
        send(signal.SIGINT)
        run.over.wait(60)

    with pytest.raises(KeyboardInterrupt):
        oversee(run_dir, work)
    assert read_status(run_dir / "status.json")["state"] == "stopped"
    assert [event["event"] for event in read_events(run_dir / "events.jsonl")] == ["start", "interrupted"]


@pytest.mark.attack
def test_a_run_directory_that_is_deleted_ends_the_run_with_one_line(run_dir: Path):
    def work(run: FakeRun) -> None:
        run_dir.rename(run_dir.with_name("elsewhere"))
        run.over.wait(0.5)
        raise FileNotFoundError("rollouts/part-1.parquet")

    with pytest.raises(RunFailed, match="run is gone: it was deleted or moved while the run wrote to it"):
        oversee(run_dir, work)
    assert not run_dir.exists(), "nothing is made anew there"


def child(kind: str, run_dir: Path, *point: str, **variables: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.overseer.ending_child", kind, str(run_dir), *point]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables
    )


def until_trained(process: subprocess.Popen[str], run_dir: Path) -> None:
    def trained() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return ((read_status(run_dir / "status.json") or {}).get("step") or 0) >= 2

    wait_until(trained, "two updates", LIMIT_S)


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "control"])
def test_a_closed_terminal_leaves_a_checkpoint_of_the_last_update(kind: str, run_dir: Path):
    with child(kind, run_dir) as process:
        try:
            until_trained(process, run_dir)
            process.send_signal(signal.SIGHUP)
            _, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    status = read_status(run_dir / "status.json")
    assert (process.returncode, status["state"]) == (130, "stopped"), err
    assert (run_dir / "checkpoints" / f"step-{status['step']}").is_dir()


@pytest.mark.attack
@pytest.mark.slow
def test_under_nohup_a_closed_terminal_changes_nothing(run_dir: Path):
    with child("language", run_dir, HANGUP="ignored") as process:
        try:
            until_trained(process, run_dir)
            before = read_status(run_dir / "status.json")["step"]
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: read_status(run_dir / "status.json")["step"] > before + 2, "more updates", LIMIT_S)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 130


FROM_NOTHING = ["before the log", "in the first evaluation of a language policy", "in the first checkpoint"]


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.parametrize("point", FROM_NOTHING)
def test_a_language_run_that_was_killed_before_its_first_checkpoint_is_started_anew(point: str, run_dir: Path):
    starts_anew("language", point, run_dir, tiny({"steps": 3}))


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.parametrize("point", [FROM_NOTHING[0], "in the first evaluation of a control policy", FROM_NOTHING[2]])
def test_a_control_run_that_was_killed_before_its_first_checkpoint_is_started_anew(point: str, run_dir: Path):
    from tests.overseer.test_fleet_training import tiny as tiny_control

    starts_anew("control", point, run_dir, tiny_control({"steps": 3}))


def starts_anew(kind: str, point: str, run_dir: Path, config: Any) -> None:
    with child(kind, run_dir, point) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL, err
    assert not list((run_dir / "checkpoints").glob("step-*"))
    summary = train(config, run_dir, resume=True, quiet=True)
    assert summary.complete
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    events = list(read_events(run_dir / "events.jsonl"))
    assert [event["event"] for event in events].count("started_anew") == 1
    assert [event["lineage"] for event in events if event["event"] == "start"][-1] == 1
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "control"])
def test_a_kill_while_a_checkpoint_is_written_beside_the_training_leaves_the_one_before(kind: str, run_dir: Path):
    """All files of version 6 are written, nothing is renamed, and two more updates were made: none of it counts."""
    from tests.overseer.test_fleet_training import tiny as tiny_control

    with child(kind, run_dir, "in a checkpoint beside the training") as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL, err
    folder = run_dir / "checkpoints"
    (left,) = folder.glob(".tmp-step-6-*")
    assert (left / "manifest.json").is_file() and latest_checkpoint(folder) == folder / "step-3"
    assert len(list((run_dir / "batches").glob("*.parquet"))) >= 8
    config = (tiny if kind == "language" else tiny_control)({"steps": 9})
    assert train(config, run_dir, resume=True, quiet=True).complete
    assert not list(folder.glob(".tmp-*"))
    ledger = read_status(run_dir / "status.json")["ledger"]
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    if kind == "language":
        assert ledger["trained"] == 9 * 3 * 3, "uses of the updates 3 to 7 of the life that ended do not count"
    resumed = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "start"][-1]
    assert resumed["lineage"] == 1 and resumed["step"] == 3


@pytest.mark.attack
@pytest.mark.slow
def test_a_run_that_was_killed_before_its_config_was_written_is_begun_in_the_same_place(run_dir: Path):
    with child("language", run_dir, "before the config") as process:
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL and run_dir.is_dir()
    assert train(tiny({"steps": 1}), run_dir, quiet=True).complete


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language", "control"])
def test_a_run_that_waits_for_room_says_so_and_goes_on_with_some(kind: str, tmp_path: Path):
    def said() -> str:
        return (read_status(run_dir / "status.json") or {}).get("waiting_for", "")

    with small_disk(tmp_path / "disk", "6m") as disk:
        run_dir = disk / "run"
        with child(kind, run_dir) as process:
            try:
                until_trained(process, run_dir)
                ballast = fill(disk)
                wait_until(lambda: "no room on the disk" in said(), "it says that it waits", LIMIT_S)
                fill(disk)
                time.sleep(5)  # the status goes on meanwhile
                looked = read_run_status(run_dir)
                assert looked.state == "running" and looked.age_s is not None and looked.age_s < 5
                assert "no room on the disk" in looked.content["waiting_for"]
                step = looked.content["step"]
                ballast.unlink()
                wait_until(lambda: read_status(run_dir / "status.json")["step"] > step + 2, "updates", LIMIT_S)
                process.send_signal(signal.SIGHUP)
                _, err = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        assert process.returncode == 130, err
        ledger = read_status(run_dir / "status.json")["ledger"]
        assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")

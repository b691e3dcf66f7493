"""The parts of the chaos benchmark that need no run; `test_chaos_runs` has the others."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.chaos import __main__ as benchmark
from benchmarks.chaos import (
    auditing,
    clocks,
    file_damage,
    inflicting,
    invariants,
    memory,
    misbehaving,
    reporting,
    small_disk,
)
from benchmarks.chaos.schedule import KINDS, LONGEST_CALM_S, make_schedule
from benchmarks.chaos.slow_network import CLEAR, Proxy, Weather
from benchmarks.chaos.watching import Effect, in_words
from benchmarks.marks import Marks

from penstock.replay import History, LoggedFate
from penstock.replay.history import SealedRollout
from penstock.types import WeightVersion

LIMIT_S = 10.0


# --- the schedule ----------------------------------------------------------------------------------------------------


def test_a_schedule_follows_from_its_seed_and_holds_every_kind_in_each_round():
    schedule = make_schedule(7, KINDS, 100)
    assert schedule == make_schedule(7, KINDS, 100) != make_schedule(8, KINDS, 100)
    assert [fault.number for fault in schedule] == list(range(1, 101))
    for first in range(0, 101 - len(KINDS), len(KINDS)):
        assert {fault.kind for fault in schedule[first : first + len(KINDS)]} == set(KINDS)
    assert min(Counter(fault.kind for fault in schedule).values()) >= 5
    assert all(0 <= fault.calm_s < LONGEST_CALM_S and 0 <= fault.choice < 1 for fault in schedule)


def test_kinds_are_chosen_by_name_and_unknown_ones_refused(capsys):
    assert benchmark.parse(["--kinds", "full disk, kill learner"]).kinds == ["full disk", "kill learner"]
    with pytest.raises(SystemExit):
        benchmark.parse(["--kinds", "fire"])
    assert "--kinds names fire; known are kill rollout" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.parse(["--parts", "run,walk"])
    assert "--parts names walk; known are run, drivers, rewards" in capsys.readouterr().err


# --- processes -------------------------------------------------------------------------------------------------------


def test_only_descendants_of_this_process_may_be_signalled():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert inflicting.descends_from(child.pid, os.getpid())
        assert not inflicting.descends_from(os.getpid(), child.pid)
        child.communicate(b"\n", LIMIT_S)
    assert not inflicting.descends_from(child.pid, os.getpid()), "it is gone"
    assert not inflicting.descends_from(os.getppid(), os.getpid())
    assert not inflicting.descends_from(1, os.getpid())


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_a_clock_jumps_by_what_its_file_says(monkeypatch, tmp_path):
    true_time, true_time_ns, now = time.time, time.time_ns, time.monotonic()
    monkeypatch.setattr(time, "time", true_time)  # put back at the end
    monkeypatch.setattr(time, "time_ns", true_time_ns)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(clocks, "_offset", clocks._Offset())
    clocks.follow(tmp_path / "rollout-1")
    assert abs(time.time() - true_time()) < 60
    clocks.set_offset(tmp_path, "rollout-1", -7200.0)
    clocks.set_offset(tmp_path, "rollout-2", 99999.0)
    now += clocks.LOOK_S
    assert -7260 < time.time() - true_time() < -7140
    assert -7260 < (time.time_ns() - true_time_ns()) / 1e9 < -7140


def test_factories_are_made_for_every_role_and_are_plain_to_send(tmp_path):
    factories = clocks.components(tmp_path)
    assert factories.keys() == {"learner", "replay", "curriculum", "inference", "rollout", "evaluator"}
    assert factories["learner"].func is clocks.make and factories["learner"].args == ("learner", str(tmp_path))


def test_a_cluster_watches_memory_some_gigabytes_above_what_is_in_use(monkeypatch):
    machine = SimpleNamespace(total=20 * memory.GIB, available=15 * memory.GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "9")
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    with memory.watched():
        assert os.environ["RAY_memory_usage_threshold"] == "0.5000"
        assert os.environ["RAY_memory_monitor_refresh_ms"] == "250"
    assert "RAY_memory_usage_threshold" not in os.environ and os.environ["RAY_memory_monitor_refresh_ms"] == "9"
    machine.available = 0
    with memory.watched():
        assert os.environ["RAY_memory_usage_threshold"] == "0.9500"


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture
def echo():
    """A server that sends back what it gets; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # closed by the test
                with connection:
                    while block := connection.recv(65536):
                        connection.sendall(block)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT_S)


def exchange(connection: socket.socket, message: bytes) -> bytes:
    connection.sendall(message)
    answer = b""
    while len(answer) < len(message):
        answer += connection.recv(65536)
    return answer


def test_a_proxy_passes_everything_on_and_delays_it_while_the_network_is_slow(echo):
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), LIMIT_S) as connection:
        message = bytes(range(256)) * 1000
        assert exchange(connection, message) == message and proxy.delayed_bytes == 0
        proxy.weather = Weather(latency_s=0.1)
        started = time.monotonic()
        assert exchange(connection, b"slow") == b"slow"
        assert time.monotonic() - started >= 0.2 and proxy.delayed_bytes == 8
        proxy.weather = CLEAR
        assert exchange(connection, message) == message and proxy.delayed_bytes == 8


def test_a_slow_block_is_let_go_when_the_network_clears(echo):
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), LIMIT_S) as connection:
        proxy.weather = Weather(latency_s=1000.0)
        connection.sendall(b"held")
        deadline = time.monotonic() + LIMIT_S
        while proxy.delayed_bytes < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        proxy.weather = CLEAR
        assert connection.recv(4) == b"held"


def test_a_proxy_to_nobody_ends_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with Proxy(port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), LIMIT_S) as connection:
        assert connection.recv(1) == b""


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_disk_is_filled_until_nothing_more_goes_in(monkeypatch, tmp_path):
    room = 3 * small_disk.MIB + 1234
    true_write = os.write

    def write(descriptor: int, block: bytes) -> int:
        if os.fstat(descriptor).st_size + len(block) > room:
            raise OSError(errno.ENOSPC, "no space left on device")
        return true_write(descriptor, block)

    monkeypatch.setattr(os, "write", write)
    disk = small_disk.SmallDisk(tmp_path, 4)
    assert disk.fill() == room == disk.fill()
    assert disk.fill(1000) == room - 1000
    disk.free()
    disk.free()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_where_nothing_may_be_mounted_says_so(monkeypatch, tmp_path):
    refused = subprocess.CompletedProcess([], 32, "", "mount: permission denied.\n")
    monkeypatch.setattr(small_disk.subprocess, "run", lambda *_, **__: refused)
    with small_disk.SmallDisk(tmp_path / "disk", 4) as disk:
        assert not disk.can_be_full
        assert disk.in_words() == (
            "no tmpfs may be mounted here (mount: permission denied.): the kinds «full disk» and «full "
            "checkpoints» are left out"
        )


def part(path, ids):
    pq.write_table(pa.table({"rollout_id": ids, "noise": list(range(len(ids)))}), path)


def test_a_damaged_part_cannot_be_read_and_its_rollouts_were_known_before(tmp_path):
    for name, first in (("part-01", 0), ("part-02", 100)):
        part(tmp_path / f"{name}.parquet", [f"t/{index}" for index in range(first, first + 100)])
    newest = file_damage.newest_part(tmp_path)
    assert newest is not None and newest.name == "part-02.parquet"
    assert file_damage.ids_in(newest) == [f"t/{index}" for index in range(100, 200)]
    size = newest.stat().st_size
    assert file_damage.flip_bytes(newest, 3) > file_damage.FLIPPED // 2 and newest.stat().st_size == size
    with pytest.raises((OSError, pa.ArrowException)):
        file_damage.ids_in(newest)


def test_the_last_checkpoint_that_is_left_is_not_damaged(tmp_path):
    (tmp_path / "step-9").mkdir()
    (tmp_path / "damaged-step-30-ab").mkdir()
    assert file_damage.newest_checkpoint(tmp_path) is None
    (tmp_path / "step-10" / "model").mkdir(parents=True)
    assert file_damage.newest_checkpoint(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-10" / "state.json").write_text("{}")
    (tmp_path / "step-10" / "model" / "weights").write_bytes(bytes(100))
    assert file_damage.largest_file(tmp_path / "step-10").name == "weights"


# --- the books -------------------------------------------------------------------------------------------------------

VERSION = WeightVersion(0, 3)
HISTORY = History(
    started={"a": 2, "b": 2},
    sealed={i: SealedRollout(i, i[0], VERSION) for i in ("a/0", "a/1", "b/0")},
    fates={"a/0": LoggedFate("trained", VERSION), "b/0": LoggedFate("waiting", VERSION)},
    batches=[],
)


def test_the_books_close_over_every_rollout_that_was_started():
    found = invariants.books(HISTORY)
    assert found.closed and found.started == 4
    assert found.states == {"trained": 1, "waiting": 2, "in_flight": 1}


def test_a_rollout_that_nobody_started_or_of_an_unknown_state_keeps_the_books_open():
    sealed = {**HISTORY.sealed, "c/0": SealedRollout("c/0", "c", VERSION)}
    assert not invariants.books(replace(HISTORY, sealed=sealed)).closed
    assert not invariants.books(replace(HISTORY, fates={"a/0": LoggedFate("mislaid", VERSION)})).closed


class Store:
    def __init__(self, directory) -> None: ...

    def history(self) -> History:
        return HISTORY


def test_what_was_noted_must_be_there_or_damaged_on_purpose_put_aside_and_settled(monkeypatch, tmp_path):
    monkeypatch.setattr(auditing, "RolloutStore", Store)
    monkeypatch.setattr(auditing, "violations", lambda directory, damaged: [f"{len(damaged)} damaged"])
    directory = auditing.RunDirectory(tmp_path)
    noted, told = {"a/0", "b/1", "c/0"}, {"started": 4}
    assert auditing.audit(directory, noted, {}, told).lost == ("b/1", "c/0")
    found = auditing.audit(directory, noted, {"part-1.parquet": ["b/1", "c/0", "a/1"]}, told)
    assert (found.lost, found.unsettled, found.not_aside) == ((), ("b/1", "c/0"), ("part-1.parquet",))
    (tmp_path / "damaged" / "rollouts").mkdir(parents=True)
    (tmp_path / "damaged" / "rollouts" / "part-1.parquet").touch()
    rolled_back = {i: LoggedFate("rolled_back", VERSION) for i in ("b/1", "c/0")}
    monkeypatch.setattr(Store, "history", lambda _: replace(HISTORY, fates=rolled_back))
    found = auditing.audit(directory, noted, {"part-1.parquet": ["b/1", "c/0", "a/1"]}, told)
    assert (found.lost, found.unsettled, found.not_aside, found.sealed) == ((), (), (), 3)


def test_sealed_rollouts_are_noted_once_and_damaged_files_passed_over(tmp_path):
    directory = auditing.RunDirectory(tmp_path)
    directory.rollouts.mkdir()
    part(directory.rollouts / "part-1.parquet", ["a/0", "a/1"])
    (directory.rollouts / "part-2.parquet").write_bytes(b"no parquet")
    notes = auditing.Notes(directory)
    notes.take()
    (directory.rollouts / "part-1.parquet").unlink()
    part(directory.rollouts / "part-3.parquet", ["b/0"])
    notes.take()
    assert notes.sealed == {"a/0", "a/1", "b/0"} and notes.times == 2


# --- what is printed -------------------------------------------------------------------------------------------------


def effect(kind, up_s, update_s, **more):
    return Effect(1, kind, "learner-0", 12.0, up_s=up_s, update_s=update_s, **more)


def test_the_table_counts_and_times_by_kind():
    effects = [
        effect("kill learner", 7.0, 9.0, paused_s=8.5),
        effect("kill learner", 5.0, 6.0),
        effect("kill learner", 8.0, None),
        effect("clock jump", None, None),
    ]
    clock, kill = reporting.rows(effects)
    assert (kill.count, kill.recovered, kill.median_s, kill.worst_s, kill.up_s) == (3, 2, 7.5, 9.0, 7.0)
    assert kill.paused_s == 0.0
    assert (clock.count, clock.recovered, clock.median_s, clock.worst_s) == (1, 0, None, None)
    lines = reporting.table([clock, kill]).splitlines()
    assert lines[1].split() == ["clock", "jump", "1", "0", "–", "–", "–", "0.0"]
    assert lines[2].split() == ["kill", "learner", "3", "2", "7.5", "9.0", "7.0", "0.0"]


def test_a_fault_is_told_in_a_line_with_what_the_overseer_said_of_it():
    events = [
        in_words({"event": "component_death", "component": "learner-0", "incarnation": 2, "reason": "gone"}),
        in_words({"event": "rewind", "reason": "learner-0#2: gone", "checkpoint": "step-10"}),
    ]
    assert events[0] == "component_death learner-0 2 gone"
    said = reporting.line(effect("kill learner", 7.0, None, events=events, did="SIGKILL to learner-0#2"))
    assert "up   7.0 s, update   never; 1 deaths, 1 rewinds, no update for 0.0 s; SIGKILL to learner-0#2" in said
    assert json.loads(json.dumps(effect("x", 1.0, 2.0).record()))["recovered"]


def test_missed_marks_are_counted():
    marks = Marks()
    marks.add("one", "fine", True)
    marks.add("two", "3 s", False)
    assert marks.missed == 1 and "MISSED   3 s" in marks.lines[1]


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_the_reward_of_a_text_follows_from_it_alone():
    assert [misbehaving.of(text) for text in ("cat", "cat", "dog")] == [0.6186258587986231] * 2 + [0.5045810632873327]

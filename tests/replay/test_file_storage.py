"""What the file kind of rollout storage promises beside what every kind does."""

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.replay.storage_kinds import LIMIT_S, blocked, drain, names_of, write
from tests.waiting import wait_until

from penstock.replay import file_queue
from penstock.replay.file_queue import UNFINISHED_S, BatchName, writer_folder
from penstock.types import RunFailed


def batch_files(path: Path) -> list[Path]:
    return sorted(path.glob("w-*/*.arrow"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    """As a power loss does it: the length is right, the blocks never came."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(cut, "cut short"), (empty, "cut short"), (zero, "cut short or foreign"), (flip, "checksum")],
)
def test_a_damaged_file_is_put_aside_and_counted_while_the_others_go_on(files, damage, reason):
    storage = files.open()
    write(storage.writer("w"), "a", "b", "c")
    write(storage.writer("x"), "d")
    damaged = batch_files(files.path)[1]
    damage(damaged)
    left = damaged.read_bytes()
    assert sorted(drain(storage)) == ["a", "c", "d"]
    assert storage.metrics()["rollout_storage/quarantined"] == 1
    [(source, told)] = files.quarantined
    assert Path(source) == files.path / "quarantine" / "w-w" / damaged.name
    assert Path(source).read_bytes() == left and reason in told
    assert Path(f"{source}.reason").read_text() == f"{told}\n"
    assert drain(files.restart_reader(storage)) == [] and batch_files(files.path) == []


def test_the_quarantine_overwrites_nothing(files):
    storage = files.open()
    write(storage.writer("w"), "a")
    [path] = batch_files(files.path)
    content = path.read_bytes()
    for _ in range(2):
        path.write_bytes(content[:50])
        assert drain(files.restart_reader(storage)) == []
    assert len(list((files.path / "quarantine" / "w-w").glob("*.arrow*"))) == 4  # two files, two reasons


def test_files_are_deleted_only_when_they_are_acknowledged(files):
    storage = files.open()
    write(storage.writer("w"), "a", "b")
    delivery = storage.receive(1)
    assert len(batch_files(files.path)) == 2
    delivery.acknowledge()
    assert len(batch_files(files.path)) == 1
    storage.close()
    assert drain(files.restart_reader(storage)) == ["b"]


NAMES = (
    "w", "W", "node-1.cluster.local", "node_1", "node-1", "node%2D1", "a/b", "a\\b", "..", ".", "", " ", "-", "ü",
    "u\u0308", "рабочий-7", "机器", "a:b*?<>|", "line\nbreak", "nul\0", "x" * 300, "x" * 301, "ü" * 60, "\udce9",
    "quarantine", "w-w", "[a]*", "~", "%",
)  # fmt: skip


def test_host_names_of_any_spelling_are_safe_and_distinct(files):
    folders = [writer_folder(name) for name in NAMES]
    assert len({folder.casefold() for folder in folders}) == len(NAMES)
    assert all(len(folder.encode()) < 200 and "/" not in folder and folder.isascii() for folder in folders)
    storage = files.open()
    for index, name in enumerate(NAMES):
        write(storage.writer(name), str(index))
    assert {path.parent.parent for path in batch_files(files.path)} == {files.path}
    assert sorted(drain(storage), key=int) == [str(index) for index in range(len(NAMES))]


def test_names_sort_as_they_were_written():
    names = [BatchName(9, "f" * 12, 999_999, 1), BatchName(9, "f" * 12, 1_000_000, 12), BatchName(10, "0" * 12, 0, 1)]
    assert sorted(name.file_name for name in names) == [name.file_name for name in names]
    assert [BatchName.parse(name.file_name) for name in names] == names
    for other in (".nfs0001", f".{names[0].file_name}.0123.tmp", "notes.arrow", f"{names[0].file_name}.reason"):
        assert BatchName.parse(other) is None


def test_other_files_in_the_folder_are_left_alone(files):
    storage = files.open()
    write(storage.writer("w"), "a")
    strangers = [files.path / "w-w" / name for name in (".nfs0001", "notes.arrow", "README")]
    for stranger in strangers:
        stranger.write_text("mine")
    assert drain(storage) == ["a"] and all(stranger.exists() for stranger in strangers)


def test_another_process_is_seen_by_polling(files):
    """A second storage object stands for another process: nothing wakes this one."""
    storage, other = files.open(), files.open(capacity_groups=1)
    writer = other.writer("w")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(write, writer, "a", "b")
        first = storage.receive(LIMIT_S)
        assert names_of(first) == ["a"]
        wait_until(lambda: blocked(other) == 1)
        first.acknowledge()
        waiting.result(LIMIT_S)
    assert drain(storage) == ["b"]


def test_polling_is_no_busy_loop(files, monkeypatch):
    looks = []
    listed = file_queue.list_batches
    storage = files.open(poll_s=0.1)
    storage.writer("w")
    monkeypatch.setattr(file_queue, "list_batches", lambda folder: looks.append(folder) or listed(folder))
    assert storage.receive(0.35) is None
    assert 3 <= len(looks) <= 5


def test_a_listing_that_misses_an_older_file_does_not_change_the_order(files, monkeypatch):
    storage = files.open()
    write(storage.writer("w"), "a", "b", "c")
    listed, calls = file_queue.list_batches, []

    def racing(folder: Path) -> list[BatchName]:
        calls.append(folder)
        names = listed(folder)
        return [names[0], names[2]] if len(calls) == 1 else names

    monkeypatch.setattr(file_queue, "list_batches", racing)
    assert drain(storage) == ["a", "b", "c"]


def test_a_gap_is_passed(files):
    storage = files.open()
    write(storage.writer("w"), "a", "b", "c")
    batch_files(files.path)[1].unlink()
    assert drain(storage) == ["a", "c"]


@pytest.mark.attack
def test_a_clock_that_runs_backwards_does_not_change_the_order(files, monkeypatch):
    storage = files.open()
    write(storage.writer("w"), "a")
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    write(storage.writer("w"), "b")
    assert drain(storage) == ["a", "b"]


def test_a_file_that_cannot_be_read_for_a_while_keeps_its_place(files, monkeypatch):
    storage = files.open()
    write(storage.writer("w"), "a", "b")
    write(storage.writer("x"), "c")
    path, read, failures = batch_files(files.path)[0], Path.read_bytes, [3]

    def flaky(self: Path) -> bytes:
        if self == path and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ESTALE, "stale file handle")
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", flaky)
    found: list[str] = []
    wait_until(lambda: found.extend(drain(storage)) or len(found) == 3, "all three came")
    assert sorted(found) == ["a", "b", "c"] and files.quarantined == []
    failures[0] = 10**6
    write(storage.writer("w"), "d")
    path = batch_files(files.path)[0]
    wait_until(lambda: files.quarantined or drain(storage), "the file was put aside")
    assert "cannot be read" in files.quarantined[0][1] and failures[0] == 10**6 - file_queue.READ_ATTEMPTS


def test_unfinished_files_are_passed_over_and_removed_when_they_are_old(files):
    storage = files.open()
    write(storage.writer("w"), "a")
    young, old = (files.path / "w-w" / f".{name}.arrow.0123.tmp" for name in ("young", "old"))
    for path in (young, old):
        path.write_bytes(b"half a mess")
    long_ago = time.time() - UNFINISHED_S - 60
    os.utime(old, (long_ago, long_ago))
    assert drain(storage) == ["a"] and young.exists() and old.exists()
    storage.redeliver()
    assert young.exists() and not old.exists()


def test_a_folder_that_cannot_be_written_ends_the_wait_by_name(files):
    storage = files.open()
    writer = storage.writer("w")
    (files.path / "w-w").rmdir()
    with pytest.raises(RunFailed, match=r"w-w/.*cannot be written.*rollout.storage.path"):
        write(writer, "a")


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[2])
from storage_kinds import make_batch
from penstock.replay import FileRolloutStorage

writer = FileRolloutStorage(sys.argv[1]).writer("node-1")
def stuck(source, target):
    print("written, not renamed", flush=True)
    sys.stdin.read()

for count in range(10**6):
    if str(count) == sys.argv[3]:
        os.replace = stuck
    writer.add_batches([make_batch(str(count))])
"""


def start_writer(path: Path, stuck_at: int) -> subprocess.Popen:
    """A process that writes "0", "1", … and does not get the file of number `stuck_at` renamed."""
    arguments = [sys.executable, "-c", CHILD, str(path), str(Path(__file__).parent), str(stuck_at)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_writer_that_is_killed_in_the_middle_of_a_file(files):
    """What it had finished arrives; what it had not is passed over; its successor begins under the same id."""
    with start_writer(files.path, 2) as child:
        assert child.stdout.readline() == "written, not renamed\n"
        child.kill()
    storage = files.open()
    [unfinished] = (files.path / "w-node-1").glob(".*.tmp")
    assert unfinished.stat().st_size > 1000
    write(storage.writer("node-1"), "2", "3")
    assert drain(storage) == ["0", "1", "2", "3"]
    assert files.quarantined == [] and unfinished.exists()


def test_a_writer_that_is_killed_at_any_moment(files):
    storage = files.open()
    with start_writer(files.path, -1) as child:
        found = [names_of(storage.receive(LIMIT_S))[0] for _ in range(20)]
        child.kill()
    found += drain(storage)
    assert found == [str(count) for count in range(len(found))] and files.quarantined == []

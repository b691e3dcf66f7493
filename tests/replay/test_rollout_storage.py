"""What every kind of rollout storage promises, and what the file kind promises beside.

A new kind joins by one class in `KINDS`.
"""

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.replay import (
    Delivery,
    FileRolloutStorage,
    MemoryRolloutStorage,
    RolloutStorage,
    RolloutStorageConfig,
    file_storage,
    open_rollout_storage,
)
from penstock.replay.file_writer import UNFINISHED_S
from penstock.replay.spool_names import BatchName, writer_folder
from penstock.types import (
    InvalidRolloutError,
    NoProgressError,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    RolloutSink,
    RunFailed,
    Stopped,
)

LIMIT_S = 10.0
"""No wait of these tests takes so long unless something hangs."""


class MemoryKind:
    """Threads of one process."""

    def __init__(self, folder: Path) -> None:
        self.quarantined: list[tuple[str, str]] = []

    def open(self, **config) -> RolloutStorage:
        return MemoryRolloutStorage(
            RolloutStorageConfig(kind="memory", **{"write_timeout_s": LIMIT_S} | config), self._note
        )

    def restart_reader(self, storage: RolloutStorage) -> RolloutStorage:
        storage.redeliver()
        return storage

    def _note(self, source: str, reason: str) -> None:
        self.quarantined.append((source, reason))


class FileKind(MemoryKind):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "storage"
        self.config = RolloutStorageConfig()

    def open(self, **config) -> RolloutStorage:
        self.config = RolloutStorageConfig(kind="file", **{"poll_s": 0.02, "write_timeout_s": LIMIT_S} | config)
        return FileRolloutStorage(self.path, self.config, self._note)

    def restart_reader(self, storage: RolloutStorage) -> RolloutStorage:
        return FileRolloutStorage(self.path, self.config, self._note)


KINDS = {"memory": MemoryKind, "file": FileKind}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path) -> MemoryKind:
    return KINDS[request.param](tmp_path)


@pytest.fixture
def files(tmp_path) -> FileKind:
    return FileKind(tmp_path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def make_rollout(rollout_id: str, metadata: RolloutMetadata | None) -> Rollout:
    return Rollout(
        env_name="cats",
        env_example_id="1",
        prompt_tokens=np.array([1, 2], np.int32),
        response_tokens=np.array([3, 4], np.int32),
        response_logprobs=np.array([-0.5, -1.0], np.float32),
        token_rewards=np.array([0.0, 1.0], np.float32),
        episode_reward=1.0,
        metadata=metadata,
        rollout_id=rollout_id,
    )


STAMP = RolloutMetadata("w", 1.0, 0)


def make_batch(*names: str, metadata: RolloutMetadata | None = STAMP) -> RolloutBatch:
    """One group of one rollout per name."""
    return RolloutBatch.of(tuple(RolloutGroup("k", (make_rollout(f"{name}/0", metadata),), name) for name in names))


def write(writer: RolloutSink, *names: str) -> None:
    for name in names:
        writer.add_batches([make_batch(name)])


def names_of(delivery: Delivery) -> list[str]:
    return [group.group_id for batch in delivery.batches for group in batch.groups]


def drain(storage: RolloutStorage, most: int = 10_000) -> list[str]:
    """Receives and acknowledges what there is."""
    found: list[str] = []
    while len(found) < most and (delivery := storage.receive(0.1)) is not None:
        found += names_of(delivery)
        delivery.acknowledge()
    return found


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.002)


def blocked(storage: RolloutStorage) -> float:
    return storage.metrics()["rollout_storage/blocked_writers"]


# --- every kind ------------------------------------------------------------------------------------------------------


def test_it_keeps_the_protocols(kind):
    storage = kind.open()
    assert isinstance(storage, RolloutStorage) and isinstance(storage.writer("w"), RolloutSink)
    write(storage.writer("w"), "a")
    assert isinstance(storage.receive(1), Delivery)


def test_a_writers_batches_arrive_in_its_order(kind):
    storage = kind.open()
    writer = storage.writer("w")
    writer.add_batches([make_batch("a", "b"), make_batch("c")])
    writer.add_batches([make_batch("d")])
    deliveries = [storage.receive(1) for _ in range(3)]
    assert [names_of(delivery) for delivery in deliveries] == [["a", "b"], ["c"], ["d"]]
    [rollout] = deliveries[2].batches[0].rollouts()
    assert rollout.response_logprobs.tolist() == [-0.5, -1.0] and rollout.metadata == STAMP


def test_writers_are_served_in_turn(kind):
    storage = kind.open()
    write(storage.writer("eager"), "e0", "e1", "e2", "e3")
    write(storage.writer("slow"), "s0", "s1")
    found = drain(storage)
    assert sorted(found[:4]) == ["e0", "e1", "s0", "s1"] and found[4:] == ["e2", "e3"]


def test_nothing_to_receive_is_none_at_the_limit(kind):
    storage = kind.open()
    started = time.monotonic()
    assert storage.receive(0.1) is None
    assert 0.09 < time.monotonic() - started < 1.0
    assert storage.receive(0) is None


def test_a_waiting_reader_is_woken_at_once(kind, pool):
    storage = kind.open(**({"poll_s": 30} if isinstance(kind, FileKind) else {}))
    waiting = pool.submit(storage.receive, LIMIT_S)
    write(storage.writer("w"), "a")
    assert names_of(waiting.result(LIMIT_S / 2)) == ["a"]


def test_a_rollout_without_metadata_is_refused(kind):
    storage = kind.open()
    with pytest.raises(InvalidRolloutError, match="'a/0' has no metadata"):
        storage.writer("w").add_batches([make_batch("a", metadata=None)])
    assert storage.receive(0.05) is None


def test_batches_without_groups_are_passed_over(kind):
    storage = kind.open()
    storage.writer("w").add_batches([RolloutBatch(()), make_batch("a")])
    assert drain(storage) == ["a"]


def test_a_full_share_makes_its_writer_wait_until_something_is_acknowledged(kind, pool):
    storage = kind.open(capacity_groups=2)
    writer = storage.writer("w")
    write(writer, "a", "b")
    waiting = pool.submit(write, writer, "c")
    until(lambda: blocked(storage) == 1)
    first = storage.receive(1)
    assert first is not None and not waiting.done()  # received is not safe yet
    time.sleep(0.05)
    assert not waiting.done() and storage.metrics()["rollout_storage/blocked_s"] >= 0.05
    first.acknowledge()
    waiting.result(LIMIT_S)
    assert drain(storage) == ["b", "c"]
    metrics = storage.metrics()
    assert metrics["rollout_storage/blocked_writers"] == 0 and metrics["rollout_storage/blocked_s"] >= 0.05


def test_one_writers_full_share_leaves_the_others_theirs(kind, pool):
    storage = kind.open(capacity_groups=1)
    eager = storage.writer("eager")
    write(eager, "a")
    waiting = pool.submit(write, eager, "b")
    until(lambda: blocked(storage) == 1)
    write(storage.writer("other"), "c")
    assert sorted(drain(storage, 2)) == ["a", "c"]
    waiting.result(LIMIT_S)
    assert drain(storage) == ["b"]


def test_capacity_counts_groups_and_a_larger_batch_passes_alone(kind, pool):
    storage = kind.open(capacity_groups=3)
    writer = storage.writer("w")
    writer.add_batches([make_batch("a", "b", "c", "d", "e")])
    waiting = pool.submit(write, writer, "f")
    until(lambda: blocked(storage) == 1)
    assert drain(storage, 5) == ["a", "b", "c", "d", "e"]
    waiting.result(LIMIT_S)
    assert drain(storage) == ["f"]


def test_a_wait_without_end_names_who_does_not_read(kind):
    storage = kind.open(capacity_groups=1, write_timeout_s=0.1)
    writer = storage.writer("worker-7")
    write(writer, "a")
    expected = r"worker-7 waited 0.1 s .*write_timeout_s.*1 of 1 groups wait.*no reader has asked yet.*receiver runs"
    with pytest.raises(NoProgressError, match=expected):
        write(writer, "b")
    assert storage.receive(1) is not None
    with pytest.raises(NoProgressError, match="the reader last asked 0 s ago"):
        write(writer, "b")


def test_closing_ends_every_wait_and_every_later_call(kind, pool):
    storage = kind.open(capacity_groups=1, poll_s=30)
    writer = storage.writer("w")
    write(writer, "a")
    waits = [pool.submit(write, writer, "b"), pool.submit(write, writer, "c")]
    until(lambda: blocked(storage) == 2)
    assert storage.receive(1) is not None
    waits.append(pool.submit(storage.receive, LIMIT_S))
    waits.append(pool.submit(storage.receive, LIMIT_S))
    started = time.monotonic()
    storage.close()
    for wait in waits:
        with pytest.raises(Stopped):
            wait.result(LIMIT_S)
    assert time.monotonic() - started < 2.0
    for call in (lambda: write(writer, "d"), lambda: storage.receive(0)):
        with pytest.raises(Stopped):
            call()


def test_a_new_reader_gets_again_what_was_not_acknowledged(kind):
    storage = kind.open()
    write(storage.writer("w"), "a", "b", "c", "d")
    storage.receive(1).acknowledge()
    lost = [storage.receive(1), storage.receive(1)]
    assert [names_of(delivery) for delivery in lost] == [["b"], ["c"]]
    reader = kind.restart_reader(storage)
    assert drain(reader) == ["b", "c", "d"]
    for delivery in lost:  # of a reader that was thought dead
        delivery.acknowledge()
    assert reader.receive(0.05) is None


def test_redelivery_in_the_same_reader(kind):
    storage = kind.open()
    write(storage.writer("w"), "a", "b")
    assert names_of(storage.receive(1)) == ["a"]
    storage.redeliver()
    assert storage.metrics()["rollout_storage/received"] == 1
    assert drain(storage) == ["a", "b"]
    assert storage.metrics()["rollout_storage/depth"] == 0


def test_a_writer_that_begins_again_under_its_id_clashes_with_nothing(kind):
    storage = kind.open()
    for life in range(3):
        write(storage.writer("node-1"), f"{life}.0", f"{life}.1")
    assert drain(storage) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]


def test_acknowledging_twice_changes_nothing(kind):
    storage = kind.open(capacity_groups=1)
    writer = storage.writer("w")
    write(writer, "a")
    delivery = storage.receive(1)
    delivery.acknowledge()
    write(writer, "b")
    delivery.acknowledge()
    delivery.quarantine("too late")
    assert storage.metrics()["rollout_storage/quarantined"] == 0
    assert drain(storage) == ["b"]


def test_what_the_reader_cannot_use_is_put_aside_and_the_others_go_on(kind):
    storage = kind.open(capacity_groups=3)
    writer = storage.writer("w")
    write(writer, "a", "b", "c")
    storage.receive(1).quarantine("a makes no sense")
    write(writer, "d")  # its place is free
    assert drain(kind.restart_reader(storage)) == ["b", "c", "d"]
    assert storage.metrics()["rollout_storage/quarantined"] == 1
    [(source, reason)] = kind.quarantined
    assert "w" in source and reason == "a makes no sense"


def test_metrics_say_how_much_waits(kind):
    storage = kind.open()
    storage.writer("w").add_batches([make_batch("a", "b", "c"), make_batch("d")])
    first = storage.receive(1)
    assert storage.metrics() == {
        "rollout_storage/depth": 1.0,
        "rollout_storage/received": 1.0,
        "rollout_storage/quarantined": 0.0,
        "rollout_storage/blocked_writers": 0.0,
        "rollout_storage/blocked_s": 0.0,
    }
    first.acknowledge()
    drain(storage)
    assert storage.metrics()["rollout_storage/depth"] == 0
    assert storage.metrics()["rollout_storage/received"] == 2


def test_many_writers_and_a_slow_reader(kind, pool):
    """Six workers, one of them in two threads; every batch once, each thread's in its order."""
    storage = kind.open(capacity_groups=2)
    shared = storage.writer("w0")
    writers = [shared, shared, *(storage.writer(f"w{i}") for i in range(1, 6))]
    written = [[f"{i}.{n}" for n in range(12)] for i in range(len(writers))]
    running = [pool.submit(write, writer, *names) for writer, names in zip(writers, written, strict=True)]
    found: list[str] = []
    while len(found) < 12 * len(writers):
        delivery = storage.receive(LIMIT_S)
        assert delivery is not None, found
        time.sleep(0.001)
        found += names_of(delivery)
        delivery.acknowledge()
    for thread in running:
        thread.result(LIMIT_S)
    assert sorted(found) == sorted(name for names in written for name in names)
    for i, names in enumerate(written):
        assert [name for name in found if name.startswith(f"{i}.")] == names
    assert storage.metrics()["rollout_storage/blocked_s"] > 0
    assert storage.receive(0.05) is None


def test_reading_threads_share_without_doubling(kind, pool):
    storage = kind.open()
    write(storage.writer("w"), *(str(n) for n in range(40)))
    found = [pool.submit(drain, storage) for _ in range(4)]
    names = [name for thread in found for name in thread.result(LIMIT_S)]
    assert sorted(names, key=int) == [str(n) for n in range(40)]


def test_the_configuration_chooses_the_kind(tmp_path):
    assert isinstance(open_rollout_storage(RolloutStorageConfig(), tmp_path / "s"), MemoryRolloutStorage)
    assert not (tmp_path / "s").exists()
    storage = open_rollout_storage(RolloutStorageConfig(kind="file"), tmp_path / "s")
    assert isinstance(storage, FileRolloutStorage) and storage.path == tmp_path / "s"
    storage = open_rollout_storage(RolloutStorageConfig(kind="file", path=str(tmp_path / "own")), tmp_path / "s")
    assert isinstance(storage, FileRolloutStorage) and storage.path == tmp_path / "own"


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_hands_over_by_reference_and_keeps_what_was_put_aside():
    storage = MemoryRolloutStorage()
    batch = make_batch("a")
    storage.writer("w").add_batches([batch])
    delivery = storage.receive(1)
    assert delivery is not None and delivery.batches[0] is batch
    delivery.quarantine("no use")
    assert list(storage.quarantined) == [(batch, "no use")]


# --- files -----------------------------------------------------------------------------------------------------------


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
        until(lambda: blocked(other) == 1)
        first.acknowledge()
        waiting.result(LIMIT_S)
    assert drain(storage) == ["b"]


def test_polling_is_no_busy_loop(files, monkeypatch):
    looks = []
    listed = file_storage.list_batches
    monkeypatch.setattr(file_storage, "list_batches", lambda folder: looks.append(folder) or listed(folder))
    storage = files.open(poll_s=0.1)
    storage.writer("w")
    assert storage.receive(0.35) is None
    assert 3 <= len(looks) <= 5


def test_a_listing_that_misses_an_older_file_does_not_change_the_order(files, monkeypatch):
    storage = files.open()
    write(storage.writer("w"), "a", "b", "c")
    listed, calls = file_storage.list_batches, []

    def racing(folder: Path) -> list[BatchName]:
        calls.append(folder)
        names = listed(folder)
        return [names[0], names[2]] if len(calls) == 1 else names

    monkeypatch.setattr(file_storage, "list_batches", racing)
    assert drain(storage) == ["a", "b", "c"]


def test_a_gap_is_passed(files):
    storage = files.open()
    write(storage.writer("w"), "a", "b", "c")
    batch_files(files.path)[1].unlink()
    assert drain(storage) == ["a", "c"]


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
    found = drain(storage)
    assert sorted(found) == ["a", "b", "c"] and files.quarantined == []
    failures[0] = 10**6
    write(storage.writer("w"), "d")
    path = batch_files(files.path)[0]
    assert drain(storage) == []
    assert "cannot be read" in files.quarantined[0][1] and failures[0] == 10**6 - file_storage.READ_ATTEMPTS


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
from test_rollout_storage import make_batch
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


def test_the_documentation_names_every_setting_and_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "rollout_storage.md").read_text()
    fields = RolloutStorageConfig.model_fields
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", page.partition("## Configuration")[2], re.MULTILINE)
    told = {name: default for name, default in rows if name in fields}
    assert told == {
        name: "<run directory>/rollout_storage"
        if name == "path"
        else f"{field.default:g}"
        if isinstance(field.default, float | int)
        else field.default
        for name, field in fields.items()
    }
    for name in MemoryRolloutStorage().metrics():
        assert f"`{name.removeprefix('rollout_storage/')}`" in page or f"`{name}`" in page

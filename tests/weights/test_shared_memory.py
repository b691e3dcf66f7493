"""Segments, who may write over them, and folders that the dead left in memory."""

import gc
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.types import UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster, open_client, shared_memory
from penstock.weights import broadcaster as broadcasters
from penstock.weights.manifest import Manifest, compact_json, describe
from penstock.weights.shared_memory import (
    JobFolder,
    ParallelCopier,
    Segment,
    SharedMemoryFiles,
    _cut,
    find_abandoned,
    free_abandoned,
    is_own_folder,
    job_folder,
    mapped_arrays,
    memory_folder,
    segment_bytes,
)

COPIER = ParallelCopier()


def three_arrays(value: float) -> dict[str, np.ndarray]:
    return {"small": np.full(3, value, np.float32), "large": np.full((100, 100), value, np.float64)}


BYTES = segment_bytes(array.nbytes for array in three_arrays(0.0).values())


def described_three(value: float) -> Manifest:
    return describe("job", "a" * 32, WeightVersion(0, 0), three_arrays(value))


def written(path: Path, value: float) -> Segment:
    segment = Segment(path, BYTES)
    assert segment.take()
    segment.write(three_arrays(value), COPIER)()
    segment.give()
    return segment


@pytest.fixture
def path():
    path = memory_folder() / f"penstock-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_what_is_written_is_mapped_aligned_and_read_only(path: Path):
    segment = written(path, 1.5)
    found = mapped_arrays(path, described_three(1.5))
    np.testing.assert_array_equal(found["large"], three_arrays(1.5)["large"])
    assert all(array.ctypes.data % 64 == 0 and not array.flags.writeable for array in found.values())
    segment.remove()


def test_it_is_not_written_over_while_one_of_its_arrays_lives(path: Path):
    segment = written(path, 1.0)
    kept = mapped_arrays(path, described_three(1.0))["small"]
    gc.collect()
    assert not segment.take()
    del kept
    gc.collect()
    assert segment.take()
    segment.remove()


def test_it_is_not_mapped_while_it_is_written(path: Path):
    segment = written(path, 1.0)
    assert segment.take()
    with pytest.raises(WeightsError, match="being written"):
        mapped_arrays(path, described_three(1.0))
    segment.remove()


def test_arrays_outlive_the_name(path: Path):
    segment = written(path, 2.0)
    found = mapped_arrays(path, described_three(2.0))
    segment.remove()
    assert not path.exists()
    assert float(found["large"].sum()) == 20_000.0
    with pytest.raises(WeightsError, match="cannot be opened"):
        mapped_arrays(path, described_three(2.0))


def test_a_segment_that_is_too_small_is_not_mapped(path: Path):
    path.write_bytes(b"x" * 100)
    with pytest.raises(WeightsError, match="too few"):
        mapped_arrays(path, described_three(1.0))


def test_a_link_is_not_followed(path: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.write_bytes(bytes(BYTES))
    path.symlink_to(other)
    with pytest.raises(WeightsError, match="cannot be opened"):
        mapped_arrays(path, described_three(1.0))


def test_too_little_memory_is_told_with_the_remedy_and_leaves_nothing(path: Path):
    with pytest.raises(WeightsError, match=r"no shared memory for .* Make it larger"):
        Segment(path, 1 << 50)
    assert not path.exists()


def test_only_this_user_may_read_it(path: Path):
    segment = written(path, 1.0)
    assert path.stat().st_mode & 0o777 == 0o600
    segment.remove()


def test_a_copier_moves_every_byte_of_arrays_of_any_size():
    sources = [np.arange(size, dtype=np.int64).view(np.uint8) for size in (0, 1, 400_000, 1_000_003)]
    targets = [np.zeros_like(source) for source in sources]
    COPIER.begin(zip(targets, sources, strict=True))()
    for target, source in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(target, source)


def test_pieces_shrink_so_that_threads_end_together():
    array = np.zeros(25_000_000, np.uint8)
    small = np.zeros(1000, np.uint8)
    pieces = list(_cut([(small, small), (array, array)], threads=2))
    assert [end - start for _, _, start, end in pieces[:4]] == [1000, 6_250_000, 4_687_500, 3_515_625]
    assert len(pieces) == 12 and all(end - start <= 1 << 20 for _, _, start, end in pieces[-4:])
    assert sum(end - start for _, _, start, end in pieces) == 25_001_000
    huge = np.broadcast_to(small[:1], 1 << 30)
    assert {end - start for _, _, start, end in list(_cut([(huge, huge)], threads=2))[:100]} == {1 << 23}


def test_a_helper_that_finds_no_core_is_not_waited_for():
    copier, release = ParallelCopier(), threading.Event()
    for _ in range(copier._helpers):
        copier._pool.submit(release.wait, 60.0)
    source = np.arange(1_000_000)
    target, began = np.zeros_like(source), time.monotonic()
    copier.begin([(target.view(np.uint8), source.view(np.uint8))])()
    assert time.monotonic() - began < 30.0
    np.testing.assert_array_equal(target, source)
    release.set()
    copier.close()


@pytest.mark.skipif(shared_memory._core is None, reason="the system does not tell the core")
def test_helpers_keep_off_the_core_of_the_thread_that_begins(monkeypatch):
    allowed, copier, seen = os.sched_getaffinity(0), ParallelCopier(), queue.SimpleQueue()
    core = max(allowed)
    monkeypatch.setattr(shared_memory, "_core", lambda: core)
    monkeypatch.setattr(shared_memory, "_copy", lambda pieces: seen.put(os.sched_getaffinity(0)))
    source = np.zeros(30_000_000, np.uint8)
    finish = copier.begin([(source, source)])
    for _ in range(copier._helpers):
        assert seen.get(timeout=5.0) == allowed - {core}
    finish()
    assert seen.get(timeout=5.0) == allowed == os.sched_getaffinity(0)
    copier.close()


DIES = """
import os, sys
from pathlib import Path
from penstock.weights import shared_memory
shared_memory.memory_folder = lambda: Path(sys.argv[2])
folder = shared_memory.JobFolder(sys.argv[1], 5.0)
(folder.path / "segment").write_bytes(b"left behind")
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def folder_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(shared_memory, "memory_folder", lambda: tmp_path)
    return "a job"


def test_a_folder_is_made_for_this_user_and_removed(folder_job: str):
    folder = JobFolder(folder_job, 1.0)
    assert folder.path == job_folder(folder_job) and is_own_folder(folder.path)
    (folder.path / "segment").write_bytes(b"x")
    folder.remove()
    assert not folder.path.exists()


def test_a_folder_that_somebody_removed_is_no_error_at_the_end(folder_job: str):
    folder = JobFolder(folder_job, 1.0)
    shutil.rmtree(folder.path)
    folder.remove()
    JobFolder(folder_job, 1.0).remove()


def test_two_jobs_have_two_folders(folder_job: str):
    assert job_folder(folder_job) != job_folder("another")


@pytest.mark.attack
def test_a_second_broadcaster_of_the_job_is_refused_in_time(folder_job: str):
    first = JobFolder(folder_job, 1.0)
    with pytest.raises(WeightsError, match="another broadcaster of this job lives"):
        JobFolder(folder_job, 0.1)
    first.remove()
    JobFolder(folder_job, 1.0).remove()


@pytest.mark.attack
def test_the_next_broadcaster_of_the_job_frees_what_a_killed_one_left(folder_job: str, tmp_path: Path):
    died = subprocess.run([sys.executable, "-c", DIES, folder_job, str(tmp_path)], timeout=280)
    assert died.returncode == -9
    assert [path.name for path in job_folder(folder_job).iterdir() if path.name == "segment"] == ["segment"]
    folder = JobFolder(folder_job, 5.0)
    assert not (folder.path / "segment").exists()
    folder.remove()


@pytest.mark.attack
def test_the_next_broadcaster_of_any_job_frees_it_too_but_nothing_of_the_living(folder_job: str):
    abandoned, alive = job_folder("abandoned"), JobFolder("alive", 1.0)
    abandoned.mkdir(mode=0o700)
    (abandoned / "broadcaster.lock").touch()
    (abandoned / "segment").write_bytes(b"left behind")
    (alive.path / "segment").write_bytes(b"in use")
    JobFolder(folder_job, 1.0).remove()
    assert not abandoned.exists()
    assert (alive.path / "segment").exists()
    alive.remove()


@pytest.mark.attack
def test_a_folder_that_others_may_write_to_is_refused(folder_job: str):
    path = job_folder(folder_job)
    path.mkdir()
    os.chmod(path, 0o777)
    with pytest.raises(WeightsError, match="not a folder of this user alone"):
        JobFolder(folder_job, 0.1)


@pytest.mark.attack
def test_a_link_in_its_place_is_refused(folder_job: str, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    job_folder(folder_job).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="not a folder of this user alone"):
        JobFolder(folder_job, 0.1)


@pytest.mark.attack
def test_what_a_killed_broadcaster_left_is_found_and_freed_without_another_broadcaster(folder_job: str, tmp_path: Path):
    died = subprocess.run([sys.executable, "-c", DIES, folder_job, str(tmp_path)], timeout=280)
    assert died.returncode == -9
    found = find_abandoned()
    taken = sum(file.stat().st_blocks for file in job_folder(folder_job).iterdir()) * 512
    assert [(folder.path, folder.nbytes) for folder in found] == [(job_folder(folder_job), taken)]
    assert job_folder(folder_job).is_dir(), "nothing is removed by looking"
    assert found[0] in free_abandoned()
    assert not job_folder(folder_job).exists()


@pytest.mark.attack
def test_nothing_of_the_living_is_freed_not_even_of_one_that_is_stopped(folder_job: str):
    alive = JobFolder(folder_job, 1.0)
    (alive.path / "segment").write_bytes(b"in use")
    assert find_abandoned() == free_abandoned() == []
    assert (alive.path / "segment").exists()
    alive.remove()


def test_what_was_killed_as_it_came_or_went_leaves_no_folder(folder_job: str):
    empty, foreign = job_folder("empty"), job_folder("foreign")
    for folder in (empty, foreign):
        folder.mkdir(mode=0o700)
    foreign.chmod(0o777)
    assert free_abandoned() == []
    assert not empty.exists() and foreign.exists(), "others may write there: it is nobody's"


HOLDS = """
import json, sys
from penstock.weights.manifest import Manifest
from penstock.weights.shared_memory import SharedMemoryFiles
job, name = sys.argv[1:]
held = SharedMemoryFiles(job).read_arrays(name, Manifest.from_values(json.loads(sys.stdin.buffer.readline()), 1 << 40))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def memory(job: str) -> Iterator[SharedMemoryFiles]:
    memory = SharedMemoryFiles(job)
    memory.prepare()
    yield memory
    memory.close()


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full(5000, value, np.float32)}


def described(value: float) -> Manifest:
    return describe("job", "a" * 32, WeightVersion(0, int(value)), arrays(value))


def segments(job: str) -> list[str]:
    return sorted(path.name for path in job_folder(job).glob("segment-*"))


def publish(memory: SharedMemoryFiles, value: float, taken: set[str]) -> str:
    name = memory.begin_arrays(arrays(value), taken)
    memory.write_arrays(name, described(value), arrays(value))
    memory.write_pointer(name.encode())
    memory.discard(taken - {name})
    return name


def test_two_segments_are_used_in_turn(memory: SharedMemoryFiles, job: str):
    names, offered = [], set[str]()
    for value in range(6):
        names.append(publish(memory, value, offered))
        offered = {names[-1]}
    assert names == ["segment-0.weights", "segment-1.weights"] * 3
    assert segments(job) == ["segment-0.weights", "segment-1.weights"]


def test_a_version_that_somebody_holds_costs_one_more_until_it_is_let_go(memory: SharedMemoryFiles, job: str):
    first = publish(memory, 0, set())
    held = SharedMemoryFiles(job).read_arrays(first, described(0))
    offered = {first}
    for value in range(1, 5):
        offered = {publish(memory, value, offered)}
    assert len(segments(job)) == 3
    np.testing.assert_array_equal(held["x"], arrays(0)["x"])
    del held
    gc.collect()
    publish(memory, 5, offered)
    assert len(segments(job)) == 2


@pytest.mark.attack
def test_a_reader_that_is_killed_holds_nothing(memory: SharedMemoryFiles, job: str):
    first = publish(memory, 0, set())
    reader = subprocess.Popen([sys.executable, "-c", HOLDS, job, first], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(compact_json(described(0).to_values()) + b"\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == b"held\n"
    second = publish(memory, 1, {first})
    third = publish(memory, 2, {second})
    assert third not in (first, second)
    reader.kill()
    reader.communicate(timeout=280)
    assert publish(memory, 3, {third}) in (first, second)
    publish(memory, 4, {first})
    assert len(segments(job)) == 2


def test_arrays_of_another_size_get_another_segment(memory: SharedMemoryFiles, job: str):
    first = publish(memory, 0, set())
    larger = {"x": np.zeros(50_000, np.float32)}
    assert memory.begin_arrays(larger, {first}) == "segment-1.weights"


def test_a_publication_that_was_given_up_holds_nothing(memory: SharedMemoryFiles, job: str):
    first = publish(memory, 0, set())
    given_up = memory.begin_arrays(arrays(1), {first})  # and then, say, its digests could not be reckoned
    assert publish(memory, 2, {first}) == given_up
    np.testing.assert_array_equal(SharedMemoryFiles(job).read_arrays(given_up, described(2))["x"], arrays(2)["x"])


def test_the_pointer_is_seen_when_it_changes(memory: SharedMemoryFiles, job: str):
    reader = SharedMemoryFiles(job)
    assert reader.read_pointer() is None
    memory.write_pointer(b"one")
    assert reader.read_pointer() == b"one"
    memory.write_pointer(b"two")
    assert reader.read_pointer() == b"two"


def test_messages_are_bounded_and_discarded(memory: SharedMemoryFiles, job: str):
    reader = SharedMemoryFiles(job)
    memory.write_delta("delta-0.bin", [b"abc", b"def"])
    assert reader.read_delta("delta-0.bin", 6) == b"abcdef"
    with pytest.raises(WeightsError, match="at most 5"):
        reader.read_delta("delta-0.bin", 5)
    memory.discard({"delta-0.bin"})
    with pytest.raises(WeightsError, match="gone"):
        reader.read_delta("delta-0.bin", 6)


def test_closing_frees_everything(job: str):
    memory = SharedMemoryFiles(job)
    memory.prepare()
    held = SharedMemoryFiles(job).read_arrays(publish(memory, 3, set()), described(3))
    memory.close()
    assert not job_folder(job).exists()
    assert float(held["x"][0]) == 3.0
    with pytest.raises(UnreachableError, match="no broadcaster"):
        SharedMemoryFiles(job).read_pointer()


def test_a_version_whose_digests_fail_leaves_the_one_before_and_the_next_arrives(job: str, monkeypatch):
    def large(value: float) -> dict[str, np.ndarray]:
        return {"x": np.full(2_000_000, value, np.float32)}

    def fail(*_: object) -> None:
        raise MemoryError("no digests")

    config = WeightsConfig(transport="shared_memory")
    broadcaster = open_broadcaster(config, job, "token", "unused")
    client = open_client(broadcaster.endpoint(), config, "token", "client")
    try:
        broadcaster.publish(WeightVersion(0, 0), large(0))
        with monkeypatch.context() as patched:
            patched.setattr(broadcasters, "describe", fail)
            with pytest.raises(MemoryError, match="no digests"):
                broadcaster.publish(WeightVersion(0, 1), large(1))
        assert client.wait_for(None, 10.0) == WeightVersion(0, 0)
        np.testing.assert_array_equal(client.fetch(WeightVersion(0, 0))["x"], large(0)["x"])
        broadcaster.publish(WeightVersion(0, 2), large(2))
        np.testing.assert_array_equal(client.fetch(WeightVersion(0, 2))["x"], large(2)["x"])
        assert len(segments(broadcaster.endpoint()["job"])) == 2  # that of the version that failed was used again
    finally:
        client.close()
        broadcaster.close()

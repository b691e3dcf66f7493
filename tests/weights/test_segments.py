import gc
import os
import queue
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from penstock.types import WeightsError, WeightVersion
from penstock.weights import segments
from penstock.weights.manifest import Manifest, describe
from penstock.weights.segments import Copier, Segment, _cut, mapped_arrays, memory_folder, segment_bytes

COPIER = Copier()


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"small": np.full(3, value, np.float32), "large": np.full((100, 100), value, np.float64)}


BYTES = segment_bytes(array.nbytes for array in arrays(0.0).values())


def described(value: float) -> Manifest:
    return describe("job", "a" * 32, WeightVersion(0, 0), arrays(value))


def written(path: Path, value: float) -> Segment:
    segment = Segment(path, BYTES)
    assert segment.take()
    segment.write(arrays(value), COPIER)()
    segment.give()
    return segment


@pytest.fixture
def path():
    path = memory_folder() / f"penstock-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_what_is_written_is_mapped_aligned_and_read_only(path: Path):
    segment = written(path, 1.5)
    found = mapped_arrays(path, described(1.5))
    np.testing.assert_array_equal(found["large"], arrays(1.5)["large"])
    assert all(array.ctypes.data % 64 == 0 and not array.flags.writeable for array in found.values())
    segment.remove()


def test_it_is_not_written_over_while_one_of_its_arrays_lives(path: Path):
    segment = written(path, 1.0)
    kept = mapped_arrays(path, described(1.0))["small"]
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
        mapped_arrays(path, described(1.0))
    segment.remove()


def test_arrays_outlive_the_name(path: Path):
    segment = written(path, 2.0)
    found = mapped_arrays(path, described(2.0))
    segment.remove()
    assert not path.exists()
    assert float(found["large"].sum()) == 20_000.0
    with pytest.raises(WeightsError, match="cannot be opened"):
        mapped_arrays(path, described(2.0))


def test_a_segment_that_is_too_small_is_not_mapped(path: Path):
    path.write_bytes(b"x" * 100)
    with pytest.raises(WeightsError, match="too few"):
        mapped_arrays(path, described(1.0))


def test_a_link_is_not_followed(path: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.write_bytes(bytes(BYTES))
    path.symlink_to(other)
    with pytest.raises(WeightsError, match="cannot be opened"):
        mapped_arrays(path, described(1.0))


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
    copier, release = Copier(), threading.Event()
    for _ in range(copier._helpers):
        copier._pool.submit(release.wait, 5.0)
    source = np.arange(1_000_000)
    target, began = np.zeros_like(source), time.monotonic()
    copier.begin([(target.view(np.uint8), source.view(np.uint8))])()
    assert time.monotonic() - began < 2.0
    np.testing.assert_array_equal(target, source)
    release.set()
    copier.close()


@pytest.mark.skipif(segments._core is None, reason="the system does not tell the core")
def test_helpers_keep_off_the_core_of_the_thread_that_begins(monkeypatch):
    allowed, copier, seen = os.sched_getaffinity(0), Copier(), queue.SimpleQueue()
    core = max(allowed)
    monkeypatch.setattr(segments, "_core", lambda: core)
    monkeypatch.setattr(segments, "_copy", lambda pieces: seen.put(os.sched_getaffinity(0)))
    source = np.zeros(30_000_000, np.uint8)
    finish = copier.begin([(source, source)])
    for _ in range(copier._helpers):
        assert seen.get(timeout=5.0) == allowed - {core}
    finish()
    assert seen.get(timeout=5.0) == allowed == os.sched_getaffinity(0)
    copier.close()

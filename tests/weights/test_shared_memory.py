import gc
import subprocess
import sys
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.types import UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster, open_client, publishing
from penstock.weights.job_folder import job_folder
from penstock.weights.manifest import Manifest, describe
from penstock.weights.shared_memory import SharedMemory, SharedMemoryShelf

HOLDS = """
import sys
from penstock.weights.manifest import Manifest
from penstock.weights.shared_memory import SharedMemoryShelf
job, name = sys.argv[1:]
held = SharedMemoryShelf(job).arrays(name, Manifest.from_json(sys.stdin.buffer.readline(), 1 << 40))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def memory(job: str) -> Iterator[SharedMemory]:
    memory = SharedMemory(job)
    yield memory
    memory.close()


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full(5000, value, np.float32)}


def described(value: float) -> Manifest:
    return describe("job", "a" * 32, WeightVersion(0, int(value)), arrays(value))


def segments(job: str) -> list[str]:
    return sorted(path.name for path in job_folder(job).glob("segment-*"))


def publish(memory: SharedMemory, value: float, taken: set[str]) -> str:
    name = memory.begin_arrays(arrays(value), taken)
    memory.write_arrays(name, described(value), arrays(value))
    memory.write_marker(name.encode())
    memory.discard(taken - {name})
    return name


def test_two_segments_are_used_in_turn(memory: SharedMemory, job: str):
    names, offered = [], set[str]()
    for value in range(6):
        names.append(publish(memory, value, offered))
        offered = {names[-1]}
    assert names == ["segment-0.weights", "segment-1.weights"] * 3
    assert segments(job) == ["segment-0.weights", "segment-1.weights"]


def test_a_version_that_somebody_holds_costs_one_more_until_it_is_let_go(memory: SharedMemory, job: str):
    first = publish(memory, 0, set())
    held = SharedMemoryShelf(job).arrays(first, described(0))
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
def test_a_reader_that_is_killed_holds_nothing(memory: SharedMemory, job: str):
    first = publish(memory, 0, set())
    reader = subprocess.Popen([sys.executable, "-c", HOLDS, job, first], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(described(0).to_json() + b"\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == b"held\n"
    second = publish(memory, 1, {first})
    third = publish(memory, 2, {second})
    assert third not in (first, second)
    reader.kill()
    reader.communicate(timeout=30)
    assert publish(memory, 3, {third}) in (first, second)
    publish(memory, 4, {first})
    assert len(segments(job)) == 2


def test_arrays_of_another_size_get_another_segment(memory: SharedMemory, job: str):
    first = publish(memory, 0, set())
    larger = {"x": np.zeros(50_000, np.float32)}
    assert memory.begin_arrays(larger, {first}) == "segment-1.weights"


def test_a_publication_that_was_given_up_holds_nothing(memory: SharedMemory, job: str):
    first = publish(memory, 0, set())
    given_up = memory.begin_arrays(arrays(1), {first})  # and then, say, its digests could not be reckoned
    assert publish(memory, 2, {first}) == given_up
    np.testing.assert_array_equal(SharedMemoryShelf(job).arrays(given_up, described(2))["x"], arrays(2)["x"])


def test_the_marker_is_seen_when_it_changes(memory: SharedMemory, job: str):
    shelf = SharedMemoryShelf(job)
    assert shelf.marker() is None
    memory.write_marker(b"one")
    assert shelf.marker() == b"one"
    memory.write_marker(b"two")
    assert shelf.marker() == b"two"


def test_messages_are_bounded_and_discarded(memory: SharedMemory, job: str):
    shelf = SharedMemoryShelf(job)
    memory.write_message("delta-0.bin", [b"abc", b"def"])
    assert shelf.message("delta-0.bin", 6) == b"abcdef"
    with pytest.raises(WeightsError, match="at most 5"):
        shelf.message("delta-0.bin", 5)
    memory.discard({"delta-0.bin"})
    with pytest.raises(WeightsError, match="gone"):
        shelf.message("delta-0.bin", 6)


def test_closing_frees_everything(job: str):
    memory = SharedMemory(job)
    held = SharedMemoryShelf(job).arrays(publish(memory, 3, set()), described(3))
    memory.close()
    assert not job_folder(job).exists()
    assert float(held["x"][0]) == 3.0
    with pytest.raises(UnreachableError, match="no broadcaster"):
        SharedMemoryShelf(job).marker()


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
            patched.setattr(publishing, "describe", fail)
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

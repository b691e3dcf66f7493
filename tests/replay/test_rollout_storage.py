"""What every kind of rollout storage promises."""

import re
import time
from pathlib import Path

import pytest
from tests.replay.storage_kinds import LIMIT_S, STAMP, FileKind, blocked, drain, make_batch, names_of, write
from tests.waiting import wait_until

from penstock.replay import (
    Delivery,
    FileRolloutStorage,
    MemoryRolloutStorage,
    RolloutStorage,
    RolloutStorageConfig,
    open_rollout_storage,
)
from penstock.types import InvalidRolloutError, NoProgressError, RolloutBatch, RolloutSink, Stopped


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
    assert 0.09 < time.monotonic() - started < 30.0
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
    wait_until(lambda: blocked(storage) == 1)
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
    wait_until(lambda: blocked(storage) == 1)
    write(storage.writer("other"), "c")
    assert sorted(drain(storage, 2)) == ["a", "c"]
    waiting.result(LIMIT_S)
    assert drain(storage) == ["b"]


def test_capacity_counts_groups_and_a_larger_batch_passes_alone(kind, pool):
    storage = kind.open(capacity_groups=3)
    writer = storage.writer("w")
    writer.add_batches([make_batch("a", "b", "c", "d", "e")])
    waiting = pool.submit(write, writer, "f")
    wait_until(lambda: blocked(storage) == 1)
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
    storage = kind.open(capacity_groups=1, **({"poll_s": 30} if isinstance(kind, FileKind) else {}))
    writer = storage.writer("w")
    write(writer, "a")
    waits = [pool.submit(write, writer, "b"), pool.submit(write, writer, "c")]
    wait_until(lambda: blocked(storage) == 2)
    assert storage.receive(1) is not None
    waits.append(pool.submit(storage.receive, LIMIT_S))
    waits.append(pool.submit(storage.receive, LIMIT_S))
    started = time.monotonic()
    storage.close()
    for wait in waits:
        with pytest.raises(Stopped):
            wait.result(LIMIT_S)
    assert time.monotonic() - started < 20.0  # of `poll_s`, 30 s
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


def test_memory_hands_over_by_reference_and_keeps_what_was_put_aside():
    storage = MemoryRolloutStorage()
    batch = make_batch("a")
    storage.writer("w").add_batches([batch])
    delivery = storage.receive(1)
    assert delivery is not None and delivery.batches[0] is batch
    delivery.quarantine("no use")
    assert list(storage.quarantined) == [(batch, "no use")]


def test_the_documentation_names_every_setting_and_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    fields = RolloutStorageConfig.model_fields
    section = page.partition("### Configuration of rollout storage")[2]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", section, re.MULTILINE)
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

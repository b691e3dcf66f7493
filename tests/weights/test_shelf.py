import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from tests.weights.publications import INCARNATION, JOB, arrays_of, manifest_of, publications

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig
from penstock.weights.fetching import Announcement, FetchingClient
from penstock.weights.manifest import Manifest
from penstock.weights.marker import Marker, Offer
from penstock.weights.shelf import ShelfReader

LARGE = 1 << 40


def marker_of(step: int, incarnation: str = INCARNATION, deltas: bool = False) -> bytes:
    chains = {manifest_of(step - 1).content: ("delta-0.bin",)} if deltas else {}
    return Marker(JOB, (Offer(manifest_of(step, incarnation), f"file-{step}", chains),)).to_bytes("t")


class FakeShelf:
    look_every_s = 0.001
    may_hang = False

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.while_reading: Callable[[], object] = lambda: None
        self.missing = False

    def marker(self) -> bytes | None:
        return self.content

    def arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        self.while_reading()
        if self.missing:
            raise WeightsError(f"{name} is gone")
        return arrays_of(manifest.version.step)

    def message(self, name: str, most_bytes: int) -> Any:
        delta = publications(2, deltas=True)[1].chains[manifest_of(0).content][0].to_bytes()
        assert name == "delta-0.bin" and most_bytes == manifest_of(1).nbytes
        return delta

    def put(self, content: bytes) -> None:
        self.content = content


def reader_of(shelf: FakeShelf) -> ShelfReader:
    return ShelfReader(shelf, JOB, "t", LARGE)


def test_an_empty_shelf_has_nothing():
    reader = reader_of(FakeShelf(None))
    assert reader.newest() is None
    with pytest.raises(SupersededVersionError, match="nothing is published"):
        reader.read(WeightVersion(0, 0), None, 1.0)


def test_a_version_is_read_whole():
    received = reader_of(FakeShelf(marker_of(3))).read(WeightVersion(0, 3), None, 1.0)
    assert received.manifest == manifest_of(3)
    assert received.arrays is not None and received.arrays["step"][0] == 3
    assert received.moved_bytes == manifest_of(3).nbytes


def test_a_delta_is_read_where_one_leads_from_the_base():
    reader = reader_of(FakeShelf(marker_of(1, deltas=True)))
    received = reader.read(WeightVersion(0, 1), manifest_of(0).content, 1.0)
    assert received.arrays is None and len(received.deltas) == 1
    assert received.moved_bytes == len(received.deltas[0])
    assert reader.read(WeightVersion(0, 1), manifest_of(7).content, 1.0).arrays is not None


def test_a_version_that_goes_while_it_is_read_is_superseded_not_damaged():
    shelf = FakeShelf(marker_of(3))
    shelf.while_reading = lambda: shelf.put(marker_of(4))
    with pytest.raises(SupersededVersionError) as refusal:
        reader_of(shelf).read(WeightVersion(0, 3), None, 1.0)
    assert refusal.value.newest == (0, 4)
    shelf.put(marker_of(3))
    shelf.missing = True
    with pytest.raises(SupersededVersionError):
        reader_of(shelf).read(WeightVersion(0, 3), None, 1.0)


def test_a_file_that_is_gone_although_it_is_offered_is_damage():
    shelf = FakeShelf(marker_of(3))
    shelf.missing = True
    with pytest.raises(WeightsError, match="file-3 is gone") as refusal:
        reader_of(shelf).read(WeightVersion(0, 3), None, 1.0)
    assert not isinstance(refusal.value, SupersededVersionError)


def test_a_version_that_is_published_anew_while_it_is_read_is_read_again():
    shelf = FakeShelf(marker_of(3))
    shelf.while_reading = lambda: shelf.put(marker_of(3, "b" * 32))
    with pytest.raises(WeightsError, match="published anew"):
        reader_of(shelf).read(WeightVersion(0, 3), None, 1.0)


def test_a_wait_ends_when_something_else_is_there():
    shelf, seen = FakeShelf(marker_of(3)), []
    reader = reader_of(shelf)
    known = reader.newest()
    assert reader.wait(known, 0.0) == known
    waiter = threading.Thread(target=lambda: seen.append(reader.wait(known, 30.0)))
    waiter.start()
    shelf.put(marker_of(4))
    waiter.join(30.0)
    assert seen == [Announcement(INCARNATION, WeightVersion(0, 4))]


def test_closing_ends_a_wait_and_every_read():
    reader, seen = reader_of(FakeShelf(marker_of(3))), []
    known = reader.newest()
    waiter = threading.Thread(target=lambda: seen.append(reader.wait(known, 30.0)))
    waiter.start()
    reader.close()
    waiter.join(10.0)
    assert seen == [known]
    with pytest.raises(Stopped):
        reader.read(WeightVersion(0, 3), None, 1.0)


def hanging_shelf(released: threading.Event) -> FakeShelf:
    shelf = FakeShelf(marker_of(3))
    shelf.may_hang = True
    shelf.while_reading = lambda: released.wait(30.0)
    return shelf


def test_a_read_that_hangs_ends_at_the_fetchs_limit():
    released = threading.Event()
    reader = reader_of(hanging_shelf(released))
    with pytest.raises(UnreachableError, match=r"reading WeightVersion\(lineage=0, step=3\) was not over within 0.1 s"):
        reader.read(WeightVersion(0, 3), None, 0.1)
    released.set()
    assert reader.read(WeightVersion(0, 3), None, 30.0).manifest == manifest_of(3)


def test_a_marker_that_hangs_is_a_failure_of_the_client(monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()
    shelf = hanging_shelf(released)
    monkeypatch.setattr(shelf, "marker", lambda: released.wait(30.0) and None)
    monkeypatch.setattr("penstock.weights.shelf.MARKER_S", 0.05)
    endpoint = {"transport": "checkpoint", "job": JOB, "incarnation": INCARNATION}
    client = FetchingClient(endpoint, WeightsConfig(transport="checkpoint"), lambda _: reader_of(shelf))
    assert client.wait_for(None, 0.0) is None
    assert client.failure == "reading the marker of weights was not over within 0.05 s"
    monkeypatch.undo()
    assert client.wait_for(None, 30.0) == WeightVersion(0, 3)
    assert client.failure is None
    released.set()


def test_what_cannot_hang_is_read_in_the_callers_thread():
    shelf, threads = FakeShelf(marker_of(3)), []
    shelf.while_reading = lambda: threads.append(threading.current_thread())
    reader_of(shelf).read(WeightVersion(0, 3), None, 1.0)
    assert threads == [threading.current_thread()]

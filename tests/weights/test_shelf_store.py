from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from tests.weights.publications import JOB, arrays_of, manifest_of, publications

from penstock.types import WeightsError, WeightVersion
from penstock.weights.manifest import Manifest
from penstock.weights.marker import Marker, free_name
from penstock.weights.publishing import Publication
from penstock.weights.shelf_store import ShelfStore

LARGE = 1 << 40


class FakeShelf:
    """Keeps files in a dict, and writes down what happens in which order."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.content = b""
        self.log: list[str] = []
        self.full = False

    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        return free_name("weights", "", taken)

    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        self.files[name] = manifest
        self.log.append(name)

    def write_message(self, name: str, buffers: Iterable[bytes]) -> None:
        self.files[name] = b"".join(buffers)
        self.log.append(name)

    def write_marker(self, content: bytes) -> None:
        if self.full:
            raise WeightsError("no room")
        self.content = content
        self.log.append("marker")

    def discard(self, names: set[str]) -> None:
        for name in names:
            del self.files[name]
        self.log += [f"-{name}" for name in sorted(names)]

    def endpoint(self) -> dict[str, Any]:
        return {"place": "here"}

    def close(self) -> None:
        self.log.append("closed")

    def marker(self) -> Marker:
        return Marker.from_bytes(self.content, JOB, "t", LARGE)


def offer(store: ShelfStore, publication: Publication) -> None:
    store.begin(publication.arrays)
    store.put(publication)


def test_the_marker_comes_after_the_files_and_what_is_superseded_goes_last():
    shelf = FakeShelf()
    store = ShelfStore(shelf, JOB, "t", keep=1)
    for publication in publications(3):
        offer(store, publication)
    assert shelf.log == [
        "weights-0",
        "marker",
        "weights-1",
        "marker",
        "-weights-0",
        "weights-0",
        "marker",
        "-weights-1",
    ]
    assert shelf.marker().announcement.version == WeightVersion(0, 2)


def test_as_many_versions_are_kept_as_asked():
    shelf = FakeShelf()
    store = ShelfStore(shelf, JOB, "t", keep=3)
    for publication in publications(5):
        offer(store, publication)
    assert [offer.manifest.version.step for offer in shelf.marker().offers] == [4, 3, 2]
    assert len(shelf.files) == 3


def test_where_the_marker_cannot_be_written_the_version_before_stays():
    shelf = FakeShelf()
    store = ShelfStore(shelf, JOB, "t", keep=1)
    first, second, third = publications(3, deltas=True)
    offer(store, first)
    shelf.full = True
    with pytest.raises(WeightsError, match="no room"):
        offer(store, second)
    offered = shelf.marker().offer(WeightVersion(0, 0))
    assert shelf.files[offered.file] == first.manifest
    shelf.full = False
    offer(store, third)
    newest = shelf.marker().offers[0]
    assert shelf.files[newest.file] == third.manifest
    assert shelf.files.keys() >= newest.files


def test_no_file_that_is_offered_is_written_over():
    shelf = FakeShelf()
    store = ShelfStore(shelf, JOB, "t", keep=2)
    for publication in publications(9, deltas=True):
        before = dict(shelf.files)
        offered = shelf.marker().files if shelf.content else set()
        shelf.full = True
        with pytest.raises(WeightsError, match="no room"):
            offer(store, publication)
        assert {name: shelf.files[name] for name in offered} == {name: before[name] for name in offered}
        shelf.full = False
        offer(store, publication)


def test_each_delta_is_written_once_and_goes_when_no_way_needs_it():
    shelf = FakeShelf()
    store = ShelfStore(shelf, JOB, "t", keep=1)
    for publication in publications(8, deltas=True):
        offer(store, publication)
        assert shelf.files.keys() == shelf.marker().files
    written = [name for name in shelf.log if name.startswith("delta")]
    assert len(written) == 7
    newest = shelf.marker().offers[0]
    assert sorted(version.step for version, _ in newest.chains) == [3, 4, 5, 6, 7]
    assert len(newest.chains[manifest_of(4).content]) == 3


def test_what_a_broadcaster_before_offers_is_kept_and_its_files_are_not_written_over():
    shelf = FakeShelf()
    offer(ShelfStore(shelf, JOB, "t", keep=2), publications(1)[0])
    again = ShelfStore(shelf, JOB, "t", keep=2, found=shelf.marker())
    offer(again, publications(2)[1])
    assert [(offer.manifest.version.step, offer.file) for offer in shelf.marker().offers] == [
        (1, "weights-1"),
        (0, "weights-0"),
    ]


def test_the_same_version_of_a_broadcaster_before_is_replaced_and_an_older_one_refused():
    shelf = FakeShelf()
    old = ShelfStore(shelf, JOB, "t", keep=2)
    for publication in publications(4):
        offer(old, publication)
    again = ShelfStore(shelf, JOB, "t", keep=2, found=shelf.marker())
    with pytest.raises(WeightsError, match="older than"):
        offer(again, publications(3)[2])
    same = publications(4)[3]
    offer(again, type(same)(manifest_of(3, "b" * 32), arrays_of(3), {}))
    assert [(offer.manifest.version.step, offer.manifest.incarnation[0]) for offer in shelf.marker().offers] == [
        (3, "b"),
        (2, "a"),
    ]


def test_bytes_written_are_counted():
    store = ShelfStore(FakeShelf(), JOB, "t", keep=1)
    first, second = publications(2, deltas=True)
    offer(store, first)
    assert store.metrics() == {"weights/bytes_written": 20_004.0}
    offer(store, second)
    delta = second.chains[first.manifest.content][0]
    assert store.metrics() == {"weights/bytes_written": 20_004.0 + delta.nbytes}

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.weights.publications import JOB, arrays_of, manifest_of

from penstock.types import WeightsError, WeightVersion
from penstock.weights import WeightsConfig, publishing
from penstock.weights.publishing import Publication, PublishingBroadcaster, new_incarnation


class FakeStore:
    def __init__(self) -> None:
        self.put_here: list[Publication] = []
        self.begun: list[Mapping[str, np.ndarray]] = []
        self.closed = 0
        self.full = False

    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.begun.append(arrays)

    def put(self, publication: Publication) -> None:
        if self.full:
            raise WeightsError("no room")
        self.put_here.append(publication)

    def endpoint(self) -> dict[str, Any]:
        return {"address": "here"}

    def metrics(self) -> dict[str, float]:
        return {"weights/bytes_written": 7.0}

    def close(self) -> None:
        self.closed += 1


def broadcaster_of(store: FakeStore, **config: Any) -> PublishingBroadcaster:
    return PublishingBroadcaster(WeightsConfig.model_validate(config), JOB, store, "b" * 32)


def test_a_publication_is_described_and_put():
    store = FakeStore()
    broadcaster_of(store).publish(WeightVersion(0, 3), arrays_of(3))
    assert store.put_here[0].manifest == manifest_of(3, "b" * 32)
    assert store.put_here[0].chains == {}


def test_the_store_may_begin_while_digests_are_reckoned_but_not_with_what_cannot_be_sent(monkeypatch):
    store, order = FakeStore(), []
    describe = publishing.describe
    monkeypatch.setattr(store, "begin", lambda arrays: order.append(("begin", list(arrays))))
    monkeypatch.setattr(publishing, "describe", lambda *args: order.append("describe") or describe(*args))
    broadcaster = broadcaster_of(store)
    broadcaster.publish(WeightVersion(0, 3), arrays_of(3))
    assert order == [("begin", ["kernel", "step"]), "describe"] and len(store.put_here) == 1
    with pytest.raises(WeightsError, match="arrays cannot be sent: .'words is object'"):
        broadcaster_of(store).publish(WeightVersion(0, 3), {"words": np.array([None])})
    assert len(order) == 2


def test_arrays_of_the_host_are_put_by_reference():
    store, arrays = FakeStore(), arrays_of(3)
    broadcaster_of(store).publish(WeightVersion(0, 3), arrays)
    assert store.put_here[0].arrays["kernel"] is arrays["kernel"]


def test_the_endpoint_says_who_and_where():
    assert broadcaster_of(FakeStore()).endpoint() == {
        "transport": "arrow_flight",
        "job": JOB,
        "incarnation": "b" * 32,
        "address": "here",
    }


def test_with_deltas_there_are_ways_from_earlier_versions():
    store = FakeStore()
    broadcaster = broadcaster_of(store, encoding="delta")
    for step in range(1, 4):
        broadcaster.publish(WeightVersion(0, step), arrays_of(step))
    assert sorted(version.step for version, _ in store.put_here[-1].chains) == [1, 2, 3]
    assert broadcaster.metrics()["weights/changed_share"] == pytest.approx(2 / 5001)
    assert broadcaster.metrics()["weights/bytes_delta"] < 1000


def test_a_version_that_could_not_be_put_may_be_published_again():
    store = FakeStore()
    broadcaster = broadcaster_of(store)
    broadcaster.publish(WeightVersion(0, 0), arrays_of(0))
    store.full = True
    with pytest.raises(WeightsError, match="no room"):
        broadcaster.publish(WeightVersion(0, 1), arrays_of(1))
    assert broadcaster.latest() == WeightVersion(0, 0)
    store.full = False
    broadcaster.publish(WeightVersion(0, 1), arrays_of(1))
    assert broadcaster.latest() == WeightVersion(0, 1)


def test_it_closes_its_store_once():
    store = FakeStore()
    broadcaster = broadcaster_of(store)
    broadcaster.close()
    broadcaster.close()
    assert store.closed == 1


def test_numbers_of_the_store_are_among_its_own():
    broadcaster = broadcaster_of(FakeStore())
    broadcaster.publish(WeightVersion(0, 0), {"x": np.zeros(10, np.float32)})
    numbers = broadcaster.metrics()
    assert numbers["weights/bytes_written"] == 7.0 and numbers["weights/bytes_published"] == 40.0
    parts = ("host_copy_s", "digest_s", "encode_s", "serialise_s")
    assert numbers["weights/publish_s"] == pytest.approx(sum(numbers[f"weights/{part}"] for part in parts))


def test_incarnations_are_never_the_same():
    assert len({new_incarnation() for _ in range(100)}) == 100

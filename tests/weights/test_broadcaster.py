"""Which arrays are published, how they come to the host, and what a publication is."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.weights.publications import JOB, arrays_of, manifest_of

from penstock.types import WeightsError, WeightVersion
from penstock.weights import WeightsConfig, merged_arrays, trained_arrays
from penstock.weights import broadcaster as broadcasters
from penstock.weights.broadcaster import Publication, PublishingBroadcaster, host_arrays, new_incarnation


def model() -> dict[str, jnp.ndarray]:
    return {"embedding": jnp.ones((2, 2)), "layers.query": jnp.zeros(3), "layers.key": jnp.zeros(3)}


def test_frozen_arrays_are_left_out():
    assert list(trained_arrays(model(), [])) == ["embedding", "layers.query", "layers.key"]
    assert list(trained_arrays(model(), ["embedding", "*.key"])) == ["layers.query"]


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(WeightsError, match=r"\['head'\] match no name"):
        trained_arrays(model(), ["head", "embedding"])


def test_freezing_everything_is_an_error():
    with pytest.raises(WeightsError, match="nothing would train"):
        trained_arrays(model(), ["*"])


def test_fetched_arrays_meet_the_clients_own_in_its_dtype():
    base = model()
    merged = merged_arrays(base, {"layers.key": np.full(3, 0.5, ml_dtypes.bfloat16)})
    assert merged["embedding"] is base["embedding"] and list(merged) == list(base)
    assert merged["layers.key"].dtype == jnp.float32
    np.testing.assert_array_equal(merged["layers.key"], [0.5, 0.5, 0.5])
    assert merged["layers.key"].sharding == base["layers.key"].sharding


def test_unknown_and_misshaped_arrays_are_refused_by_name():
    fetched = {"head": np.zeros(1, np.float32), "layers.key": np.zeros(4, np.float32)}
    with pytest.raises(WeightsError, match=r"unknown \['head'\], misshaped \['layers.key is \(4,\), not \(3,\)'\]"):
        merged_arrays(model(), fetched)


def test_merged_arrays_own_their_memory():
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # aligned: JAX would refer to it
    fetched = memory[start : start + 4096].view(np.float32)
    merged = merged_arrays({"layers.query": jnp.ones(1024)}, {"layers.query": fetched})
    fetched[:] = 7.0
    np.testing.assert_array_equal(merged["layers.query"], np.zeros(1024))


def test_arrays_come_to_the_host_as_they_are():
    arrays = {"jax": jnp.arange(6.0).reshape(2, 3), "numpy": np.arange(3), "scalar": jnp.array(2.0)}
    found = host_arrays(arrays, bfloat16=False)
    assert all(isinstance(array, np.ndarray) and array.flags.c_contiguous for array in found.values())
    assert [(array.shape, str(array.dtype)) for array in found.values()] == [
        ((2, 3), "float32"),
        ((3,), "int64"),
        ((), "float32"),
    ]
    assert not np.may_share_memory(found["numpy"], arrays["numpy"]), "which a learner may go on writing to"
    arrays["numpy"].flags.writeable = False
    assert host_arrays(arrays, bfloat16=False)["numpy"] is arrays["numpy"]


def test_transposed_arrays_are_put_in_order():
    array = np.arange(6.0).reshape(2, 3).T
    found = host_arrays({"x": array}, bfloat16=False)["x"]
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, array)


def test_only_float32_is_cast_and_on_its_device():
    device = jax.devices()[0]
    arrays = {"w": jax.device_put(jnp.array([1.0, 1 / 3]), device), "n": jnp.arange(2), "h": jnp.ones(1, jnp.float16)}
    found = host_arrays(arrays, bfloat16=True)
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "w": "bfloat16",
        "n": "int32",
        "h": "float16",
    }
    assert found["w"][1] == np.float32(1 / 3).astype(ml_dtypes.bfloat16) == 0.333984375


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
    describe = broadcasters.describe
    monkeypatch.setattr(store, "begin", lambda arrays: order.append(("begin", list(arrays))))
    monkeypatch.setattr(broadcasters, "describe", lambda *args: order.append("describe") or describe(*args))
    broadcaster = broadcaster_of(store)
    broadcaster.publish(WeightVersion(0, 3), arrays_of(3))
    assert order == [("begin", ["kernel", "step"]), "describe"] and len(store.put_here) == 1
    with pytest.raises(WeightsError, match="arrays cannot be sent: .'words is object'"):
        broadcaster_of(store).publish(WeightVersion(0, 3), {"words": np.array([None])})
    assert len(order) == 2


def test_arrays_of_the_host_that_nobody_writes_to_are_put_by_reference():
    store, arrays = FakeStore(), arrays_of(3)
    arrays["kernel"].flags.writeable = False
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

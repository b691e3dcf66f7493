"""The client of every transport: damage, deltas, restarts of the broadcaster, lag."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.weights.publications import INCARNATION, JOB, arrays_of, manifest_of, publications

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig
from penstock.weights.client import ATTEMPTS, FetchedArrays, FetchingClient, LatestVersion

ENDPOINT = {"transport": "checkpoint", "job": JOB, "incarnation": INCARNATION}


class FakeReader:
    """Answers from a script: what is announced, and one answer for each read."""

    def __init__(self, announced: LatestVersion | None = None, answers: tuple[Any, ...] = ()) -> None:
        self.announced, self.answers = announced, list(answers)
        self.bases: list[Any] = []
        self.reachable, self.closed = True, threading.Event()

    def wait(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        if not self.reachable:
            raise UnreachableError("nobody answers")
        if self.announced == known:
            self.closed.wait(timeout_s)
        return self.announced

    def read(self, version: WeightVersion, base: Any, timeout_s: float) -> FetchedArrays:
        self.bases.append(base)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def metrics(self) -> dict[str, float]:
        return {"weights/own": 1.0}

    def close(self) -> None:
        self.closed.set()


def client_of(*readers: FakeReader, encoding: str = "full") -> FetchingClient:
    left = list(readers)
    config = WeightsConfig.model_validate({"transport": "checkpoint", "encoding": encoding})
    return FetchingClient(ENDPOINT, config, lambda _: left.pop(0))


def whole(step: int) -> FetchedArrays:
    return FetchedArrays(manifest_of(step), arrays_of(step), moved_bytes=manifest_of(step).nbytes)


def damaged(step: int) -> FetchedArrays:
    arrays = arrays_of(step)
    arrays["kernel"][4999] = 9.0
    return FetchedArrays(manifest_of(step), arrays)


def by_delta(step: int) -> FetchedArrays:
    chain = publications(step + 1, deltas=True)[step].chains[manifest_of(step - 1).content]
    messages = [delta.to_bytes() for delta in chain]
    return FetchedArrays(manifest_of(step), None, messages, sum(map(len, messages)))


def announced(step: int, incarnation: str = INCARNATION) -> LatestVersion:
    return LatestVersion(incarnation, WeightVersion(0, step))


def assert_step(found: Mapping[str, np.ndarray], step: int) -> None:
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in arrays_of(step).items()
    }


def test_damage_is_fetched_again():
    reader = FakeReader(answers=(damaged(1), WeightsError("torn"), whole(1)))
    client = client_of(reader)
    assert_step(client.fetch(WeightVersion(0, 1)), 1)
    assert client.metrics()["weights/retries"] == 2


@pytest.mark.attack
def test_damage_time_and_again_is_an_error_that_names_the_arrays():
    client = client_of(FakeReader(answers=(damaged(1),) * ATTEMPTS))
    with pytest.raises(WeightsError, match=r"3 attempts: arrays are damaged: \['kernel'\]"):
        client.fetch(WeightVersion(0, 1))


@pytest.mark.parametrize("error", [SupersededVersionError("old", (0, 9)), UnreachableError("dead"), Stopped("over")])
def test_what_is_no_damage_is_not_tried_again(error: Exception):
    reader = FakeReader(answers=(error,))
    with pytest.raises(type(error)):
        client_of(reader).fetch(WeightVersion(0, 1))
    assert reader.answers == []


def test_another_version_than_asked_for_is_refused():
    with pytest.raises(WeightsError, match="asked for .*step=2.* got .*step=1"):
        client_of(FakeReader(answers=(whole(1),))).fetch(WeightVersion(0, 2))


def test_a_delta_is_applied_to_what_is_held():
    reader = FakeReader(answers=(whole(1), by_delta(2), by_delta(3)))
    client = client_of(reader, encoding="delta")
    for step in (1, 2, 3):
        assert_step(client.fetch(WeightVersion(0, step)), step)
    assert reader.bases == [None, manifest_of(1).content, manifest_of(2).content]
    assert client.metrics()["weights/bytes"] < client.metrics()["weights/bytes_full"] / 10


def test_without_deltas_no_base_is_named():
    reader = FakeReader(answers=(whole(1), whole(2)))
    client = client_of(reader)
    client.fetch(WeightVersion(0, 1))
    client.fetch(WeightVersion(0, 2))
    assert reader.bases == [None, None]


def test_after_a_delta_that_fails_the_arrays_are_asked_for():
    torn = FetchedArrays(manifest_of(2), None, [by_delta(2).deltas[0][:-1]])
    reader = FakeReader(answers=(whole(1), torn, whole(2)))
    client = client_of(reader, encoding="delta")
    client.fetch(WeightVersion(0, 1))
    assert_step(client.fetch(WeightVersion(0, 2)), 2)
    assert reader.bases == [None, manifest_of(1).content, None]


def test_deltas_that_lead_elsewhere_are_refused():
    elsewhere = FetchedArrays(manifest_of(3), None, by_delta(2).deltas)
    reader = FakeReader(answers=(whole(1), elsewhere, whole(3)))
    client = client_of(reader, encoding="delta")
    client.fetch(WeightVersion(0, 1))
    assert_step(client.fetch(WeightVersion(0, 3)), 3)
    assert client.metrics()["weights/retries"] == 1


def test_a_broadcaster_that_cannot_be_reached_is_waited_for():
    reader, seen = FakeReader(announced(1)), []
    client = client_of(reader)
    reader.reachable = False
    assert client.failure is None
    assert client.wait_for(None, timeout_s=0.01) is None
    assert client.failure == "nobody answers"
    waiter = threading.Thread(target=lambda: seen.append(client.wait_for(None, 30.0)))
    waiter.start()
    reader.reachable = True
    waiter.join(30.0)
    assert seen == [WeightVersion(0, 1)]
    assert client.metrics()["weights/unreachable"] >= 1 and client.failure is None
    reader.reachable = False
    assert client.latest() == WeightVersion(0, 1) and client.failure == "nobody answers"


def test_the_same_version_of_another_incarnation_is_news_only_after_a_fetch():
    reader = FakeReader(announced(1, "b" * 32), answers=(whole(1),))
    client = client_of(reader)
    assert client.wait_for(WeightVersion(0, 1), 0.0) is None  # it came by other ways, such as a checkpoint
    client.fetch(WeightVersion(0, 1))
    assert client.wait_for(WeightVersion(0, 1), 0.0) == WeightVersion(0, 1)
    reader.announced = announced(1)
    assert client.wait_for(WeightVersion(0, 1), 0.0) is None


def test_an_older_version_of_another_incarnation_is_no_news():
    reader = FakeReader(announced(1, "b" * 32), answers=(whole(2),))
    client = client_of(reader)
    client.fetch(WeightVersion(0, 2))
    assert client.wait_for(WeightVersion(0, 2), 0.0) is None


def test_a_new_endpoint_reaches_a_wait_that_runs():
    before, after, seen = FakeReader(announced(1)), FakeReader(announced(2)), []
    client = client_of(before, after)
    waiter = threading.Thread(target=lambda: seen.append(client.wait_for(WeightVersion(0, 1), 30.0)))
    waiter.start()
    client.connect(ENDPOINT | {"incarnation": "b" * 32})
    waiter.join(10.0)
    assert seen == [WeightVersion(0, 2)]
    assert before.closed.is_set() and not after.closed.is_set()


def test_the_present_endpoint_changes_nothing():
    reader = FakeReader(announced(1))
    client = client_of(reader)
    client.connect(dict(ENDPOINT))
    assert not reader.closed.is_set()


@pytest.mark.parametrize("change", [{"job": "other"}, {"transport": "arrow_flight"}, {"job": None}])
def test_an_endpoint_of_another_job_or_transport_is_refused(change: dict[str, Any]):
    client = client_of(FakeReader(announced(1)))
    with pytest.raises(WeightsError, match=next(iter(change))):
        client.connect(ENDPOINT | change)


def test_a_closed_client_fetches_nothing():
    client = client_of(FakeReader(announced(1), answers=(whole(1),)))
    client.close()
    with pytest.raises(Stopped):
        client.fetch(WeightVersion(0, 1))
    with pytest.raises(Stopped):
        client.wait_for(None, 1.0)


def test_what_was_fetched_without_a_question_for_news_is_not_ahead_of_it():
    client = client_of(FakeReader(announced(5), answers=(whole(5), whole(6))))
    client.latest()
    client.fetch(WeightVersion(0, 5))
    client.fetch(WeightVersion(0, 6))
    assert client.metrics()["weights/lag"] == 0


def test_lag_counts_versions():
    reader = FakeReader(announced(5), answers=(whole(2),))
    client = client_of(reader)
    assert client.metrics()["weights/lag"] == 0
    client.fetch(WeightVersion(0, 2))
    client.latest()
    assert client.metrics()["weights/lag"] == 3
    reader.announced = LatestVersion("b" * 32, WeightVersion(1, 1))
    client.latest()
    assert client.metrics()["weights/lag"] == 1
    assert client.metrics()["weights/own"] == 1.0

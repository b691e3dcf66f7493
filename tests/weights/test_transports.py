"""What holds for every transport, hand-over by reference included."""

import threading
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.weights.transports import CROSSING, LONG_S, Rig, arrays, assert_arrays_of, rig_of

from penstock.types import Stopped, SupersededVersionError, WeightsError, WeightVersion
from penstock.weights import (
    Broadcaster,
    InProcessBroadcaster,
    WeightClient,
    WeightsConfig,
    open_broadcaster,
    open_client,
)
from penstock.weights.config import Transport


@pytest.mark.parametrize("transport", get_args(Transport))
def test_what_is_opened_keeps_the_protocols(transport: str, tmp_path: Path):
    config = WeightsConfig.model_validate({"transport": transport})
    broadcaster = open_broadcaster(config, f"job of {tmp_path}", "t", str(tmp_path))
    client = open_client(broadcaster.endpoint(), config, "t", "c")
    assert isinstance(broadcaster, Broadcaster) and isinstance(client, WeightClient)
    assert broadcaster.endpoint()["transport"] == transport
    client.close()
    broadcaster.close()


def test_the_local_one_is_both():
    assert isinstance(InProcessBroadcaster(), Broadcaster) and isinstance(InProcessBroadcaster(), WeightClient)


@pytest.mark.parametrize(
    "endpoint",
    [
        {},
        {"transport": "checkpoint"},
        {"transport": "arrow_flight", "job": "j"},
        {"transport": "checkpoint", "job": "j"},
    ],
)
def test_an_endpoint_of_another_configuration_is_refused(endpoint: dict[str, Any]):
    with pytest.raises(WeightsError, match="endpoint"):
        open_client(endpoint, WeightsConfig(transport="checkpoint"), "t", "c")


rig = pytest.fixture(params=[("local", "full"), *CROSSING], ids="-".join)(rig_of)


def test_every_transport_of_the_configuration_is_held_to_it_and_no_other():
    assert set(get_args(Transport)) == {transport for transport, _ in CROSSING} - {"memory_url"}


def test_before_the_first_publication_there_is_nothing(rig: Rig):
    client = rig.client(rig.broadcaster())
    assert client.latest() is None
    assert client.wait_for(None, timeout_s=0.0) is None
    with pytest.raises(SupersededVersionError) as refusal:
        client.fetch(WeightVersion(0, 0))
    assert refusal.value.newest is None


def test_every_version_arrives_bit_for_bit(rig: Rig):
    broadcaster = rig.broadcaster()
    client = rig.client(broadcaster)
    held = None
    for step in range(6):
        broadcaster.publish(WeightVersion(0, step), arrays(step))
        held = client.wait_for(held, LONG_S)
        assert held == broadcaster.latest() == client.latest() == WeightVersion(0, step)
        assert_arrays_of(step, client.fetch(held))


def test_a_client_that_missed_versions_gets_the_newest(rig: Rig):
    broadcaster = rig.broadcaster()
    client = rig.client(broadcaster)
    for step in range(9):
        broadcaster.publish(WeightVersion(0, step), arrays(step))
        if step in (0, 2, 8):
            assert_arrays_of(step, client.fetch(WeightVersion(0, step)))


def test_a_superseded_version_gets_a_typed_answer_and_no_arrays(rig: Rig):
    broadcaster = rig.broadcaster()
    client = rig.client(broadcaster)
    for step in range(5):
        broadcaster.publish(WeightVersion(1, step), arrays(step))
    with pytest.raises(SupersededVersionError, match="step=0.*not available") as refusal:
        client.fetch(WeightVersion(1, 0))
    assert refusal.value.newest == (1, 4)
    with pytest.raises(SupersededVersionError) as refusal:
        client.fetch(WeightVersion(1, 5))
    assert refusal.value.newest == (1, 4)


@pytest.mark.parametrize("version", [WeightVersion(0, 3), WeightVersion(0, 2)])
def test_a_version_that_is_not_newer_is_refused(rig: Rig, version: WeightVersion):
    broadcaster = rig.broadcaster()
    broadcaster.publish(WeightVersion(0, 3), arrays(3))
    with pytest.raises(WeightsError, match="not newer"):
        broadcaster.publish(version, arrays(5))
    assert_arrays_of(3, rig.client(broadcaster).fetch(WeightVersion(0, 3)))


def test_a_new_lineage_may_fork_at_an_older_step(rig: Rig):
    broadcaster = rig.broadcaster()
    client = rig.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 3), arrays(3))
    client.fetch(WeightVersion(0, 3))
    broadcaster.publish(WeightVersion(1, 2), arrays(2))
    assert client.wait_for(WeightVersion(0, 3), LONG_S) == WeightVersion(1, 2)
    assert_arrays_of(2, client.fetch(WeightVersion(1, 2)))


def test_missing_extra_and_misshaped_arrays_are_refused_by_name(rig: Rig):
    broadcaster = rig.broadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    wrong = arrays(1) | {"kernel": np.zeros((4, 3), np.float32), "bias": np.zeros(1, np.float32)}
    del wrong["flags"]
    with pytest.raises(WeightsError, match=r"missing \['flags'\], extra \['bias'\], changed \[.kernel"):
        broadcaster.publish(WeightVersion(0, 1), wrong)
    assert broadcaster.latest() == WeightVersion(0, 0)
    assert_arrays_of(0, rig.client(broadcaster).fetch(WeightVersion(0, 0)))


def test_a_waiting_client_wakes_at_the_publication(rig: Rig):
    broadcaster, seen = rig.broadcaster(), []
    client = rig.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    waiter = threading.Thread(target=lambda: seen.append(client.wait_for(WeightVersion(0, 0), LONG_S)))
    waiter.start()
    broadcaster.publish(WeightVersion(0, 1), arrays(1))
    waiter.join(LONG_S)
    assert seen == [WeightVersion(0, 1)]


def test_the_held_version_is_no_news(rig: Rig):
    broadcaster = rig.broadcaster()
    client = rig.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 4), arrays(4))
    client.fetch(WeightVersion(0, 4))
    assert client.wait_for(WeightVersion(0, 4), timeout_s=0.05) is None
    assert client.wait_for(WeightVersion(1, 0), timeout_s=0.0) is None


def test_closing_a_client_ends_its_wait(rig: Rig):
    broadcaster, ended = rig.broadcaster(), []
    client = rig.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 0), arrays(0))

    def wait() -> None:
        try:
            client.wait_for(WeightVersion(0, 0), LONG_S)
        except Stopped:
            ended.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.close()
    waiter.join(LONG_S / 2)
    assert ended == [True]
    client.close()


def test_what_was_published_may_be_written_to(rig: Rig):
    if not rig.crossing:
        pytest.skip("in one process versions go by reference")
    broadcaster, mine = rig.broadcaster(), arrays(0)
    client = rig.client(broadcaster)
    for step in range(3):
        for name, array in arrays(step).items():
            mine[name][...] = array
        broadcaster.publish(WeightVersion(0, step), mine)
        for array in mine.values():
            array[...] = 0
        assert_arrays_of(step, client.fetch(WeightVersion(0, step)))
    assert client.metrics().get("weights/retries", 0) == 0


def test_fetched_arrays_stay_what_they_are(rig: Rig):
    broadcaster = rig.broadcaster()
    client = rig.client(broadcaster)
    held = []
    for step in range(6):
        broadcaster.publish(WeightVersion(0, step), arrays(step))
        held.append(client.fetch(WeightVersion(0, step)))
    broadcaster.close()
    client.close()
    for step, found in enumerate(held):
        assert_arrays_of(step, found)


def test_a_closed_broadcaster_takes_nothing(rig: Rig):
    broadcaster = rig.broadcaster()
    broadcaster.close()
    broadcaster.close()
    with pytest.raises(WeightsError, match="closed"):
        broadcaster.publish(WeightVersion(0, 0), arrays(0))


def test_nobody_ever_sees_a_mix_of_two_versions(rig: Rig):
    broadcaster, mixed, fetched = rig.broadcaster(), [], []
    broadcaster.publish(WeightVersion(0, 0), {"x": np.zeros(200_000, np.float32), "y": np.zeros(7, np.int32)})
    clients = [rig.client(broadcaster) for _ in range(2)]

    def follow(client: WeightClient) -> None:
        held = None
        while held != WeightVersion(0, 20):
            version = client.wait_for(held, LONG_S)
            assert version is not None
            try:
                found = client.fetch(version)
            except SupersededVersionError:
                continue
            held = version
            fetched.append(version)
            if not all((np.asarray(array) == version.step).all() for array in found.values()):
                mixed.append(version)

    threads = [threading.Thread(target=follow, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for step in range(1, 21):
        filled = {"x": np.full(200_000, step, np.float32), "y": np.full(7, step, np.int32)}
        broadcaster.publish(WeightVersion(0, step), filled)
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert fetched and mixed == []

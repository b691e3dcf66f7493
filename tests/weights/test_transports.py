"""What holds for every transport, with and without deltas."""

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import (
    Broadcaster,
    InProcessBroadcaster,
    WeightClient,
    WeightsConfig,
    open_broadcaster,
    open_client,
)

TOKEN = "correct horse"
LONG_S = 30.0
CROSSING = [
    ("shared_memory", "full"),
    ("shared_memory", "delta"),
    ("checkpoint", "full"),
    ("checkpoint", "delta"),
    ("memory_url", "full"),
    ("memory_url", "delta"),
    ("arrow_flight", "full"),
    ("arrow_flight", "delta"),
]


class Rig:
    """Opens broadcasters and clients of one transport, and closes them."""

    def __init__(self, transport: str, encoding: str, folder: Path) -> None:
        self.job = f"runs/{uuid.uuid4().hex}"
        self.transport, self.crossing = transport, transport != "local"
        self.url = f"memory://{uuid.uuid4().hex}" if transport == "memory_url" else str(folder)
        name = "checkpoint" if transport == "memory_url" else transport
        self.config = None if name == "local" else WeightsConfig.model_validate(
            {"transport": name, "encoding": encoding, "fetch_timeout_s": LONG_S}
        )  # fmt: skip
        self._open: list[Any] = []

    def broadcaster(self, job: str | None = None, token: str = TOKEN, **changes: Any) -> Broadcaster:
        if self.config is None:
            made: Broadcaster = InProcessBroadcaster()
        else:
            made = open_broadcaster(self.config.model_copy(update=changes), job or self.job, token, self.url)
        self._open.append(made)
        return made

    def client(self, broadcaster: Broadcaster, token: str = TOKEN, **changes: Any) -> WeightClient:
        if isinstance(broadcaster, InProcessBroadcaster):
            return broadcaster
        assert self.config is not None
        config = self.config.model_copy(update=changes)
        made = open_client(broadcaster.endpoint(), config, token, f"client-{len(self._open)}")
        self._open.append(made)
        return made

    def close(self) -> None:
        for each in reversed(self._open):
            each.close()


def rig_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(*request.param, tmp_path)
    yield rig
    rig.close()


rig = pytest.fixture(params=[("local", "full"), *CROSSING], ids="-".join)(rig_of)
crossing = pytest.fixture(params=CROSSING, ids="-".join)(rig_of)
with_delta = pytest.fixture(params=[each for each in CROSSING if each[1] == "delta"], ids="-".join)(rig_of)


def arrays(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    kernel = random.standard_normal((40, 50)).astype(np.float32)
    kernel[:, :step] += 0.25
    return {
        "embedding": random.standard_normal((64, 8)).astype(ml_dtypes.bfloat16),
        "kernel": kernel,
        "scale": np.array(float(step)),
        "empty": np.zeros((0, 3), np.int32),
        "flags": np.array([True, step % 2 == 0, False]),
    }


def assert_arrays_of(step: int, found: Mapping[str, Any]) -> None:
    for name, expected in arrays(step).items():
        array = np.asarray(found[name])
        assert (array.dtype, array.shape, array.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), name
    assert found.keys() == arrays(step).keys()


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


def test_fetched_arrays_are_read_only(crossing: Rig):
    broadcaster = crossing.broadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    found = crossing.client(broadcaster).fetch(WeightVersion(0, 0))
    with pytest.raises(ValueError, match="read-only"):
        found["kernel"][0, 0] = 1.0


def test_a_broadcaster_that_restarts_at_the_same_version_is_found_again(crossing: Rig):
    first = crossing.broadcaster()
    client = crossing.client(first)
    first.publish(WeightVersion(0, 5), arrays(5))
    client.fetch(WeightVersion(0, 5))
    first.close()
    second = crossing.broadcaster()
    assert second.endpoint()["incarnation"] != first.endpoint()["incarnation"]
    second.publish(WeightVersion(0, 5), arrays(6))
    client.connect(second.endpoint())
    assert client.wait_for(WeightVersion(0, 5), LONG_S) == WeightVersion(0, 5)
    assert_arrays_of(6, client.fetch(WeightVersion(0, 5)))
    assert client.wait_for(WeightVersion(0, 5), timeout_s=0.0) is None


def test_another_layout_after_a_restart_is_refused_by_the_client(crossing: Rig):
    first = crossing.broadcaster()
    client = crossing.client(first)
    first.publish(WeightVersion(0, 0), arrays(0))
    client.fetch(WeightVersion(0, 0))
    first.close()
    second = crossing.broadcaster()
    second.publish(WeightVersion(1, 0), {"kernel": np.zeros((40, 50), np.float16), "other": np.zeros(1, np.float32)})
    client.connect(second.endpoint())
    with pytest.raises(WeightsError, match=r"missing .*'scale'.*extra \['other'\], changed \[.kernel"):
        client.fetch(WeightVersion(1, 0))


def test_without_a_broadcaster_a_wait_ends_in_time(crossing: Rig):
    broadcaster = crossing.broadcaster()
    client = crossing.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    client.fetch(WeightVersion(0, 0))
    broadcaster.close()
    assert client.wait_for(WeightVersion(0, 0), timeout_s=0.3) is None
    assert client.latest() == WeightVersion(0, 0)


def test_another_token_gets_nothing(crossing: Rig):
    broadcaster = crossing.broadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    stranger = crossing.client(broadcaster, token="battery staple")
    with pytest.raises(WeightsError, match="token"):
        stranger.fetch(WeightVersion(0, 0))


def test_jobs_do_not_meet(crossing: Rig):
    mine, other = crossing.broadcaster(), crossing.broadcaster(job="another")
    mine.publish(WeightVersion(0, 0), arrays(0))
    other.publish(WeightVersion(0, 0), arrays(1))
    client = crossing.client(mine)
    assert_arrays_of(0, client.fetch(WeightVersion(0, 0)))
    with pytest.raises(WeightsError, match="job"):
        client.connect(other.endpoint())
    assert_arrays_of(1, crossing.client(other).fetch(WeightVersion(0, 0)))


def test_the_token_is_in_no_endpoint(crossing: Rig):
    assert TOKEN not in str(crossing.broadcaster().endpoint())


def test_a_publication_that_is_too_large_is_refused_before_it_is_fetched(crossing: Rig):
    broadcaster = crossing.broadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    with pytest.raises(WeightsError, match="max_bytes"):
        crossing.client(broadcaster, max_bytes=1000).fetch(WeightVersion(0, 0))


def test_float32_is_cast_to_bfloat16_where_asked(crossing: Rig):
    broadcaster = crossing.broadcaster(bfloat16=True)
    sent = {"x": jnp.linspace(0, 1, 7), "n": jnp.arange(3), "y": np.linspace(0, 1, 5, dtype=np.float32)}
    broadcaster.publish(WeightVersion(0, 0), sent)
    found = crossing.client(broadcaster, bfloat16=True).fetch(WeightVersion(0, 0))
    assert {name: str(array.dtype) for name, array in found.items()} == {"x": "bfloat16", "n": "int32", "y": "bfloat16"}
    np.testing.assert_array_equal(np.asarray(sent["x"].astype(jnp.bfloat16)), found["x"])


def test_both_sides_measure(crossing: Rig):
    broadcaster = crossing.broadcaster()
    client = crossing.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    client.fetch(WeightVersion(0, 0))
    for step in (1, 2, 3):
        broadcaster.publish(WeightVersion(0, step), arrays(step))
    assert client.latest() == WeightVersion(0, 3)
    full_bytes = sum(array.nbytes for array in arrays(0).values())
    published, fetched = broadcaster.metrics(), client.metrics()
    assert published["weights/publish_s"] > 0 and published["weights/serialise_s"] >= 0
    assert published["weights/bytes_published"] == full_bytes
    assert fetched["weights/bytes"] == fetched["weights/bytes_full"] == full_bytes
    assert fetched["weights/transfer_s"] > 0 and fetched["weights/mib_per_s"] > 0
    assert fetched["weights/lag"] == 3


def test_deltas_move_less(with_delta: Rig):
    broadcaster = with_delta.broadcaster()
    client = with_delta.client(broadcaster)
    array = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    for step in range(3):
        array = array.copy()
        array[step] += 1.0
        broadcaster.publish(WeightVersion(0, step), {"x": array})
        assert client.fetch(WeightVersion(0, step))["x"].tobytes() == array.tobytes()
    assert client.metrics()["weights/bytes"] < 2000 < client.metrics()["weights/bytes_full"] == 1_200_000
    assert broadcaster.metrics()["weights/changed_share"] == pytest.approx(1 / 300_000)


def test_a_restart_with_the_same_content_moves_nothing(with_delta: Rig):
    first = with_delta.broadcaster()
    client = with_delta.client(first)
    first.publish(WeightVersion(0, 5), arrays(5))
    client.fetch(WeightVersion(0, 5))
    first.close()
    second = with_delta.broadcaster()
    second.publish(WeightVersion(0, 5), arrays(5))
    client.connect(second.endpoint())
    assert client.wait_for(WeightVersion(0, 5), LONG_S) == WeightVersion(0, 5)
    assert_arrays_of(5, client.fetch(WeightVersion(0, 5)))
    assert client.metrics()["weights/bytes"] == 0


FETCH = """
import json, sys, zlib
from penstock.types import WeightVersion
from penstock.weights import WeightsConfig, open_client
given = json.load(sys.stdin)
client = open_client(given["endpoint"], WeightsConfig(**given["config"]), given["token"], "another-process")
version = client.wait_for(None, 30.0)
for name, array in client.fetch(version).items():
    print(name, array.dtype, array.shape, zlib.crc32(array.tobytes()))
client.close()
"""


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint", "arrow_flight"])
def test_another_process_gets_the_same_arrays(transport: str, tmp_path: Path):
    import json
    import zlib

    rig = Rig(transport, "full", tmp_path)
    try:
        broadcaster = rig.broadcaster()
        broadcaster.publish(WeightVersion(0, 2), arrays(2))
        assert rig.config is not None
        given = {"endpoint": broadcaster.endpoint(), "config": rig.config.model_dump(), "token": TOKEN}
        ended = subprocess.run(
            [sys.executable, "-c", FETCH], input=json.dumps(given), capture_output=True, text=True, timeout=60
        )
        expected = [f"{name} {x.dtype} {x.shape} {zlib.crc32(x.tobytes())}" for name, x in arrays(2).items()]
        assert ended.stdout.splitlines() == expected, ended.stderr
    finally:
        rig.close()


def test_a_fetch_of_a_broadcaster_that_died_says_so(crossing: Rig):
    broadcaster = crossing.broadcaster()
    client = crossing.client(broadcaster)
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    broadcaster.close()
    if crossing.transport in ("checkpoint", "memory_url"):
        assert_arrays_of(0, client.fetch(WeightVersion(0, 0)))  # files outlive who wrote them
    else:
        with pytest.raises(UnreachableError):
            client.fetch(WeightVersion(0, 0))

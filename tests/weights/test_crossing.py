"""What holds for every transport between processes, with and without deltas."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tests.weights.transports import CROSSING, LONG_S, TOKEN, Rig, arrays, assert_arrays_of, rig_of

from penstock.types import UnreachableError, WeightsError, WeightVersion

crossing = pytest.fixture(params=CROSSING, ids="-".join)(rig_of)
with_delta = pytest.fixture(params=[each for each in CROSSING if each[1] == "delta"], ids="-".join)(rig_of)


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


@pytest.mark.attack
def test_another_token_gets_nothing(crossing: Rig):
    broadcaster = crossing.broadcaster()
    broadcaster.publish(WeightVersion(0, 0), arrays(0))
    stranger = crossing.client(broadcaster, token="battery staple")
    with pytest.raises(WeightsError, match="token"):
        stranger.fetch(WeightVersion(0, 0))


@pytest.mark.attack
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


@pytest.mark.attack
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
    rig = Rig(transport, "full", tmp_path)
    try:
        broadcaster = rig.broadcaster()
        broadcaster.publish(WeightVersion(0, 2), arrays(2))
        assert rig.config is not None
        given = {"endpoint": broadcaster.endpoint(), "config": rig.config.model_dump(), "token": TOKEN}
        ended = subprocess.run(
            [sys.executable, "-c", FETCH], input=json.dumps(given), capture_output=True, text=True, timeout=280
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

"""A client that serves others: from the first version that it is asked to keep, to its end."""

import numpy as np
import pytest

from penstock.types import SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights.flight_access import Access
from penstock.weights.flight_channel import Channel
from penstock.weights.flight_messages import OfferAnswer, OfferRequest
from penstock.weights.manifest import describe
from penstock.weights.relay import Relay

BASE = ((0, 1), "digest")


@pytest.fixture
def relay():
    made = Relay("job", Access("token"), "127.0.0.1")
    yield made
    made.close()


def keep(relay, step, base=None, messages=()):
    arrays = {"x": np.full(3, step, np.int32)}
    return relay.keep(describe("job", "ab", WeightVersion(0, step), arrays), arrays, base, messages)


def offer(port, step, base=None, job="job", token="token"):
    channel = Channel(f"127.0.0.1:{port}", False, Access(token), 1, 4096)
    try:
        request = OfferRequest(job=job, client="c", version=(0, step), base=base, timeout_s=0.0)
        return channel.ask("offer", request, OfferAnswer, 20.0)
    finally:
        channel.close()


def test_the_version_kept_last_is_offered(relay):
    port = keep(relay, 1)
    assert keep(relay, 2) == port
    assert offer(port, 2) == OfferAnswer()
    with pytest.raises(SupersededVersionError) as refusal:
        offer(port, 1)
    assert refusal.value.newest == (0, 2)


def test_deltas_are_offered_as_they_came(relay):
    port = keep(relay, 2, BASE, [b"123", b"45"])
    assert offer(port, 2, BASE).deltas == [3, 2]
    assert offer(port, 2, ((0, 0), "digest")).deltas is None


def test_others_jobs_and_tokens_get_nothing(relay):
    port = keep(relay, 1)
    with pytest.raises(WeightsError, match="job 'other'"):
        offer(port, 1, job="other")
    with pytest.raises(WeightsError, match="token"):
        offer(port, 1, token="wrong")


def test_what_was_dropped_is_offered_no_more(relay):
    relay.drop()
    port = keep(relay, 1)
    relay.drop()
    with pytest.raises(SupersededVersionError):
        offer(port, 1)


def test_after_its_end_nothing_is_kept(relay):
    port = keep(relay, 1)
    relay.close()
    relay.close()
    assert keep(relay, 2) is None and relay.metrics() == {"weights/bytes_relayed": 0.0}
    with pytest.raises(UnreachableError):
        offer(port, 1)

"""Malformed weights: requests to a Flight server, and what clients read of servers, files and segments."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.fuzz.fuzzing import COUNTS, damaged, fuzz, json_bytes

from penstock.types import WeightsError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster, open_client
from penstock.weights.checkpoint import read_tensors, write_tensors
from penstock.weights.delta import decode_delta, encode_delta
from penstock.weights.files import _SIGNATURE_CHARACTERS, CurrentVersion, OfferedVersion, _signature
from penstock.weights.flight_messages import (
    Access,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    open_channel,
    read_answer,
)
from penstock.weights.manifest import Manifest, describe, read_json

JOB, TOKEN, MOST = "cats-1", "a fuzzer's token", 1 << 20
VERSION = WeightVersion(0, 3)
CALL_S = 0.2
"""A server may hold a request that long: one that waits for a version, or for a place in the tree."""


def arrays(step):
    rng = np.random.default_rng(step)
    kept = np.arange(2000, dtype=np.float32).reshape(40, 50)
    return {
        "kept": kept,
        "some": np.where(rng.random(3000) < 0.1, 1.5, 2.5).astype(np.float32),
        "none": np.zeros((0, 3)),
    }


@pytest.fixture(scope="module")
def server():
    # Every fuzzed name takes a place in the tree and never gives it back; the honest client must find one.
    broadcaster = open_broadcaster(WeightsConfig(transport="arrow_flight", fanout=1_000_000), JOB, TOKEN, "")
    broadcaster.publish(VERSION, arrays(3))
    yield broadcaster
    broadcaster.close()


def is_typed(error):
    """Whether a server refused on purpose: by one of our errors, the token, or Flight's own for what nobody serves."""
    if isinstance(error, flight.FlightServerError):
        return bool(json.loads(error.extra_info)["message"])
    known = (flight.FlightUnauthenticatedError, flight.FlightTimedOutError, pa.ArrowNotImplementedError)
    return isinstance(error, known) or "size in bytes" in str(error) or "larger than max" in str(error)


def requests():
    version, client = VERSION, "fuzzer"
    return {
        "wait": WaitRequest(job=JOB, client=client, known=None, timeout_s=0.0),
        "offer": OfferRequest(job=JOB, client=client, version=version, base=(WeightVersion(0, 2), "ab"), timeout_s=0.0),
        "finished": FinishedRequest(job=JOB, client=client, version=version, port=1234),
        "stream": StreamTicket(
            job=JOB, client=client, incarnation="0" * 32, version=version, base=None, stream=0, streams=2,
            chunk_bytes=4096,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_a_flight_server_answers_or_refuses(server, count):
    endpoint = server.endpoint()
    address, tls = endpoint["address"], endpoint["tls"]
    allowed, stranger = (open_channel(address, tls, Access(token), MOST) for token in (TOKEN, "another token"))
    good = {name: json.loads(request.to_bytes()) for name, request in requests().items()}
    good["stream"]["incarnation"] = endpoint["incarnation"]
    options = flight.FlightCallOptions(timeout=CALL_S)

    def make(rng):
        name = rng.choice(list(good))
        body = json_bytes(good[name], rng)
        return (stranger if rng.random() < 0.05 else allowed), name, body, rng.random() < 0.05

    def call(channel, name, body, odd):
        if name == "stream" and not odd:
            return channel.do_get(flight.Ticket(body), options).read_all()
        if odd and len(body) % 3 == 0:
            return list(channel.list_flights(body[:50], options))
        if odd and len(body) % 3 == 1:
            return channel.get_flight_info(flight.FlightDescriptor.for_command(body), options)
        return list(channel.do_action(flight.Action("" if odd else name, body), options))

    def target(given):
        try:
            call(*given)
        except (pa.ArrowException, OSError) as error:
            assert is_typed(error), repr(error)
            raise WeightsError("refused") from error
        assert given[0] is allowed, "whoever has no token must get nothing"

    assert 0.2 * count < fuzz(target, make, count, WeightsError) < count
    allowed.close()
    stranger.close()
    client = open_client(endpoint, WeightsConfig(transport="arrow_flight"), TOKEN, "honest")
    assert client.wait_for(None, 30.0) == VERSION
    np.testing.assert_array_equal(client.fetch(VERSION)["some"], arrays(3)["some"])
    client.close()


def published(step):
    return describe(JOB, "0" * 32, WeightVersion(0, step), arrays(step)), arrays(step)


@pytest.mark.parametrize("count", COUNTS)
def test_manifests_and_answers_are_read_or_refused(count):
    manifest, _ = published(3)
    values = manifest.to_values()
    answers = {
        WaitAnswer: WaitAnswer(newest=("0" * 32, VERSION)),
        OfferAnswer: OfferAnswer(manifest=values, parent="127.0.0.1:1234", keep=True, deltas=[3, 4]),
    }
    readers = [
        (values, lambda text: Manifest.from_values(read_json(text), MOST)),
        (json.loads(answers[WaitAnswer].to_bytes()), lambda text: read_answer(WaitAnswer, text)),
        (
            json.loads(answers[OfferAnswer].to_bytes()),
            lambda text: read_answer(OfferAnswer, text).read_manifest(MOST),
        ),
    ]

    def make(rng):
        good, read = rng.choice(readers)
        return read, json_bytes(good, rng)

    assert fuzz(lambda given: given[0](given[1]), make, count, WeightsError) > 0.3 * count


@pytest.mark.parametrize("count", COUNTS)
def test_deltas_and_files_are_read_or_refused(count):
    """What passes is right to the last bit: every array has its digest."""
    (base_manifest, base), (manifest, new) = published(2), published(3)
    delta = encode_delta(base_manifest, base, manifest, new).to_bytes()
    file = io.BytesIO()
    write_tensors(file, manifest, new)

    def target(given):
        if given[0] == "delta":
            read, result = decode_delta(given[1], base_manifest, base, MOST)
            assert read.digest != manifest.digest or all(np.array_equal(result[name], new[name]) for name in new)
        else:
            read_tensors(io.BytesIO(given[1]), manifest)

    def make(rng):
        return ("delta", damaged(delta, rng)) if rng.random() < 0.7 else ("file", damaged(file.getvalue(), rng))

    assert fuzz(target, make, count, WeightsError) > 0.5 * count


@pytest.mark.parametrize("count", COUNTS)
def test_pointers_are_read_or_refused(count):
    """Half of them with a right signature, as by somebody who has the token."""
    manifest, _ = published(3)
    good = CurrentVersion(
        JOB, (OfferedVersion(manifest, "full-0.safetensors", {(WeightVersion(0, 2), "ab"): ("delta-0",)}),)
    )
    content = good.to_bytes(TOKEN)
    assert CurrentVersion.from_bytes(content, JOB, TOKEN, MOST) == good
    text = content[_SIGNATURE_CHARACTERS:]

    def make(rng):
        if rng.random() < 0.5:
            return damaged(content, rng)
        forged = json_bytes(json.loads(text), rng)
        return _signature(forged, TOKEN) + forged

    assert (
        fuzz(lambda given: CurrentVersion.from_bytes(given, JOB, TOKEN, MOST), make, count, WeightsError) > 0.5 * count
    )

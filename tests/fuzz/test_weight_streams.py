"""Malformed streams of weights as a client gets them from a server, or another client, that errs or means it.

A Flight server of Arrow's sends well-formed messages only. Here gRPC is spoken without Arrow, so that every byte of a
message is the fuzzer's: the envelope, Arrow's description of a batch, and its body.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.fuzz.fuzzing import COUNTS, LIMIT_S, altered, damaged, fuzz, json_bytes

from penstock.types import UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, open_client
from penstock.weights.flight_messages import OFFER_KEY, SCHEMA, OfferAnswer, local_error
from penstock.weights.flight_tree import ROOT
from penstock.weights.manifest import describe

JOB, TOKEN, MOST, INCARNATION = "cats-1", "a fuzzer's token", 1 << 20, "0" * 32
VERSION = WeightVersion(0, 3)
SENT = {"w": np.arange(2000, dtype=np.float32), "none": np.zeros((0, 3)), "b": np.arange(500, dtype=np.uint8)}
MANIFEST = describe(JOB, INCARNATION, VERSION, SENT)
CHUNK_BYTES = 4096
FETCH_S = 0.15
"""Limit of a fetch; some servers lead a client in circles until then."""
COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")
OTHER_COLUMNS = (
    pa.array([None, 1, 2], pa.uint8()), pa.array(["a", "b"]), pa.array([[1], [2, 3]]), pa.array([b"x"] * 5),
    pa.array(["a", "a"]).dictionary_encode(), pa.nulls(7), pa.array([1.5]), pa.array([{"a": 1}]), pa.array([True] * 9),
)  # fmt: skip


def ipc_messages(schema, batches, options=None):
    """Arrow's messages for a stream, each as description and body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    stream, found = sink.getvalue().to_pybytes(), []
    at = 0
    while (size := int.from_bytes(stream[at + 4 : at + 8], "little")) > 0:
        header = stream[at + 8 : at + 8 + size]
        message = pa.ipc.read_message(pa.py_buffer(stream[at:]))
        body = b"" if message.body is None else message.body.to_pybytes()
        found.append((header, body))
        at += 8 + size + len(body)
    return found


def envelope(*fields):
    """Protocol Buffers: numbered fields of bytes."""
    return b"".join(varint(number << 3 | 2) + varint(len(content)) + content for number, content in fields)


def varint(number):
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def bytes_batch(content, schema=SCHEMA):
    return pa.RecordBatch.from_arrays([pa.array(np.frombuffer(content, np.uint8))], schema=schema)


def chunks():
    """What an honest server sends over one stream: messages that each lie in one array."""
    for array in SENT.values():
        content = array.tobytes()
        yield from (content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES))


class Server:
    """Sends whatever bytes it was given last; `streams` are the messages of each, `answers` those of a question."""

    def __init__(self):
        self.stream, self.answers = [], {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        handlers = {
            "DoGet": grpc.unary_stream_rpc_method_handler(lambda request, context: iter(self.stream)),
            "DoAction": grpc.unary_stream_rpc_method_handler(self._action),
        }
        service = grpc.method_handlers_generic_handler("arrow.flight.protocol.FlightService", handlers)
        self._server.add_generic_rpc_handlers((service,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _action(self, request, context):
        name = next(name for name in self.answers if name.encode() in request)
        return iter(self.answers[name])

    def close(self):
        self._server.stop(None)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def offered(**changes):
    honest = {"manifest": MANIFEST.to_values(), "parent": ROOT, "keep": False, "deltas": None}
    assert OfferAnswer(**honest)
    try:
        return json.dumps(honest | changes).encode()
    except RecursionError:
        return b"[" * 100_000


def result(answer):
    return envelope((1, answer))


def honest_stream(schema=SCHEMA, options=None):
    batches = [bytes_batch(content, schema) for content in chunks()]
    return ipc_messages(schema, batches, options)


def open_fetching(server, timeout_s):
    config = WeightsConfig(streams=1, chunk_bytes=CHUNK_BYTES, max_bytes=MOST, fetch_timeout_s=timeout_s)
    where = {"address": server.address, "tls": False}
    endpoint = {"transport": "arrow_flight", "job": JOB, "incarnation": INCARNATION, **where}
    return open_client(endpoint, config, TOKEN, "honest")


def be_honest(server):
    server.answers = {"offer": [result(offered())], "finished": [result(b"{}")]}
    server.stream = [envelope((2, header), (1000, body)) for header, body in honest_stream()]


@pytest.mark.parametrize("count", COUNTS)
def test_streams_are_received_whole_or_refused(server, count):
    plain, packed = honest_stream(), honest_stream(options=COMPRESSED)
    riding = honest_stream(SCHEMA.with_metadata({OFFER_KEY: offered()}))
    others = [
        ipc_messages(pa.schema([("bytes", column.type)]), [pa.record_batch([column], ["bytes"])] * 3)
        for column in OTHER_COLUMNS
    ]
    client = open_fetching(server, FETCH_S)

    def make_stream(rng):
        messages = list(rng.choice((plain, plain, riding, riding, packed, rng.choice(others))))
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(len(messages))
            header, body = messages[at]
            match rng.randrange(6):
                case 0:
                    messages[at] = damaged(header, rng), body
                case 1:
                    messages[at] = header, damaged(body, rng)
                case 2:
                    messages[at:at] = [rng.choice(rng.choice((plain, packed, *others)))] * rng.randint(1, 3)
                case 3 if len(messages) > 1:
                    del messages[at]
                case 4:
                    messages[at] = header, b""
                case _:
                    messages[1:] = rng.sample(messages[1:], len(messages) - 1)
        stream = [envelope((2, header), (1000, body)) for header, body in messages]
        if rng.random() < 0.1:
            at = rng.randrange(len(stream))
            stream[at] = damaged(stream[at], rng)
        return stream

    parents = (server.address, None, "127.0.0.1:1", "", "x", "\x00", "127.0.0.1:99999", "[::1]:0", ":", "é:1", "\ud800")
    deltas = ([], [0], [9], [500, 500], [1 << 47], [0] * 300)

    def make_offer(rng):
        chance = rng.random()
        if chance < 0.04:
            return offered(parent=rng.choice(parents))
        if chance < 0.08:
            return offered(deltas=rng.choice(deltas))
        return offered(manifest=altered(MANIFEST.to_values(), rng)) if chance < 0.12 else offered()

    def make(rng):
        answers = [result(make_offer(rng))] * rng.choice((1,) * 60 + (0, 2))
        return make_stream(rng), answers

    def target(given):
        server.stream, server.answers["offer"] = given
        found = client.fetch(VERSION)
        assert all(np.array_equal(found[name], array) for name, array in SENT.items())

    be_honest(server)
    refused = fuzz(target, make, count, (WeightsError, UnreachableError))
    assert 0.3 * count < refused < 0.95 * count
    client.close()
    be_honest(server)
    client = open_fetching(server, LIMIT_S)
    np.testing.assert_array_equal(client.fetch(VERSION)["w"], SENT["w"])
    client.close()


@pytest.mark.parametrize("count", COUNTS)
def test_errors_of_a_server_are_read_or_replaced(count):
    told = {"message": "superseded", "superseded_by": [0, 9]}

    def target(content):
        error = local_error(flight.FlightServerError("refused", content), "127.0.0.1:1")
        assert isinstance(error, WeightsError | UnreachableError) and len(str(error)) < 5000

    fuzz(target, lambda rng: json_bytes(told, rng), count, ())

"""The server of one publication: what it sends, what it refuses, and how it ends."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import flight_service
from penstock.weights.flight_access import Access, local_error, open_channel
from penstock.weights.flight_messages import OfferRequest, StreamTicket
from penstock.weights.flight_service import Served, WeightService
from penstock.weights.manifest import describe

ACCESS = Access("token")
LIMIT_S = flight.FlightCallOptions(timeout=20)
BASE = ((0, 6), "earlier")


def served(step, arrays=None, ways=None):
    arrays = arrays or {"a": np.arange(10, dtype=np.int32) + step, "b": np.ones((2, 3), np.float32)}
    return Served(describe("job", "incarnation", WeightVersion(0, step), arrays), arrays, ways or {})


def ticket(**changes):
    values = {"job": "job", "client": "c", "incarnation": "incarnation", "version": (0, 7), "base": None}
    return StreamTicket(**values | {"stream": 0, "streams": 1, "chunk_bytes": 4096} | changes)


def streams_of(service, request):
    """The messages of one stream."""
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    try:
        reader = channel.do_get(flight.Ticket(request.to_bytes()), LIMIT_S)
        return [chunk.data.column(0).to_numpy().tobytes() for chunk in reader]
    except (pa.ArrowException, OSError) as error:
        raise local_error(error, "service") from error
    finally:
        channel.close()


def schema_of(service, request):
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    try:
        return channel.do_get(flight.Ticket(request.to_bytes()), LIMIT_S).schema
    finally:
        channel.close()


@pytest.fixture
def service():
    made = WeightService("job", ACCESS, "127.0.0.1", 0, {})
    made.put(served(7))
    yield made
    made.close()


def test_arrays_are_sent_as_they_lie_and_counted(service):
    expected = [np.arange(7, 17, dtype=np.int32).tobytes(), np.ones(6, np.float32).tobytes()]
    assert streams_of(service, ticket()) == expected
    assert streams_of(service, ticket(streams=2)) == [expected[0][:32]]
    assert streams_of(service, ticket(streams=2, stream=1)) == [expected[0][32:], expected[1]]
    assert service.metrics() == {"weights/bytes_served": 128.0, "weights/streams_served": 3.0}


def test_messages_refer_to_the_arrays_and_copy_nothing():
    array = np.arange(100, dtype=np.int64)
    [buffer] = served(7, {"a": array}).buffers(None)
    assert buffer.address == array.ctypes.data and buffer.size == 800


def test_deltas_are_sent_to_those_who_have_their_base(service):
    service.put(served(7, ways={BASE: [b"first", b"second"]}))
    assert streams_of(service, ticket(base=BASE)) == [b"first", b"second"]
    with pytest.raises(WeightsError, match="no delta from"):
        streams_of(service, ticket(base=((0, 6), "other")))


def test_a_stream_that_asks_begins_with_the_offer():
    asked = []

    def offer(body, host):
        asked.append((OfferRequest.from_bytes(body, 1000), host))
        return b'{"parent": "here"}'

    service = WeightService("job", ACCESS, "127.0.0.1", 0, {"offer": offer})
    service.put(served(7))
    try:
        assert schema_of(service, ticket()).metadata is None and asked == []
        assert schema_of(service, ticket(asks=True)).metadata == {b"offer": b'{"parent": "here"}'}
    finally:
        service.close()
    assert asked == [(OfferRequest(job="job", client="c", version=(0, 7), base=None, timeout_s=0.0), "127.0.0.1")]


def test_where_there_are_no_offers_a_stream_that_asks_begins_without(service):
    assert schema_of(service, ticket(asks=True)).metadata is None


def test_the_sizes_of_deltas_are_known_before_they_are_fetched():
    publication = served(7, ways={BASE: [b"first", b"second"]})
    own = ((0, 7), publication.manifest.digest)
    assert publication.delta_sizes(BASE) == [5, 6]
    assert publication.delta_sizes(own) == []
    assert publication.delta_sizes(((0, 5), "unknown")) is None is publication.delta_sizes(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "other"}, "job 'other' asks the weight server of job 'job'"),
        ({"version": (0, 6)}, "not available"),
        ({"version": (1, 7)}, "not available"),
        ({"incarnation": "before"}, "published it anew"),
    ],
)
def test_nothing_but_what_was_asked_for_is_ever_sent(service, changes, message):
    with pytest.raises(WeightsError, match=message) as refusal:
        streams_of(service, ticket(**changes))
    if "job" not in changes:
        assert isinstance(refusal.value, SupersededVersionError) and refusal.value.newest == (0, 7)
    assert service.metrics()["weights/bytes_served"] == 0


def test_before_the_first_publication_nothing_is_available():
    service = WeightService("job", ACCESS, "127.0.0.1", 0, {})
    with pytest.raises(SupersededVersionError) as refusal:
        streams_of(service, ticket())
    assert refusal.value.newest is None
    service.close()


def test_what_is_no_ticket_is_refused(service):
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    for text in (b"", b"[]", b"\xff" * 100, b"x" * 100_000):
        with pytest.raises(pa.ArrowException) as failure:
            channel.do_get(flight.Ticket(text), LIMIT_S).read_all()
        assert "StreamTicket" in str(local_error(failure.value, "service"))
    channel.close()


def test_unknown_actions_are_refused(service):
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    with pytest.raises(flight.FlightServerError, match="unknown action 'update_weights'"):
        list(channel.do_action(flight.Action("update_weights", b""), LIMIT_S))
    channel.close()


def test_a_fetch_that_began_is_served_to_its_end():
    old = {"a": np.full(8 << 20, 1, np.uint8)}
    service = WeightService("job", ACCESS, "127.0.0.1", 0, {})
    service.put(served(7, old))
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    reader = channel.do_get(flight.Ticket(ticket(chunk_bytes=1 << 20).to_bytes()), LIMIT_S)
    first = reader.read_chunk().data.column(0).to_numpy()
    service.put(served(8, {"a": np.full(8 << 20, 2, np.uint8)}))
    rest = [chunk.data.column(0).to_numpy() for chunk in reader]
    assert sum(map(len, rest)) + len(first) == 8 << 20 and all((part == 1).all() for part in (first, *rest))
    channel.close()
    service.close()


def test_an_address_in_use_is_named(service):
    with pytest.raises(ConfigError, match=f"127.0.0.1:{service.port} cannot be listened on"):
        WeightService("job", ACCESS, "127.0.0.1", service.port, {})


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(monkeypatch, caplog):
    class Held(WeightService):
        def shutdown(self):  # gRPC's waits for every stream that is open
            ended.wait(20.0)
            super().shutdown()

    ended = threading.Event()
    monkeypatch.setattr(flight_service, "_CLOSE_S", 0.1)
    service = Held("job", ACCESS, "127.0.0.1", 0, {})
    began = time.monotonic()
    service.close()
    assert time.monotonic() - began < 10.0 and "left behind" in caplog.text
    ended.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "weights-close"]:
        thread.join(10.0)
        assert not thread.is_alive()


def test_streams_end_when_the_service_closes(service):
    service.put(served(7, {"a": np.zeros(64 << 20, np.uint8)}))
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    reader = channel.do_get(flight.Ticket(ticket(chunk_bytes=1 << 20).to_bytes()), LIMIT_S)
    reader.read_chunk()
    closing = threading.Thread(target=service.close)
    closing.start()
    with pytest.raises(pa.ArrowException) as failure:
        for _ in reader:
            closing.join(0.01)
    assert isinstance(local_error(failure.value, "service"), UnreachableError)
    closing.join(20.0)
    channel.close()

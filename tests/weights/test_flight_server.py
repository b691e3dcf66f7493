"""What the server of a publication sends and refuses, and what the root says of versions and places."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, flight_server
from penstock.weights.broadcaster import Publication
from penstock.weights.flight_connection import Channel
from penstock.weights.flight_messages import (
    Access,
    FinishedAnswer,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    local_error,
    open_channel,
)
from penstock.weights.flight_server import FlightServer, ServedVersion, WeightService
from penstock.weights.manifest import describe

ACCESS = Access("token")
CALL_OPTIONS = flight.FlightCallOptions(timeout=280)
BASE = (WeightVersion(0, 6), "earlier")


def served(step, arrays=None, ways=None):
    arrays = arrays or {"a": np.arange(10, dtype=np.int32) + step, "b": np.ones((2, 3), np.float32)}
    return ServedVersion(describe("job", "incarnation", WeightVersion(0, step), arrays), arrays, ways or {})


def ticket(**changes):
    values = {"job": "job", "client": "c", "incarnation": "incarnation", "version": WeightVersion(0, 7), "base": None}
    return StreamTicket(**values | {"stream": 0, "streams": 1, "chunk_bytes": 4096} | changes)


def streams_of(service, request):
    """The messages of one stream."""
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    try:
        reader = channel.do_get(flight.Ticket(request.to_bytes()), CALL_OPTIONS)
        return [chunk.data.column(0).to_numpy().tobytes() for chunk in reader]
    except (pa.ArrowException, OSError) as error:
        raise local_error(error, "service") from error
    finally:
        channel.close()


def schema_of(service, request):
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    try:
        return channel.do_get(flight.Ticket(request.to_bytes()), CALL_OPTIONS).schema
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
        streams_of(service, ticket(base=(WeightVersion(0, 6), "other")))


def test_a_stream_that_asks_begins_with_the_offer():
    asked = []

    def offer(request, host):
        asked.append((request, host))
        return OfferAnswer(parent="here")

    service = WeightService("job", ACCESS, "127.0.0.1", 0, {"offer": (OfferRequest, offer)})
    service.put(served(7))
    try:
        assert schema_of(service, ticket()).metadata is None and asked == []
        assert schema_of(service, ticket(asks=True)).metadata == {b"offer": OfferAnswer(parent="here").to_bytes()}
    finally:
        service.close()
    assert asked == [
        (OfferRequest(job="job", client="c", version=WeightVersion(0, 7), base=None, timeout_s=0.0), "127.0.0.1")
    ]


def test_where_there_are_no_offers_a_stream_that_asks_begins_without(service):
    assert schema_of(service, ticket(asks=True)).metadata is None


def test_the_sizes_of_deltas_are_known_before_they_are_fetched():
    publication = served(7, ways={BASE: [b"first", b"second"]})
    own = (WeightVersion(0, 7), publication.manifest.digest)
    assert publication.delta_sizes(BASE) == [5, 6]
    assert publication.delta_sizes(own) == []
    assert publication.delta_sizes((WeightVersion(0, 5), "unknown")) is None is publication.delta_sizes(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "other"}, "job 'other' asks the weight server of job 'job'"),
        ({"version": WeightVersion(0, 6)}, "not available"),
        ({"version": WeightVersion(1, 7)}, "not available"),
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
            channel.do_get(flight.Ticket(text), CALL_OPTIONS).read_all()
        assert "StreamTicket" in str(local_error(failure.value, "service"))
    channel.close()


def test_unknown_actions_are_refused(service):
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    with pytest.raises(flight.FlightServerError, match="unknown action 'update_weights'"):
        list(channel.do_action(flight.Action("update_weights", b""), CALL_OPTIONS))
    channel.close()


def test_a_fetch_that_began_is_served_to_its_end():
    old = {"a": np.full(8 << 20, 1, np.uint8)}
    service = WeightService("job", ACCESS, "127.0.0.1", 0, {})
    service.put(served(7, old))
    channel = open_channel(f"127.0.0.1:{service.port}", False, ACCESS, 1 << 20)
    reader = channel.do_get(flight.Ticket(ticket(chunk_bytes=1 << 20).to_bytes()), CALL_OPTIONS)
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
    monkeypatch.setattr(flight_server, "_CLOSE_S", 0.1)
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
    reader = channel.do_get(flight.Ticket(ticket(chunk_bytes=1 << 20).to_bytes()), CALL_OPTIONS)
    reader.read_chunk()
    closing = threading.Thread(target=service.close)
    closing.start()
    with pytest.raises(pa.ArrowException) as failure:
        for _ in reader:
            closing.join(0.01)
    assert isinstance(local_error(failure.value, "service"), UnreachableError)
    closing.join(20.0)
    channel.close()


LIMIT_S = 20.0


class Root:
    def __init__(self, **config):
        self.now = 0.0
        self.store = FlightServer(WeightsConfig(**config), "job", "token", "ab", clock=lambda: self.now)
        self.channel = Channel(self.store.endpoint()["address"], False, Access("token"), 1, 4096)

    def put(self, step):
        arrays = {"x": np.full(3, step, np.int32)}
        self.store.put(Publication(describe("job", "ab", WeightVersion(0, step), arrays), arrays, {}))

    def wait(self, known=None, timeout_s=0.0, job="job"):
        request = WaitRequest(job=job, client="c", known=known, timeout_s=timeout_s)
        return self.channel.ask("wait", request, WaitAnswer, LIMIT_S).newest

    def offer(self, client, step, **more):
        values = {"job": "job", "base": None, "timeout_s": 0.0} | more
        request = OfferRequest(client=client, version=WeightVersion(0, step), **values)
        return self.channel.ask("offer", request, OfferAnswer, LIMIT_S)

    def finished(self, client, step, port):
        request = FinishedRequest(job="job", client=client, version=WeightVersion(0, step), port=port)
        self.channel.ask("finished", request, FinishedAnswer, LIMIT_S)

    def close(self):
        self.channel.close()
        self.store.close()
        self.store.close()


@pytest.fixture
def root():
    made = Root(fanout=1)
    yield made
    made.close()


def test_what_is_known_is_no_news_until_there_is_more(root):
    assert root.wait() is None
    root.put(1)
    assert root.wait() == ("ab", WeightVersion(0, 1))
    began = time.monotonic()
    assert (
        root.wait(("ab", WeightVersion(0, 1)), timeout_s=0.2) == ("ab", WeightVersion(0, 1))
        and time.monotonic() - began >= 0.2
    )
    assert root.wait(("another", WeightVersion(0, 1)), timeout_s=LIMIT_S) == ("ab", WeightVersion(0, 1))


def test_a_publication_wakes_who_waits(root):
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(root.wait(None, timeout_s=LIMIT_S)))
    waiter.start()
    root.put(1)
    waiter.join(LIMIT_S)
    assert seen == [("ab", WeightVersion(0, 1))]


def test_closing_ends_waits(root):
    failures = []

    def wait():
        try:
            root.wait(None, timeout_s=LIMIT_S)
        except UnreachableError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while root.store.metrics()["weights/clients"] == 0:
        time.sleep(0.01)
    root.store.close()
    waiter.join(LIMIT_S)
    assert len(failures) == 1


def test_places_are_given_and_passed_on(root):
    root.put(1)
    for client in ("a", "b"):
        root.offer(client, 1)
    assert root.offer("a", 1).parent == "" and root.offer("b", 1).parent is None
    assert root.offer("a", 1).keep  # there are more clients than the root serves
    root.finished("a", 1, 8123)
    answer = root.offer("b", 1)
    assert answer.parent == "127.0.0.1:8123" and answer.deltas is None
    assert answer.read_manifest(1 << 20).version == WeightVersion(0, 1)
    assert root.offer("b", 1, failed=True).parent == ""


def test_an_offer_waits_for_a_place(root):
    root.put(1)
    root.offer("a", 1)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(root.offer("b", 1, timeout_s=LIMIT_S)))
    waiter.start()
    root.finished("a", 1, 8123)
    waiter.join(LIMIT_S)
    assert [answer.parent for answer in answers] == ["127.0.0.1:8123"]


def test_a_stream_keeps_the_place_of_its_client(root):
    root.put(1)
    root.offer("a", 1)
    root.now += 59.0
    ticket = StreamTicket(
        job="job",
        client="a",
        incarnation="ab",
        version=WeightVersion(0, 1),
        base=None,
        stream=0,
        streams=1,
        chunk_bytes=4096,
    )
    root.channel.begin(ticket, [np.empty(12, np.uint8)], time.monotonic() + LIMIT_S).wait(None)
    root.now += 59.0
    assert root.offer("b", 1).parent is None
    root.now += 2.0
    assert root.offer("b", 1).parent == ""


def test_a_superseded_version_is_not_offered(root):
    root.put(1)
    root.put(2)
    for step in (1, 3):
        with pytest.raises(SupersededVersionError) as refusal:
            root.offer("a", step)
        assert refusal.value.newest == (0, 2)


def test_another_jobs_requests_are_refused(root):
    root.put(1)
    with pytest.raises(WeightsError, match="job 'other' asks the weight server of job 'job'"):
        root.wait(job="other")
    with pytest.raises(WeightsError, match="job 'other'"):
        root.offer("a", 1, job="other")


def test_the_lag_of_the_slowest_client_is_measured(root):
    root.put(1)
    for client in ("a", "b"):
        root.offer(client, 1)
        root.finished(client, 1, None)
    root.put(2)
    root.put(4)
    root.offer("a", 4)
    root.finished("a", 4, None)
    assert root.store.metrics()["weights/slowest_lag"] == 3.0 and root.store.metrics()["weights/clients"] == 2.0
    root.now += 59.0
    root.wait()  # as client c
    root.now += 2.0
    root.wait()
    assert root.store.metrics()["weights/slowest_lag"] == 0.0 and root.store.metrics()["weights/clients"] == 1.0


def test_the_endpoint_names_where_clients_connect():
    for config, address in (({"advertise": "gateway:9000"}, "gateway:9000"), ({"host": "0.0.0.0"}, None)):
        root = FlightServer(WeightsConfig(**config), "job", "token", "ab")
        told = root.endpoint()["address"]
        assert told == address or (address is None and not told.startswith("0.0.0.0:"))
        assert root.endpoint()["tls"] is False
        root.close()


def test_an_open_address_without_a_token_is_refused():
    with pytest.raises(ConfigError, match="needs a token"):
        FlightServer(WeightsConfig(host="0.0.0.0"), "job", None, "ab")

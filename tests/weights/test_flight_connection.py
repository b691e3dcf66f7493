"""How a payload is cut into streams, and that every fetch ends, whole or with an error that says what came."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.types import UnreachableError, WeightsError, WeightVersion
from penstock.weights.flight_connection import Channel, Fetch, StreamChunk, chunks_of, cut_streams
from penstock.weights.flight_messages import (
    OFFER_KEY,
    SCHEMA,
    Access,
    FinishedAnswer,
    FinishedRequest,
    OfferAnswer,
    StreamTicket,
    serving_options,
)


def test_shares_are_equal_and_messages_end_with_their_buffers():
    assert cut_streams([10, 0, 3, 7], streams=2, chunk_bytes=4) == [
        [StreamChunk(0, 0, 4), StreamChunk(0, 4, 4), StreamChunk(0, 8, 2)],
        [StreamChunk(2, 0, 3), StreamChunk(3, 0, 4), StreamChunk(3, 4, 3)],
    ]


def test_streams_without_a_share_are_empty():
    assert cut_streams([2], streams=3, chunk_bytes=8) == [[StreamChunk(0, 0, 1)], [StreamChunk(0, 1, 1)], []]
    assert cut_streams([], streams=2, chunk_bytes=8) == [[], []]
    assert cut_streams([0, 0], streams=2, chunk_bytes=8) == [[], []]


@given(
    st.lists(st.integers(0, 500), max_size=8),
    st.integers(1, 9),
    st.integers(1, 64),
)
def test_every_byte_is_in_one_message_of_one_stream(sizes, streams, chunk_bytes):
    plan = cut_streams(sizes, streams, chunk_bytes)
    assert len(plan) == streams
    covered = [set() for _ in sizes]
    for piece in (piece for pieces in plan for piece in pieces):
        part = set(range(piece.offset, piece.offset + piece.size))
        assert 0 < piece.size <= chunk_bytes and not covered[piece.index] & part
        covered[piece.index] |= part
    assert covered == [set(range(size)) for size in sizes]
    shares = [sum(piece.size for piece in pieces) for pieces in plan]
    assert max(shares) == -(-sum(sizes) // streams)


def test_a_plan_of_tiny_messages_takes_no_memory_before_it_is_used():
    """A client says how small; a plan of all of them at once would have sixteen million entries here."""
    pieces = chunks_of([1 << 36], 1, 4096, 0)
    assert next(pieces) == StreamChunk(0, 0, 4096) and next(pieces) == StreamChunk(0, 4096, 4096)


def test_a_stream_that_is_not_there_has_nothing():
    assert list(chunks_of([10, 20], 2, 8, 2)) == [] == list(chunks_of([], 2, 8, 0))


ACCESS = Access("token")
LIMIT_S = 20.0
TICKET = StreamTicket(
    job="j", client="c", incarnation="i", version=WeightVersion(0, 1), base=None, stream=0, streams=1, chunk_bytes=4096
)


class Server(flight.FlightServerBase):
    """Streams what it was given; an Event among the batches is waited for."""

    def __init__(self, batches, schema=SCHEMA, answers=(b"{}",)):
        self.batches, self.schema, self.answers, self.tickets = batches, schema, answers, []
        super().__init__(**serving_options(ACCESS, "127.0.0.1", 0))

    def do_get(self, context, ticket):
        self.tickets.append(StreamTicket.model_validate_json(ticket.ticket))
        return flight.GeneratorStream(self.schema, self._batches())

    def do_action(self, context, action):
        return list(self.answers)

    def _batches(self):
        for batch in self.batches:
            if isinstance(batch, threading.Event):
                batch.wait(LIMIT_S)
            else:
                yield batch


def batch(text, schema=SCHEMA):
    return pa.RecordBatch.from_arrays([pa.array(list(text), schema.field(0).type)], schema=schema)


def fetch(server, sizes, streams=1, deadline_s=LIMIT_S, stall_s=None, channel=None):
    channel = channel or Channel(f"127.0.0.1:{server.port}", False, ACCESS, streams, 4096)
    buffers = [np.zeros(size, np.uint8) for size in sizes]
    try:
        channel.begin(TICKET, buffers, time.monotonic() + deadline_s).wait(stall_s)
    finally:
        channel.close()
    return [buffer.tobytes() for buffer in buffers]


def test_each_message_goes_to_its_place():
    with Server([batch(b"abc"), batch(b"de")]) as server:
        assert fetch(server, [3, 0, 2]) == [b"abc", b"", b"de"]
        assert (server.tickets[0].streams, server.tickets[0].chunk_bytes) == (1, 4096)


def test_every_stream_asks_for_its_own_share():
    with Server([batch(b"xy")]) as server:
        assert fetch(server, [6], streams=3) == [b"xyxyxy"]
        assert sorted(ticket.stream for ticket in server.tickets) == [0, 1, 2]


def test_nothing_to_fetch_asks_for_nothing():
    with Server([]) as server:
        assert fetch(server, [0, 0]) == [b"", b""] and fetch(server, []) == []
        assert server.tickets == []


other = pa.schema([pa.field("bytes", pa.int8(), nullable=False)])
two = pa.schema([pa.field("a", pa.uint8()), pa.field("b", pa.uint8())])
named = pa.schema([pa.field("other", pa.uint8(), nullable=False)])
null = pa.RecordBatch.from_arrays([pa.array([1, None], pa.uint8())], names=["bytes"])


@pytest.mark.parametrize(
    ("batches", "schema", "message"),
    [
        ([], SCHEMA, "less than"),
        ([batch(b"a"), batch(b"b")], SCHEMA, "other things than 2 bytes"),
        ([batch(b"ab"), batch(b"c")], SCHEMA, "more than"),
        ([batch(b"abc")], SCHEMA, "other things"),
        ([batch(b"ab", other)], other, "other things"),
        ([batch(b"ab", named)], named, "other things"),  # Arrow cannot even read a name that is not UTF-8
        ([pa.RecordBatch.from_arrays([pa.array([1, 2], pa.uint8())] * 2, schema=two)], two, "other things"),
        ([null], null.schema, "other things"),
    ],
    ids=["nothing", "short", "more", "long", "type", "name", "columns", "nulls"],
)
def test_other_bytes_than_were_due_are_refused(batches, schema, message):
    with Server(batches, schema) as server:
        with pytest.raises(WeightsError, match=message):
            fetch(server, [2])


class Forged(list):
    """A column, and the batch of it, as Arrow makes them of a forged message; by itself it makes none such."""

    null_count, offset = 0, 0

    def __init__(self, length, body):
        super().__init__([0] * length)
        self.body = body

    def buffers(self):
        return [None, self.body]

    def column(self, index):
        return self


@pytest.mark.parametrize("body", [pa.py_buffer(b"a"), pa.py_buffer(b""), None], ids=["short", "empty", "none"])
def test_a_message_that_says_more_than_it_holds_is_refused(body):
    fetch = Fetch("there", [np.zeros(2, np.uint8)], 0.0, threading.Event())
    with pytest.raises(WeightsError, match="sent other things than 2 bytes"):
        fetch._place(Forged(2, body), StreamChunk(0, 0, 2))


@pytest.fixture
def asking():
    """Begins to fetch two bytes with a ticket that asks, and gives the fetch."""
    channels = []

    def begin(server, sizes=(2,), deadline_s=LIMIT_S):
        channels.append(Channel(f"127.0.0.1:{server.port}", False, ACCESS, 2, 4096))
        buffers = [np.zeros(size, np.uint8) for size in sizes]
        ticket = TICKET.model_copy(update={"asks": True})
        return channels[-1].begin(ticket, buffers, time.monotonic() + deadline_s)

    yield begin
    for channel in channels:
        channel.close()


def test_the_first_stream_alone_asks_and_brings_the_answer_before_its_bytes(asking):
    stuck, offered = threading.Event(), OfferAnswer(parent="elsewhere", keep=True)
    with Server([stuck, batch(b"a")], SCHEMA.with_metadata({OFFER_KEY: offered.to_bytes()})) as server:
        fetch = asking(server)
        assert fetch.offer(LIMIT_S) == offered and not any(stream.done() for stream in fetch.streams)
        stuck.set()
        fetch.wait(None)
        assert sorted((ticket.stream, ticket.asks) for ticket in server.tickets) == [(0, True), (1, False)]


def test_a_server_that_brings_no_answer_is_to_be_asked_by_itself(asking):
    with Server([batch(b"a")]) as server:
        assert asking(server).offer(LIMIT_S) is None
        assert asking(server, sizes=(0,)).offer(LIMIT_S) is None  # without a stream


def test_an_answer_that_cannot_be_read_or_does_not_come_is_an_error(asking):
    with Server([batch(b"a")], SCHEMA.with_metadata({OFFER_KEY: b"{"})) as server:
        with pytest.raises(WeightsError, match="not a OfferAnswer"):
            asking(server).offer(LIMIT_S)
    with Server([]) as server:
        server.do_get = lambda context, ticket: time.sleep(1.0)
        with pytest.raises(UnreachableError, match="did not begin to send in time|is dead, silent or broken"):
            asking(server, deadline_s=0.2).offer(LIMIT_S)


def test_closing_ends_the_wait_for_an_answer_and_so_does_its_limit(asking):
    stuck = threading.Event()
    with Server([batch(b"a")]) as server:
        server.do_get = lambda context, ticket: stuck.wait(LIMIT_S)
        fetch = asking(server)
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="did not begin to send in time"):
            fetch.offer(0.3)
        closer = threading.Timer(0.3, fetch._closed.set)
        closer.start()
        with pytest.raises(UnreachableError, match="was closed"):
            fetch.offer(LIMIT_S)
        assert time.monotonic() - began < 5.0
        stuck.set()


def test_a_stream_that_stalls_is_given_up():
    stuck = threading.Event()
    with Server([batch(b"ab"), stuck, batch(b"cd")]) as server:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="sent nothing for"):
            fetch(server, [2, 2], stall_s=0.3)
        assert time.monotonic() - began < 5.0
        stuck.set()


def test_a_stream_that_takes_too_long_is_given_up():
    stuck = threading.Event()
    with Server([batch(b"ab"), stuck, batch(b"cd")]) as server:
        with pytest.raises(UnreachableError):
            fetch(server, [2, 2], deadline_s=0.3)
        stuck.set()


def test_closing_ends_a_fetch():
    stuck = threading.Event()
    with Server([stuck]) as server:
        channel = Channel(f"127.0.0.1:{server.port}", False, ACCESS, 1, 4096)
        closing = threading.Timer(0.1, channel.close)
        closing.start()
        with pytest.raises((UnreachableError, WeightsError)):
            fetch(server, [2], channel=channel)
        stuck.set()
        closing.join()


def test_closing_under_a_question_lets_it_end_and_no_other_begin():
    asked, release = threading.Event(), threading.Event()

    class Slow(Server):
        def do_action(self, context, action):
            asked.set()
            release.wait(LIMIT_S)
            return [b"{}"]

    request = FinishedRequest(job="j", client="c", version=WeightVersion(0, 1), port=None)
    with Slow([]) as server:
        channel = Channel(f"127.0.0.1:{server.port}", False, ACCESS, 1, 4096)
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(channel.ask("finished", request, FinishedAnswer, LIMIT_S))
        )
        asking.start()
        assert asked.wait(LIMIT_S)
        channel.close()
        channel.close()
        with pytest.raises(UnreachableError, match="was closed"):
            channel.ask("finished", request, FinishedAnswer, LIMIT_S)
        with pytest.raises(UnreachableError, match="was closed"):
            channel.begin(TICKET, [np.zeros(2, np.uint8)], time.monotonic() + LIMIT_S)
        channel.notify("finished", request, LIMIT_S)
        release.set()
        asking.join(LIMIT_S)
        assert answers == [FinishedAnswer()]


def test_one_stream_that_fails_ends_the_others():
    stuck, failed = threading.Event(), []

    class Half(Server):
        def do_get(self, context, ticket):
            if StreamTicket.model_validate_json(ticket.ticket).stream == 1:
                failed.append(True)
                raise flight.FlightUnavailableError("gone")
            return super().do_get(context, ticket)

    with Half([stuck]) as server:
        with pytest.raises(UnreachableError, match="gone"):
            fetch(server, [4], streams=2)
        assert failed
        stuck.set()


def test_answers_are_bounded_and_read():
    request = FinishedRequest(job="j", client="c", version=WeightVersion(0, 1), port=None)
    for answers, message in (((b"{}", b"{}"), "2 answers"), ((), "0 answers"), ((b"[",), "not a FinishedAnswer")):
        with Server([], answers=answers) as server:
            channel = Channel(f"127.0.0.1:{server.port}", False, ACCESS, 1, 4096)
            with pytest.raises(WeightsError, match=message):
                channel.ask("finished", request, FinishedAnswer, LIMIT_S)
            channel.close()

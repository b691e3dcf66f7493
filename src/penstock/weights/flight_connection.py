"""A client's connections to one Flight server of weights: one for requests, one for each stream of a fetch.

Every call has a deadline. A stream that delivers nothing for too long is given up long before it, where the caller asks
for that. Connections are closed by whoever uses them last: Arrow crashes where one is closed under a call.

A payload is a row of buffers (the arrays, or encoded differences). Every stream gets an equal, contiguous share of its
bytes, cut at the buffers' ends and at the largest message: so each message lies in one buffer, and is sent from there
and received into there without any other copy of ours. Both ends compute the same plan (`chunks_of`).
"""

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from penstock.types import UnreachableError, WeightsError
from penstock.weights.flight_messages import (
    OFFER_KEY,
    SCHEMA,
    Access,
    AnyFlightMessage,
    FinishedAnswer,
    FlightMessage,
    OfferAnswer,
    StreamTicket,
    local_error,
    open_channel,
    read_answer,
)
from penstock.weights.manifest import MAX_MANIFEST_BYTES

_log = logging.getLogger(__name__)
_CHECK_S = 0.25


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One message: `size` bytes of buffer `index`, from `offset`."""

    index: int
    offset: int
    size: int


class Channel:
    """Connections to one server; they are made when first used.

    Args:
        address: ``host:port``.
        tls: Whether it speaks TLS.
        access: Token and trust.
        streams: Most parallel streams.
        chunk_bytes: Largest message of a stream.
    """

    def __init__(self, address: str, tls: bool, access: Access, streams: int, chunk_bytes: int) -> None:
        self.address = address
        self._streams, self._chunk_bytes = streams, chunk_bytes
        self._asking = open_channel(address, tls, access, MAX_MANIFEST_BYTES)
        self._connections = [open_channel(address, tls, access, chunk_bytes) for _ in range(streams)]
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="weights-stream")
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._users = 0

    def ask(
        self, name: str, request: FlightMessage, kind: type[AnyFlightMessage], timeout_s: float
    ) -> AnyFlightMessage:
        """Asks the server.

        Raises:
            UnreachableError: it did not answer in time.
            WeightsError: it refused, or its answer cannot be read.
        """
        options = flight.FlightCallOptions(timeout=max(timeout_s, 1e-3))
        with self._in_use():
            try:
                results = list(self._asking.do_action(flight.Action(name, request.to_bytes()), options=options))
            except (pa.ArrowException, OSError) as error:
                raise local_error(error, self.address) from error
        if len(results) != 1:
            raise WeightsError(f"the weight server at {self.address} gave {len(results)} answers to {name!r}")
        return read_answer(kind, results[0].body)

    def notify(self, name: str, request: FlightMessage, timeout_s: float) -> None:
        """Sends a request without waiting for the answer; a failure is logged, and nothing else comes of it."""

        def ask() -> None:
            try:
                self.ask(name, request, FinishedAnswer, timeout_s)
            except (UnreachableError, WeightsError) as error:
                _log.info("%r did not reach the weight server: %s", name, error)

        try:
            with self._in_use():
                self._pool.submit(ask)
        except UnreachableError as error:
            _log.info("%r did not reach the weight server: %s", name, error)

    def begin(self, ticket: StreamTicket, buffers: Sequence[np.ndarray], deadline: float) -> "Fetch":
        """Begins to receive a payload over parallel streams; `Fetch.wait` ends that, or `Fetch.give_up`.

        Args:
            ticket: What; the numbers of the streams are filled in here. Where it asks, the first stream does.
            buffers: uint8 [size] each: where its buffers go.
            deadline: Monotonic seconds.

        Raises:
            UnreachableError: this was closed.
        """
        plan = cut_streams([buffer.size for buffer in buffers], self._streams, self._chunk_bytes)
        numbers = {"streams": self._streams, "chunk_bytes": self._chunk_bytes}
        fetch = Fetch(self.address, buffers, deadline, self._closed)
        tickets = [
            ticket.model_copy(update=numbers | {"stream": stream, "asks": ticket.asks and stream == 0})
            for stream in range(self._streams)
        ]
        with self._in_use():
            fetch.streams = [
                self._pool.submit(self._receive, fetch, connection, stream_ticket, chunks)
                for connection, stream_ticket, chunks in zip(self._connections, tickets, plan, strict=True)
                if chunks
            ]
        return fetch

    def close(self) -> None:
        """Ends fetches that run, and lets no call begin; a request that runs ends in its own time. May come twice."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            unused = self._users == 0
        if unused:
            self._disconnect()

    def _receive(
        self, fetch: "Fetch", connection: flight.FlightClient, ticket: StreamTicket, chunks: Sequence[StreamChunk]
    ) -> None:
        with self._in_use():
            fetch.receive(connection, ticket, chunks)

    @contextmanager
    def _in_use(self) -> Generator[None]:
        with self._lock:
            if self._closed.is_set():
                raise UnreachableError(f"the connection to the weight server at {self.address} was closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed.is_set() and self._users == 0
            if last:
                self._disconnect()

    def _disconnect(self) -> None:
        self._pool.shutdown(wait=False)
        for connection in (self._asking, *self._connections):
            connection.close()


class Fetch:
    """The streams of one fetch that runs: all end when one fails. Made by `Channel.begin`.

    Attributes:
        streams: One future for each stream that has something to bring.
    """

    def __init__(self, address: str, buffers: Sequence[np.ndarray], deadline: float, closed: threading.Event) -> None:
        self._address, self._buffers, self._deadline, self._closed = address, buffers, deadline, closed
        self._readers: list[flight.FlightStreamReader] = []
        self._lock = threading.Lock()
        self._moved_at = time.monotonic()
        self._ended = False
        self._offer: Future[OfferAnswer | None] = Future()
        self.streams: Sequence[Future[None]] = ()

    def receive(self, connection: flight.FlightClient, ticket: StreamTicket, chunks: Sequence[StreamChunk]) -> None:
        """Receives one stream into its places."""
        remaining_s = max(self._deadline - time.monotonic(), 1e-3)
        try:
            options = flight.FlightCallOptions(timeout=remaining_s)
            reader = connection.do_get(flight.Ticket(ticket.to_bytes()), options=options)
            self._register(reader)
            schema = reader.schema
            if not schema.equals(SCHEMA):
                raise WeightsError(f"the weight server at {self._address} sent other things than bytes")
            if ticket.asks:
                offer = (schema.metadata or {}).get(OFFER_KEY)
                self._offer.set_result(None if offer is None else read_answer(OfferAnswer, offer))
            for chunk in chunks:
                self._place(reader.read_chunk().data, chunk)
            if next(iter(reader), None) is not None:
                raise WeightsError(f"the weight server at {self._address} sent more than the arrays have")
        except StopIteration as error:
            raise WeightsError(f"the weight server at {self._address} sent less than the arrays have") from error
        except (pa.ArrowException, OSError) as error:
            raise local_error(error, self._address) from error

    def offer(self, timeout_s: float) -> OfferAnswer | None:
        """The answer to a ticket that asks, which comes before the first message; None where it was not sent along.

        Raises:
            UnreachableError: the server died, or did not begin in time; or the connection was closed.
            WeightsError: it refused, or sent something else.
        """
        if not self.streams:
            return None
        either: list[Future[Any]] = [self._offer, self.streams[0]]
        limit = min(time.monotonic() + timeout_s, self._deadline)
        while not wait(either, max(0.0, min(_CHECK_S, limit - time.monotonic())), FIRST_COMPLETED).done:
            if self._closed.is_set():
                raise UnreachableError("the connection was closed")
            if time.monotonic() >= limit:
                raise UnreachableError(f"the weight server at {self._address} did not begin to send in time")
        if not self._offer.done():
            self.streams[0].result()
            raise WeightsError(f"the weight server at {self._address} ended its first stream without an answer")
        return self._offer.result()

    def wait(self, stall_s: float | None) -> None:
        """Waits for all streams, and ends them all when one failed or nothing comes any more.

        Args:
            stall_s: Give up when nothing came for so long; None waits until the deadline.

        Raises:
            UnreachableError: the server died, or was too slow.
            WeightsError: it refused, or sent something else.
        """
        pending = set(self.streams)
        try:
            while pending:
                done, pending = wait(pending, timeout=_CHECK_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if pending:
                    self._check_progress(stall_s)
        finally:
            if pending:
                self.give_up()

    def give_up(self) -> None:
        """Ends the streams that still run; what came is not used. A stream that hangs is left to its deadline."""
        with self._lock:
            self._ended = True
            readers = list(self._readers)
        running = [stream for stream in self.streams if not stream.cancel() and not stream.done()]
        if running:
            for reader in readers:
                reader.cancel()
            wait(running, timeout=_CHECK_S)

    def _place(self, batch: pa.RecordBatch | None, chunk: StreamChunk) -> None:
        column = None if batch is None else batch.column(0)
        data = None if column is None or len(column) != chunk.size or column.null_count else column.buffers()[1]
        if column is None or data is None or data.size < column.offset + chunk.size:  # Arrow looks at no buffer's size
            raise WeightsError(f"the weight server at {self._address} sent other things than {chunk.size} bytes")
        received = np.frombuffer(data, np.uint8, chunk.size, column.offset)
        self._buffers[chunk.index][chunk.offset : chunk.offset + chunk.size] = received
        self._moved_at = time.monotonic()

    def _register(self, reader: flight.FlightStreamReader) -> None:
        with self._lock:
            self._readers.append(reader)
            ended = self._ended
        if ended:
            reader.cancel()

    def _check_progress(self, stall_s: float | None) -> None:
        if self._closed.is_set():
            raise UnreachableError("the connection was closed")
        still_s = time.monotonic() - self._moved_at
        if stall_s is not None and still_s > stall_s:
            raise UnreachableError(f"the weight server at {self._address} sent nothing for {still_s:.0f} s")


def cut_streams(sizes: Sequence[int], streams: int, chunk_bytes: int) -> list[list[StreamChunk]]:
    """The messages of each stream, in order.

    Args:
        sizes: Bytes of every buffer.
        streams: How many streams; those for which there is nothing left get an empty list.
        chunk_bytes: Most bytes of a message.

    Returns:
        One list per stream; together they cover every byte once.
    """
    return [list(chunks_of(sizes, streams, chunk_bytes, stream)) for stream in range(streams)]


def chunks_of(sizes: Sequence[int], streams: int, chunk_bytes: int, stream: int) -> Iterator[StreamChunk]:
    """The messages of one stream, one after the other: a server keeps no plan, however small a client wants them.

    Args:
        sizes: Bytes of every buffer.
        streams: How many there are.
        chunk_bytes: Most bytes of a message.
        stream: Its number, from 0; one that is not among them has nothing.
    """
    share = -(-sum(sizes) // streams)
    first, end = stream * share, (stream + 1) * share if stream < streams else 0
    start = 0
    for index, size in enumerate(sizes):
        low, high = max(first - start, 0), min(end - start, size)
        for offset in range(low, high, chunk_bytes):
            yield StreamChunk(index, offset, min(chunk_bytes, high - offset))
        start += size

"""Serves weights over Arrow Flight: `WeightService` sends one publication at a time, for the root and every relay.

The root (`FlightServer`) is in the learner's process, answers when there is a new version, and gives each client its
place in the distribution tree. Arrays are sent from where they lie: each message refers to a part of an array of the
learner's own host copy, and Arrow writes it to the socket without taking the interpreter lock. A fetch that has begun
is served to its end even if a newer version is put in its place meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import override

from penstock.types import ConfigError, SupersededVersionError, WeightsError, WeightVersion
from penstock.weights.broadcaster import Publication, TransportServer
from penstock.weights.client import LatestVersion
from penstock.weights.config import WeightsConfig
from penstock.weights.flight_connection import StreamChunk, chunks_of
from penstock.weights.flight_messages import (
    MAX_RIDING_OFFER_BYTES,
    OFFER_KEY,
    SCHEMA,
    Access,
    AnyRequest,
    FinishedAnswer,
    FinishedRequest,
    FlightMessage,
    OfferAnswer,
    OfferRequest,
    Request,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    join_address,
    own_address,
    peer_host,
    read_request,
    serving_options,
    wire_error,
)
from penstock.weights.flight_tree import ROOT, DistributionTree
from penstock.weights.manifest import Content, Manifest, compact_json, raw_bytes

Action = tuple[type[Request], Callable[[Any, str], FlightMessage]]
"""What a request is, and what answers it, given the host that it came from."""

_CLOSE_S = 5.0
_PROGRESS_S = 0.25
_CHUNKS_AHEAD = 1000
"""Cut at once; one by one, in turn with the sending, a stream takes a fifth longer."""
_BYTES = pa.uint8()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedVersion:
    """A publication as it is served.

    Attributes:
        manifest: What it holds.
        arrays: Its arrays by name.
        ways: Encoded deltas from an earlier content, the oldest first.
        values: The manifest as JSON values.
        rides: Whether these are short enough to travel with a stream.
    """

    manifest: Manifest
    arrays: Mapping[str, np.ndarray]
    ways: Mapping[Content, Sequence[Any]]
    values: dict[str, Any] = field(init=False)
    rides: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.manifest.to_values())
        object.__setattr__(self, "rides", len(compact_json(self.values)) <= MAX_RIDING_OFFER_BYTES)

    def delta_sizes(self, base: Content | None) -> list[int] | None:
        """Bytes of each delta of the way from `base`; None where there is none, and arrays must be sent whole."""
        if base is None:
            return None
        if base == self.manifest.content:
            return []
        way = self.ways.get(base)
        return None if way is None else [memoryview(message).nbytes for message in way]

    def buffers(self, base: Content | None) -> list[pa.Buffer]:
        """What is sent, by reference. Raises WeightsError where there is no way from `base`."""
        if base is None:
            return [pa.py_buffer(raw_bytes(self.arrays[spec.name])) for spec in self.manifest.arrays]
        if base not in self.ways:
            raise WeightsError(f"there is no delta from {base} to {self.manifest.version}: ask for the whole arrays")
        return [pa.py_buffer(message) for message in self.ways[base]]


class WeightService(flight.FlightServerBase):
    """A Flight server of the publication that was put last.

    Args:
        job: Requests of other jobs are refused.
        access: Token and certificates.
        host: Address to listen on.
        port: 0 takes a free one; the attribute `port` says which.
        actions: What it answers beside streams, by name.
        on_sent: Called with a client's name while messages to it move, a few times a second.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self,
        job: str,
        access: Access,
        host: str,
        port: int,
        actions: Mapping[str, Action],
        on_sent: Callable[[str], None] | None = None,
    ) -> None:
        self._job, self._actions, self._on_sent = job, actions, on_sent
        self._lock = threading.Lock()
        self._served: ServedVersion | None = None
        self._closing = False
        self._numbers = {"weights/bytes_served": 0.0, "weights/streams_served": 0.0}
        try:
            super().__init__(**serving_options(access, host, port))
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"weights: {join_address(host, port)} cannot be listened on: {error}") from error

    def put(self, served: ServedVersion | None) -> None:
        """Serves this from here on."""
        with self._lock:
            self._served = served

    def get(self, version: WeightVersion, incarnation: str | None = None) -> ServedVersion:
        """What is served, if it is that version (of that broadcaster).

        Raises:
            SupersededVersionError: it is not.
        """
        with self._lock:
            served = self._served
        if served is None:
            raise SupersededVersionError(f"{version} is not available: nothing is the newest and only one kept", None)
        newest, publisher = served.manifest.version, served.manifest.incarnation
        if newest == version and incarnation in (None, publisher):
            return served
        why = f"is not available: {newest} is the newest and only one kept"
        if newest == version:
            why = f"of broadcaster {incarnation} is gone: {publisher} published it anew"
        raise SupersededVersionError(f"{version} {why}", (newest.lineage, newest.step))

    def metrics(self) -> dict[str, float]:
        """Totals of what was sent."""
        with self._lock:
            return dict(self._numbers)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Answers a request; called by Flight."""
        try:
            if action.type not in self._actions:
                raise WeightsError(f"unknown action {action.type!r:.100}: it is one of {sorted(self._actions)}")
            kind, answer = self._actions[action.type]
            request = self._read(kind, action.body)
            return [answer(request, peer_host(context.peer())).to_bytes()]
        except WeightsError as error:
            raise wire_error(error) from error

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Sends one stream of a publication; called by Flight."""
        try:
            request = self._read(StreamTicket, ticket.ticket)
            served = self.get(request.version, request.incarnation)
            buffers = served.buffers(request.base)
            schema = self._schema(request, peer_host(context.peer())) if served.rides else SCHEMA
        except WeightsError as error:
            raise wire_error(error) from error
        sizes = [buffer.size for buffer in buffers]
        chunks = chunks_of(sizes, request.streams, request.chunk_bytes, request.stream)
        batches = self._batches(buffers, chunks, request.client)
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, batches))

    def close(self) -> None:
        """Ends streams and refuses new ones; a client that takes nothing cannot hold it up for long."""
        self._closing = True
        ending = threading.Thread(target=self.shutdown, name="weights-close", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            _log.warning("a client holds a stream of weights open and reads nothing: it is left behind")

    def _read(self, kind: type[AnyRequest], body: pa.Buffer | bytes) -> AnyRequest:
        request = read_request(kind, body)
        if request.job != self._job:
            raise WeightsError(f"job {request.job!r} asks the weight server of job {self._job!r}")
        return request

    def _schema(self, ticket: StreamTicket, host: str) -> pa.Schema:
        """Of a stream: with the answer to an `OfferRequest`, where the ticket asks."""
        if not ticket.asks or "offer" not in self._actions:
            return SCHEMA
        _, answer = self._actions["offer"]
        request = OfferRequest(
            job=ticket.job, client=ticket.client, version=ticket.version, base=ticket.base, timeout_s=0.0
        )
        return SCHEMA.with_metadata({OFFER_KEY: answer(request, host).to_bytes()})

    def _batches(
        self, buffers: Sequence[pa.Buffer], chunks: Iterator[StreamChunk], client: str
    ) -> Iterator[pa.RecordBatch]:
        counted_at, uncounted_bytes = 0.0, 0
        try:
            while block := list(islice(chunks, _CHUNKS_AHEAD)):
                for chunk in block:
                    if self._closing:
                        raise flight.FlightUnavailableError("the weight server is closing")
                    data = buffers[chunk.index].slice(chunk.offset, chunk.size)
                    column = pa.Array.from_buffers(_BYTES, chunk.size, [None, data], null_count=0)
                    yield pa.RecordBatch.from_arrays([column], schema=SCHEMA)
                    uncounted_bytes += chunk.size
                    if time.monotonic() - counted_at > _PROGRESS_S:
                        counted_at, uncounted_bytes = time.monotonic(), self._count_sent(uncounted_bytes, client)
            self._count("weights/streams_served", 1)
        finally:  # streams that end early, too
            self._count_sent(uncounted_bytes, client)

    def _count_sent(self, sent_bytes: int, client: str) -> int:
        """Counts what was sent, and reports that it moves; returns zero, the bytes that are not counted yet."""
        self._count("weights/bytes_served", sent_bytes)
        if self._on_sent is not None:
            self._on_sent(client)
        return 0

    def _count(self, name: str, number: float) -> None:
        with self._lock:
            self._numbers[name] += number


_LEASE_S = 60.0
"""A client that was given a place and to which nothing moves loses it after so long."""

_FORGET_S = 60.0
"""A client that asked nothing for so long is counted no more."""

_TICK_S = 1.0


class FlightServer(TransportServer):
    """Serves publications to clients that fetch.

    Args:
        config: Address, fan-out and certificates.
        job: The run; requests of others are refused.
        token: What clients must show; None only on loopback.
        incarnation: Of this broadcaster.
        clock: Seconds.

    Raises:
        ConfigError: the address cannot be listened on, needs a token, or a certificate cannot be read.
    """

    def __init__(
        self,
        config: WeightsConfig,
        job: str,
        token: str | None,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        access = Access.from_config(config, token or "")
        self._config, self._incarnation = config, incarnation
        self._tls = access.certificate is not None
        self._changed = threading.Condition()
        self._tree = DistributionTree(config.fanout, min(_LEASE_S, config.fetch_timeout_s / 2), _FORGET_S, clock)
        self._newest: LatestVersion | None = None
        self._held: dict[str, WeightVersion] = {}
        self._closed = False
        actions: dict[str, Action] = {
            "wait": (WaitRequest, self._wait),
            "offer": (OfferRequest, self._offer),
            "finished": (FinishedRequest, self._finished),
        }
        self._service = WeightService(job, access, config.host, config.port, actions, self._sent)

    @override
    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        """They are sent from where they lie."""

    @override
    def put(self, publication: Publication) -> None:
        messages = {id(delta): delta.to_bytes() for chain in publication.chains.values() for delta in chain}
        ways = {base: [messages[id(delta)] for delta in chain] for base, chain in publication.chains.items()}
        manifest = publication.manifest
        with self._changed:
            self._service.put(ServedVersion(manifest, publication.arrays, ways))
            self._newest = LatestVersion(manifest.incarnation, manifest.version)
            self._tree.start(manifest.version)
            self._changed.notify_all()

    @override
    def endpoint(self) -> dict[str, Any]:
        return {"address": self._config.advertise or self._own_address(), "tls": self._tls}

    @override
    def metrics(self) -> dict[str, float]:
        with self._changed:
            clients = self._tree.clients
            self._held = {name: version for name, version in self._held.items() if self._tree.knows(name)}
            newest = self._newest
            behind = [newest.version.step - held.step for held in self._held.values() if newest is not None]
        return self._service.metrics() | {
            "weights/clients": float(clients),
            "weights/slowest_lag": float(max(behind, default=0)),
        }

    @override
    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._service.close()

    def _own_address(self) -> str:
        host = self._config.host
        if host in ("0.0.0.0", "::"):
            host = own_address()
        return join_address(host, self._service.port)

    def _wait(self, request: WaitRequest, host: str) -> WaitAnswer:
        deadline = time.monotonic() + request.timeout_s
        with self._changed:
            self._tree.note(request.client)
            self._changed.wait_for(
                lambda: self._closed or self._newest != request.known, max(0.0, deadline - time.monotonic())
            )
            self._check_open()
            return WaitAnswer(newest=self._newest)

    def _offer(self, request: OfferRequest, host: str) -> OfferAnswer:
        deadline = time.monotonic() + request.timeout_s
        with self._changed:
            self._tree.note(request.client)
            if request.failed:
                self._tree.failed(request.version, request.client)
                self._changed.notify_all()
            parent = self._place(request, deadline)
            served = self._service.get(request.version)
            keep = self._tree.has_relays
        deltas = served.delta_sizes(request.base) if parent == ROOT else None
        return OfferAnswer(manifest=served.values, parent=parent, keep=keep, deltas=deltas)

    def _place(self, request: OfferRequest, deadline: float) -> str | None:
        """Where the client shall fetch; None where no place came free until the deadline."""
        while True:
            self._check_open()
            parent = self._tree.parent(request.version, request.client)
            remaining_s = deadline - time.monotonic()
            if parent is not None or remaining_s <= 0:
                return parent
            self._changed.wait(min(remaining_s, _TICK_S))

    def _finished(self, request: FinishedRequest, host: str) -> FinishedAnswer:
        with self._changed:
            self._tree.note(request.client)
            location = None if request.port is None else join_address(host, request.port)
            self._held[request.client] = request.version
            if self._tree.finished(request.version, request.client, location):
                self._changed.notify_all()
        return FinishedAnswer()

    def _sent(self, client: str) -> None:
        with self._changed:
            self._tree.moves(client)

    def _check_open(self) -> None:
        if self._closed:
            raise flight.FlightUnavailableError("the weight server is closing")

"""A client of weights over Arrow Flight: fetches from the root or, where the root says so, from another client.

Whatever goes wrong with another client (it died, stalls, has moved on, sends damaged arrays) leads back to the root.

The part of a client that serves what it fetched to other clients, as a node of the fan-out tree.

It starts with the first version that the root asks it to keep. Whoever fetches from it checks the arrays by the
manifest that the root gave, so that a relay cannot hand on anything else.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.types import ConfigError, UnreachableError, WeightsError, WeightVersion
from penstock.weights.client import FetchedArrays, FetchingClient, LatestVersion
from penstock.weights.config import WeightsConfig
from penstock.weights.flight_connection import Channel, Fetch
from penstock.weights.flight_messages import (
    Access,
    Content,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    content_pair,
    host_of,
    is_loopback,
    pair,
    read_request,
)
from penstock.weights.flight_server import ServedVersion, WeightService
from penstock.weights.flight_tree import ROOT
from penstock.weights.manifest import BufferPool, Manifest, from_raw_bytes, plain_memory


class PeerRelay:
    """Serves the version that was kept last.

    Args:
        job: Requests of others are refused.
        access: Token and certificates, the root's own.
        host: Address to listen on.
    """

    def __init__(self, job: str, access: Access, host: str) -> None:
        self._job, self._access, self._host = job, access, host
        self._lock = threading.Lock()
        self._service: WeightService | None = None
        self._closed = False

    def keep(
        self, manifest: Manifest, arrays: Mapping[str, np.ndarray], base: Content | None, messages: Sequence[Any]
    ) -> int | None:
        """Serves this version from here on, in place of the one before.

        Args:
            manifest: What it is.
            arrays: Verified.
            base: The content that the deltas start from; None where it came whole.
            messages: The deltas, as they came.

        Returns:
            The port; None after `close`.
        """
        with self._lock:
            if self._closed:
                return None
            if self._service is None:
                self._service = WeightService(self._job, self._access, self._host, 0, {"offer": self._offer})
            ways = {} if base is None or not messages else {base: messages}
            self._service.put(ServedVersion(manifest, arrays, ways))
            return self._service.port

    def drop(self) -> None:
        """Keeps no arrays any more."""
        with self._lock:
            if self._service is not None:
                self._service.put(None)

    def metrics(self) -> dict[str, float]:
        """What was handed on."""
        with self._lock:
            service = self._service
        served = 0.0 if service is None else service.metrics()["weights/bytes_served"]
        return {"weights/bytes_relayed": served}

    def close(self) -> None:
        """Stops serving. May be called twice."""
        with self._lock:
            self._closed = True
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def _offer(self, body: bytes, host: str) -> bytes:
        request = read_request(OfferRequest, body)
        service = self._service
        if service is None:
            raise ConnectionError("the relay is closing")
        service.check_job(request.job)
        served = service.get(WeightVersion(*request.version))
        return OfferAnswer(deltas=served.delta_sizes(request.base)).to_bytes()


STALL_S = 30.0
"""A client that gives nothing to another for so long is given up."""

_ANSWER_S = 10.0
_PLACE_S = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Came:
    """What was received last, to be handed on once it is found whole."""

    manifest: Manifest
    base: Content | None
    messages: Sequence[Any]
    keep: bool


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchedStreams:
    """Streams that were opened before the root said where to fetch, by what it published before."""

    incarnation: str
    sizes: list[int]
    buffers: list[np.ndarray]
    fetch: Fetch


class FlightReader:
    """Speaks to the root at one endpoint, and to the parents that it names (`fetching.TransportReader`).

    Args:
        endpoint: ``address`` and ``tls`` of the root, and ``job``.
        config: Streams and limits.
        access: Token and certificates.
        client_id: Names this client.
        relay: Serves others with what came; closed by its owner.

    Raises:
        WeightsError: the endpoint is not one of a Flight server.
    """

    def __init__(
        self, endpoint: Mapping[str, Any], config: WeightsConfig, access: Access, client_id: str, relay: PeerRelay
    ) -> None:
        address, tls = endpoint.get("address"), endpoint.get("tls")
        if not isinstance(address, str) or not isinstance(tls, bool):
            raise WeightsError(f"an endpoint of Flight has an address and tls, this one {sorted(endpoint)}")
        self._who = {"job": endpoint["job"], "client": client_id}
        self._config, self._access, self._relay, self._tls = config, access, relay, tls
        self._server_name = host_of(address)
        self._memory = BufferPool()
        self._root = Channel(address, tls, access, config.streams, config.chunk_bytes)
        self._parent: Channel | None = None
        self._came: _Came | None = None
        self._direct: Manifest | None = None
        self._numbers = {"weights/bytes_received": 0.0, "weights/from_clients": 0.0, "weights/parent_failures": 0.0}

    def newest(self) -> LatestVersion | None:
        """See `fetching.TransportReader.newest`."""
        return self.wait(None, 0.0)

    def wait(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        """See `fetching.TransportReader.wait`."""
        request = WaitRequest(
            **self._who,
            known=None if known is None else (known.incarnation, pair(known.version)),
            timeout_s=timeout_s,
        )
        newest = self._root.ask("wait", request, WaitAnswer, timeout_s + _ANSWER_S).newest
        return None if newest is None else LatestVersion(newest[0], WeightVersion(*newest[1]))

    def read(self, version: WeightVersion, base: tuple[WeightVersion, str] | None, timeout_s: float) -> FetchedArrays:
        """See `fetching.TransportReader.read`."""
        deadline = time.monotonic() + timeout_s
        again = self._came is not None and self._came.manifest.version == version  # what came was damaged
        self._came = None
        early = None if again or base is not None else self._begin_early(version, deadline)
        while True:
            try:
                offer, early = self._told(early)
                offer = offer or self._offer(version, base, again, deadline)
                manifest = offer.read_manifest(self._config.max_bytes)
                if offer.parent == ROOT:
                    return self._received(self._root, manifest, base, offer, offer.deltas, deadline, None, early)
            finally:
                if early is not None:
                    early.fetch.give_up()
                    early = None
            why = "none came free"
            if offer.parent is not None:
                try:
                    return self._from_parent(offer.parent, manifest, base, offer, deadline)
                except (UnreachableError, WeightsError) as error:
                    _log.info("weights come from the root: %s", error)
                    self._numbers["weights/parent_failures"] += 1
                    why = str(error)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"no place in the fan-out tree to fetch {version} was found in {timeout_s:.3g} s: {why}"
                )
            again = offer.parent is not None

    def found_whole(self, arrays: Mapping[str, np.ndarray]) -> None:
        """What was read last is verified: it is handed on to other clients, where the root asked for that."""
        came, self._came = self._came, None
        if came is None:
            return
        if not came.keep:
            self._relay.drop()
        port = self._port(came, arrays) if came.keep else None
        request = FinishedRequest(**self._who, version=pair(came.manifest.version), port=port)
        self._root.tell("finished", request, _ANSWER_S)

    def metrics(self) -> dict[str, float]:
        """See `fetching.TransportReader.metrics`."""
        return self._numbers | self._relay.metrics()

    def close(self) -> None:
        """See `fetching.TransportReader.close`."""
        self._root.close()
        if self._parent is not None:
            self._parent.close()

    def _offer(
        self, version: WeightVersion, base: tuple[WeightVersion, str] | None, failed: bool, deadline: float
    ) -> OfferAnswer:
        remaining_s = max(0.0, deadline - time.monotonic())
        request = OfferRequest(
            **self._who,
            version=pair(version),
            base=content_pair(base),
            failed=failed,
            timeout_s=min(_PLACE_S, remaining_s),
        )
        return self._root.ask("offer", request, OfferAnswer, min(_PLACE_S, remaining_s) + _ANSWER_S)

    def _from_parent(
        self,
        address: str,
        manifest: Manifest,
        base: tuple[WeightVersion, str] | None,
        offer: OfferAnswer,
        deadline: float,
    ) -> FetchedArrays:
        parent = self._channel_to(address)
        request = OfferRequest(**self._who, version=pair(manifest.version), base=content_pair(base), timeout_s=0.0)
        deltas = parent.ask("offer", request, OfferAnswer, _ANSWER_S).deltas
        received = self._received(parent, manifest, base, offer, deltas, deadline, STALL_S)
        self._numbers["weights/from_clients"] += 1
        return received

    def _received(
        self,
        channel: Channel,
        manifest: Manifest,
        base: tuple[WeightVersion, str] | None,
        offer: OfferAnswer,
        deltas: Sequence[int] | None,
        deadline: float,
        stall_s: float | None,
        early: PrefetchedStreams | None = None,
    ) -> FetchedArrays:
        start = None if deltas is None else content_pair(base)
        sizes = [spec.nbytes for spec in manifest.arrays] if deltas is None else list(deltas)
        if sum(sizes) > manifest.nbytes:
            raise WeightsError(f"deltas of {sum(sizes)} bytes are more than the arrays' {manifest.nbytes}")
        if early is not None and deltas is None and early.incarnation == manifest.incarnation and early.sizes == sizes:
            buffers, fetch = early.buffers, early.fetch
        else:
            if early is not None:
                early.fetch.give_up()
            take = self._memory.take if deltas is None else plain_memory
            buffers = [take(size) for size in sizes]
            fetch = channel.begin(self._ticket(manifest.incarnation, manifest.version, start), buffers, deadline)
        fetch.wait(stall_s)
        self._direct = manifest if channel is self._root and deltas is None and not offer.keep else None
        self._numbers["weights/bytes_received"] += sum(sizes)
        self._came = _Came(manifest, start, buffers if deltas is not None else (), offer.keep)
        if deltas is not None:
            return FetchedArrays(manifest, None, buffers, sum(sizes))
        arrays = {spec.name: from_raw_bytes(spec, data) for spec, data in zip(manifest.arrays, buffers, strict=True)}
        for array in arrays.values():
            array.flags.writeable = False
        return FetchedArrays(manifest, arrays, (), sum(sizes))

    def _begin_early(self, version: WeightVersion, deadline: float) -> PrefetchedStreams | None:
        """Opens the streams from the root and asks with the first of them, where it will hardly say anything else.

        That is so after a fetch of whole arrays from the root with no more clients than it serves itself. Where it says
        something else after all, what came is thrown away.
        """
        before, self._direct = self._direct, None
        if before is None:
            return None
        sizes = [spec.nbytes for spec in before.arrays]
        buffers = [self._memory.take(size) for size in sizes]
        ticket = self._ticket(before.incarnation, version, None).model_copy(update={"asks": True})
        return PrefetchedStreams(before.incarnation, sizes, buffers, self._root.begin(ticket, buffers, deadline))

    def _told(self, early: PrefetchedStreams | None) -> tuple[OfferAnswer | None, PrefetchedStreams | None]:
        """What came with the first stream, and the streams; nothing of either where that could not begin.

        Then the question by itself finds out why, and other streams are opened.
        """
        if early is None:
            return None, None
        try:
            return early.fetch.offer(_ANSWER_S), early
        except (UnreachableError, WeightsError) as error:
            _log.info("weights are asked for anew: %s", error)
            early.fetch.give_up()
            return None, None

    def _ticket(self, incarnation: str, version: WeightVersion, base: Content | None) -> StreamTicket:
        return StreamTicket(
            **self._who,
            incarnation=incarnation,
            version=pair(version),
            base=base,
            stream=0,
            streams=1,
            chunk_bytes=self._config.chunk_bytes,
        )

    def _channel_to(self, address: str) -> Channel:
        if self._parent is None or self._parent.address != address:
            if self._parent is not None:
                self._parent.close()
                self._parent = None
            access = self._access.named(self._server_name)
            self._parent = Channel(address, self._tls, access, self._config.streams, self._config.chunk_bytes)
        return self._parent

    def _port(self, came: _Came, arrays: Mapping[str, np.ndarray]) -> int | None:
        if self._tls and self._access.certificate is None:
            return None  # it has no certificate to show to others
        try:
            return self._relay.keep(came.manifest, arrays, came.base, came.messages)
        except ConfigError as error:
            _log.warning("this client serves no other: %s", error)
            return None


class FlightClient:
    """Fetches over Arrow Flight, and serves other clients where the root asks for it (`protocol.WeightClient`).

    Args:
        endpoint: Of the broadcaster.
        config: Streams, limits and certificates. Where `host` is loopback, other clients are served on loopback only.
        token: The broadcaster's.
        client_id: Names this client.
    """

    def __init__(self, endpoint: Mapping[str, Any], config: WeightsConfig, token: str | None, client_id: str) -> None:
        access = Access.from_config(config, token or "")
        self._relay = PeerRelay(endpoint["job"], access, "127.0.0.1" if is_loopback(config.host) else "0.0.0.0")
        self._config, self._access, self._client_id = config, access, client_id
        self._reader: FlightReader | None = None
        self._fetching = FetchingClient(endpoint, config, self._open)

    @property
    def failure(self) -> str | None:
        """See `WeightClient.failure`."""
        return self._fetching.failure

    def latest(self) -> WeightVersion | None:
        """See `WeightClient.latest`."""
        return self._fetching.latest()

    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        """See `WeightClient.wait_for`."""
        return self._fetching.wait_for(newer_than, timeout_s)

    def fetch(self, version: WeightVersion) -> Mapping[str, np.ndarray]:
        """See `WeightClient.fetch`."""
        arrays = self._fetching.fetch(version)
        reader = self._reader
        if reader is not None:
            reader.found_whole(arrays)
        return arrays

    def connect(self, endpoint: Mapping[str, Any]) -> None:
        """See `WeightClient.connect`."""
        self._fetching.connect(endpoint)

    def metrics(self) -> dict[str, float]:
        """See `WeightClient.metrics`."""
        return self._fetching.metrics()

    def close(self) -> None:
        """See `WeightClient.close`."""
        self._fetching.close()
        self._relay.close()

    def _open(self, endpoint: Mapping[str, Any]) -> FlightReader:
        self._reader = FlightReader(endpoint, self._config, self._access, self._client_id, self._relay)
        return self._reader

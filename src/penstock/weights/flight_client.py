"""A client of weights over Arrow Flight: fetches from the root or, where the root says so, from another client.

Whatever goes wrong with another client (it died, stalls, has moved on, sends damaged arrays) leads back to the root.
What was fetched is served to other clients (`PeerRelay`) where the root asks for that.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from penstock.types import ConfigError, UnreachableError, WeightsError, WeightVersion
from penstock.weights.client import FetchedArrays, LatestVersion, TransportReader
from penstock.weights.config import WeightsConfig
from penstock.weights.flight_connection import Channel, Fetch
from penstock.weights.flight_messages import (
    Access,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    host_of,
)
from penstock.weights.flight_server import ServedVersion, WeightService
from penstock.weights.flight_tree import ROOT
from penstock.weights.manifest import BufferPool, Content, Manifest, from_raw_bytes, plain_memory

STALL_S = 30.0
"""A client that sends nothing to another for so long is given up."""

_ANSWER_S = 10.0
_PLACE_S = 2.0
"""Longest wait of one request for a place in the tree."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchedStreams:
    """Streams of whole arrays that were opened before the root said where to fetch; the first one asks it.

    Attributes:
        incarnation: Of the broadcaster that is expected.
        sizes: Bytes of each array that is expected.
        buffers: uint8 [size] each, where they go.
        fetch: What runs.
    """

    incarnation: str
    sizes: list[int]
    buffers: list[np.ndarray]
    fetch: Fetch


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where a version is fetched, and how it comes.

    Attributes:
        channel: To the root or another client.
        manifest: What the root says of the version.
        deltas: Bytes of each delta; None where the arrays come whole.
        keep: Whether others shall be served with it.
        stall_s: Give up when nothing came for so long; None waits until the deadline.
    """

    channel: Channel
    manifest: Manifest
    deltas: Sequence[int] | None
    keep: bool
    stall_s: float | None = None


class FlightReader(TransportReader):
    """Speaks to the root at one endpoint, and to the parents that it names.

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
        self, endpoint: Mapping[str, Any], config: WeightsConfig, access: Access, client_id: str, relay: "PeerRelay"
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
        self._unverified: WeightVersion | None = None
        self._direct: Manifest | None = None
        self._numbers = {"weights/bytes_received": 0.0, "weights/from_clients": 0.0, "weights/parent_failures": 0.0}

    @override
    def wait(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        request = WaitRequest(**self._who, known=known, timeout_s=timeout_s)
        newest = self._root.ask("wait", request, WaitAnswer, timeout_s + _ANSWER_S).newest
        return None if newest is None else LatestVersion(*newest)

    @override
    def read(self, version: WeightVersion, base: Content | None, timeout_s: float) -> FetchedArrays:
        deadline = time.monotonic() + timeout_s
        failed, self._unverified = self._unverified == version, None  # what came of it last was damaged
        prefetched = None if failed or base is not None else self._prefetch(version, deadline)
        try:
            offer, prefetched = self._offer_beside(prefetched)
            offer = offer or self._offer(version, base, failed, deadline)
            source = self._source_at_root(offer)
            if offer.parent == ROOT:
                return self._receive(source, base, deadline, prefetched)
        finally:
            if prefetched is not None:
                prefetched.fetch.give_up()
        while True:
            why = "none came free"
            if offer.parent is not None:
                try:
                    return self._from_parent(offer.parent, source, base, deadline)
                except (UnreachableError, WeightsError) as error:
                    _log.info("weights come from the root: %s", error)
                    self._numbers["weights/parent_failures"] += 1
                    why = str(error)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"no place in the fan-out tree to fetch {version} was found in {timeout_s:.3g} s: {why}"
                )
            offer = self._offer(version, base, offer.parent is not None, deadline)
            source = self._source_at_root(offer)
            if offer.parent == ROOT:
                return self._receive(source, base, deadline)

    @override
    def metrics(self) -> dict[str, float]:
        return self._numbers | self._relay.metrics()

    @override
    def close(self) -> None:
        self._root.close()
        if self._parent is not None:
            self._parent.close()

    def _offer(self, version: WeightVersion, base: Content | None, failed: bool, deadline: float) -> OfferAnswer:
        timeout_s = min(_PLACE_S, max(0.0, deadline - time.monotonic()))
        request = OfferRequest(**self._who, version=version, base=base, failed=failed, timeout_s=timeout_s)
        return self._root.ask("offer", request, OfferAnswer, timeout_s + _ANSWER_S)

    def _source_at_root(self, offer: OfferAnswer) -> _Source:
        return _Source(self._root, offer.read_manifest(self._config.max_bytes), offer.deltas, offer.keep)

    def _from_parent(self, address: str, source: _Source, base: Content | None, deadline: float) -> FetchedArrays:
        parent = self._channel_to(address)
        request = OfferRequest(**self._who, version=source.manifest.version, base=base, timeout_s=0.0)
        deltas = parent.ask("offer", request, OfferAnswer, _ANSWER_S).deltas
        fetched = self._receive(_Source(parent, source.manifest, deltas, source.keep, STALL_S), base, deadline)
        self._numbers["weights/from_clients"] += 1
        return fetched

    def _receive(
        self, source: _Source, base: Content | None, deadline: float, prefetched: PrefetchedStreams | None = None
    ) -> FetchedArrays:
        manifest, deltas = source.manifest, source.deltas
        start = None if deltas is None else base
        sizes = [spec.nbytes for spec in manifest.arrays] if deltas is None else list(deltas)
        moved_bytes = sum(sizes)
        if moved_bytes > manifest.nbytes:
            raise WeightsError(f"deltas of {moved_bytes} bytes are more than the arrays' {manifest.nbytes}")
        expected = None if prefetched is None else (prefetched.incarnation, prefetched.sizes)
        if prefetched is not None and deltas is None and expected == (manifest.incarnation, sizes):
            buffers, fetch = prefetched.buffers, prefetched.fetch
        else:
            if prefetched is not None:
                prefetched.fetch.give_up()
            take = self._memory.take if deltas is None else plain_memory
            buffers = [take(size) for size in sizes]
            ticket = self._ticket(manifest.incarnation, manifest.version, start)
            fetch = source.channel.begin(ticket, buffers, deadline)
        fetch.wait(source.stall_s)
        whole_from_root = source.channel is self._root and deltas is None
        self._direct = manifest if whole_from_root and not source.keep else None
        self._unverified = manifest.version
        self._numbers["weights/bytes_received"] += moved_bytes
        on_verified = partial(self._report, manifest, start, buffers if deltas is not None else (), source.keep)
        if deltas is not None:
            return FetchedArrays(manifest, None, buffers, moved_bytes, on_verified)
        arrays = {spec.name: from_raw_bytes(spec, data) for spec, data in zip(manifest.arrays, buffers, strict=True)}
        for array in arrays.values():
            array.flags.writeable = False
        return FetchedArrays(manifest, arrays, (), moved_bytes, on_verified)

    def _prefetch(self, version: WeightVersion, deadline: float) -> PrefetchedStreams | None:
        """Opens the streams from the root where it will hardly lead to somebody else.

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

    def _offer_beside(
        self, prefetched: PrefetchedStreams | None
    ) -> tuple[OfferAnswer | None, PrefetchedStreams | None]:
        """What came with the first stream, and the streams; nothing of either where that could not begin.

        Then the request by itself finds out why, and other streams are opened.
        """
        if prefetched is None:
            return None, None
        try:
            return prefetched.fetch.offer(_ANSWER_S), prefetched
        except (UnreachableError, WeightsError) as error:
            _log.info("weights are asked for anew: %s", error)
            prefetched.fetch.give_up()
            return None, None

    def _ticket(self, incarnation: str, version: WeightVersion, base: Content | None) -> StreamTicket:
        return StreamTicket(
            **self._who,
            incarnation=incarnation,
            version=version,
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

    def _report(
        self,
        manifest: Manifest,
        base: Content | None,
        deltas: Sequence[Any],
        keep: bool,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        """Serves others with what was found to be whole, where the root asked for that, and tells the root."""
        self._unverified = None
        port = None
        if not keep:
            self._relay.drop()
        elif not self._tls or self._access.certificate is not None:  # else it has none to show to others
            try:
                port = self._relay.keep(manifest, arrays, base, deltas)
            except ConfigError as error:
                _log.warning("this client serves no other: %s", error)
        request = FinishedRequest(**self._who, version=manifest.version, port=port)
        self._root.notify("finished", request, _ANSWER_S)


class PeerRelay:
    """Serves other clients, as a node of the distribution tree, with the version that was kept last.

    It listens from the first version on that the root asks it to keep. Whoever fetches from it checks the arrays by the
    manifest that the root gave, so that it cannot hand on anything else.

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
                self._service = WeightService(
                    self._job, self._access, self._host, 0, {"offer": (OfferRequest, self._offer)}
                )
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

    def _offer(self, request: OfferRequest, host: str) -> OfferAnswer:
        service = self._service
        if service is None:
            raise ConnectionError("the relay is closing")
        return OfferAnswer(deltas=service.get(request.version).delta_sizes(request.base))

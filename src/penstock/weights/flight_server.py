"""The root of weights over Arrow Flight, in the learner's process: arrays are sent from the learner's own host copy.

It tells clients when there is a new version, and gives each of them its place in the fan-out tree.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow.flight as flight

from penstock.types import WeightVersion
from penstock.weights.config import WeightsConfig
from penstock.weights.fan_out import ROOT, FanOut
from penstock.weights.flight_access import Access, join_address
from penstock.weights.flight_messages import (
    Announced,
    Content,
    FinishedAnswer,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    Version,
    WaitAnswer,
    WaitRequest,
    pair,
    read_request,
)
from penstock.weights.flight_service import Served, WeightService
from penstock.weights.own_address import own_address
from penstock.weights.publishing import Publication

LEASE_S = 60.0
"""A client that was given a place and to which nothing moves loses it after so long."""

FORGET_S = 60.0
"""A client that asked nothing for so long is counted no more."""

_TICK_S = 1.0


class FlightStore:
    """Serves publications to clients that fetch (`publishing.Store`).

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
        self._fan_out = FanOut(config.fanout, min(LEASE_S, config.fetch_timeout_s / 2), FORGET_S, clock)
        self._newest: Announced | None = None
        self._held: dict[str, Version] = {}
        self._closed = False
        actions = {"wait": self._wait, "offer": self._offer, "finished": self._finished}
        self._service = WeightService(job, access, config.host, config.port, actions, self._sent)

    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `publishing.Store.begin`: they are sent from where they lie."""

    def put(self, publication: Publication) -> None:
        """See `publishing.Store.put`."""
        messages = {id(delta): delta.to_bytes() for chain in publication.chains.values() for delta in chain}
        ways: dict[Content, list[bytes]] = {
            (pair(version), digest): [messages[id(delta)] for delta in chain]
            for (version, digest), chain in publication.chains.items()
        }
        manifest = publication.manifest
        with self._changed:
            self._service.put(Served(manifest, publication.arrays, ways))
            self._newest = (manifest.incarnation, pair(manifest.version))
            self._fan_out.start(pair(manifest.version))
            self._changed.notify_all()

    def endpoint(self) -> dict[str, Any]:
        """See `publishing.Store.endpoint`."""
        return {"address": self._config.advertise or self._own_address(), "tls": self._tls}

    def metrics(self) -> dict[str, float]:
        """See `publishing.Store.metrics`."""
        with self._changed:
            clients = self._fan_out.clients
            self._held = {name: version for name, version in self._held.items() if self._fan_out.knows(name)}
            newest = None if self._newest is None else self._newest[1]
            behind = [newest[1] - held[1] for held in self._held.values() if newest is not None]
        return self._service.metrics() | {
            "weights/clients": float(clients),
            "weights/slowest_lag": float(max(behind, default=0)),
        }

    def close(self) -> None:
        """See `publishing.Store.close`."""
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

    def _wait(self, body: bytes, host: str) -> bytes:
        request = read_request(WaitRequest, body)
        self._service.check_job(request.job)
        deadline = time.monotonic() + request.timeout_s
        with self._changed:
            self._fan_out.hear(request.client)
            self._changed.wait_for(
                lambda: self._closed or self._newest != request.known, max(0.0, deadline - time.monotonic())
            )
            self._check_open()
            return WaitAnswer(newest=self._newest).to_bytes()

    def _offer(self, body: bytes, host: str) -> bytes:
        request = read_request(OfferRequest, body)
        self._service.check_job(request.job)
        deadline = time.monotonic() + request.timeout_s
        with self._changed:
            self._fan_out.hear(request.client)
            if request.failed:
                self._fan_out.failed(request.version, request.client)
                self._changed.notify_all()
            parent = self._place(request, deadline)
            served = self._service.get(WeightVersion(*request.version))
            keep = self._fan_out.has_relays
        deltas = served.delta_sizes(request.base) if parent == ROOT else None
        return OfferAnswer(manifest=served.values, parent=parent, keep=keep, deltas=deltas).to_bytes()

    def _place(self, request: OfferRequest, deadline: float) -> str | None:
        """Where the client shall fetch; None where no place came free until the deadline."""
        while True:
            self._check_open()
            parent = self._fan_out.parent(request.version, request.client)
            remaining_s = deadline - time.monotonic()
            if parent is not None or remaining_s <= 0:
                return parent
            self._changed.wait(min(remaining_s, _TICK_S))

    def _finished(self, body: bytes, host: str) -> bytes:
        request = read_request(FinishedRequest, body)
        self._service.check_job(request.job)
        with self._changed:
            self._fan_out.hear(request.client)
            location = None if request.port is None else join_address(host, request.port)
            self._held[request.client] = request.version
            if self._fan_out.finished(request.version, request.client, location):
                self._changed.notify_all()
        return FinishedAnswer().to_bytes()

    def _sent(self, client: str) -> None:
        with self._changed:
            self._fan_out.moves(client)

    def _check_open(self) -> None:
        if self._closed:
            raise flight.FlightUnavailableError("the weight server is closing")

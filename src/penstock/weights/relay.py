"""The part of a client that serves what it fetched to other clients, as a node of the fan-out tree.

It starts with the first version that the root asks it to keep. Whoever fetches from it checks the arrays by the
manifest that the root gave, so that a relay cannot hand on anything else.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.types import WeightVersion
from penstock.weights.flight_access import Access
from penstock.weights.flight_messages import Content, OfferAnswer, OfferRequest, read_request
from penstock.weights.flight_service import Served, WeightService
from penstock.weights.manifest import Manifest


class Relay:
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
            self._service.put(Served(manifest, arrays, ways))
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

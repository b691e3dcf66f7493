"""The broadcaster of every transport that crosses a process: checks, host copy, digests and deltas are done here.

What differs, how the bytes are offered, is a `Store`: shared memory, files, or an Arrow Flight server.
"""

import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.types import WeightsError, WeightVersion
from penstock.weights.config import WeightsConfig
from penstock.weights.delta import Delta
from penstock.weights.delta_history import DeltaHistory
from penstock.weights.host import host_arrays
from penstock.weights.manifest import Layout, Manifest, check_layout, check_sendable, describe, layout_of


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """One version, ready to be offered.

    Attributes:
        manifest: What it holds.
        arrays: Host arrays by name, C-contiguous; never changed again.
        chains: Ways to it from earlier contents (`Manifest.content`): deltas, the oldest first. Empty without
            ``encoding: delta``.
    """

    manifest: Manifest
    arrays: Mapping[str, np.ndarray]
    chains: Mapping[tuple[WeightVersion, str], tuple[Delta, ...]]


class Store(Protocol):
    """Offers publications to other processes."""

    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Told of the next publication's arrays before their digests are known: what can be done, begins.

        Raises:
            WeightsError: there is no room for them.
        """
        ...

    def put(self, publication: Publication) -> None:
        """Offers what was begun, whole, in place of the one before; where it raises, that one is still offered.

        Raises:
            WeightsError: there is no room for it.
        """
        ...

    def endpoint(self) -> dict[str, Any]:
        """What a client needs to reach it, beside transport, job and incarnation."""
        ...

    def metrics(self) -> dict[str, float]:
        """Its own numbers, as ``weights/<name>``."""
        ...

    def close(self) -> None:
        """Stops offering."""
        ...


class PublishingBroadcaster:
    """Publishes through a store (`protocol.Broadcaster`).

    Args:
        config: How.
        job: The run.
        store: Where; closed with this.
        incarnation: 32 hexadecimal digits, nobody else's; see `new_incarnation`.
    """

    def __init__(self, config: WeightsConfig, job: str, store: Store, incarnation: str) -> None:
        self._config, self._job, self._store, self._incarnation = config, job, store, incarnation
        self._lock = threading.Lock()
        self._version: WeightVersion | None = None
        self._layout: Layout | None = None
        self._history = DeltaHistory() if config.encoding == "delta" else None
        self._numbers: dict[str, float] = {}
        self._closed = False

    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """See `Broadcaster.publish`."""
        with self._lock:
            layout = layout_of(arrays)
            self._check(version, layout)
            began = time.perf_counter()
            host = host_arrays(arrays, self._config.bfloat16)
            copied = time.perf_counter()
            check_sendable(host)
            self._store.begin(host)
            begun = time.perf_counter()
            manifest = describe(self._job, self._incarnation, version, host)
            digested = time.perf_counter()
            publication = Publication(manifest, host, self._chains(manifest, host))
            encoded = time.perf_counter()
            self._store.put(publication)
            ended = time.perf_counter()
            self._version, self._layout = version, layout
            self._numbers |= {
                "weights/publish_s": ended - began,
                "weights/host_copy_s": copied - began,
                "weights/digest_s": digested - begun,
                "weights/encode_s": encoded - digested,
                "weights/serialise_s": ended - encoded + begun - copied,
                "weights/bytes_published": float(manifest.nbytes),
            }

    def latest(self) -> WeightVersion | None:
        """See `Broadcaster.latest`."""
        return self._version

    def endpoint(self) -> dict[str, Any]:
        """See `Broadcaster.endpoint`."""
        common = {"transport": self._config.transport, "job": self._job, "incarnation": self._incarnation}
        return common | self._store.endpoint()

    def metrics(self) -> dict[str, float]:
        """See `Broadcaster.metrics`."""
        return dict(self._numbers) | self._store.metrics()

    def close(self) -> None:
        """See `Broadcaster.close`; waits for a publication that is under way."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._store.close()

    def _check(self, version: WeightVersion, layout: Layout) -> None:
        if self._closed:
            raise WeightsError("the broadcaster was closed: nothing can be published")
        if self._version is not None and version <= self._version:
            raise WeightsError(f"{version} is not newer than the published {self._version}")
        if self._layout is not None:
            check_layout(self._layout, layout, "published arrays")

    def _chains(
        self, manifest: Manifest, host: Mapping[str, np.ndarray]
    ) -> dict[tuple[WeightVersion, str], tuple[Delta, ...]]:
        if self._history is None:
            return {}
        delta = self._history.add(manifest, host)
        if delta is not None:
            self._numbers["weights/changed_share"] = delta.changed_elements / max(delta.elements, 1)
        self._numbers["weights/bytes_delta"] = float(delta.nbytes if delta is not None else manifest.nbytes)
        return self._history.chains()


def new_incarnation() -> str:
    """32 hexadecimal digits that nobody had before."""
    return uuid.uuid4().hex

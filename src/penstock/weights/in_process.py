"""Weights handed over inside one process: by reference, version by version, whole or not at all.

Nothing is copied: JAX arrays are immutable, and published arrays are never donated by the learner. Only the newest
version is kept. Both sides are one object, which never changes its incarnation.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from penstock.types import Stopped, SupersededVersionError, WeightsError, WeightVersion
from penstock.weights.manifest import Layout, check_next, layout_of
from penstock.weights.protocol import Broadcaster, WeightClient


class InProcessBroadcaster(Broadcaster, WeightClient):
    """Publishes and serves named arrays by version, as broadcaster and client in one.

    The first publication fixes the arrays' names, shapes and dtypes; a later one that differs is refused with the names
    that differ. Versions only grow. Arrays are given out as they came in: of JAX or of NumPy.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: WeightVersion | None = None
        self._arrays: Mapping[str, Any] = {}
        self._layout: Layout | None = None
        self._publish_s = 0.0
        self._closed = False
        self._openings = 0

    def reopen(self) -> None:
        """Begins anew: forgets the version that it holds, and takes any."""
        with self._changed:
            self._version, self._arrays, self._layout, self._closed = None, {}, None, False
            self._openings += 1

    @override
    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        layout = layout_of(arrays)
        with self._changed:
            if self._closed:
                raise WeightsError("the broadcaster was closed: nothing can be published")
            check_next(self._version, self._layout, version, layout)
            self._version, self._arrays, self._layout = version, dict(arrays), layout
            self._changed.notify_all()
            self._publish_s = time.perf_counter() - began

    @override
    def latest(self) -> WeightVersion | None:
        with self._changed:
            return self._version

    @override
    def fetch(self, version: WeightVersion) -> Mapping[str, Any]:
        with self._changed:
            if version != self._version:
                newest = None if self._version is None else (self._version.lineage, self._version.step)
                raise SupersededVersionError(
                    f"{version} is not available: {self._version} is the newest and only one kept", newest
                )
            return self._arrays

    @property
    @override
    def failure(self) -> None:
        """It is always reached."""
        return None

    @override
    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        def over() -> bool:
            newer = self._version is not None and (newer_than is None or self._version > newer_than)
            return newer or self._closed

        with self._changed:
            changed = self._changed.wait_for(over, timeout_s)
            if self._closed:
                raise Stopped("the broadcaster of weights was closed")
            return self._version if changed else None

    @override
    def endpoint(self) -> dict[str, Any]:
        """Nothing that another process could use."""
        return {"transport": "local", "job": "local", "incarnation": f"local-{self._openings}"}

    @override
    def connect(self, endpoint: Mapping[str, Any]) -> None:
        """Takes no endpoint but its own."""
        if dict(endpoint) != self.endpoint():
            raise WeightsError(f"an endpoint of transport {endpoint.get('transport')!r}: weights are local here")

    @override
    def metrics(self) -> dict[str, float]:
        """Seconds of the last publication."""
        return {"weights/publish_s": self._publish_s}

    @override
    def close(self) -> None:
        """Ends every wait, and lets go of the arrays."""
        with self._changed:
            self._closed = True
            self._arrays = {}
            self._changed.notify_all()

"""The client of every transport that crosses a process: versions, verification, retries and deltas are done here.

What differs, how the bytes come, is a `TransportReader`: of files (`files`) or of a Flight server (`flight_client`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights.config import WeightsConfig
from penstock.weights.delta import decode_delta
from penstock.weights.manifest import BufferPool, Content, Layout, Manifest, check_layout, damaged_arrays
from penstock.weights.protocol import WeightClient

ATTEMPTS = 3
"""How often a fetch is tried before damage is an error."""

_WAIT_S = 1.0
_RECONNECT_S = 0.2
_MIB = 1024 * 1024


class LatestVersion(NamedTuple):
    """What a broadcaster has: who it is, and its newest version."""

    incarnation: str
    version: WeightVersion


@dataclass(frozen=True, slots=True, eq=False)
class FetchedArrays:
    """What a transport got of one version; not verified yet.

    Attributes:
        manifest: Of the version.
        arrays: All of them, in the manifest's layout; None where deltas came instead.
        deltas: Messages to be applied one after the other to the content that was named as base; none where that is
            the version's own content.
        moved_bytes: How much was moved for it.
        on_verified: Called with the arrays once they are found to be whole, and the client has them.
    """

    manifest: Manifest
    arrays: Mapping[str, np.ndarray] | None
    deltas: Sequence[Any] = ()
    moved_bytes: int = 0
    on_verified: Callable[[Mapping[str, np.ndarray]], None] | None = None


class TransportReader(Protocol):
    """Speaks to one broadcaster. `close` comes from another thread, and ends what runs."""

    def wait(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        """What is there when that differs from `known`, or at the timeout; None before the first publication.

        Raises:
            UnreachableError: nobody answers.
            WeightsError: what is there is of another job or token.
        """
        ...

    def read(self, version: WeightVersion, base: Content | None, timeout_s: float) -> FetchedArrays:
        """Gets that version.

        Args:
            version: Of which weights.
            base: The content that the client holds, for a delta; None asks for the arrays.
            timeout_s: Longest time it may take.

        Raises:
            SupersededVersionError: it is not there.
            UnreachableError: nobody answers, or not in time.
            WeightsError: what came is damaged, too large, or of another job or token.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Its own numbers, as ``weights/<name>``."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What was fetched last; the arrays only where a delta may be applied to them."""

    manifest: Manifest
    arrays: Mapping[str, np.ndarray] | None = field(default=None)


class FetchingClient(WeightClient):
    """Fetches through a transport.

    Args:
        endpoint: Of the broadcaster.
        config: Encoding and limits.
        open_reader: Makes the reader of an endpoint of this transport.
        on_close: Called after the reader is closed for good; `connect` closes one reader for another.
    """

    def __init__(
        self,
        endpoint: Mapping[str, Any],
        config: WeightsConfig,
        open_reader: Callable[[Mapping[str, Any]], TransportReader],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._config, self._open_reader, self._on_close = config, open_reader, on_close
        self._endpoint = dict(endpoint)
        self._reader = open_reader(endpoint)
        self._change = threading.Lock()
        self._closed = threading.Event()
        self._newest: LatestVersion | None = None
        self._failure: str | None = None
        self._held: _Held | None = None
        self._memory = BufferPool()
        self._layout: Layout | None = None
        self._numbers: dict[str, float] = {"weights/fetches": 0.0, "weights/retries": 0.0, "weights/unreachable": 0.0}

    @property
    @override
    def failure(self) -> str | None:
        return self._failure

    @override
    def latest(self) -> WeightVersion | None:
        self._poll(None, 0.0)
        return None if self._newest is None else self._newest.version

    @override
    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        deadline = time.monotonic() + timeout_s
        known: LatestVersion | None = None
        while not self._closed.is_set():
            remaining_s = deadline - time.monotonic()
            known = self._poll(known, max(0.0, min(remaining_s, _WAIT_S)))
            if known is not None and self._is_new(known, newer_than):
                return known.version
            if remaining_s <= 0:
                return None
        raise Stopped("the weight client was closed")

    @override
    def fetch(self, version: WeightVersion) -> Mapping[str, np.ndarray]:
        began = time.perf_counter()
        deadline = time.monotonic() + self._config.fetch_timeout_s
        fetched, arrays = self._fetch_undamaged(version, deadline)
        manifest = fetched.manifest
        if manifest.version != version or manifest.job != self._endpoint["job"]:
            raise WeightsError(
                f"asked for {version} of {self._endpoint['job']}, got {manifest.version} of {manifest.job}"
            )
        layout = manifest.layout
        if self._layout is not None:
            check_layout(self._layout, layout, "fetched arrays")
        self._layout = layout
        self._held = _Held(manifest, arrays if self._config.encoding == "delta" else None)
        if self._newest is None:
            self._newest = LatestVersion(manifest.incarnation, version)
        self._note(fetched, time.perf_counter() - began)
        if fetched.on_verified is not None:
            fetched.on_verified(arrays)
        return arrays

    @override
    def connect(self, endpoint: Mapping[str, Any]) -> None:
        with self._change:
            if dict(endpoint) == self._endpoint or self._closed.is_set():
                return
            for key in ("transport", "job"):
                if endpoint.get(key) != self._endpoint[key]:
                    raise WeightsError(
                        f"an endpoint with {key} {endpoint.get(key)!r}: this client has {self._endpoint[key]!r}"
                    )
            before, self._reader = self._reader, self._open_reader(endpoint)
            self._endpoint = dict(endpoint)
        before.close()

    @override
    def metrics(self) -> dict[str, float]:
        return dict(self._numbers) | {"weights/lag": float(self._lag())} | self._reader.metrics()

    @override
    def close(self) -> None:
        with self._change:
            self._closed.set()
            self._reader.close()
        if self._on_close is not None:
            self._on_close()

    def _poll(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        try:
            self._newest, self._failure = self._reader.wait(known, timeout_s), None
        except UnreachableError as error:
            self._failure = str(error)
            self._numbers["weights/unreachable"] += 1
            self._closed.wait(min(timeout_s, _RECONNECT_S))
            return known
        return self._newest

    def _is_new(self, announced: LatestVersion, newer_than: WeightVersion | None) -> bool:
        if newer_than is None or announced.version > newer_than:
            return True
        restarted = self._held is not None and self._held.manifest.incarnation != announced.incarnation
        return announced.version == newer_than and restarted

    def _fetch_undamaged(
        self, version: WeightVersion, deadline: float
    ) -> tuple[FetchedArrays, Mapping[str, np.ndarray]]:
        base = self._held if self._held is not None and self._held.arrays is not None else None
        problems: list[str] = []
        for _ in range(ATTEMPTS):
            if self._closed.is_set():
                raise Stopped("the weight client was closed")
            content = None if base is None else base.manifest.content
            try:
                fetched = self._reader.read(version, content, max(0.0, deadline - time.monotonic()))
                return fetched, self._verified(fetched, base)
            except SupersededVersionError:
                raise
            except WeightsError as error:
                problems.append(str(error))
                self._numbers["weights/retries"] += 1
                base = None
        raise WeightsError(f"{version} could not be fetched whole in {ATTEMPTS} attempts: {'; '.join(problems)}")

    def _verified(self, fetched: FetchedArrays, base: _Held | None) -> Mapping[str, np.ndarray]:
        began = time.perf_counter()
        if fetched.arrays is not None:
            arrays = fetched.arrays
            damaged = damaged_arrays(fetched.manifest.arrays, arrays)
            if damaged:
                raise WeightsError(f"arrays are damaged: {damaged[:5]} ({len(damaged)} of {len(arrays)})")
        else:
            arrays = self._from_deltas(fetched, base)
        self._numbers["weights/verify_s"] = time.perf_counter() - began
        return arrays

    def _from_deltas(self, fetched: FetchedArrays, base: _Held | None) -> Mapping[str, np.ndarray]:
        if base is None or base.arrays is None:
            raise WeightsError("a delta came, although no base was named")
        manifest, arrays = base.manifest, base.arrays
        for message in fetched.deltas:
            manifest, arrays = decode_delta(message, manifest, arrays, self._config.max_bytes, self._memory)
        if manifest.content != fetched.manifest.content:
            raise WeightsError(f"the deltas lead to {manifest.content}, not to {fetched.manifest.content}")
        return arrays

    def _note(self, fetched: FetchedArrays, fetch_s: float) -> None:
        transfer_s = fetch_s - self._numbers["weights/verify_s"]
        self._numbers["weights/fetches"] += 1
        self._numbers |= {
            "weights/fetch_s": fetch_s,
            "weights/transfer_s": transfer_s,
            "weights/bytes": float(fetched.moved_bytes),
            "weights/bytes_full": float(fetched.manifest.nbytes),
            "weights/mib_per_s": fetched.moved_bytes / _MIB / max(transfer_s, 1e-9),
        }

    def _lag(self) -> int:
        """Versions between the one fetched and the newest known; at least 1 across a resume of the run."""
        if self._newest is None or self._held is None:
            return 0
        newest, held = self._newest.version, self._held.manifest.version
        behind = newest.step - held.step
        return max(0, behind) if newest.lineage == held.lineage else max(1, behind)

"""The broadcaster of every transport that crosses a process: checks, host copy, digests and deltas are done here.

What differs, how the bytes are offered, is a `TransportServer`: files (`files`) or a Flight server
(`flight_server`). Which arrays are published, and how a client puts them beside its own, is here too.
"""

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from typing_extensions import override

from penstock.types import WeightsError, WeightVersion
from penstock.weights.config import WeightsConfig
from penstock.weights.delta import Delta, DeltaHistory
from penstock.weights.manifest import Content, Layout, Manifest, check_next, check_sendable, describe, layout_of
from penstock.weights.protocol import Broadcaster


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
    chains: Mapping[Content, tuple[Delta, ...]]


class TransportServer(Protocol):
    """Offers publications to other processes."""

    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Begins what can be done for the next publication before its digests are known.

        Raises:
            WeightsError: there is no space for them.
        """
        ...

    def put(self, publication: Publication) -> None:
        """Offers what was begun, whole, in place of the one before; where it raises, that one is still offered.

        Raises:
            WeightsError: there is no space for it.
        """
        ...

    def endpoint(self) -> dict[str, Any]:
        """What a client needs to connect, beside transport, job and incarnation; JSON values."""
        ...

    def metrics(self) -> dict[str, float]:
        """Its own numbers, as ``weights/<name>``."""
        ...

    def close(self) -> None:
        """Stops offering."""
        ...


class PublishingBroadcaster(Broadcaster):
    """Publishes through a transport.

    Args:
        config: Encoding and dtype.
        job: The run.
        server: Offers what is published; closed with this.
        incarnation: 32 hexadecimal digits, nobody else's (`new_incarnation`).
    """

    def __init__(self, config: WeightsConfig, job: str, server: TransportServer, incarnation: str) -> None:
        self._config, self._job, self._server, self._incarnation = config, job, server, incarnation
        self._lock = threading.Lock()
        self._version: WeightVersion | None = None
        self._layout: Layout | None = None
        self._history = DeltaHistory() if config.encoding == "delta" else None
        self._numbers: dict[str, float] = {}
        self._closed = False

    @override
    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        with self._lock:
            layout = layout_of(arrays)
            if self._closed:
                raise WeightsError("the broadcaster was closed: nothing can be published")
            check_next(self._version, self._layout, version, layout)
            began = time.perf_counter()
            host = host_arrays(arrays, self._config.bfloat16)
            copied = time.perf_counter()
            check_sendable(host)
            self._server.begin(host)
            begun = time.perf_counter()
            manifest = describe(self._job, self._incarnation, version, host)
            digested = time.perf_counter()
            publication = Publication(manifest, host, self._chains(manifest, host))
            encoded = time.perf_counter()
            self._server.put(publication)
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

    @override
    def latest(self) -> WeightVersion | None:
        return self._version

    @override
    def endpoint(self) -> dict[str, Any]:
        common = {"transport": self._config.transport, "job": self._job, "incarnation": self._incarnation}
        return common | self._server.endpoint()

    @override
    def metrics(self) -> dict[str, float]:
        return dict(self._numbers) | self._server.metrics()

    @override
    def close(self) -> None:
        """Waits for a publication that is under way."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._server.close()

    def _chains(self, manifest: Manifest, host: Mapping[str, np.ndarray]) -> dict[Content, tuple[Delta, ...]]:
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


def trained_arrays(arrays: Mapping[str, Any], frozen: Sequence[str]) -> dict[str, Any]:
    """The arrays that are published, in their order.

    Args:
        arrays: All of the model's, by name.
        frozen: Patterns of names that do not train, such as ``embedding`` or ``layers.*``.

    Raises:
        WeightsError: a pattern matches no array, or together they match all.
    """
    idle = [pattern for pattern in frozen if not any(fnmatchcase(name, pattern) for name in arrays)]
    if idle:
        raise WeightsError(f"frozen arrays {idle} match no name: the model has {sorted(arrays)}")
    kept = {name: array for name, array in arrays.items() if not any(fnmatchcase(name, each) for each in frozen)}
    if arrays and not kept:
        raise WeightsError(f"frozen arrays {list(frozen)} match every name: nothing would train")
    return kept


def merged_arrays(base: Mapping[str, Any], fetched: Mapping[str, Any]) -> dict[str, Any]:
    """All arrays of a model: the fetched ones, and the client's own where none came.

    Args:
        base: The client's JAX arrays, whose dtypes the result has. They stay where they are. Of those that are fetched
            a `jax.ShapeDtypeStruct` with its sharding will do.
        fetched: Arrays of the same names and shapes, for some or all of them; of another dtype where they were cast to
            travel. They are copied to where the client's own lie, and cast there; their memory may be used again.

    Raises:
        WeightsError: naming fetched arrays that the client does not know, or that have another shape.
    """
    unknown = sorted(fetched.keys() - base.keys())
    misshaped = [
        f"{name} is {tuple(array.shape)}, not {tuple(base[name].shape)}"
        for name, array in fetched.items()
        if name in base and tuple(array.shape) != tuple(base[name].shape)
    ]
    if unknown or misshaped:
        raise WeightsError(f"fetched arrays do not fit the model: unknown {unknown}, misshaped {misshaped}")
    return {name: _placed(fetched[name], own) if name in fetched else own for name, own in base.items()}


def _placed(array: Any, like: Any) -> Any:
    import jax

    if any(device.platform == "cpu" for device in like.sharding.device_set):
        array = np.array(array)  # there, JAX would only refer to memory that is aligned well
    return jax.device_put(array, like.sharding).astype(like.dtype)


def host_arrays(arrays: Mapping[str, Any], bfloat16: bool) -> dict[str, np.ndarray]:
    """C-contiguous NumPy arrays of JAX or NumPy arrays; by reference where they are that and nobody may write to them.

    What a learner goes on writing to is copied: clients fetch it later, and deltas are made of it at the next version.

    Args:
        arrays: Of any device. Those split over several are put together.
        bfloat16: Cast float32 arrays to bfloat16, on the device that they lie on.
    """
    sent = {name: _cast(array) if bfloat16 else array for name, array in arrays.items()}
    for array in sent.values():
        start = getattr(array, "copy_to_host_async", None)
        if start is not None:
            start()  # every copy is on its way before the first is waited for
    host = {name: np.asarray(array, order="C") for name, array in sent.items()}
    return {
        name: array.copy() if array.flags.writeable and array is arrays[name] else array for name, array in host.items()
    }


def _cast(array: Any) -> Any:
    return array.astype(ml_dtypes.bfloat16) if str(array.dtype) == "float32" else array

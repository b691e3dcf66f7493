"""Seconds from `publish` to arrays in another process, for every transport, beside a memory copy and raw Flight.

Rounds are interleaved, so that a disturbed second hurts all of them; the first ones, in which memory is touched for the
first time and connections are made, are left out. The memory copy goes to two places in turn, since nobody may write
over the version before while it is read. "In all" is from `publish` to verified arrays, with the question for news;
what digests cost is measured apart, by both sides, and taken off where a line says so.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.weights.fetching_process import TOKEN, Fetcher
from benchmarks.weights.raw_flight import RawServer
from penstock.types import WeightVersion
from penstock.weights import Broadcaster, InProcessBroadcaster, WeightsConfig, open_broadcaster
from penstock.weights.manifest import array_digest

WARM_UP_ROUNDS = 3
"""Shared memory has warm segments from the third publication on."""

RAW = ("thrown away", "kept", "into arrays")
"""What raw Flight does with what it receives."""

_ARRAY_BYTES = 32 * 1024 * 1024
_CROSSING = ("shared_memory", "arrow_flight", "checkpoint")


@dataclass
class Measured:
    """Seconds by what was done, and how many bytes each moved."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name][min(WARM_UP_ROUNDS, len(self.seconds[name]) - 1) :])

    def rate(self, name: str) -> float:
        """GB/s."""
        return self.nbytes / self.median(name) / 1e9


def make_arrays(nbytes: int, value: int = 0) -> dict[str, np.ndarray]:
    """A model's arrays: some large, some small, with bytes that do not repeat."""
    rng = np.random.default_rng(value)
    arrays: dict[str, np.ndarray] = {}
    left = nbytes
    while left > 0:
        size = min(left, _ARRAY_BYTES)
        layer = len(arrays) // 2
        arrays[f"layers.{layer}.kernel"] = rng.integers(0, 1 << 32, max(size // 4 - 256, 1), np.uint32).view(np.float32)
        arrays[f"layers.{layer}.scale"] = rng.standard_normal(256).astype(np.float32)
        left -= size
    return arrays


def measure(nbytes: int, rounds: int, transports: tuple[str, ...] = _CROSSING) -> Measured:
    """Measures every transport that many rounds after the warm-up."""
    arrays = make_arrays(nbytes)
    measured = Measured(sum(array.nbytes for array in arrays.values()))
    copies = [{name: np.empty_like(array) for name, array in arrays.items()} for _ in range(2)]
    local, fetcher = InProcessBroadcaster(), Fetcher()
    with tempfile.TemporaryDirectory(prefix="penstock-weights-") as folder, RawServer(arrays) as raw:
        configs = {name: WeightsConfig.model_validate({"transport": name}) for name in transports}
        broadcasters = {
            name: open_broadcaster(config, f"bench-{nbytes}", TOKEN, folder) for name, config in configs.items()
        }
        try:
            for name, config in configs.items():
                fetcher(do="open", name=name, endpoint=broadcasters[name].endpoint(), config=config.model_dump())
            for step in range(WARM_UP_ROUNDS + rounds):
                _copy(arrays, copies[step % 2], measured)
                _local(local, step, arrays, measured)
                for name in transports:
                    _cross(name, broadcasters[name], fetcher, step, arrays, measured)
                if "arrow_flight" in transports:
                    _raw(raw, configs["arrow_flight"], fetcher, measured)
            _check(fetcher, transports, arrays)
        finally:
            for name in transports:
                fetcher(do="close", name=name)
                broadcasters[name].close()
            fetcher.close()
    return measured


def _copy(arrays: dict[str, np.ndarray], copies: dict[str, np.ndarray], measured: Measured) -> None:
    began = time.perf_counter()
    for name, array in arrays.items():
        np.copyto(copies[name], array)
    measured.add("memory copy", time.perf_counter() - began)


def _local(local: InProcessBroadcaster, step: int, arrays: dict[str, np.ndarray], measured: Measured) -> None:
    version = WeightVersion(0, step)
    began = time.perf_counter()
    local.publish(version, arrays)
    assert local.wait_for(None, 1.0) == version
    found = local.fetch(version)
    measured.add("local", time.perf_counter() - began)
    assert all(found[name] is array for name, array in arrays.items())


def _cross(
    name: str, broadcaster: Broadcaster, fetcher: Fetcher, step: int, arrays: dict[str, Any], measured: Measured
) -> None:
    began = time.perf_counter()
    broadcaster.publish(WeightVersion(0, step), arrays)
    publish_s = time.perf_counter() - began
    fetched = fetcher(do="fetch", name=name, step=step)
    digest_s = broadcaster.metrics()["weights/digest_s"]
    verify_s = fetched["weights/verify_s"]
    measured.add(f"{name}: in all", publish_s + fetched["seconds"])
    measured.add(f"{name}: without digests", publish_s - digest_s + fetched["weights/transfer_s"])
    measured.add(f"{name}: fetch", fetched["weights/fetch_s"])
    measured.add(f"{name}: fetch without digests", fetched["weights/transfer_s"])
    measured.add(f"{name}: digests", digest_s + verify_s)


def _raw(raw: RawServer, config: WeightsConfig, fetcher: Fetcher, measured: Measured) -> None:
    for how in RAW:
        more = {"port": raw.port, "streams": config.streams, "chunk_bytes": config.chunk_bytes}
        found = fetcher(do="raw", how=how, nbytes=measured.nbytes, **more)
        assert found["bytes"] == measured.nbytes
        measured.add(f"raw Flight, {how}", found["seconds"])


def _check(fetcher: Fetcher, transports: tuple[str, ...], arrays: dict[str, np.ndarray]) -> None:
    expected = {name: array_digest(array) for name, array in arrays.items()}
    for name in transports:
        if fetcher(do="digests", name=name) != expected:
            raise AssertionError(f"{name} delivered other arrays than were published")


def print_measured(measured: Measured) -> None:
    print(f"\nHand-over of {measured.nbytes / 1e6:,.0f} MB, medians")
    for name in measured.seconds:
        print(f"  {name:<40}{measured.median(name) * 1e3:>10.2f} ms{measured.rate(name):>10.2f} GB/s")

"""Seconds from `publish` to arrays in another process, for every transport, beside a memory copy and raw Flight.

Every round does all of them, Flight several times, each round in another order: a disturbed second hurts all, and
nobody always comes right after what warms caches and connections for it. The first rounds, in which memory is touched
for the first time and connections are made, are left out; small sizes are measured several times anew, with other
processes, memory and connections, since luck with those moves a figure by a tenth. Memory copy and raw Flight write
to two places in turn, as nobody may write over the version before while it is read; raw Flight to one, where no cache
holds either. "In all" is from `publish` to verified arrays, with the question for news. "Digests ready" is from
`publish` to arrays without what digests take: the publisher is given the manifest, so that nothing hides behind them,
and of the client's fetch its verification is taken off.
"""

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.weights.fetching_process import TOKEN, Fetcher
from benchmarks.weights.raw_flight import RawServer
from penstock.types import WeightVersion
from penstock.weights import Broadcaster, InProcessBroadcaster, WeightsConfig, open_broadcaster
from penstock.weights import broadcaster as broadcasting
from penstock.weights.manifest import Manifest, array_digest, describe

WARM_UP_ROUNDS = 3
"""Shared memory has warm segments from the third publication on."""

RAW = ("thrown away", "kept", "into arrays")
"""What raw Flight does with what it receives."""

FLIGHT_TURNS = 3
"""In every round, of Flight and of raw Flight into arrays: a mark is near their ratio, and single turns differ much."""

_ARRAY_BYTES = 32 * 1024 * 1024
_CROSSING = ("shared_memory", "arrow_flight", "checkpoint")


@dataclass
class Measured:
    """Seconds by what was done, and how many bytes each moved; nothing is noted before it is `warm`."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    warm: bool = False

    def add(self, name: str, seconds: float) -> None:
        if self.warm:
            self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def rate(self, name: str) -> float:
        """GB/s."""
        return self.nbytes / self.median(name) / 1e9


def make_arrays(nbytes: int) -> dict[str, np.ndarray]:
    """A model's arrays: some large, some small, with bytes that do not repeat."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    left = nbytes
    while left > 0:
        size = min(left, _ARRAY_BYTES)
        layer = len(arrays) // 2
        arrays[f"layers.{layer}.kernel"] = rng.integers(0, 1 << 32, max(size // 4 - 256, 1), np.uint32).view(np.float32)
        arrays[f"layers.{layer}.scale"] = rng.standard_normal(256).astype(np.float32)
        left -= size
    for array in arrays.values():
        array.flags.writeable = False  # as a learner's are: nobody needs a copy
    return arrays


def measure(nbytes: int, rounds: int, repeats: int = 1, transports: tuple[str, ...] = _CROSSING) -> Measured:
    """Measures every transport that many rounds after the warm-up, so many times anew."""
    arrays = make_arrays(nbytes)
    measured = Measured(sum(array.nbytes for array in arrays.values()))
    for repeat in range(repeats):
        _measure_once(arrays, rounds, random.Random(repeat), transports, measured)
    return measured


def _measure_once(
    arrays: dict[str, np.ndarray], rounds: int, order: random.Random, transports: tuple[str, ...], measured: Measured
) -> None:
    copies = [{name: np.empty_like(array) for name, array in arrays.items()} for _ in range(2)]
    local, fetcher, measured.warm = InProcessBroadcaster(), Fetcher(), False
    with tempfile.TemporaryDirectory(prefix="penstock-weights-") as folder, RawServer(arrays) as raw:
        configs = {name: WeightsConfig.model_validate({"transport": name}) for name in transports}
        broadcasters = {
            name: open_broadcaster(config, f"bench-{measured.nbytes}", TOKEN, folder)
            for name, config in configs.items()
        }
        steps: dict[str, Iterator[int]] = {name: itertools.count() for name in transports}
        manifest = describe("of this", "0" * 32, WeightVersion(0, 0), arrays)
        try:
            for name, config in configs.items():
                fetcher(do="open", name=name, endpoint=broadcasters[name].endpoint(), config=config.model_dump())
            for step in range(WARM_UP_ROUNDS + rounds):
                measured.warm = step >= WARM_UP_ROUNDS
                turns = [partial(_copy, arrays, copies[step % 2], measured)]
                turns += [partial(_local, local, step, arrays, measured)]
                for name, broadcaster in broadcasters.items():
                    crossing = partial(_cross, name, broadcaster, fetcher, steps[name], arrays, measured)
                    turns += [crossing] * (FLIGHT_TURNS if name == "arrow_flight" else 1)
                if "shared_memory" in transports:
                    name, broadcaster = "shared_memory", broadcasters["shared_memory"]
                    turns += [
                        partial(_cross_ready, name, broadcaster, fetcher, steps[name], arrays, manifest, measured)
                    ]
                if "arrow_flight" in transports:
                    for how in RAW:
                        reading = partial(_raw, raw, configs["arrow_flight"], how, fetcher, measured)
                        turns += [reading] * (FLIGHT_TURNS if how == "into arrays" else 1)
                order.shuffle(turns)
                for turn in turns:
                    turn()
            _check(fetcher, transports, arrays)
        finally:
            for name in transports:
                fetcher(do="close", name=name)
                broadcasters[name].close()
            fetcher.close()


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


def _hand_over(
    name: str, broadcaster: Broadcaster, fetcher: Fetcher, steps: Iterator[int], arrays: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Seconds of `publish`, and what the fetcher said."""
    step = next(steps)
    began = time.perf_counter()
    broadcaster.publish(WeightVersion(0, step), arrays)
    return time.perf_counter() - began, fetcher(do="fetch", name=name, step=step)


def _cross(
    name: str, broadcaster: Broadcaster, fetcher: Fetcher, steps: Iterator[int], arrays: dict[str, Any],
    measured: Measured,
) -> None:  # fmt: skip
    publish_s, fetched = _hand_over(name, broadcaster, fetcher, steps, arrays)
    measured.add(f"{name}: in all", publish_s + fetched["seconds"])
    measured.add(f"{name}: fetch", fetched["weights/fetch_s"])
    measured.add(f"{name}: fetch without digests", fetched["weights/transfer_s"])


def _cross_ready(
    name: str, broadcaster: Broadcaster, fetcher: Fetcher, steps: Iterator[int], arrays: dict[str, Any],
    manifest: Manifest, measured: Measured,
) -> None:  # fmt: skip
    def ready(job: str, incarnation: str, version: WeightVersion, _: Any) -> Manifest:
        return replace(manifest, job=job, incarnation=incarnation, version=version)

    with mock.patch.object(broadcasting, "describe", ready):
        publish_s, fetched = _hand_over(name, broadcaster, fetcher, steps, arrays)
    measured.add(f"{name}: digests ready", publish_s + fetched["weights/transfer_s"])


def _raw(raw: RawServer, config: WeightsConfig, how: str, fetcher: Fetcher, measured: Measured) -> None:
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
    for name in sorted(measured.seconds):
        print(f"  {name:<44}{measured.median(name) * 1e3:>10.2f} ms{measured.rate(name):>10.2f} GB/s")

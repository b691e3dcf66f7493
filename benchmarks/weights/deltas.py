"""What deltas save: bytes against the share of elements that changed, and time over a slow network.

Two training runs were recorded, with a fine-tuning learning rate and a large one. Over the slow network whole arrays
and deltas of the same publications are timed from `publish` to arrays in another process, everything included, in turn.
Arrays of other sizes, in which a chosen share changes, go the same way without a limit to the network.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.weights.fetching_process import TOKEN, Fetcher
from benchmarks.weights.slow_link import SlowLink
from penstock.types import WeightVersion
from penstock.weights import Broadcaster, WeightsConfig, open_broadcaster
from penstock.weights.manifest import array_digest

GIGABIT = 1e9


@dataclass
class Update:
    """One publication: what changed, what moved, and how long it took from `publish` to arrays elsewhere."""

    changed_share: float
    bytes_full: float
    bytes_delta: float
    seconds: dict[str, float]


def changing(arrays: dict[str, np.ndarray], share: float, versions: int) -> Iterator[dict[str, np.ndarray]]:
    """These float32 arrays, and so many later versions, in each of which about that share of the elements changed."""
    rng = np.random.default_rng(0)
    yield arrays
    for _ in range(versions):
        arrays = {name: array.copy() for name, array in arrays.items()}
        for array in arrays.values():
            array.view(np.uint32)[rng.integers(0, array.size, round(share * array.size))] ^= 1
            array.flags.writeable = False
        yield arrays


def measure(publications: Iterable[dict[str, np.ndarray]], bits_per_s: float | None = GIGABIT) -> list[Update]:
    """Publishes one version after the other, whole and as deltas, through a slow link each.

    The first version, which all get whole, is left out. Without `bits_per_s` there is no link between.
    """
    fetcher, links, broadcasters = Fetcher(), [], {}
    found: list[Update] = []
    try:
        for encoding in ("full", "delta"):
            config = WeightsConfig.model_validate({"encoding": encoding, "fanout": 8})
            broadcasters[encoding] = open_broadcaster(config, f"bench-{encoding}", TOKEN, "unused")
            endpoint = broadcasters[encoding].endpoint()
            if bits_per_s is not None:
                links.append(SlowLink(endpoint["address"], bits_per_s))
                endpoint |= {"address": links[-1].address}
            fetcher(do="open", name=encoding, endpoint=endpoint, config=config.model_dump())
        for step, arrays in enumerate(publications):
            turn = ("full", "delta") if step % 2 else ("delta", "full")
            seconds = {
                encoding: _hand_over(broadcasters[encoding], fetcher, encoding, step, arrays) for encoding in turn
            }
            if step:
                numbers = broadcasters["delta"].metrics()
                share, full = numbers["weights/changed_share"], numbers["weights/bytes_published"]
                found.append(Update(share, full, numbers["weights/bytes_delta"], seconds))
    finally:
        for link in links:
            link.close()
        for name, broadcaster in broadcasters.items():
            fetcher(do="close", name=name)
            broadcaster.close()
        fetcher.close()
    return found


def _hand_over(
    broadcaster: Broadcaster, fetcher: Fetcher, name: str, step: int, arrays: dict[str, np.ndarray]
) -> float:
    began = time.perf_counter()
    broadcaster.publish(WeightVersion(0, step), arrays)
    fetcher(do="fetch", name=name, step=step)
    seconds = time.perf_counter() - began
    if fetcher(do="digests", name=name) != {key: array_digest(array) for key, array in arrays.items()}:
        raise AssertionError(f"{name} delivered other arrays than were published")
    return seconds


def bytes_ratio(found: list[Update]) -> float:
    """Bytes of whole arrays over bytes of deltas, over the whole run."""
    return sum(update.bytes_full for update in found) / sum(update.bytes_delta for update in found)


def time_ratio(found: list[Update]) -> float:
    """Seconds of whole arrays over seconds of deltas, medians."""
    full, delta = (statistics.median(update.seconds[name] for update in found) for name in ("full", "delta"))
    return full / delta


def print_sized(found: list[Update]) -> None:
    """A line of a table: what changed, what was sent, and how fast the arrays were there."""
    nbytes, sent = found[0].bytes_full, statistics.median(update.bytes_delta for update in found)
    share = statistics.median(update.changed_share for update in found)
    words = [
        f"{name} {seconds * 1e3:,.0f} ms ({nbytes / seconds / 1e9:.2f} GB/s)"
        for name in ("full", "delta")
        for seconds in [statistics.median(update.seconds[name] for update in found)]
    ]
    print(f"  delta, {share:.1%} changed: {sent / 1e6:,.1f} MB sent; {', '.join(words)}")


def print_deltas(learning_rate: float, found: list[Update]) -> None:
    full, delta = (statistics.median(update.seconds[name] for update in found) for name in ("full", "delta"))
    shares = [update.changed_share for update in found]
    sent = [update.bytes_delta for update in found]
    print(
        f"  learning rate {learning_rate:g}: {found[0].bytes_full / 1e6:.1f} MB whole; changed elements "
        f"{min(shares):.2%} to {max(shares):.2%}, deltas {min(sent) / 1e6:.3f} to {max(sent) / 1e6:.3f} MB, "
        f"{bytes_ratio(found):.1f} times fewer bytes; at 1 Gbit/s whole {full * 1e3:.0f} ms, delta {delta * 1e3:.0f} ms"
    )

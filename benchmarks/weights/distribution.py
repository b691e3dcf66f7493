"""What the distribution tree gains: seconds from `publish` until the last of many clients has the arrays over Flight.

    python -m benchmarks.weights.distribution [--clients 8,16] [--megabytes 25] [--limited-megabytes 5] [--mbit 100]

The same clients, a process each on loopback, fetch in turn with the tree (`weights.fanout` as it is) and without (all
of them from the server). Loopback has no network card, and what ends first there is the processor: each copy costs as
much whoever sends it. So the second half gives everybody who sends, server and clients alike, a link of a limited rate
for what they send (`slow_link`), as a card has it. Rounds alternate; medians, with the load of the machine.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from benchmarks.weights.fetching_process import TOKEN, Fetcher
from benchmarks.weights.handover import make_arrays
from benchmarks.weights.slow_link import SlowLink
from penstock.types import WeightVersion
from penstock.weights import Broadcaster, WeightsConfig, open_broadcaster

FANOUT = WeightsConfig().fanout

Seconds = dict[str, list[tuple[float, float]]]
"""By `tree` and `no tree`: until the mean and until the last client had a version."""


def measure(clients: int, nbytes: int, rounds: int, bits_per_s: float | None, fanout: int = FANOUT) -> Seconds:
    """Publishes so many versions both ways, after one that is not counted."""
    arrays = make_arrays(nbytes)
    found: Seconds = {"tree": [], "no tree": []}
    relayed = {"tree": 0.0, "no tree": 0.0}
    with _opened(clients, bits_per_s, fanout) as (fetchers, broadcasters), ThreadPoolExecutor(clients) as pool:
        for step in range(rounds + 1):
            for name in sorted(broadcasters, reverse=step % 2 == 0):
                if step == 0:  # connections are made one by one, so that none times out on a busy machine
                    broadcasters[name].publish(WeightVersion(0, step), arrays)
                    for fetcher in fetchers:
                        _fetch(fetcher, name, step)
                    continue
                fetches = [pool.submit(_fetch, fetcher, name, step) for fetcher in fetchers]
                began = time.perf_counter()
                broadcasters[name].publish(WeightVersion(0, step), arrays)
                ends = [end - began for end, _ in (fetch.result() for fetch in fetches)]
                found[name].append((statistics.fmean(ends), max(ends)))
                relayed[name] = sum(fetch.result()[1] for fetch in fetches)
    if relayed["no tree"] or not relayed["tree"]:
        raise AssertionError(f"fetches from other clients: {relayed}")
    return found


def _fetch(fetcher: Fetcher, name: str, step: int) -> tuple[float, float]:
    """When the arrays were there, and how often this client fetched from another one until now."""
    numbers = fetcher(do="fetch", name=name, step=step)
    return time.perf_counter(), numbers["weights/from_clients"]


@contextmanager
def _opened(
    clients: int, bits_per_s: float | None, fanout: int
) -> Iterator[tuple[list[Fetcher], dict[str, Broadcaster]]]:
    fetchers, links = [Fetcher() for _ in range(clients)], []
    configs = {"tree": WeightsConfig(fanout=fanout), "no tree": WeightsConfig(fanout=clients)}
    broadcasters = {name: open_broadcaster(config, f"bench-{name}", TOKEN, "") for name, config in configs.items()}
    try:
        for name, broadcaster in broadcasters.items():
            endpoint = broadcaster.endpoint()
            if bits_per_s is not None:
                links.append(SlowLink(endpoint["address"], bits_per_s))
                endpoint |= {"address": links[-1].address}
            for number, fetcher in enumerate(fetchers):
                config = configs[name].model_dump()
                fetcher(do="open", name=name, endpoint=endpoint, config=config, number=number, bits_per_s=bits_per_s)
        yield fetchers, broadcasters
    finally:
        for fetcher in fetchers:
            fetcher.close()
        for each in (*links, *broadcasters.values()):
            each.close()


def print_found(clients: int, what: str, found: Seconds) -> None:
    """A line: medians until the last client, and until the mean client, had a version."""
    tree, flat = (np.median(found[name], axis=0) for name in ("tree", "no tree"))
    print(
        f"  {clients:>3} clients, {what}: last {tree[1]:.2f} s with the tree, {flat[1]:.2f} s without "
        f"({1 - tree[1] / flat[1]:+.0%} gained); mean {tree[0]:.2f} s, {flat[0]:.2f} s ({1 - tree[0] / flat[0]:+.0%})",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="8,16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=float, default=25.0, help="on bare loopback")
    parser.add_argument("--limited-megabytes", type=float, default=5.0, help="over links")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each link, Mbit/s")
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds each")
    for clients in map(int, options.clients.split(",")):
        for what, megabytes, rate in (
            ("bare loopback", options.megabytes, None),
            (f"{options.mbit:g} Mbit/s each", options.limited_megabytes, options.mbit * 1e6),
        ):
            found = measure(clients, round(megabytes * 1e6), options.rounds, rate)
            print_found(clients, f"{megabytes:g} MB, {what}", found)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

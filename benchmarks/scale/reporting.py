"""The tables of the scale benchmark."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence

from benchmarks.scale.counting import Limits, Window, broken, marginal, median_of
from benchmarks.scale.latencies import Latencies
from benchmarks.scale.making import GROUP_SIZE

COUNTED = ("overseer", "replay", "curriculum", "learner", "inference", "Ray")
"""Whose processor time is a run's own: all but the simulated workers'."""
KINDS = ("acquire", "deliver", "now", "heartbeat", "fetch")


def expected_groups_per_s(window: Window) -> float:
    """What the engines' pace would give."""
    return window.workers / Latencies(speed=window.speed).mean_s


def costs(windows: Mapping[int, Sequence[Window]]) -> dict[int, float]:
    """Number of workers → processor seconds per worker and second, medians."""
    return {workers: median_of(found, "cost", COUNTED) for workers, found in windows.items()}


def margins(costs: Mapping[int, float]) -> list[float]:
    """Processor seconds per second of one more worker, from each number to the next."""
    return [marginal(smaller, larger) for smaller, larger in itertools.pairwise(costs.items())]


def print_run(started_s: float, window: Window, faults: Sequence[str]) -> None:
    """One line, as soon as it was measured."""
    print(f"  {window.workers:>6,} workers, engines {window.speed:g} times as fast: started in {started_s:.1f} s; "
          f"{window.messages_per_s:,.1f} messages/s, {window.groups * GROUP_SIZE / window.seconds:,.1f} rollouts/s; "
          f"faults in the books so far: {len(faults)}", flush=True)  # fmt: skip


def print_table(windows: Mapping[int, Sequence[Window]]) -> None:
    """Rates and latencies."""
    runs = max(len(found) for found in windows.values())
    print(f"\nAt the measured pace; medians of {runs} runs each")
    print(f"{'workers':>9}{'rollouts/s':>12}" + "".join(f"{kind + '/s':>13}" for kind in KINDS) + f"{'all/s':>10}")
    for workers, found in windows.items():
        rollouts = median_of([*found], "groups") * GROUP_SIZE / median_of(found, "seconds")
        rates = "".join(f"{median_of(found, 'rate', kind):>13,.2f}" for kind in KINDS)
        print(f"{workers:>9,}{rollouts:>12,.1f}{rates}{median_of(found, 'messages_per_s'):>10,.1f}")
    print("\nLatency in ms, p50 / p99 (acquire: only those that were answered with tickets)")
    print(f"{'workers':>9}" + "".join(f"{kind:>20}" for kind in KINDS))
    for workers, found in windows.items():
        pairs = (
            f"{median_of(found, 'p', k, 0.5) * 1e3:.1f} / {median_of(found, 'p', k, 0.99) * 1e3:.1f}" for k in KINDS
        )
        print(f"{workers:>9,}" + "".join(f"{pair:>20}" for pair in pairs))


def print_cost(windows: Mapping[int, Sequence[Window]]) -> None:
    """Processor time."""
    roles = (*COUNTED, "farms")
    print("\nCores kept busy (farms: the simulated workers, which are not counted)")
    print(f"{'workers':>9}" + "".join(f"{role:>12}" for role in roles) + f"{'machine':>12}")
    for workers, found in windows.items():
        cores = "".join(f"{median_of(found, 'cores', role):>12.3f}" for role in roles)
        print(f"{workers:>9,}{cores}{median_of(found, 'machine_share'):>12.0%}")
    found, smallest = costs(windows), next(iter(windows))
    print("\nProcessor milliseconds per worker and second, and as a multiple of the fewest workers'")
    for workers, cost in found.items():
        print(f"{workers:>9,}{cost * 1e3:>10.3f}{cost / found[smallest]:>8.2f}")
    for (fewer, more), margin in zip(itertools.pairwise(found), margins(found), strict=True):
        print(f"  one more between {fewer:,} and {more:,}: {margin * 1e3:.3f}")


def print_limit(windows: Sequence[Window], limits: Limits, saturated: Callable[[Window, int], str]) -> None:
    """Where it breaks."""
    print(f"\n{windows[0].workers:,} workers whose engines are faster and faster")
    print(f"{'speed':>7}{'rollouts/s':>12}{'all/s':>10}{'deliver p99, ms':>17}{'heartbeat p99, ms':>19}"
          f"{'heartbeats':>12}{'overseer':>10}{'replay':>8}{'farms':>8}{'machine':>9}")  # fmt: skip
    for w in windows:
        print(f"{w.speed:>7g}{w.groups * GROUP_SIZE / w.seconds:>12,.1f}{w.messages_per_s:>10,.1f}"
              f"{w.p('deliver', 0.99) * 1e3:>17,.1f}{w.p('heartbeat', 0.99) * 1e3:>19,.1f}{w.beats_made:>12.0%}"
              f"{w.cores('overseer'):>10.2f}{w.cores('replay'):>8.2f}{w.cores('farms'):>8.2f}"
              f"{w.machine_share:>9.0%}")  # fmt: skip
    last = windows[-1]
    crossed = broken(last, expected_groups_per_s(last), limits)
    if crossed:
        print(f"It breaks at {last.messages_per_s:,.0f} messages/s, {last.groups * GROUP_SIZE / last.seconds:,.0f} "
              f"rollouts/s: {'; '.join(crossed)}.")  # fmt: skip
        print(f"Saturated: {saturated(last, os.cpu_count() or 1)}.")
    else:
        print("No limit was crossed.")

"""A thousand rollout workers against one replay buffer, curriculum and weight broadcaster: what does a worker cost?

    python -m benchmarks.scale [--workers 10,100,1000] [--seconds 20] [--repeats 3] [--quick]

Workers are coroutines in a few processes, with engines that only take time (`latencies`: of real calls); each has its
own identity, incarnation, heartbeats and calls, and they speak the protocol of a run through Ray over the loopback
interface. Everything that a run has once is real: the supervisor in this process, and in processes of their own the
replay buffer with its files, the curriculum, a Flight broadcaster whose versions two clients fetch. Only the learner
does no arithmetic. The numbers of workers take turns, medians are printed. After each window the books are compared:
nothing that was delivered is lost, nothing is trained twice. Then the largest run goes faster and faster until a limit
is crossed. Takes about 10 minutes. Exits with 1 where a mark is missed.
"""

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.marks import Marks
from benchmarks.scale import reporting
from benchmarks.scale.counting import Limits, Window, broken, saturated
from benchmarks.scale.latencies import Latencies

FARMS = 2
FLAT, FLAT_MARGIN = 1.25, 2.0
"""Most that one of many workers may cost, as a multiple of one of the fewest; and most that one *more* may cost, from
the second largest to the largest number, as a multiple of one more from the smallest to the second."""
FASTEST = 64.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="10,100,1000", help="numbers of workers, ascending")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window that is measured")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds before each window that are not")
    parser.add_argument("--repeats", type=int, default=3, help="windows of each number, each in a run of its own")
    parser.add_argument("--no-limit", action="store_true", help="do not look for the rate at which it breaks")
    parser.add_argument("--quick", action="store_true", help="10 and 50 workers, short windows; no figure to quote")
    options = parser.parse_args(arguments)
    options.workers = [int(count) for count in options.workers.split(",")]
    if options.quick:
        options.workers, options.seconds, options.settle, options.repeats = [10, 50], 4.0, 2.0, 1
    if sorted(set(options.workers)) != options.workers:
        parser.error(f"--workers is {options.workers}: give ascending numbers")
    return options


def measure(options: argparse.Namespace, scratch: Path) -> tuple[dict[int, list[Window]], list[Window], list[str]]:
    """Windows by number of workers; those of the search for the limit; what was wrong with the books."""
    from benchmarks.scale.farm import FarmLauncher, cluster
    from benchmarks.scale.phase import running

    windows: dict[int, list[Window]] = defaultdict(list)
    faster: list[Window] = []
    faults: list[str] = []
    ray = cluster(scratch)
    try:
        for repeat in range(options.repeats):
            for workers in options.workers:
                farms = FarmLauncher(ray, FARMS, 1.0)
                with running(farms, scratch / f"{workers}-{repeat}", workers) as phase:
                    phase.turn(options.settle)
                    windows[workers].append(phase.measure(options.seconds))
                    faults += phase.finish()
                    reporting.print_run(phase.started_s, windows[workers][-1], faults)
                farms.close(30)
        if not options.no_limit:
            farms = FarmLauncher(ray, FARMS, 1.0)
            with running(farms, scratch / "limit", options.workers[-1]) as phase:
                speed = 2.0
                while speed <= FASTEST:
                    farms.set_speed(speed)
                    phase.turn(options.settle)
                    faster.append(phase.measure(options.seconds, speed))
                    reporting.print_run(phase.started_s, faster[-1], faults)
                    if broken(faster[-1], reporting.expected_groups_per_s(faster[-1])):
                        break
                    speed *= 2
                faults += phase.finish()
            farms.close(30)
    finally:
        ray.close(60)
    return windows, faster, faults


def mark(windows: dict[int, Sequence[Window]], faults: Sequence[str], marks: Marks) -> None:
    """What was promised."""
    costs = reporting.costs(windows)
    counts = list(windows)
    for workers in counts[1:]:
        ratio = costs[workers] / costs[counts[0]]
        marks.at_most(f"cost per worker at {workers:,} / at {counts[0]:,}", ratio, FLAT)
    if len(counts) > 2:
        first, last = reporting.margins(costs)[0], reporting.margins(costs)[-1]
        marks.at_most(f"cost of one more, {counts[-2]:,} to {counts[-1]:,} / {counts[0]:,} to {counts[1]:,}",
                      last / first, FLAT_MARGIN)  # fmt: skip
    crossed = [limit for found in windows.values() for w in found for limit in broken(w, reporting.expected_groups_per_s(w))]  # fmt: skip
    marks.at_most("limits crossed at the measured pace", float(len(crossed)), 0.0)
    marks.at_most("faults in the books", float(len(faults)), 0.0)


def main(arguments: list[str] | None = None) -> int:
    options, marks = parse(arguments), Marks()
    latencies = Latencies()
    print(f"engines answer within {latencies.at(0):.1f}–{latencies.at(1):.1f} s, {latencies.mean_s:.1f} s on average; "
          f"{os.cpu_count()} cores for everything, the simulated workers included")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as scratch:
        windows, faster, faults = measure(options, Path(scratch))
    reporting.print_table(windows)
    reporting.print_cost(windows)
    if faster:
        reporting.print_limit(faster, Limits(), saturated)
    mark(windows, faults, marks)
    print("\nMarks\n" + "\n".join([*marks.lines, *(f"  {fault}" for fault in faults)]))
    return 1 if marks.missed else 0


if __name__ == "__main__":
    sys.exit(main())

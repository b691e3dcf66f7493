"""A thousand rollout workers against one replay buffer, curriculum and weight broadcaster: what does a worker cost?

    python -m benchmarks.scale [--workers 10,100,1000] [--seconds 20] [--repeats 3] [--quick]

Workers are coroutines in a few processes, with engines that only take time (`latencies`: of real calls); each has its
own identity, incarnation, heartbeats and calls, and they speak the protocol of a run through Ray over the loopback
interface. Everything that a run has once is real: the supervisor in this process, and in processes of their own the
replay buffer with its files, the curriculum, a Flight broadcaster whose versions two clients fetch. Only the learner
does no arithmetic. The numbers of workers take turns, medians are printed. After each window the books are compared:
nothing that was delivered is lost, nothing is trained twice. Then the largest run goes faster and faster until a limit
is crossed. Takes about 12 minutes. Exits with 1 where a mark is missed.
"""

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.marks import Marks
from benchmarks.scale import reporting
from benchmarks.scale.counting import Limits, Window, broken, saturated
from benchmarks.scale.latencies import Latencies
from penstock.types import PenstockError

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


@dataclass
class Found:
    """What was measured.

    Attributes:
        windows: By number of workers.
        faster: Those of the search for the limit.
        faults: What was wrong with the books, and what failed.
    """

    windows: dict[int, list[Window]] = field(default_factory=lambda: defaultdict(list))
    faster: list[Window] = field(default_factory=list[Window])
    faults: list[str] = field(default_factory=list[str])

    @contextmanager
    def faults_of(self, what: str) -> Iterator[None]:
        """A run that fails is a fault, and the others are measured all the same."""
        try:
            yield
        except (RuntimeError, PenstockError) as error:
            self.faults.append(f"{what}: {type(error).__name__}: {error}")
            print(f"  {self.faults[-1]}", flush=True)


def measure(options: argparse.Namespace, scratch: Path) -> Found:
    """Runs of all numbers of workers in turns, and then the search for the limit."""
    from benchmarks.scale.farm import cluster  # Ray is an extra
    from benchmarks.scale.phase import farmed

    found = Found()
    ray = cluster(scratch)
    try:
        for repeat in range(options.repeats):
            for workers in options.workers:
                with (
                    found.faults_of(f"{workers} workers"),
                    farmed(ray, scratch / f"{workers}-{repeat}", workers) as run,
                ):
                    run.phase.turn(options.settle)
                    found.windows[workers].append(run.phase.measure(options.seconds))
                    found.faults += run.phase.finish()
                    reporting.print_run(run.phase.started_s, found.windows[workers][-1], found.faults)
        if not options.no_limit:
            workers = options.workers[-1]
            with found.faults_of("the search for the limit"), farmed(ray, scratch / "limit", workers) as run:
                search(run, options, found)
    finally:
        ray.close(60)
    return found


def search(run: Any, options: argparse.Namespace, found: Found) -> None:
    """Engines go twice as fast again and again, until a limit is crossed."""
    speed = 2.0
    while speed <= FASTEST:
        run.farms.set_speed(speed)
        run.phase.turn(options.settle)
        window = run.phase.measure(options.seconds, speed)
        found.faster.append(window)
        reporting.print_run(run.phase.started_s, window, found.faults)
        if broken(window, reporting.expected_groups_per_s(window)):
            break
        speed *= 2
    run.farms.set_speed(1.0)
    found.faults += run.phase.finish()


def crossed_limits(windows: dict[int, list[Window]]) -> list[str]:
    """In words, at the measured pace."""
    return [
        f"{workers:,} workers: {limit}"
        for workers, found in windows.items()
        for window in found
        for limit in broken(window, reporting.expected_groups_per_s(window))
    ]


def mark(windows: dict[int, list[Window]], faults: Sequence[str], marks: Marks) -> None:
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
    marks.at_most("limits crossed at the measured pace", float(len(crossed_limits(windows))), 0.0)
    marks.at_most("faults in the books", float(len(faults)), 0.0)


def main(arguments: list[str] | None = None) -> int:
    options, marks = parse(arguments), Marks()
    latencies = Latencies()
    print(f"engines answer within {latencies.at(0):.1f}–{latencies.at(1):.1f} s, {latencies.mean_s:.1f} s on average; "
          f"{os.cpu_count()} cores for everything, the simulated workers included")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as scratch:
        found = measure(options, Path(scratch))
    windows, faults = found.windows, found.faults
    if not all(windows[workers] for workers in options.workers):
        print("\n".join(["\nNot everything could be measured:", *faults]))
        return 1
    reporting.print_table(windows)
    reporting.print_cost(windows)
    if found.faster:
        reporting.print_limit(found.faster, Limits(), saturated)
    mark(windows, faults, marks)
    print("\nMarks\n" + "\n".join([*marks.lines, *(f"  {fault}" for fault in faults)]))
    for limit in sorted(set(crossed_limits(windows))):
        print(f"  crossed: {limit}")
    return 1 if marks.missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Weights from the learner to an engine: every transport against a memory copy and raw Flight, and what deltas save.

    python -m benchmarks.weights [--quick] [--sizes 25,500,2000]

The whole takes about 10 minutes, and memory for ten times the largest size; sizes that the machine has no memory for
are skipped, and said. Arrays that arrive are compared with those that were published. Exits with 1 where a mark is
missed.
"""

import argparse
import sys

from benchmarks.marks import Marks
from benchmarks.replay.memory import available_bytes
from benchmarks.weights import deltas, handover, training
from penstock.weights import WeightsConfig

LOCAL_MS, SHARED, FLIGHT, FEWER_BYTES, FASTER = 1.0, 0.8, 0.9, 10.0, 1.0
COPIES = 10
"""Arrays, two copies, two segments, three received sets, the place and the messages of raw Flight."""

SMALL_MB, REPEATS = 100, 10
"""Sizes up to this are measured so many times anew."""

RATES = (1e-6, 1e-3)
CHANGED_SHARES, DELTA_VERSIONS = (0.01, 0.3), 3
"""Of each size, through Flight without a limit to its rate."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="25,500,2000", help="megabytes of weights")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds per size")
    parser.add_argument("--updates", type=int, default=12, help="recorded updates per learning rate")
    parser.add_argument("--quick", action="store_true", help="size 25, few rounds, a tiny model; no figure to quote")
    options = parser.parse_args(arguments)
    options.sizes = [int(size) for size in options.sizes.split(",")]
    options.model = training.Size()
    if options.quick:
        options.sizes = options.sizes[:1]
        options.rounds, options.updates, options.model = min(options.rounds, 2), min(options.updates, 3), training.TINY
    return options


def measure_transports(options: argparse.Namespace, marks: Marks) -> None:
    for megabytes in options.sizes:
        if COPIES * megabytes * 1e6 > available_bytes():
            print(f"\n{megabytes:,} MB: skipped, {COPIES * megabytes / 1e3:.1f} GB are not there")
            continue
        repeats = 1 if options.quick or megabytes > SMALL_MB else REPEATS
        measured = handover.measure(megabytes * 1_000_000, options.rounds, repeats)
        handover.print_measured(measured)
        for share in CHANGED_SHARES:
            arrays = handover.make_arrays(megabytes * 1_000_000)
            deltas.print_sized(deltas.measure(deltas.changing(arrays, share, DELTA_VERSIONS), None))
        marks.at_most(f"{megabytes} MB: local, ms", measured.median("local") * 1e3, LOCAL_MS)
        shared = measured.rate("shared_memory: digests ready") / measured.rate("memory copy")
        marks.at_least(f"{megabytes} MB: shared memory / memory copy", shared, SHARED)
        flight = measured.rate("arrow_flight: fetch without digests")
        for how in handover.RAW:
            print(f"  Flight is {flight / measured.rate(f'raw Flight, {how}'):.2f} of raw Flight, {how}")
        raw = measured.rate("raw Flight, into arrays")
        marks.at_least(f"{megabytes} MB: Flight / raw Flight, both into arrays", flight / raw, FLIGHT)


def measure_deltas(options: argparse.Namespace, marks: Marks) -> None:
    print("\nDeltas of recorded runs of the recipe cats, bfloat16, from `publish` to arrays in another process")
    for rate in RATES:
        found = deltas.measure(training.record(options.model, rate, options.updates))
        deltas.print_deltas(rate, found)
        if rate == min(RATES):
            marks.at_least(f"learning rate {rate:g}: bytes whole / delta", deltas.bytes_ratio(found), FEWER_BYTES)
            marks.at_least(f"learning rate {rate:g}: time whole / delta, 1 Gbit/s", deltas.time_ratio(found), FASTER)


def main(arguments: list[str] | None = None) -> int:
    options, marks = parse(arguments), Marks()
    config = WeightsConfig()
    print(f"{config.streams} streams, messages of {config.chunk_bytes / 1024**2:g} MiB")
    measure_transports(options, marks)
    measure_deltas(options, marks)
    return marks.report("\nMarks\n")


if __name__ == "__main__":
    sys.exit(main())

"""The replay buffer and its files, measured: rates, flatness, memory, Parquet, and peers on the same work.

    python -m benchmarks.replay [--quick] [--sizes 1000,100000,1000000] [--reverb-python PATH]

`workload` says what a round is; correctness is checked beside every figure. The buffer is measured with a store that
keeps nothing, unless it says otherwise. The whole takes about 5 minutes and 8 GB; what the machine has no memory for
is skipped, and said. Exits with 1 where a mark is missed.

`--reverb-python` names the interpreter of an environment with `dm-reverb[tensorflow]`, which needs another NumPy and a
TensorFlow of its own; without it that peer is skipped.
"""

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.marks import Marks
from benchmarks.replay import durable, memory, parquet, rates
from benchmarks.replay.list_design import ListReplay
from benchmarks.replay.workload import GROUPS, ROUND, SHAPES, Shape, Workload, buffer_config, whole_rounds

LARGE_ROLLOUTS = 100_000
"""Most buffered rollouts of 4,096 tokens: 6.5 GB."""

FLAT, MEMORY, PARQUET, PEER = 2.0, 1.15, 0.8, 20.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,100000,1000000", help="buffered rollouts, ascending")
    parser.add_argument("--repeats", type=int, default=30, help="timed rounds per buffer")
    parser.add_argument("--rows", type=int, default=8192, help="rows of a Parquet file")
    parser.add_argument("--quick", action="store_true", help="sizes 1000,10000, fewer repeats; no figure to quote")
    parser.add_argument("--reverb-python", help="interpreter that has dm-reverb")
    options = parser.parse_args(arguments)
    options.sizes = [int(size) for size in options.sizes.split(",")]
    if options.quick:
        options.sizes = [size for size in options.sizes if size <= 1000] + [10_000]
        options.repeats, options.rows = min(options.repeats, 10), min(options.rows, 1024)
    return options


def fitting(shape: Shape, sizes: list[int]) -> list[int]:
    """The sizes that memory suffices for all at once; what is left out is said."""
    room, taken = 0.8 * memory.available_bytes(), 0.0
    kept: list[int] = []
    for size in sizes:
        taken += 1.3 * shape.array_bytes * whole_rounds(size) * ROUND
        if taken > room:
            print(f"{size:,} rollouts of {shape.tokens} tokens: skipped, {taken / 1e9:.1f} GB are not there")
        else:
            kept.append(size)
    return kept


def measure_rates(options: argparse.Namespace, tokens: int, sizes: list[int], marks: Marks) -> None:
    workload = Workload(SHAPES[tokens])
    rounds = [whole_rounds(size) for size in fitting(workload.shape, sizes)]
    buffers = [rates.fill(rates.make_buffer(workload, count), workload, count) for count in rounds]
    rates.measure(buffers, workload, options.repeats)
    rates.print_rates(buffers, workload)
    rates.print_growth(buffers)
    for name, ratio in rates.growth(buffers).items():
        marks.at_most(f"{tokens} tokens: {name} at {buffers[-1].rollouts:,} / at {buffers[0].rollouts:,}", ratio, FLAT)
    rates.close(buffers)


def measure_peers(options: argparse.Namespace, marks: Marks) -> None:
    """Rounds in a buffer of 100,000 (or the largest asked for below that): ours, the list design's, dm-reverb's."""
    workload = Workload(SHAPES[256])
    rounds = whole_rounds(max(size for size in options.sizes if size <= 100_000))
    ours = rates.fill(rates.make_buffer(workload, rounds), workload, rounds)
    lists = rates.fill(make_lists(rounds), workload, rounds)
    repeats = max(3, options.repeats // 3)
    rates.measure([ours, lists], workload, repeats)
    print(f"\nThe same rounds at {rounds * ROUND:,} rollouts of 256 tokens; ms per round of {ROUND}, medians")
    for name, filled in (("penstock", ours), ("lists, filters, choice", lists)):
        parts = ", ".join(f"{part} {filled.median(part) * 1e3:.2f}" for part in rates.OPERATIONS)
        print(f"  {name:<24}{filled.round_s * 1e3:>9.2f}  ({parts})")
    print_reverb(options, rounds * ROUND, ours)
    marks.at_least(f"list design over penstock at {rounds * ROUND:,}", lists.round_s / ours.round_s, PEER)
    together = [replace(filled, calls=1, seconds={name: [] for name in rates.OPERATIONS}) for filled in (ours, lists)]
    rates.measure(together, workload, repeats)
    once, lists_once = (filled.round_s * 1e3 for filled in together)
    print(f"  with a round's {GROUPS} groups in one call: penstock {once:.2f}, lists {lists_once:.2f}, "
          f"{lists_once / once:.1f} times as long")  # fmt: skip
    rates.close([ours])


def make_lists(rounds: int) -> ListReplay:
    """The peer, with the limits of ours."""
    config = buffer_config(rounds)
    return ListReplay(
        config.capacity, config.max_rollout_step_delay, config.max_rollout_timestamp_delay, alpha=3.0, max_tokens=256
    )


def print_reverb(options: argparse.Namespace, buffered: int, ours: rates.Filled) -> None:
    if options.reverb_python is None:
        print(f"  {'dm-reverb':<24}not installed: skipped (--reverb-python names an interpreter that has it)")
        return
    shape = SHAPES[256]
    arguments = [buffered, shape.prompt, shape.response, ROUND, options.repeats]
    script = Path(__file__).with_name("reverb_peer.py")
    command = [options.reverb_python, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if "No module named 'reverb'" in done.stderr:
        print(f"  {'dm-reverb':<24}not installed for {options.reverb_python}: skipped")
        return
    if done.returncode != 0:
        print(f"  {'dm-reverb':<24}failed: {done.stderr.strip().splitlines()[-1]}")
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    total = found["insert_s"] + found["draw_s"]
    print(f"  dm-reverb {found['version']:<14}{total * 1e3:>9.2f}  (insert {found['insert_s'] * 1e3:.2f}, uniform draw "
          f"{found['draw_s'] * 1e3:.2f}; no freshness, no books; {total / ours.round_s:.2f} of ours)")  # fmt: skip


def measure_memory(options: argparse.Namespace, marks: Marks) -> None:
    plan = [(256, max(options.sizes), "recency"), (256, min(100_000, max(options.sizes)), "deadline")]
    plan += [(256, min(100_000, max(options.sizes)), "grpo"), (4096, min(10_000, max(options.sizes)), "recency")]
    print("\nResident memory per buffered rollout")
    for tokens, rollouts, maker in plan:
        if not fitting(SHAPES[tokens], [rollouts]):
            continue
        found, arrays = memory.bytes_per_rollout(tokens, rollouts, maker), SHAPES[tokens].array_bytes
        print(f"  {tokens:>5} tokens, {rollouts:>9,} buffered, {maker:<9}{found:>10,.0f} bytes, {arrays:,} of arrays")
        marks.at_most(f"{tokens} tokens: memory / arrays' bytes, {maker}", found / arrays, MEMORY)


def measure_files(options: argparse.Namespace, marks: Marks) -> None:
    for tokens, rows in ((256, options.rows), (4096, options.rows // 8)):
        workload = Workload(SHAPES[tokens])
        seconds = parquet.measure(workload, rows, max(3, options.repeats // 3))
        parquet.print_parquet(seconds, workload, rows)
        for ours, theirs in (
            ("write a table", "write and flush"),
            ("write records", "write records, flush"),
            ("read a table", "read a table"),
        ):
            ratio = seconds[f"pyarrow: {theirs}"] / seconds[ours]
            marks.at_least(f"{tokens} tokens: {ours} / pyarrow: {theirs}", ratio, PARQUET)
    workload = Workload(SHAPES[256])
    rounds = whole_rounds(options.rows)
    durable.print_durable([durable.measure(workload, rounds, size) for size in (8, ROUND)], workload)


def main(arguments: list[str] | None = None) -> int:
    options, marks = parse(arguments), Marks()
    measure_memory(options, marks)
    measure_files(options, marks)
    gc.collect()
    measure_rates(options, 4096, [size for size in options.sizes if size <= LARGE_ROLLOUTS], marks)
    gc.collect()
    measure_rates(options, 256, options.sizes, marks)
    gc.collect()
    measure_peers(options, marks)
    return marks.report("\nMarks\n")


if __name__ == "__main__":
    sys.exit(main())

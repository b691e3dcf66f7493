"""The whole way with files: groups in, sealed to Parquet with a flush to the disk each, batches drawn and stored.

A batch is drawn after each round, and everything that waits for a file gets it then: so no file holds more than a
round. Small files are merged meanwhile.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.workload import ROUND, Workload, buffer_config
from penstock.batch import RecencyBatchMaker
from penstock.replay import ReplayBuffer, RolloutStore, StoreConfig


@dataclass(frozen=True)
class DurableRates:
    """Rollouts per second with the real store."""

    buffer_size: int
    rollouts: int
    ingest: float
    sample: float
    files: int


def measure(workload: Workload, rounds: int, buffer_size: int) -> DurableRates:
    """Fills a buffer round by round, drawing a batch after each; checks that the files hold what was put in."""
    adding = drawing = 0.0
    with tempfile.TemporaryDirectory(prefix="penstock-store-") as folder:
        config = buffer_config(rounds, StoreConfig(buffer_size=buffer_size))
        store = RolloutStore(Path(folder), config.store)
        maker = RecencyBatchMaker(unit="rollout", max_samples=-1, max_tokens=workload.shape.tokens)
        buffer = ReplayBuffer(config, store, maker)
        for step in range(rounds):
            arriving = workload.round(step)
            buffer.set_current_step(step)
            began = time.perf_counter()
            for group in arriving:
                buffer.add_batches([group])
            added = time.perf_counter()
            batch = buffer.sample(ROUND)
            adding, drawing = adding + added - began, drawing + time.perf_counter() - added
            assert batch is not None and all(workload.is_right(example) for example in batch.examples)
        buffer.check_ledger()
        buffer.close()
        files = len(list(Path(folder, "rollouts").glob("*.parquet")))
        stored = {record.rollout.rollout_id for record in store.read_records()}
        store.close()
    count = rounds * ROUND
    assert len(stored) == count, f"{len(stored)} rollouts are in the files, not {count}"
    return DurableRates(buffer_size, count, count / adding, count / drawing, files)


def print_durable(results: list[DurableRates], workload: Workload) -> None:
    count, tokens = results[0].rollouts, workload.shape.tokens
    print(f"\nWith files (zstd, each flushed to the disk), {count:,} rollouts of {tokens} tokens")
    print(f"{'buffer_size':>13}{'ingest/s':>12}{'MB/s':>8}{'sample/s':>12}{'files':>8}")
    for result in results:
        rate = result.ingest * workload.shape.array_bytes / 1e6
        print(f"{result.buffer_size:>13,}{result.ingest:>12,.0f}{rate:>8,.0f}{result.sample:>12,.0f}{result.files:>8,}")

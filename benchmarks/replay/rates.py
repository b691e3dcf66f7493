"""Seconds per operation of the replay buffer at several sizes, without files: does the cost stay flat?

Buffers of all sizes are filled first and measured in turn, round by round, so that a disturbed second hurts all of
them; medians are printed. What is not timed: making the rollouts (the generators' work), and the checks.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.no_files import NoFiles
from benchmarks.replay.workload import GROUPS, ROUND, Workload, buffer_config
from penstock.batch import RecencyBatchMaker
from penstock.replay import ReplayBuffer
from penstock.types import RLExample, RolloutBatch

OPERATIONS = ("add_batches", "set_current_step", "sample")


class Buffer(Protocol):
    """What is measured: ours, and the peer's."""

    def add_batches(self, batches: Sequence[RolloutBatch]) -> None: ...

    def set_current_step(self, step: int) -> None: ...

    def sample(self, batch_size: int) -> Any: ...


@dataclass
class Filled:
    """A buffer at its size, and how long its operations took; the groups of a round arrive in so many calls."""

    buffer: Buffer
    rollouts: int
    step: int
    calls: int = GROUPS
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})

    def median(self, operation: str) -> float:
        """Seconds per round."""
        return statistics.median(self.seconds[operation])

    @property
    def rounds(self) -> list[float]:
        """Seconds of each round, all operations."""
        return [sum(parts) for parts in zip(*self.seconds.values(), strict=True)]

    @property
    def round_s(self) -> float:
        """Seconds per round: the median."""
        return statistics.median(self.rounds)


def make_buffer(workload: Workload, rounds: int) -> ReplayBuffer:
    """A buffer without files whose batches are drawn by recency."""
    maker = RecencyBatchMaker(
        alpha=3.0, unit="rollout", max_samples=-1, max_tokens=workload.shape.tokens, seed=0,
    )  # fmt: skip
    return ReplayBuffer(buffer_config(rounds), NoFiles(), maker)


def fill(buffer: Buffer, workload: Workload, rounds: int) -> Filled:
    for step in range(rounds):
        buffer.set_current_step(step)
        buffer.add_batches(workload.round(step))
    return Filled(buffer, rounds * ROUND, rounds)


def run_round(filled: Filled, workload: Workload) -> Sequence[RLExample]:
    """One timed round; returns what was drawn."""
    arriving = workload.round(filled.step)
    batch: Any = None

    def deliver() -> None:
        size = GROUPS // filled.calls
        for first in range(0, GROUPS, size):
            filled.buffer.add_batches(arriving[first : first + size])

    def draw() -> None:
        nonlocal batch
        batch = filled.buffer.sample(ROUND)

    filled.seconds["set_current_step"].append(_timed(lambda: filled.buffer.set_current_step(filled.step)))
    filled.seconds["add_batches"].append(_timed(deliver))
    filled.seconds["sample"].append(_timed(draw))
    filled.step += 1
    return getattr(batch, "examples", batch)


def measure(buffers: Sequence[Filled], workload: Workload, repeats: int) -> None:
    """Interleaved rounds; two of each are not counted. Checks what was drawn, and the books.

    Raises:
        AssertionError: a buffer gave something else than what was put in, holds too much, or lost count.
    """
    for repeat in range(repeats + 2):
        for filled in buffers:
            examples = run_round(filled, workload)
            assert len(examples) == ROUND, f"{len(examples)} examples were drawn, not {ROUND}"
            assert all(workload.is_right(example) for example in examples), "a rollout is not what was put in"
            if repeat < 2:
                for seconds in filled.seconds.values():
                    seconds.clear()
    for filled in buffers:
        if isinstance(filled.buffer, ReplayBuffer):
            check_books(filled.buffer, filled.rollouts, filled.step)


def check_books(buffer: ReplayBuffer, rollouts: int, rounds_so_far: int) -> None:
    """Everything that was put in waits, or was dropped for its age; nothing is over capacity."""
    buffer.check_ledger()
    metrics = buffer.metrics()
    count = {name.removeprefix("replay/ledger/"): value for name, value in metrics.items()}
    gone = count["trained"] + count["stale_step"]  # what was drawn at least once ends as trained
    assert count["started"] == rounds_so_far * ROUND and count["waiting"] == rollouts, metrics
    assert gone == count["started"] - rollouts, metrics
    assert metrics["replay/size"] <= rollouts and count["evicted"] == 0, metrics


def close(buffers: Sequence[Filled]) -> None:
    """Ends their threads, which would keep them in memory."""
    for filled in buffers:
        if isinstance(filled.buffer, ReplayBuffer):
            filled.buffer.close()


def print_rates(buffers: Sequence[Filled], workload: Workload) -> None:
    size = workload.shape.array_bytes
    print(f"\n{workload.shape.tokens}-token rollouts ({size:,} bytes of arrays each); µs per operation, medians of "
          f"{len(buffers[0].seconds['sample'])} rounds")  # fmt: skip
    print(f"{'buffered':>10}{'add a group':>13}{'step':>9}{f'draw {ROUND}':>9}"
          f"{'ingest/s':>12}{'MB/s':>8}{'sample/s':>12}{'MB/s':>8}{'slowest round':>15}")  # fmt: skip
    for filled in buffers:
        add, step, draw = (filled.median(name) for name in OPERATIONS)
        print(f"{filled.rollouts:>10,}{add / GROUPS * 1e6:>13,.0f}{step * 1e6:>9,.0f}{draw * 1e6:>9,.0f}"
              f"{ROUND / add:>12,.0f}{ROUND * size / add / 1e6:>8,.0f}"
              f"{ROUND / draw:>12,.0f}{ROUND * size / draw / 1e6:>8,.0f}"
              f"{max(filled.rounds) * 1e6:>15,.0f}")  # fmt: skip


def growth(buffers: Sequence[Filled]) -> dict[str, float]:
    """For each operation the worst ratio of its cost to that in the smallest buffer."""
    smallest, *larger = buffers
    return {
        name: max((filled.median(name) / smallest.median(name) for filled in larger), default=1.0)
        for name in OPERATIONS
    }


def print_growth(buffers: Sequence[Filled]) -> None:
    smallest, *larger = buffers
    for filled in larger:
        ratios = ", ".join(f"{name} {filled.median(name) / smallest.median(name):.2f}" for name in OPERATIONS)
        print(f"cost at {filled.rollouts:,} over cost at {smallest.rollouts:,}: {ratios}")


def _timed(operation: Callable[[], None]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began

"""Memory per buffered rollout: how much larger the process becomes, measured in a process of its own.

    python -m benchmarks.replay.memory TOKENS ROLLOUTS MAKER

Resident memory is what a machine runs out of: it holds the allocator's slack, the ledger, the indices and the batch
maker along with the arrays, and cannot be flattered by what a tracer does not see. It is read after a small buffer was
filled and thrown away (so that imports and pools are not counted), and again when the buffer is full, once something
was drawn from it. Prints bytes per rollout.
"""

import gc
import subprocess
import sys
from pathlib import Path

from benchmarks.no_files import NoFiles
from benchmarks.replay.rates import check_books, fill
from benchmarks.replay.workload import ROUND, SHAPES, Workload, buffer_config, whole_rounds
from penstock.batch import DeadlineBatchMaker, GrpoBatchMaker, RecencyBatchMaker
from penstock.replay import ReplayBuffer

MAKERS = {"deadline": DeadlineBatchMaker, "grpo": GrpoBatchMaker, "recency": RecencyBatchMaker}
_FILL_S = 1800.0


def bytes_per_rollout(tokens: int, rollouts: int, maker: str) -> float:
    """Measures in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.replay.memory", str(tokens), str(rollouts), maker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FILL_S, cwd=Path(__file__).parents[2])
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return float(done.stdout)


def resident_bytes() -> int:
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def available_bytes() -> int:
    """What the machine can still give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def filled_buffer(tokens: int, rounds: int, maker: str) -> ReplayBuffer:
    workload = Workload(SHAPES[tokens])
    makes = MAKERS[maker](max_tokens=tokens, max_samples=-1)
    buffer = ReplayBuffer(buffer_config(rounds), NoFiles(), makes)
    fill(buffer, workload, rounds)
    assert buffer.sample(1) is not None  # batch makers put off until a draw what only a draw needs
    check_books(buffer, rounds * ROUND, rounds)
    return buffer


def main(tokens: int, rollouts: int, maker: str) -> None:
    rounds = whole_rounds(rollouts)
    filled_buffer(tokens, 4, maker)
    before = resident_bytes()
    buffer = filled_buffer(tokens, rounds, maker)
    print((resident_bytes() - before) / (rounds * ROUND))
    buffer.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

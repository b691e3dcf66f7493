"""What the simulators themselves can do: as many processes as processors, each a plain loop over one simulator.

    python -m benchmarks.fleet.independent WORKLOAD

No policy, no shared memory, nobody to wait for; actions are drawn beforehand, uniformly. Processor time of steps and of
resets is kept apart, so that the work of a fleet whose episodes went otherwise can be priced by it. Plays until its
input ends, one side of `benchmarks.fleet.alternating`.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from benchmarks.fleet.alternating import AT_S, PROCESSES, answer_lines
from benchmarks.fleet.workloads import WORKLOADS, Workload
from penstock.environments.simulators import make_simulator
from penstock.environments.simulators.processes import die_with_parent
from penstock.types import RunFailed

START_S, END_S = 60.0, 10.0
ACTIONS = 4096
COUNTED = ("steps", "resets", "step_s", "reset_s")


def loop(workload: Workload, seed: int, shared: Any, ready: Any, parent: int) -> None:
    """One process: makes the simulator, says so, and plays until `parent` dies; row `seed` of `shared` is COUNTED."""
    die_with_parent(parent)
    kind = workload.simulators[0]
    simulator = make_simulator(kind.id, kind.kwargs)
    simulator.reset(seed=seed)
    simulator.action_space.seed(seed)
    actions = [simulator.action_space.sample() for _ in range(ACTIONS)]
    counts = np.frombuffer(shared).reshape(-1, len(COUNTED))[seed]
    ready.release()
    steps, before_s = 0, time.thread_time()
    while True:
        _, _, terminated, truncated, _ = simulator.step(actions[steps % ACTIONS])
        now_s = time.thread_time()
        steps += 1
        counts[0] = steps
        counts[2] += now_s - before_s
        before_s = now_s
        if terminated or truncated:
            simulator.reset()
            now_s = time.thread_time()
            counts[1] += 1
            counts[3] += now_s - before_s
            before_s = now_s


@contextmanager
def playing(workload: Workload, number: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """So many processes, while the context lasts: what they COUNTED, (number, 4) float64 that grow, and their ids.

    Raises:
        RunFailed: a process was not ready in time.
    """
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    shared = context.RawArray("d", number * len(COUNTED))
    processes: list[BaseProcess] = []
    try:
        for seed in range(number):
            words = (workload, seed, shared, ready, os.getpid())
            processes.append(context.Process(target=loop, args=words, daemon=True))
            processes[-1].start()
        for _ in processes:
            if not ready.acquire(timeout=START_S):
                raise RunFailed(f"an independent process was not ready within {START_S:g} s")
        yield np.frombuffer(shared).reshape(number, -1), [process.pid or 0 for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join(END_S)


def main(name: str) -> None:
    with playing(WORKLOADS[name], os.cpu_count() or 1) as (counts, pids):
        answer_lines(
            lambda: (
                {AT_S: time.perf_counter(), PROCESSES: pids} | dict(zip(COUNTED, counts.sum(0).tolist(), strict=True))
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

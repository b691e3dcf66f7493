"""What the simulators themselves can do: as many processes as processors, each a plain loop over one simulator.

    python -m benchmarks.fleet.independent WORKLOAD SECONDS

No policy, no shared memory, nobody to wait for; actions are drawn beforehand, uniformly. Steps and resets are timed
apart, so that the work of a fleet whose episodes went otherwise can be priced by them. Prints one JSON line.
"""

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

from benchmarks.fleet.workloads import WORKLOADS, Workload
from penstock.environments.simulators import make_simulator

START_S, END_S = 60.0, 60.0
ACTIONS = 4096


def loop(workload: Workload, seed: int, seconds: float, link: Connection) -> None:
    """One process: makes the simulator, says so, waits for the start, says (steps, resets, step_s, reset_s)."""
    kind = workload.simulators[0]
    simulator = make_simulator(kind.id, kind.kwargs)
    simulator.reset(seed=seed)
    simulator.action_space.seed(seed)
    actions = [simulator.action_space.sample() for _ in range(ACTIONS)]
    link.send("ready")
    link.recv()
    steps = resets = 0
    reset_s, begin_s = 0.0, time.perf_counter()
    now_s = begin_s
    while now_s - begin_s < seconds:
        _, _, terminated, truncated, _ = simulator.step(actions[steps % ACTIONS])
        steps += 1
        now_s = time.perf_counter()
        if terminated or truncated:
            simulator.reset()
            resets, before_s = resets + 1, now_s
            now_s = time.perf_counter()
            reset_s += now_s - before_s
    link.send((steps, resets, now_s - begin_s - reset_s, reset_s))


def measure(workload: Workload, seconds: float) -> dict[str, float]:
    """Steps per second of all processes together, and the seconds of a step and of a reset.

    Raises:
        TimeoutError: a process did not answer.
    """
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    for number in range(os.cpu_count() or 1):
        mine, other = context.Pipe()
        process = context.Process(target=loop, args=(workload, 1 + number, seconds, other), daemon=True)
        process.start()
        links.append(mine)
        processes.append(process)
    for link in links:
        _receive(link, START_S)
    for link in links:
        link.send("go")
    found = [_receive(link, seconds + END_S) for link in links]
    for process in processes:
        process.join(END_S)
    steps, resets, step_s, reset_s = (sum(column) for column in zip(*found, strict=True))
    return {
        "steps_per_s": sum(one[0] / (one[2] + one[3]) for one in found),
        "step_s": step_s / steps,
        "reset_s": reset_s / resets if resets else 0.0,
        "processes": len(links),
    }


def _receive(link: Connection, timeout_s: float):
    if not link.poll(timeout_s):
        raise TimeoutError(f"an independent process said nothing for {timeout_s:g} s")
    return link.recv()


if __name__ == "__main__":
    print(json.dumps(measure(WORKLOADS[sys.argv[1]], float(sys.argv[2]))))

"""Drives a real pool in tests: acts on what arrives and keeps the books."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.fleet.config import FleetConfig, SimulatorLimits
from penstock.fleet.pool import SimulatorPool
from penstock.fleet.steps import StepArrival

COUNTER = "tests.fleet.toys:Counter"
QUICK = SimulatorLimits(backoff_s=0.02, spawn_timeout_s=20.0)


def config_of(
    processes: int = 1, rows: int = 1, id: str = COUNTER, limits=QUICK, parts: int = 1, **kwargs: Any
) -> FleetConfig:
    """A fleet of one task."""
    return FleetConfig(
        tasks={"t": {"id": id, "kwargs": kwargs}},
        envs_per_worker=processes * rows,
        envs_per_process=rows,
        parts_per_process=parts,
        limits=limits,
    )


class Driver:
    """A pool, every row that arrived by slot, and how many actions each slot was given.

    Parts are numbered through; with one to a process they are the processes.
    """

    def __init__(self, pool: SimulatorPool, parts: int = 1) -> None:
        self.pool, self._parts = pool, parts
        self.rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.acted: dict[int, int] = defaultdict(int)
        self.open: dict[int, StepArrival] = {}

    def gather(self, timeout_s: float = 1.0) -> list[int]:
        """Takes what arrives; returns its parts."""
        arrivals = {one.process * self._parts + one.part: one for one in self.pool.poll(timeout_s)}
        for number, arrival in arrivals.items():
            assert number not in self.open, "an arrival before its action"
            self.open[number] = arrival
            for row, slot in enumerate(arrival.slots.tolist()):
                self.rows[slot].append(_row(arrival, row))
        return list(arrivals)

    def answer(self, number: int) -> None:
        """Acts: the slot's count of actions, modulo 5 or the choices that there are."""
        slots, choices = self.open.pop(number).slots, min(5, *self.pool.spaces.actions[0].n)
        actions = {"": np.array([self.acted[slot] % choices for slot in slots.tolist()])}
        self.pool.act(number // self._parts, actions, number % self._parts)
        for slot in slots.tolist():
            self.acted[slot] += 1

    def run_until(self, reached: Callable[[], bool], act: bool = True) -> None:
        """Gathers and acts."""
        deadline_s = time.monotonic() + 20.0
        while not reached():
            assert time.monotonic() < deadline_s, self.pool.counts()
            self.gather(0.2)
            if act:
                for number in tuple(self.open):
                    self.answer(number)

    def steps(self, count: int) -> None:
        """Until every slot was answered so often more."""
        goal = {slot: len(self.rows[slot]) + count for slot in range(self.pool.num_slots)}
        self.run_until(lambda: all(len(self.rows[slot]) >= rows for slot, rows in goal.items()))

    def check_books(self) -> None:
        """Arrivals and actions alternate: each action has one answer, or is on its way."""
        for slot, rows in self.rows.items():
            assert [row["acted"] for row in rows] == [False] + [True] * (len(rows) - 1)
            open_now = slot // (self.pool.num_slots // len(self.pool.process_ids())) in self.open
            assert len(rows) == self.acted[slot] + open_now or len(rows) == self.acted[slot]

    def faults(self, slot: int) -> list[int]:
        """Numbers of the slot's rows that are faults."""
        return [number for number, row in enumerate(self.rows[slot]) if row["fault"]]


def _row(arrival: StepArrival, row: int) -> dict[str, Any]:
    return {
        "observation": {name: array[row].copy() for name, array in arrival.observations.items()},
        "final": {name: array[row].copy() for name, array in arrival.final_observations.items()},
        "first": bool(arrival.first[row]), "reward": float(arrival.rewards[row]), "fault": bool(arrival.faults[row]),
        "terminated": bool(arrival.terminated[row]), "truncated": bool(arrival.truncated[row]),
        "acted": bool(arrival.acted[row]), "cut": bool(arrival.cut[row]), "has_final": bool(arrival.has_final[row]),
        "return": float(arrival.returns[row]), "length": int(arrival.lengths[row]),
    }  # fmt: skip


@contextmanager
def driven(
    config: FleetConfig, seed: int = 1, worker_id: str = "w0", events: list[tuple[str, Mapping[str, Any]]] | None = None
):
    """A started pool in a `Driver`; closed at the end."""
    told = [] if events is None else events
    pool = SimulatorPool(config, worker_id, seed, lambda name, fields: told.append((name, fields)))
    try:
        pool.start(20.0)
        yield Driver(pool, config.parts_per_process)
    finally:
        pool.close()


def cause(path: Path, what: str) -> None:
    """Makes a `Counter` misbehave once; the file is there whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(what)
    os.replace(draft, path)


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_gone(pids: list[int], timeout_s: float = 8.0) -> None:
    """Waits until none of the processes lives."""
    deadline_s = time.monotonic() + timeout_s
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline_s, f"processes {left} still live"
        time.sleep(0.01)


def open_descriptors() -> list[str]:
    """What this process has open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(names)

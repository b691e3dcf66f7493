"""A rollout actor that is killed while a run trains under Ray: what becomes of the other, and of what it leaves behind.

A `penstock train` in a process of its own, two rollout workers on one local Ray, simulators that sleep and have a
child process each. SIGKILL goes to the second worker's process. All that is found is read from the run's files
afterwards: fragments carry their worker, their life and the time at which they were finished (one clock for all), so
that the other's steps per second before the kill and from the kill until the successor's first fragment can be told.

Not covered: actors on several machines, and how fast a fleet is (one fragment is the unit of time).
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fleet.lives import Lives, wrong_books
from penstock.environments.simulators.processes import descendants
from penstock.overseer.launch.process import Process
from penstock.rundir import read_events, read_status

OTHER, VICTIM = "rollout-0", "rollout-1"
FRAGMENT_S, LEAST_LENGTH, BATCH = 0.16, 4, 32
START_S, WAIT_S, STOP_S, GONE_S = 180.0, 90.0, 120.0, 10.0
SETTLE_S, LEAST_S = 1.0, 1.0
NICENESS = {"RAY_worker_niceness": "0"}
"""Ray's own is 15: whatever else the machine does would go first, and be measured too."""


def ray_is_installed() -> bool:
    """Whether there is anything to kill."""
    return importlib.util.find_spec("ray") is not None


def recipe(envs: int, step_s: float) -> dict[str, Any]:
    """Two workers of `envs` simulators each, whose steps sleep for `step_s`; the learner never holds them up."""
    simulator = {
        "id": "synthetic",
        "kwargs": {"observation_shape": [16, 16, 3], "step_s": step_s, "episode_steps": 60, "child_process": True},
    }
    return {
        "steps": 100_000,
        "runtime": "ray",
        "model": {"hidden_sizes": [16]},
        "fleet": {
            "tasks": {"synthetic": simulator}, "workers": 2, "envs_per_worker": envs,
            "fragment_length": max(LEAST_LENGTH, round(FRAGMENT_S / step_s)),
        },
        "replay": {"fragments_per_batch": BATCH, "max_waiting": 4 * BATCH},
        "learner": {"epochs": 1, "minibatches": 1},
        "evaluation": {"before": False, "episodes": 1, "simulators": 1},
        "overseer": {"heartbeat_s": 0.25, "status_s": 0.25},
    }  # fmt: skip


class TrainingRun:
    """A ``penstock train`` in a process of its own.

    Args:
        run_dir: Of the run, to be made; the recipe and what is printed lie beside it.
        envs: Simulators of each of its two workers.
        step_s: Of each.
    """

    def __init__(self, run_dir: Path, envs: int, step_s: float) -> None:
        self.run_dir, self._printed = run_dir, run_dir.with_suffix(".out")
        path = run_dir.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(recipe(envs, step_s)))
        with self._printed.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "train", str(path), "-q", f"--run-dir={run_dir}"],
                stdout=out, stderr=subprocess.STDOUT, env=os.environ | NICENESS,
            )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """The newest status.json; empty before the first."""
        return read_status(self.run_dir / "status.json") or {}

    def component(self, name: str) -> dict[str, Any]:
        """What that says of one component."""
        return self.status().get("components", {}).get(name, {})

    def acts(self, name: str, incarnation: int) -> bool:
        """Whether that life of a worker, or a later one, has stepped."""
        told = self.component(name)
        return told.get("incarnation", -1) >= incarnation and told.get("doing") == "rolling out"

    def until(self, reached: Callable[[], bool], what: str, limit_s: float) -> None:
        """Waits.

        Raises:
            RuntimeError: the run ended meanwhile, or the time is over.
        """
        deadline_s = time.monotonic() + limit_s
        while not reached():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"no {what} within {limit_s:g} s: {self._printed.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops it as Ctrl-C does.

        Raises:
            RuntimeError: it did not end as a run that is stopped.
        """
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(STOP_S) != 130:
            raise RuntimeError(f"it ended with {self._process.returncode}: {self._printed.read_text()[-2000:]}")

    def kill(self) -> None:
        """Ends what is left of it; its actors die with it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_S)


@contextmanager
def training(run_dir: Path, envs: int, step_s: float) -> Iterator[TrainingRun]:
    """A run that trains, both of whose workers act."""
    run = TrainingRun(run_dir, envs, step_s)
    try:
        run.until(lambda: run.status().get("step", 0) >= 2, "second update", START_S)
        run.until(lambda: run.acts(OTHER, 0) and run.acts(VICTIM, 0), "steps of both workers", WAIT_S)
        yield run
    finally:
        run.kill()


@dataclass(frozen=True, slots=True)
class Kill:
    """What was seen while it happened.

    Attributes:
        at_s: Unix seconds.
        processes: So many died: the actor, its fork server, its simulators and their children.
        left: Those that were still there after `GONE_S`.
    """

    at_s: float
    processes: int
    left: tuple[int, ...]


def kill_actor(run: TrainingRun) -> Kill:
    """SIGKILL to the second worker's process; then waits for the end of all that was below it."""
    pid = int(run.component(VICTIM)["pid"])
    below = [_process(each) for each in (pid, *(process.pid for process in descendants(pid)))]
    at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + GONE_S
    while any(process.alive for process in below) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return Kill(at_s, len(below), tuple(process.pid for process in below if process.alive))


def _process(pid: int) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(pid, int(fields[19]))


@dataclass(frozen=True, slots=True)
class ActorFound:
    """What the kill of an actor did.

    Attributes:
        rates: The other's steps per second: before the kill, from then until the successor's first fragment (and a
            second at least), and after that.
        noticed_s: From the kill until the overseer starts the successor.
        respawn_s: From the kill until the successor's first fragment is finished.
        processes: How many died with the actor.
        left: Processes that outlived it.
        lives: The fragments.
        wrong: What is wrong with labels, uses and books, in words.
    """

    rates: tuple[float, float, float]
    noticed_s: float
    respawn_s: float
    processes: int
    left: tuple[int, ...]
    lives: Lives
    wrong: tuple[str, ...]

    @property
    def share(self) -> float:
        """What the other keeps."""
        return self.rates[1] / self.rates[0]

    @property
    def words(self) -> str:
        """For the table of faults."""
        return (
            f"{self.lives.steps:,} steps checked; others {', '.join(f'{rate:.0f}' for rate in self.rates)} "
            f"steps/s; started anew after {self.noticed_s:.2f} s; {self.processes} processes gone"
        )


def inflict(seconds: float, envs: int, run_dir: Path, step_s: float = 0.01) -> ActorFound:
    """Kills one actor of a run that trains, and looks at the other.

    Args:
        seconds: Before the kill, and after the successor acts.
        envs: Simulators of each worker.
        run_dir: To be made.
        step_s: That a simulator's step sleeps for.

    Raises:
        RuntimeError: the run did not start, recover, or end in good order.
    """
    with training(run_dir, envs, step_s) as run:
        time.sleep(SETTLE_S + seconds)
        killed = kill_actor(run)
        run.until(lambda: run.acts(VICTIM, 1), "successor that acts", WAIT_S)
        time.sleep(seconds)
        run.stop()
    return _found(run_dir, killed, seconds)


def _found(run_dir: Path, killed: Kill, seconds: float) -> ActorFound:
    lives, status = Lives.of(run_dir), read_status(run_dir / "status.json") or {}
    starts = [
        event["time"] for event in read_events(run_dir / "events.jsonl")
        if event["event"] == "component_start" and event["component"] == VICTIM and event["incarnation"] == 1
    ]  # fmt: skip
    of_successor_s = lives.every_end_s(f"{VICTIM}.0-1")
    if not len(of_successor_s):
        raise RuntimeError(
            f"no fragment of {VICTIM}'s second life is stored, though it acts; there are {[*lives.ends_s]}"
        )
    first_s = float(of_successor_s[0])
    times_s = (killed.at_s - seconds, killed.at_s, max(first_s, killed.at_s + LEAST_S))
    before, during, after = (
        lives.steps_per_s(f"{OTHER}.0-0", begin_s, end_s)
        for begin_s, end_s in pairwise((*times_s, times_s[-1] + seconds / 2))
    )
    return ActorFound(
        (before, during, after), starts[0] - killed.at_s, first_s - killed.at_s, killed.processes, killed.left, lives,
        (*lives.wrong, *wrong_books(status, lives)),
    )  # fmt: skip

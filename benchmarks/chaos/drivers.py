"""Two runs under Ray side by side on one machine, whose drivers are killed, hung up on and deprived of their cluster.

Each is a `penstock train` of its own with a cluster of its own, to which faults of a seeded schedule are done, and
which is resumed after each. The neighbour must not notice: nothing of it dies, and its files keep every rule.
"""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos.invariants import violations
from benchmarks.marks import Marks
from penstock.learner.checkpoints import latest_checkpoint
from penstock.rundir import RunDirectory, read_events, read_status

WORDS = (
    "runtime=ray", "steps=1000000", "rollout.workers=1", "inference.servers=1", "replay.groups_per_batch=4",
    "overseer.heartbeat_s=0.5", "overseer.heartbeat_timeout_s=60", "overseer.checkpoint_every=10",
    "overseer.status_s=1", "replay.max_filtered_groups_per_batch=1000000",
)  # fmt: skip
PENSTOCK = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from penstock.cli import main
sys.exit(main())
"""
"""Heeds hang-ups even where the benchmark was started with nohup."""
CONTROL_SERVICE = "gcs_server"
EXITS = {"kill driver": -signal.SIGKILL, "terminate driver": 130, "hang up driver": 130, "kill control service": 1}
"""Kinds of faults, and the exit code that each must end in."""
SIGNALS = {"kill driver": signal.SIGKILL, "terminate driver": signal.SIGTERM, "hang up driver": signal.SIGHUP}
SAVING = ("terminate driver", "hang up driver", "kill control service")
"""Those after which the last version is in a checkpoint."""
AGENTS = ("DashboardAgent", "RuntimeEnvAgent")
"""Daemons of Ray's that look but now and then whether their cluster is still there, where its driver was killed."""
START_S, GONE_S, POLL_S, MOST_DELAY_S = 300.0, 20.0, 0.1, 4.0


@dataclass
class Life:
    """One process of a driver, and how it ended.

    Attributes:
        run: Which of the runs.
        kind: What was done to it.
        ended_s: How long its end took; None where it did not end within the bound.
        code: Its exit code.
        updates: That it had made.
        problems: What was not as it must be.
    """

    run: str
    kind: str
    ended_s: float | None = None
    code: int | None = None
    updates: int = 0
    problems: list[str] = field(default_factory=list)


class Driver:
    """One of the runs: starts it, does faults to it, resumes it. One thread uses it.

    Args:
        folder: For the run directory and what is printed.
        name: Of the run.
        bound_s: Longest time for an end.
    """

    def __init__(self, folder: Path, name: str, bound_s: float) -> None:
        self.directory = RunDirectory(folder / name)
        self._name = name
        self._bound_s = bound_s
        self._out = folder / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None

    def live(self, kind: str, delay_s: float) -> Life:
        """Starts or resumes the run, does one fault while it trains, and sees how it ends."""
        life, before = Life(self._name, kind), self._step()
        process = self._start()
        try:
            if not self._wait(lambda: self._step() > before or process.poll() is not None, START_S):
                life.problems.append(f"no update within {START_S:g} s of the start")
            time.sleep(delay_s)
            if process.poll() is not None:
                life.problems.append(f"it ended by itself, with {process.poll()}: {self._said()}")
                return life
            life.updates = self._step()
            self._strike(life, process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(GONE_S)
        return life

    def _strike(self, life: Life, process: "subprocess.Popen[bytes]") -> None:
        family = psutil.Process(process.pid).children(recursive=True)
        if life.kind in SIGNALS:
            process.send_signal(SIGNALS[life.kind])
        else:
            next(child for child in family if child.name().startswith(CONTROL_SERVICE)).kill()
        started = time.monotonic()
        try:
            life.code = process.wait(self._bound_s)
            life.ended_s = round(time.monotonic() - started, 2)
        except subprocess.TimeoutExpired:
            life.problems.append(f"it goes on {self._bound_s:g} s later")
            return
        if life.code != EXITS[life.kind]:
            life.problems.append(f"exit code {life.code}, not {EXITS[life.kind]}: {self._said()}")
        if life.kind == "kill control service" and "control service" not in self._said():
            life.problems.append(f"it does not say what was lost: {self._said()}")
        newest = latest_checkpoint(self.directory.checkpoints)
        kept = -1 if newest is None else int(newest.name.removeprefix("step-"))
        if life.kind in SAVING and kept < life.updates:
            life.problems.append(f"the newest checkpoint is of {kept}, and {life.updates} updates were made")
        life.problems += self._left(family, life.kind)

    def _left(self, family: list[psutil.Process], kind: str) -> list[str]:
        _, alive = psutil.wait_procs(family, timeout=GONE_S)
        names = [_name(process) for process in alive]
        excused = AGENTS if kind == "kill driver" else ()
        return [f"{name} is still there" for name in names if name and not any(agent in name for agent in excused)]

    def _start(self) -> "subprocess.Popen[bytes]":
        path = self.directory.path
        words = ["--resume", str(path)] if latest_checkpoint(self.directory.checkpoints) else ["cats", *WORDS]
        place = [] if words[0] == "--resume" else [f"--run-dir={path}"]
        with self._out.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-c", PENSTOCK, "train", "-q", *words, *place],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=path.parent,
            )  # fmt: skip

    def _step(self) -> int:
        try:
            return int((read_status(self.directory.status_path) or {}).get("step", 0))
        except (OSError, json.JSONDecodeError):
            return 0

    def _said(self) -> str:
        return self._out.read_text(errors="replace")[-600:].replace("\n", " | ")

    def _wait(self, until: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not until() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return until()


def _name(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())[:60] or process.name()
    except psutil.NoSuchProcess:
        return ""


def endure(
    folder: Path, seed: int, rounds: int, bound_s: float, marks: Marks, kinds: Sequence[str] = tuple(EXITS)
) -> list[Life]:
    """Both runs through so many rounds of all faults, each in an order of its own; adds the marks."""
    folder.mkdir(parents=True)
    drivers = [Driver(folder, name, bound_s) for name in ("left", "right")]
    lives: list[Life] = []
    failures: list[str] = []

    def go(driver: Driver, draws: random.Random) -> None:
        chosen = [kind for _ in range(rounds) for kind in draws.sample(kinds, len(kinds))]
        try:
            for kind in [*chosen, "terminate driver"]:
                life = driver.live(kind, draws.random() * MOST_DELAY_S)
                lives.append(life)
                print(_line(life), flush=True)
        except Exception as error:  # told as a missed mark
            failures.append(f"{driver.directory.path.name}: {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=go, args=(driver, random.Random(seed + number)))
        for number, driver in enumerate(drivers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _add_marks(marks, drivers, lives, failures, bound_s)
    return lives


def _line(life: Life) -> str:
    took = "never ended" if life.ended_s is None else f"ended after {life.ended_s:.1f} s with {life.code}"
    return f"{life.run:<6}{life.kind:<22}at update {life.updates:>4}: {took}; {'; '.join(life.problems) or 'well'}"


def _add_marks(marks: Marks, drivers: list[Driver], lives: list[Life], failures: list[str], bound_s: float) -> None:
    wrong = [f"{life.run}, {life.kind}: {problem}" for life in lives for problem in life.problems]
    slowest = max((life.ended_s or 0.0 for life in lives), default=0.0)
    name = f"drivers end as they must within {bound_s:g} s"
    marks.add(name, "; ".join(wrong + failures) or f"{len(lives)} lives, {slowest:.1f} s at most", not wrong + failures)
    deaths = [
        f"{driver.directory.path.name}: {event.get('component')}: {event.get('reason')}"
        for driver in drivers
        for event in read_events(driver.directory.events_path)
        if event["event"] == "component_death"
    ]
    marks.add("no run side by side touches the other", "; ".join(deaths)[:400], not deaths)
    broken = [f"{d.directory.path.name}: {line}" for d in drivers for line in violations(d.directory)]
    steps = [str(latest_checkpoint(driver.directory.checkpoints)) for driver in drivers]
    reached = ", ".join(Path(step).name for step in steps)
    marks.add("no rule of their files is broken", "; ".join(broken) or reached, not broken)

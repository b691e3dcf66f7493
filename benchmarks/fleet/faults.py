"""Things that go wrong under load: what becomes of the others, how soon the victim is back, whether the books close.

    python -m benchmarks.fleet.faults [--seconds 3] [--only "simulator killed,slow buffer"]

Thirty-two simulators of 10 ms; one of them, which takes 0.5 s to make and has a child process, is the victim. Others'
throughput from the fault until the victim is back (at least a second) is compared with theirs before. Every step that
reached the sink is checked: nothing terminated, one fault where one was caused and none elsewhere, frames, actions and
rewards of one trajectory, values of the version that a step names (`labels`). Exits with 1 where a mark is missed.

"actor killed" is another scene: a run that trains under Ray, of whose two rollout actors one is killed (`actors`). It
is left out where Ray is not installed. Measured until the successor's first fragment; that it is started anew within a
second is a mark, how long its process then takes to import and compile is not.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet import actors
from benchmarks.fleet.counting import ThrowingAway
from benchmarks.fleet.labels import Labels, problems
from benchmarks.fleet.own import STOP_S, check, started_worker
from benchmarks.fleet.unlucky import RAISE
from benchmarks.fleet.workloads import FRAME
from benchmarks.marks import Marks
from penstock.fleet import FleetConfig, SimulatorPool
from penstock.fleet.config import SimulatorConfig, SimulatorLimits
from penstock.fleet.steps import StepBatch
from penstock.model.control import ControlPolicy, named_arrays
from penstock.types import WeightVersion

ENVS, INIT_S, STEP_TIMEOUT_S = 32, 0.5, 1.0
SHARE, MORE_S, LEAST_S, WAIT_S, WARM_UP_S = 0.9, 1.0, 1.0, 20.0, 0.5
SLOW_SINK_S, LOAD_S, PUBLISH_EVERY_S = 0.5, 0.3, 0.1


class Recording(ThrowingAway):
    """A sink that keeps what `labels` needs, and is slow from when it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.slow_s = 0.0
        self.labels: list[Labels] = []

    def add_batches(self, batches: Any) -> None:
        """See `RolloutSink`."""
        time.sleep(self.slow_s)
        super().add_batches(batches)
        self.labels += [
            Labels.of(fragment) for batch in batches for group in batch.groups for fragment in group.rollouts
        ]


class Watch:
    """Told of every batch: when the others stepped, and when the victim's lost action was answered."""

    def __init__(self, pool: SimulatorPool) -> None:
        self.pool = pool
        self.slot = pool.tasks.index("victim")
        self.everyone, self.back = threading.Event(), threading.Event()
        self.back_s = 0.0
        self.times: list[float] = []
        self.others: list[int] = []
        self._seen: set[int] = set()

    def __call__(self, batch: StepBatch) -> None:
        """Takes a batch in."""
        now_s = time.monotonic()
        rows = np.flatnonzero(batch.slots == self.slot)
        self.times.append(now_s)
        self.others.append(len(batch.slots) - len(rows))
        if len(rows) and batch.faults[rows].any() and not self.back.is_set():
            self.back_s = now_s
            self.back.set()
        if not self.everyone.is_set():
            self._seen.update(batch.slots[batch.acted].tolist())
            if len(self._seen) == self.pool.num_slots:
                self.everyone.set()

    @property
    def pid(self) -> int:
        """The victim's process."""
        pid = self.pool.process_ids()[self.slot]
        assert pid is not None, "the victim is not there"
        return pid

    def others_per_s(self, begin_s: float, end_s: float) -> float:
        """Steps of all others, per second of that time."""
        begin, end = np.searchsorted(self.times, (begin_s, end_s))
        return sum(self.others[begin:end]) / (end_s - begin_s)


class Publishing:
    """A source of weights whose every version takes a while to load; values are the number of their version."""

    def __init__(self, policy: ControlPolicy) -> None:
        self._arrays = {name: np.asarray(array) for name, array in named_arrays(policy).items()}
        self._began_s: float | None = None

    def begin(self) -> None:
        """Publishes ten versions a second from now on."""
        self._began_s = time.monotonic()

    def latest(self) -> WeightVersion:
        """The newest."""
        since_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        return WeightVersion(0, 1 + int(since_s / PUBLISH_EVERY_S))

    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        """See `WeightSource`."""
        end_s = time.monotonic() + timeout_s
        while (newest := self.latest()) == newer_than:
            if time.monotonic() > end_s:
                return None
            time.sleep(PUBLISH_EVERY_S / 4)
        return newest

    def fetch(self, version: WeightVersion) -> Mapping[str, Any]:
        """See `WeightSource`; takes its time from the second version on."""
        time.sleep(LOAD_S if version.step > 1 else 0.0)
        constant = {"value_head.weight": 0.0, "value_head.bias": float(version.step)}
        return {name: np.full_like(a, constant[name]) if name in constant else a for name, a in self._arrays.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """What one fault did."""

    name: str
    share: float
    respawn_s: float | None
    faults: int
    wrong: tuple[str, ...]
    words: str = ""


@dataclass(slots=True)
class Scene:
    """What a fault is done to."""

    watch: Watch
    sink: Recording
    weights: Publishing
    trigger: Path


def kill_simulator(scene: Scene) -> None:
    os.kill(scene.watch.pid, signal.SIGKILL)


def kill_child(scene: Scene) -> None:
    pid = scene.watch.pid
    os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), signal.SIGKILL)


def stop_simulator(scene: Scene) -> None:
    os.kill(scene.watch.pid, signal.SIGSTOP)


def fail_reset(scene: Scene) -> None:
    scene.trigger.write_text(RAISE)


def slow_sink(scene: Scene) -> None:
    scene.sink.slow_s = SLOW_SINK_S


def publish(scene: Scene) -> None:
    scene.weights.begin()


FAULTS: dict[str, Callable[[Scene], None]] = {
    "simulator killed": kill_simulator,
    "its child killed": kill_child,
    "simulator stopped": stop_simulator,
    "exception in reset": fail_reset,
    "slow buffer": slow_sink,
    "weights while loading": publish,
}
NO_VICTIM = ("slow buffer", "weights while loading")
ACTOR, ACTOR_ENVS = "actor killed", 8
EVERY = (*FAULTS, ACTOR)


def fleet_config(trigger: Path, envs: int = ENVS) -> FleetConfig:
    """One victim among `envs`; the oldest fragment is dropped where the queue is full."""
    common = {"observation_shape": list(FRAME), "step_s": 0.01}
    return FleetConfig(
        tasks={
            "others": SimulatorConfig(id="synthetic", share=envs - 1, kwargs={**common, "episode_steps": 150}),
            "victim": SimulatorConfig(
                id="benchmarks.fleet.unlucky:UnluckySimulator",
                kwargs={
                    **common, "trigger": str(trigger), "episode_steps": 50, "init_s": INIT_S, "child_process": True,
                },
            ),
        },
        envs_per_worker=envs,
        full_queue="drop_oldest",
        queue_fragments=16,
        limits=SimulatorLimits(step_timeout_s=STEP_TIMEOUT_S, reset_timeout_s=STEP_TIMEOUT_S),
    )  # fmt: skip


def inflict(name: str, seconds: float, envs: int = ENVS) -> Found:
    """Does it once."""
    with tempfile.TemporaryDirectory(prefix="fleet-faults-") as folder:
        trigger = Path(folder) / "trigger"
        sink, sources = Recording(), []

        def weights_of(policy: ControlPolicy) -> Publishing:
            sources.append(Publishing(policy))
            return sources[0]

        wrapper, pool, watch = started_worker(fleet_config(trigger, envs), Watch, sink, weights_of)
        try:
            time.sleep(WARM_UP_S + seconds)
            begin_s = time.monotonic()
            FAULTS[name](Scene(watch, sink, sources[0], trigger))
            end_s = _await_the_end(name, watch, sink, begin_s, seconds)
            timings = wrapper.metrics()
        finally:
            late = wrapper.stop(STOP_S)
        check(wrapper, sink, late)
        share = watch.others_per_s(begin_s, end_s) / watch.others_per_s(begin_s - seconds, begin_s)
        respawn_s = None if name in NO_VICTIM else watch.back_s - _broke_s(name, begin_s, trigger)
        return Found(name, share, respawn_s, sink.faults, tuple(problems(sink.labels, True)), _words(timings, sink))


def _await_the_end(name: str, watch: Watch, sink: Recording, begin_s: float, seconds: float) -> float:
    """Until the victim is back and its fault has reached the sink; returns until when the others are looked at."""
    if name in NO_VICTIM:
        time.sleep(seconds)
        return time.monotonic()
    if not watch.back.wait(WAIT_S):
        raise TimeoutError(f"{name}: the victim was not back within {WAIT_S:g} s")
    deadline_s = time.monotonic() + WAIT_S
    while not sink.faults:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{name}: its fault did not reach the sink within {WAIT_S:g} s")
        time.sleep(0.05)
    time.sleep(max(0.0, begin_s + LEAST_S - time.monotonic()))
    return max(watch.back_s, begin_s + LEAST_S)


def _broke_s(name: str, begin_s: float, trigger: Path) -> float:
    """From when on the victim could not be of use: where it hung, its deadline; where it raised, that moment."""
    if name == "exception in reset":
        return float(trigger.read_text())
    return begin_s + (STEP_TIMEOUT_S if name == "simulator stopped" else 0.0)


def _words(timings: Mapping[str, float], sink: Recording) -> str:
    versions = len(np.unique(np.concatenate([labels.weight_steps for labels in sink.labels])))
    return (
        f"{sum(len(labels.rewards) for labels in sink.labels):,} steps checked, {versions} versions, "
        f"{timings['fleet/steps_dropped']:,.0f} dropped"
    )


def run_all(marks: Marks, seconds: float, names: tuple[str, ...] = EVERY) -> None:
    """All of them, as a table and marks."""
    print(f"\nFaults: {ENVS} x 10 ms; a victim that takes {INIT_S:g} s to make; two actors of {ACTOR_ENVS} under Ray")
    print(f"  {'fault':<24}{'others keep':>12}{'respawned in':>14}{'faults':>8}  checked")
    for name in names:
        if name == ACTOR:
            kill_actor(marks, seconds)
            continue
        found = inflict(name, seconds)
        _print(name, found.share, found.respawn_s, found.faults, found.words, found.wrong)
        add_marks(marks, found)


def _print(name: str, share: float, respawn_s: float | None, faults: int, words: str, wrong: tuple[str, ...]) -> None:
    respawn = "" if respawn_s is None else f"{respawn_s:.2f} s"
    print(f"  {name:<24}{share:>12.3f}{respawn:>14}{faults:>8}  {words}", flush=True)
    for problem in wrong[:5]:
        print(f"    {problem}")


def kill_actor(marks: Marks, seconds: float) -> None:
    """The fault that needs Ray: a line of the table, and its marks."""
    if not actors.ray_is_installed():
        print(f"  {ACTOR}: needs Ray, skipped", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="fleet-faults-") as folder:
        found = actors.inflict(seconds, ACTOR_ENVS, Path(folder) / "run")
    _print(ACTOR, found.share, found.respawn_s, found.lives.faults, found.words, found.wrong)
    add_actor_marks(marks, found)


def add_actor_marks(marks: Marks, found: actors.ActorFound) -> None:
    """What the kill of an actor must show; nothing is a fault, since what was in flight is abandoned."""
    marks.at_least(f"{ACTOR}: others' share", found.share, SHARE)
    marks.at_most(f"{ACTOR}: started anew, s", found.noticed_s, MORE_S)
    marks.at_most(f"{ACTOR}: mislabelled", len(found.wrong) + found.lives.faults, 0)
    marks.at_most(f"{ACTOR}: processes left behind", len(found.left), 0)


def add_marks(marks: Marks, found: Found) -> None:
    """Of one fault; that its books close is a condition of being found at all."""
    name = found.name
    marks.at_least(f"{name}: others' share", found.share, SHARE)
    if found.respawn_s is not None:
        marks.at_most(f"{name}: respawn, s", found.respawn_s, INIT_S + MORE_S)
    wanted = 0 if name in NO_VICTIM else 1
    marks.at_most(f"{name}: mislabelled", len(found.wrong) + abs(found.faults - wanted), 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="before the fault, and at least during it")
    parser.add_argument("--only", default=",".join(EVERY), help="faults: " + ", ".join(EVERY))
    options, marks = parser.parse_args(arguments), Marks()
    names = tuple(name.strip() for name in options.only.split(","))
    if unknown := sorted(set(names) - set(EVERY)):
        parser.error(f"--only names {', '.join(unknown)}; known are {', '.join(EVERY)}")
    run_all(marks, options.seconds, names)
    return marks.report("\nMarks\n")


if __name__ == "__main__":
    sys.exit(main())

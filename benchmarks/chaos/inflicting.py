"""Does faults to a run, waits for its recovery, and records what was seen.

Only processes that this run started are signalled: each must descend from this process.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import clocks, file_damage, memory
from benchmarks.chaos.load import INFERENCE_SERVERS, ROLLOUT_WORKERS, Run
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.slow_network import CLEAR, Proxy, Weather
from benchmarks.chaos.small_disk import SmallDisk
from benchmarks.chaos.watching import COMPONENTS, Effect, Watch
from penstock.types import PenstockError

SHORTEST_S, LONGEST_S = 4.0, 10.0
"""How long a full disk or a slow network lasts."""
SLOW = Weather(latency_s=0.2, bytes_per_s=100_000.0)
"""The weights of this policy take 6 s through it."""
LARGEST_JUMP_H = 12.0
REFILL_S = 0.25
CLOCK_ROLES = ("replay", "rollout", "learner", "inference", "curriculum")
"""Whose clocks jump, in turn; a clock stays as wrong as it is until it jumps again, over restarts too."""
UPDATES_AFTER_JUMP = 6
"""So many must follow a jump: the first ones are of rollouts from before it."""
CALL_S = 60.0
COUNTS = {"rollout": ROLLOUT_WORKERS, "inference": INFERENCE_SERVERS}


@dataclass(frozen=True)
class Machine:
    """What the run stands on.

    Attributes:
        disk: Of the run directory.
        checkpoints: Of its checkpoints alone.
        proxy: Between the weight server and its clients.
        clock_folder: See `clocks.components`.
    """

    disk: SmallDisk
    checkpoints: SmallDisk
    proxy: Proxy
    clock_folder: Path


class Inflictor:
    """Does faults, one after another.

    Args:
        run: To whom.
        watch: Sees what they do.
        machine: What the run stands on.
        bound_s: Longest time for a recovery.

    Attributes:
        corrupted: Rollouts in files that were damaged, by the file's name.
    """

    def __init__(self, run: Run, watch: Watch, machine: Machine, bound_s: float) -> None:
        self.corrupted: dict[str, list[str]] = {}
        self._run = run
        self._watch = watch
        self._machine = machine
        self._bound_s = bound_s
        self._started = time.monotonic()
        self._jumps = 0

    def do(self, fault: Fault) -> Effect:
        """Does one fault and waits until the run has recovered, within the bound.

        Raises:
            RunEnded: the run came to an end over it.
        """
        run, watch = self._run, self._watch
        told, _ = watch.new_events()
        target = self._target(fault)
        effect = Effect(fault.number, fault.kind, target, round(time.monotonic() - self._started, 3))
        effect.before, effect.updates_before = told, run.updates
        watch.forget_pauses()
        before = {name: watch.incarnation(name) for name in COMPONENTS}
        try:
            gone = self._inflict(fault, effect)
            lifted, made = time.monotonic(), run.updates
            effect.updates_during = made - effect.updates_before
            back = watch.wait(
                lambda: all(watch.incarnation(name) > before[name] for name in gone) and watch.all_up(), self._bound_s
            )
            if back is not None:
                effect.up_s = back
                last = (run.updates if gone else made) + (UPDATES_AFTER_JUMP - 1) * (fault.kind == "clock jump")
                after = watch.wait(lambda: run.updates > last, self._bound_s - back)
                effect.update_s = None if after is None else time.monotonic() - lifted
        finally:
            effect.paused_s = round(watch.pause_s, 3)
            effect.events, effect.counted = watch.new_events()
        return effect

    def _inflict(self, fault: Fault, effect: Effect) -> list[str]:
        """Returns whom it killed for certain."""
        match fault.kind.split():
            case ["kill", _]:
                return self._signal(effect, signal.SIGKILL)
            case ["stop", _]:
                return self._signal(effect, signal.SIGSTOP)
            case ["corrupt", "checkpoint"]:
                return self._corrupt_checkpoint(fault, effect)
            case ["corrupt", "rollouts"]:
                return self._corrupt_rollouts(fault, effect)
            case ["full", "disk"]:
                return self._for_a_while(fault, effect, self._fill, self._free)
            case ["full", "checkpoints"]:
                return self._fill_while_a_checkpoint_is_written(fault, effect)
            case ["out", "of", "memory"]:
                return self._take_memory(effect)
            case ["slow", "network"]:
                return self._for_a_while(fault, effect, lambda: self._network(SLOW), lambda: self._network(CLEAR))
            case ["broadcaster", "restart"]:
                return self._restart_broadcaster(effect)
            case ["clock", "jump"]:
                return self._jump(fault, effect)
            case _:
                raise ValueError(f"{fault.kind} is no kind of fault")

    def _target(self, fault: Fault) -> str:
        match fault.kind.split():
            case ["kill" | "stop", role]:
                return f"{role}-{int(fault.choice * COUNTS.get(role, 1))}"
            case ["clock", "jump"]:
                role = CLOCK_ROLES[self._jumps % len(CLOCK_ROLES)]
                return f"{role}-{int(fault.choice * COUNTS.get(role, 1))}"
            case ["out", "of", "memory"]:
                return f"rollout-{int(fault.choice * ROLLOUT_WORKERS)}"
            case ["full", "disk"]:
                return "run directory"
            case ["full", "checkpoints"]:
                return "checkpoints"
            case ["slow", "network"]:
                return "weights"
            case _:
                return "learner-0"

    # --- processes -----------------------------------------------------------------------------------------------

    def _signal(self, effect: Effect, number: signal.Signals) -> list[str]:
        report = self._watch.report(effect.target)
        while report is None:  # the moment between two incarnations
            if self._watch.wait(lambda: self._watch.report(effect.target) is not None, self._bound_s) is None:
                raise TimeoutError(f"{effect.target} is not there to be signalled")
            report = self._watch.report(effect.target)
        if not descends_from(report.pid, os.getpid()):
            raise PermissionError(f"process {report.pid} of {report.identity} was not started by this one")
        os.kill(report.pid, number)
        effect.did = f"{number.name} to {report.identity}, process {report.pid}"
        return [effect.target]

    def _restart_broadcaster(self, effect: Effect) -> list[str]:
        def incarnation() -> str:
            report = self._watch.report("learner-0")
            return "" if report is None else str(report.condition.address.get("weights", {}).get("incarnation", ""))

        before = incarnation()
        try:
            self._run.supervisor.call("learner-0", "restart_broadcaster", timeout_s=CALL_S)
        except PenstockError as error:
            effect.did = f"refused: {type(error).__name__}: {error}"
            return []
        self._watch.wait(lambda: incarnation() not in ("", before), self._bound_s)
        effect.did = f"{before[:8]} became {incarnation()[:8]}"
        return []

    # --- files ---------------------------------------------------------------------------------------------------

    def _corrupt_checkpoint(self, fault: Fault, effect: Effect) -> list[str]:
        folder = self._run.directory.checkpoints
        if self._watch.wait(lambda: file_damage.newest_checkpoint(folder) is not None, self._bound_s) is None:
            raise TimeoutError(f"{folder} has no two checkpoints")
        newest = file_damage.newest_checkpoint(folder)
        assert newest is not None  # that was waited for
        flipped = file_damage.flip_bytes(file_damage.largest_file(newest), fault.number)
        gone = self._signal(effect, signal.SIGKILL)
        effect.did = f"{flipped} bytes of {newest.name}; {effect.did}"
        return gone

    def _corrupt_rollouts(self, fault: Fault, effect: Effect) -> list[str]:
        part = file_damage.newest_part(self._run.directory.rollouts)
        if part is None:
            raise TimeoutError("no file of rollouts has been written yet")
        ids = file_damage.ids_in(part)
        flipped = file_damage.flip_bytes(part, fault.number)
        gone = self._signal(effect, signal.SIGKILL)
        self.corrupted[part.name] = ids
        effect.did = f"{flipped} bytes of {part.name}, {len(ids)} rollouts; {effect.did}"
        return gone

    # --- surroundings --------------------------------------------------------------------------------------------

    def _for_a_while(
        self, fault: Fault, effect: Effect, begin: Callable[[], str], lift: Callable[[], object]
    ) -> list[str]:
        lasts_s = SHORTEST_S + fault.choice * (LONGEST_S - SHORTEST_S)
        started = time.monotonic()
        try:
            while (left := started + lasts_s - time.monotonic()) > 0:
                effect.did = begin()
                self._watch.wait(lambda: False, min(REFILL_S, left))
        finally:
            lift()
            effect.lasted_s = round(time.monotonic() - started, 3)
        return []

    def _fill(self) -> str:
        self._machine.checkpoints.fill()
        return f"{self._machine.disk.fill() / 1e6:.1f} MB of ballast"

    def _free(self) -> None:
        self._machine.checkpoints.free()
        self._machine.disk.free()

    def _fill_while_a_checkpoint_is_written(self, fault: Fault, effect: Effect) -> list[str]:
        """Leaves room for half a checkpoint, so that the next one begins and cannot be finished."""
        folder, full = self._run.directory.checkpoints, self._watch.count("disk_full")
        if self._watch.wait(lambda: file_damage.newest_checkpoint(folder) is not None, self._bound_s) is None:
            raise TimeoutError(f"{folder} has no two checkpoints")
        newest = file_damage.newest_checkpoint(folder)
        assert newest is not None  # that was waited for
        half = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) // 2
        started = time.monotonic()
        try:
            self._machine.checkpoints.fill(half)
            struck = self._watch.wait(lambda: self._watch.count("disk_full") > full, self._bound_s)
            effect.struck = struck is not None
            self._watch.wait(lambda: False, SHORTEST_S * fault.choice)
        finally:
            self._machine.checkpoints.free()
            effect.lasted_s = round(time.monotonic() - started, 3)
        effect.did = f"room for {half / 1e6:.1f} MB of the next checkpoint"
        return []

    def _take_memory(self, effect: Effect) -> list[str]:
        """Ray says whom it ends: not always the one that takes it, and often several."""
        before = {name: self._watch.incarnation(name) for name in COMPONENTS}

        def gone() -> list[str]:
            return [name for name in COMPONENTS if self._watch.incarnation(name) != before[name]]

        started = time.monotonic()
        memory.take(self._machine.clock_folder, effect.target)
        try:
            self._watch.wait(lambda: bool(gone()), self._bound_s)
        finally:
            memory.give_back(self._machine.clock_folder, effect.target)
            effect.lasted_s = round(time.monotonic() - started, 3)
        effect.did = f"{effect.target} took memory until Ray ended {', '.join(gone()) or 'nobody'}"
        effect.struck = bool(gone())
        return gone()

    def _network(self, weather: Weather) -> str:
        self._machine.proxy.weather = weather
        return f"{weather.latency_s:g} s and {weather.bytes_per_s or 0:g} bytes/s"

    def _jump(self, fault: Fault, effect: Effect) -> list[str]:
        hours = round((1 + fault.choice * 1e6 % 1 * (LARGEST_JUMP_H - 1)) * (-1 if fault.number % 2 else 1), 2)
        clocks.set_offset(self._machine.clock_folder, effect.target, hours * 3600)
        self._jumps += 1
        effect.did = f"clock of {effect.target} {hours:+g} h"
        return []


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether a process is a child, or a child's child, of another."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            return False
        if pid == ancestor:
            return True
    return False

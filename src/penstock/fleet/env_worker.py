"""What runs inside a simulator process: k simulators in equal parts; a token has a part's stepped one after the other.

The process makes its simulators, then a shared block that fits their spaces, and answers tokens until it is told to
close, its parent goes, `restart_interval_s` is over at an episode's end, or something raises. An exception is told to
the parent with its traceback and ends the process: the parent starts another. See docs/simulators.md.

Autoreset mode: SAME_STEP. The step that ends an episode leaves the episode's last observation in `final_observations`
and the next episode's first one in `observations`. A step is a fault where the simulator says so (``info["error"]``),
where its reward is not a finite float32, or where its observation is not finite or outside its space: nothing can be
decided on that one, so the episode ends with it. A fault that ends an episode is a truncation without a known last
observation, never a termination. Statistics count ``info["raw_reward"]`` where there is one; what a fault was rewarded
is not in a return, nor is a raw reward that is not a finite float32.

Pictures of a filmed episode are drawn by the simulator itself where it was made with ``render_mode: rgb_array``, else
they are the first image that it shows as an observation. Whatever fails there ends that film, and never the simulator.

Not covered: deadlines (the parent's), and what a simulator does to its own children (the fork server's).
"""

import json
import math
import os
import random
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import gymnasium
import numpy as np

from penstock.environments.simulators.registry import INCURABLE
from penstock.fleet.messages import (
    ARRIVED,
    READY,
    RETIRING,
    STEP,
    EnvWorkerSpec,
    Fault,
    SimulatorFailure,
    episode_seed,
    packets_of_parts,
)
from penstock.fleet.shared_block import (
    PHASE,
    ROW,
    SIMULATE_S,
    SINCE,
    FrameLabel,
    SharedBlock,
    SimulatorPhase,
    block_bytes,
    create_memory,
)
from penstock.fleet.spaces import PolicyActionError, SimulatorValueError, make_reader, make_writer, spaces_of
from penstock.types import ConfigError, fold, generator
from penstock.types.errors import raised_at

Maker = Callable[[str, Mapping[str, Any]], gymnasium.Env[Any, Any]]
"""Makes a simulator of an id and arguments."""

_MOST_REWARD = float(np.finfo(np.float32).max)


class SimulatorRow:
    """A simulator bound to row `row` of a block.

    Args:
        spec: Of its process.
        row: Which of the process's simulators.
        make: What makes it; called at once, and again after `max_fast_resets` resets in place.

    Attributes:
        env: The simulator.
        fault: Why its last step is a fault; empty where it is none.
    """

    def __init__(self, spec: EnvWorkerSpec, row: int, make: Maker) -> None:
        self._spec = spec
        self._row = row
        self._make = make
        self._episode = 0
        self._resets: int | None = None  # in place; None: it was just made and never reset
        self._return = 0.0
        self._length = 0
        self._marked = True  # its flags in the block are not all false
        self._ended = False
        self._shortened = False  # the episode began with random steps
        self._unseen = 0  # steps in a row whose observations could not be used
        self.fault = ""
        self.env = make(spec.id, spec.kwargs)

    def bind(self, block: SharedBlock) -> None:
        """Compiles the ways into and out of a block."""
        self._block = block
        self._clock = block.clock
        self._rewards = block.rewards
        self._write = make_writer(self.env.observation_space, block.observations)
        self._write_final = make_writer(self.env.observation_space, block.final_observations)
        self._read = make_reader(self.env.action_space, block.actions)

    def begin_episode(self) -> None:
        """Resets, after building anew where it was reset in place often enough; the observation is written."""
        spec = self._spec
        if spec.max_fast_resets is not None and self._resets == spec.max_fast_resets:
            self._rebuild()
        self._enter(SimulatorPhase.RESETTING)
        seed = episode_seed(spec.seed, spec.worker_id, spec.slots[self._row], spec.life, self._episode)
        observation, _ = _unpacked(self.env.reset(seed=seed), _RESET_RETURNS)
        self._resets = 0 if self._resets is None else self._resets + 1
        self._episode += 1
        self._return, self._length, self._ended, self._shortened = 0.0, 0, False, False
        self._write(self._row, observation)
        self._block.first[self._row] = self._marked = True

    def decorrelate(self, most_steps: int) -> None:
        """Takes a random number of random steps in [0, most_steps), so that simulators do not run in lockstep.

        The episode that is left is marked `cut` where it ends: it is no whole one for statistics.
        """
        spec, slot = self._spec, self._spec.slots[self._row]
        seed = fold(spec.seed, spec.worker_id, "decorrelate", slot)
        self.env.action_space.seed(seed & 0x7FFFFFFF)
        for _ in range(int(generator(seed).integers(most_steps))):
            self._enter(SimulatorPhase.STEPPING)
            returned = self.env.step(self.env.action_space.sample())
            observation, _, terminated, truncated, _ = _unpacked(returned, _STEP_RETURNS)
            try:
                self._write(self._row, observation)
            except SimulatorValueError as error:
                self.fault, truncated = str(error), True
            if terminated or truncated:
                self.begin_episode()
        self._shortened = True

    def step(self) -> bool:
        """Takes the action in the block.

        Returns:
            Whether the episode ended; then `begin_episode` is due, or nothing more.

        Raises:
            PolicyActionError: the action is outside its space.
            SimulatorValueError: the observation is, for `max_failures_in_row` steps in a row; or what the simulator
                returned is not what Gymnasium's `step` does.
        """
        row, clock = self._row, self._clock
        clock[ROW] = row
        clock[SINCE] = time.monotonic()
        clock[PHASE] = SimulatorPhase.STEPPING
        if self._marked:
            self._unmark()
        returned = self.env.step(self._read(row))
        observation, reward, terminated, truncated, told = _unpacked(returned, _STEP_RETURNS)
        reward = _number(reward, "the reward")
        raw = _number(told["raw_reward"], "info['raw_reward']") if told and "raw_reward" in told else reward
        self._length += 1
        fault = _said(told["error"]) if told and "error" in told else ""
        if not -_MOST_REWARD <= reward <= _MOST_REWARD:
            fault, reward = f"its reward is {reward}", 0.0
        ended = bool(terminated or truncated)
        try:
            if not ended:
                self._write(row, observation)
            elif not fault:
                self._write_final(row, observation)
            self._unseen = 0
        except SimulatorValueError as error:
            fault, ended = str(error), True
            self._count_unseen(error)
        if fault:
            self._block.faults[row] = self._marked = True
        elif -_MOST_REWARD <= raw <= _MOST_REWARD:  # or the return would be no number for the rest of the episode
            self._return += raw
        self.fault = fault
        self._rewards[row] = reward
        if ended:
            self._end(bool(terminated), bool(truncated), bool(fault))
        return ended

    def cut(self) -> None:
        """Truncates an episode that goes on, since its process is to be replaced; its last observation is known."""
        if self._ended or self._length == 0:
            return
        block, row = self._block, self._row
        block.truncated[row] = block.cut[row] = self._ended = self._marked = True
        if not block.faults[row]:
            for leaf, array in block.observations.items():
                block.final_observations[leaf][row] = array[row]
            self._report()

    def _count_unseen(self, error: SimulatorValueError) -> None:
        """One that shows nothing that can be used, step after step, is replaced like one that dies."""
        self._unseen += 1
        most = self._spec.max_failures_in_row
        if most is not None and self._unseen >= most:
            raise SimulatorValueError(f"{error} (in {most} steps in a row, fleet.limits.max_failures_in_row)")

    def _end(self, terminated: bool, truncated: bool, fault: bool) -> None:
        block, row = self._block, self._row
        self._ended = self._marked = True
        block.terminated[row] = terminated and not fault
        block.cut[row] = self._shortened
        block.truncated[row] = truncated or fault
        if not fault:
            self._report()

    def _report(self) -> None:
        block, row = self._block, self._row
        block.has_final[row] = True
        block.returns[row] = self._return
        block.lengths[row] = self._length

    def _unmark(self) -> None:
        block, row = self._block, self._row
        for flags in (block.terminated, block.truncated, block.faults, block.cut, block.has_final, block.first):
            flags[row] = False
        block.returns[row] = block.lengths[row] = 0
        self._marked = False

    def _rebuild(self) -> None:
        self._enter(SimulatorPhase.BUILDING)
        self.env.close()
        self.env = self._make(self._spec.id, self._spec.kwargs)
        self._resets = None
        self.bind(self._block)

    def _enter(self, phase: SimulatorPhase) -> None:
        self._clock[ROW] = self._row
        self._clock[SINCE] = time.monotonic()
        self._clock[PHASE] = phase


_STEP_RETURNS = ("step", ("observation", "reward", "terminated", "truncated", "info"))
_RESET_RETURNS = ("reset", ("observation", "info"))


def _unpacked(returned: Any, method: tuple[str, tuple[str, ...]]) -> tuple[Any, ...]:
    """What a simulator's method returned, as many values as Gymnasium's returns."""
    name, values = method
    if isinstance(returned, tuple) and len(returned) == len(values):
        return returned
    found = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"one {type(returned).__name__}"
    raise SimulatorValueError(f"{name} returned {found}: Gymnasium's returns ({', '.join(values)})")


def _number(value: Any, name: str) -> float:
    try:
        return float(value.item() if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError) as error:
        raise SimulatorValueError(f"{name} is {value!r}, a {type(value).__name__}: it must be one number") from error


def _said(error: Any) -> str:
    """The simulator's own word for a step that went wrong; empty where none did. Floats are how far off a task is."""
    if isinstance(error, str):
        return f"it said: {error}" if error else ""
    wrong = np.asarray(error).dtype.kind != "f" and bool(np.any(error))
    return "its info['error'] says that the step went wrong" if wrong else ""


_LEAST_SIDE = 16  # pixels; smaller observations are grids of something else


class Camera:
    """Films one row at a time, as the block's film area asks.

    Args:
        block: With a film area.
        simulators: One simulator per row of the block.
    """

    def __init__(self, block: SharedBlock, simulators: Sequence[SimulatorRow]) -> None:
        assert block.film is not None
        self._block, self._area, self._simulators = block, block.film, simulators
        self._row: int | None = None  # being filmed
        self._taken = False  # in this turn

    def note_end(self, row: int) -> None:
        """The row's episode ended, and the next one has not begun."""
        if row == self._row:
            self._row = None
            self._take(row, FrameLabel.LAST)
            self._area.ask(None)

    def note_begin(self, row: int) -> None:
        """The row's episode has begun."""
        if self._row is None and self._area.asked == row:
            self._row = row
            self._take(row, FrameLabel.FIRST)

    def note_turn(self) -> None:
        """All rows were stepped."""
        if self._area.asked != self._row:
            self._row = None
        if self._row is not None and not self._taken:
            self._take(self._row, FrameLabel.NEXT)
        self._taken = False

    def _take(self, row: int, label: FrameLabel) -> None:
        self._taken = True
        try:
            picture = self._picture(row, label)
            if picture is None and label is not FrameLabel.LAST:
                raise ConfigError("it draws nothing (render_mode: rgb_array), and no observation is an image")
            self._area.put(label, picture)
        except Exception as error:  # drawing is the simulator's own code, and no reason to end it
            self._row = None
            told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self._area.fail(told.strip())

    def _picture(self, row: int, label: FrameLabel) -> Any:
        env = self._simulators[row].env
        if env.render_mode == "rgb_array":
            return env.render()
        leaves = self._block.observations
        if label is FrameLabel.LAST:
            leaves = self._block.final_observations if self._block.has_final[row] else {}
        return next((leaf[row] for leaf in leaves.values() if _is_image(leaf)), None)


def filmed_maker(make: Maker) -> Maker:
    """Makes simulators that can draw themselves, where they can and `kwargs` do not say otherwise."""
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(name, "dummy")  # what draws with pygame must find no screen

    def made(id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
        if "render_mode" in kwargs:
            return make(id, kwargs)
        try:
            return make(id, {**kwargs, "render_mode": "rgb_array"})
        except ConfigError:  # it takes no such argument; whatever else is wrong is raised again
            return make(id, kwargs)

    return made


def _is_image(leaf: np.ndarray) -> bool:
    """Of an observation leaf [k, …]."""
    return leaf.dtype == np.uint8 and leaf.ndim in (3, 4) and min(leaf.shape[1:3]) >= _LEAST_SIDE


_WHERE = {
    SimulatorPhase.RESTING: "closing",
    SimulatorPhase.STEPPING: "stepping",
    SimulatorPhase.RESETTING: "resetting",
    SimulatorPhase.BUILDING: "making",
}

FAULTS_EVERY_S = 1.0
"""Faults are told so far apart, since a simulator can make thousands in a second."""


class ExitCode(IntEnum):
    """How a simulator process ends by itself."""

    CLOSED = 0
    FAILED = 70
    RETIRED = 75


def run_env_worker(spec: EnvWorkerSpec, channel: socket.socket, make: Maker) -> ExitCode:
    """Runs a simulator process to its end.

    Args:
        spec: What to run.
        channel: To the parent; blocking.
        make: What makes a simulator.

    Returns:
        What the process should exit with. Exceptions were told to the parent.
    """
    worker = EnvWorker(spec, channel, make)
    code = ExitCode.FAILED
    try:
        worker.make()
        code = worker.serve()
    except (BrokenPipeError, ConnectionResetError):
        code = ExitCode.CLOSED  # the parent has gone
    except BaseException as error:  # whatever a simulator raises, SystemExit too: it is told, and the process ends
        with suppress(OSError):
            worker.tell_fault(math.inf)
            channel.send(worker.failure(error).packet())
    worker.close()
    return code


class EnvWorker:
    """The simulators of one process.

    Args:
        spec: What to run.
        channel: To the parent; blocking.
        make: What makes a simulator.
    """

    def __init__(self, spec: EnvWorkerSpec, channel: socket.socket, make: Maker) -> None:
        self._spec = spec
        self._channel = channel
        self._make = filmed_maker(make) if spec.filmed else make
        self._camera: Camera | None = None
        self._simulators: list[SimulatorRow] = []
        self._block: SharedBlock | None = None
        self._born_s = time.monotonic()
        self._fault: Fault | None = None  # is to be told
        self._faults_due_s = 0.0

    def make(self) -> None:
        """Makes the simulators and their block, and says so.

        Raises:
            ConfigError: their spaces cannot be laid out, or differ.
        """
        spec = self._spec
        _seed_global_generators(fold(spec.seed, spec.worker_id, "process", spec.process, spec.life))
        for row in range(len(spec.slots)):
            self._simulators.append(SimulatorRow(spec, row, self._make))
        found = [spaces_of(one.env.observation_space, one.env.action_space) for one in self._simulators]
        spaces = found[0]
        for slot, other in zip(spec.slots, found, strict=True):
            if not spaces.same_form(other):
                raise ConfigError(
                    f"the simulator of slot {slot} has other spaces than the first: all that a task's id and kwargs "
                    "make must have the same arrays"
                )
            spaces = spaces.widened(other)
        fd = create_memory(block_bytes(spaces, len(spec.slots), spec.filmed))
        try:
            self._block = block = SharedBlock(fd, spaces, len(spec.slots), spec.filmed)
            block.clock[SINCE] = time.monotonic()
            block.clock[PHASE] = SimulatorPhase.RESETTING
            content = json.dumps({"spaces": spaces.to_values(), "filmed": spec.filmed}).encode()
            socket.send_fds(self._channel, [READY + content], [fd])
        finally:
            os.close(fd)
        for simulator in self._simulators:
            simulator.bind(block)
        self._camera = Camera(block, self._simulators) if spec.filmed else None

    def serve(self) -> ExitCode:
        """First observations of every part, then one answer for every token."""
        assert self._block is not None
        clock, channel, parts = self._block.clock, self._channel, self._spec.parts
        self._begin()
        clock[PHASE] = SimulatorPhase.RESTING
        self.tell_fault(time.monotonic())
        steps, arrived = packets_of_parts(STEP, parts), packets_of_parts(ARRIVED, parts)
        for packet in arrived:
            channel.send(packet)
        while True:
            token = channel.recv(len(steps[0]))
            if token not in steps:
                self.tell_fault(math.inf)
                return ExitCode.CLOSED
            began_s = time.monotonic()
            part = token[1]
            retiring = self._step_part(part)
            ended_s = time.monotonic()
            clock[SIMULATE_S] = ended_s - began_s
            clock[PHASE] = SimulatorPhase.RESTING
            if self._fault is not None:
                self.tell_fault(math.inf if retiring else ended_s)
            channel.send(RETIRING if retiring else arrived[part])
            if retiring:
                return ExitCode.RETIRED

    def tell_fault(self, now_s: float) -> None:
        """Tells of faulty steps, where there were some and the last time is long enough ago."""
        if self._fault is not None and now_s >= self._faults_due_s:
            self._channel.send(self._fault.packet())
            self._fault, self._faults_due_s = None, now_s + FAULTS_EVERY_S

    def failure(self, error: BaseException) -> SimulatorFailure:
        """An exception as it is told."""
        row, where = len(self._simulators), "making"
        if self._block is not None:
            row, where = int(self._block.clock[ROW]), _WHERE[SimulatorPhase(int(self._block.clock[PHASE]))]
        slots = self._spec.slots
        kinds = ((PolicyActionError, "policy"), (ConfigError, "config"), (INCURABLE, "code"), (object, "simulator"))
        blame = next(word for kind, word in kinds if isinstance(error, kind))
        words, text = f"{error}{raised_at(error)}", "".join(traceback.format_exception(error))
        return SimulatorFailure(where, slots[min(row, len(slots) - 1)], type(error).__name__, words, text, blame)

    def close(self) -> None:
        """Closes the simulators; what one raises then is printed and does not keep the others."""
        for simulator in self._simulators:
            try:
                simulator.env.close()
            except Exception:  # a broken simulator may well fail to close
                traceback.print_exc()

    def _begin(self) -> None:
        spec = self._spec
        for simulator in self._simulators:
            simulator.begin_episode()
        if spec.life == 0 and spec.decorrelate_steps > 0:
            for row, simulator in enumerate(self._simulators):
                simulator.decorrelate(spec.decorrelate_steps)
                if simulator.fault:
                    self._note_fault(row)
            assert self._block is not None
            self._block.first[:] = True

    def _step_part(self, part: int) -> bool:
        """Whether the process is to be replaced now; then the part is the whole of it."""
        retiring, camera = False, self._camera
        each = len(self._simulators) // self._spec.parts
        for row, simulator in enumerate(self._simulators[part * each : (part + 1) * each], part * each):
            ended = simulator.step()
            if simulator.fault:
                self._note_fault(row)
            if ended:
                retiring = retiring or self._is_due()
                if camera is not None:
                    camera.note_end(row)
                if not retiring:
                    simulator.begin_episode()
                    if camera is not None:
                        camera.note_begin(row)
        if camera is not None:
            camera.note_turn()
        if retiring:
            for simulator in self._simulators:
                simulator.cut()
        return retiring

    def _note_fault(self, row: int) -> None:
        before = 0 if self._fault is None else self._fault.steps
        self._fault = Fault(self._spec.slots[row], self._simulators[row].fault, before + 1)

    def _is_due(self) -> bool:
        interval_s = self._spec.restart_interval_s
        return interval_s is not None and time.monotonic() - self._born_s >= interval_s


def _seed_global_generators(seed: int) -> None:
    """Simulators that draw from the global generators must not draw alike: all are forks of one process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)

"""What runs inside a simulator process: k simulators in equal parts; a token has a part's stepped one after the other.

The process makes its simulators, then a shared block that fits their spaces, and answers tokens until it is told to
close, its parent goes, `restart_interval_s` is over at an episode's end, or something raises. An exception is told to
the parent with its traceback and ends the process: the parent starts another. See docs/simulator_processes.md.

Not covered: deadlines (the parent's), and what a simulator does to its own children (the nursery's).
"""

import json
import math
import os
import random
import socket
import time
import traceback
from contextlib import suppress
from enum import IntEnum

import numpy as np

from penstock.fleet.block import PHASE, ROW, SIMULATE_S, SINCE, Block, Phase, block_bytes, create_memory
from penstock.fleet.camera import Camera, filmed_maker
from penstock.fleet.messages import (
    ARRIVED,
    READY,
    RETIRING,
    STEP,
    EnvWorkerSpec,
    Failure,
    Fault,
    packets_of_parts,
)
from penstock.fleet.simulator_row import Maker, SimulatorRow
from penstock.fleet.spaces import PolicyActionError, spaces_of
from penstock.types import ConfigError, fold

_WHERE = {
    Phase.RESTING: "closing", Phase.STEPPING: "stepping", Phase.RESETTING: "resetting", Phase.BUILDING: "making",
}  # fmt: skip

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
        self._block: Block | None = None
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
        for slot, spaces in zip(spec.slots, found, strict=True):
            if spaces != found[0]:
                raise ConfigError(f"task {spec.task!r}: the simulator of slot {slot} has other spaces than the first")
        fd = create_memory(block_bytes(found[0], len(spec.slots), spec.filmed))
        try:
            self._block = block = Block(fd, found[0], len(spec.slots), spec.filmed)
            block.clock[SINCE] = time.monotonic()
            block.clock[PHASE] = Phase.RESETTING
            content = json.dumps({"spaces": found[0].to_values(), "filmed": spec.filmed}).encode()
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
        clock[PHASE] = Phase.RESTING
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
            clock[PHASE] = Phase.RESTING
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

    def failure(self, error: BaseException) -> Failure:
        """An exception as it is told."""
        row, where = len(self._simulators), "making"
        if self._block is not None:
            row, where = int(self._block.clock[ROW]), _WHERE[Phase(int(self._block.clock[PHASE]))]
        slots = self._spec.slots
        blame = "config" if isinstance(error, ConfigError) else "simulator"
        if isinstance(error, PolicyActionError):
            blame = "policy"
        text = "".join(traceback.format_exception(error))
        return Failure(where, slots[min(row, len(slots) - 1)], type(error).__name__, str(error), text, blame)

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

"""The rollout worker's view of one simulator process through all of its incarnations.

Its simulators act in equal parts (`ProcessPart`). Invariant: a part's arrivals and actions alternate. After a
`StepArrival` exactly one `act` is taken, and each action is answered by exactly one later arrival: with what it led to,
or, where it was lost with its process, as a fault by the next incarnation. One that is ready before the worker has
acted on the last arrival is held back until then, since that action is lost.

When a process that failed is started again, and when it is given up, is pure arithmetic over failures and their times:
a wait that doubles with every failure in a row (one that answered an action ends the row), a limit of such rows, a cap
for the whole life of a process slot, and a limit per minute. Replacements at `restart_interval_s` are no failures.

Not covered: who starts and kills processes (`penstock.fleet.pool`).
"""

import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from penstock.fleet.config import SimulatorLimits
from penstock.fleet.messages import (
    ARRIVED,
    CLOSE,
    FAILED,
    FAULT,
    MOST_PACKET_BYTES,
    READY,
    RETIRING,
    STEP,
    Fault,
    SimulatorFailure,
    packet_socketpair,
    packets_of_parts,
)
from penstock.fleet.shared_block import (
    PHASE,
    ROW,
    SIMULATE_S,
    SINCE,
    FrameArea,
    SharedBlock,
    SharedRows,
    SimulatorPhase,
)
from penstock.fleet.steps import Leaves, StepArrival
from penstock.types import Spaces


class ProcessPart:
    """One part of a process.

    Args:
        process: Which process of the worker.
        number: Which part of it.
        slots: int64 [n], the worker's slots that it is.

    Attributes:
        slots: int64 [n].
        lost_actions: Actions that were answered as faults, since they were lost with a life.
        fresh: This life has not arrived yet.
        resting: It waits for actions, or its arrival is held back.
    """

    def __init__(self, process: int, number: int, slots: np.ndarray) -> None:
        self.slots = slots
        self.lost_actions = 0
        self.fresh, self.resting = True, False
        self._process, self._number = process, number
        self._rows: SharedRows | None = None
        self._action_views: tuple[tuple[str, np.ndarray], ...] = ()
        self._carried: SharedRows | None = None  # of a retired life, whose results the next one's first arrival brings
        self._arrival_due = True  # an arrival is next, not an action
        self._has_arrived = False
        self._held: float | None = None  # an arrival that waits for `act`; how long the process worked on it
        self._lost = False  # the next arrival answers lost actions

    def begin_life(self, rows: SharedRows) -> None:
        """Its process is up, and these are its rows."""
        self._rows, self._action_views = rows, tuple(rows.actions.items())
        self.fresh, self.resting, self._held = True, False, None

    def carry(self) -> None:
        """Its process ends in good order: what its rows say is said by the next life."""
        self._carried, self.resting = self._rows, False

    def end_life(self) -> None:
        """Its process is gone."""
        self._rows, self._action_views = None, ()
        self.resting, self._held = False, None

    @property
    def waits_for_answer(self) -> bool:
        """Whether an action was taken, and nothing has answered it."""
        return self._arrival_due and self._has_arrived

    def arrive(self, simulate_s: float) -> StepArrival | None:
        """Its rows are the worker's again; None where the arrival is held back until `act`.

        Args:
            simulate_s: How long the process worked on it.
        """
        self.resting = True
        if self.fresh:
            self.fresh = False
            self._settle_lost_actions()
            if not self._arrival_due:
                self._held = simulate_s
                return None
        return self._arrival(simulate_s)

    def act(self, actions: Leaves) -> bool:
        """Takes the actions that answer the last arrival.

        Returns:
            Whether they lie in the block now, for the process to take; otherwise they are lost.

        Raises:
            ValueError: no arrival is open, or an array has a wrong shape.
        """
        if self._arrival_due:
            raise ValueError(
                f"part {self._number} of process {self._process} has no open arrival: it was acted on already"
            )
        for name, view in self._action_views:
            if actions[name].shape != view.shape:
                raise ValueError(f"actions {name!r} have shape {actions[name].shape}: they must have {view.shape}")
        self._arrival_due = True
        if not self.resting or self._held is not None:
            return False  # it is gone, and the next life answers; or has, and is about to be released
        for name, view in self._action_views:
            view[...] = actions[name]
        self.resting = False
        return True

    def released(self) -> StepArrival | None:
        """The arrival that was held back until `act`; None: there is none."""
        if self._held is None:
            return None
        simulate_s, self._held = self._held, None
        return self._arrival(simulate_s)

    def _settle_lost_actions(self) -> None:
        assert self._rows is not None
        if self._carried is not None:
            self._rows.take_results(self._carried)
            self._carried = None
        elif self._has_arrived:
            self._rows.mark_lost()
            self._lost = True
        else:
            self._rows.clear_results()

    def _arrival(self, simulate_s: float) -> StepArrival:
        rows = self._rows
        assert rows is not None
        rows.acted[:] = self._has_arrived
        self._arrival_due, self._has_arrived = False, True
        if self._lost:
            self.lost_actions += len(self.slots)
            self._lost = False
        return StepArrival(
            self._process, rows.rows, rows.observations, rows.final_observations, simulate_s, self._number
        )


_RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The process is given up.

    Attributes:
        reason: Which limit was passed, its value, and what can be done.
    """

    reason: str


class RestartRecord:
    """Failures of one process slot.

    Args:
        limits: Back-off, cap and rate.

    Attributes:
        restarts: Restarts that were granted so far.
        has_answered: An action was answered, ever.
    """

    def __init__(self, limits: SimulatorLimits) -> None:
        self._limits = limits
        self._in_row = 0
        self._recent: deque[float] = deque()
        self.restarts = 0
        self.has_answered = False

    def answered(self) -> None:
        """An action was answered: the next failure begins a new row."""
        self._in_row, self.has_answered = 0, True

    def failed(self, now_s: float) -> float | GiveUp:
        """Counts a failure and says what follows.

        Args:
            now_s: Monotonic time of the failure in seconds.

        Returns:
            After how many seconds the process is started again; or that it is not.
        """
        limits = self._limits
        if limits.max_restarts is not None and self.restarts >= limits.max_restarts:
            return GiveUp(
                f"it failed after fleet.limits.max_restarts = {limits.max_restarts} restarts: raise that if it is few"
            )
        if limits.max_failures_in_row is not None and self._in_row + 1 >= limits.max_failures_in_row:
            return GiveUp(
                f"it failed fleet.limits.max_failures_in_row = {limits.max_failures_in_row} times, and answered no "
                "action in between: raise that if it is few"
            )
        while self._recent and self._recent[0] <= now_s - _RATE_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= limits.restarts_per_minute:
            return GiveUp(
                f"it failed more often than fleet.limits.restarts_per_minute = {limits.restarts_per_minute}: raise "
                "that if it is few"
            )
        self._recent.append(now_s)
        self._in_row += 1
        self.restarts += 1
        return min(limits.max_backoff_s, limits.backoff_s * 2.0 ** min(self._in_row - 1, 60))


_ARRIVED = ARRIVED[0]
_TOKEN_BYTES = 2
_EXIT_GRACE_S = 0.5  # for a process that reported an exception, to close its simulators
_RETIREMENT_S = 5.0  # likewise, for one that is to be replaced
_FORK_SERVER_S = 60.0  # for the fork server to load the simulators' modules
_DYING_S = 5.0  # until SIGKILL has worked; a process in uninterruptible sleep may take longer, and is given up


class ProcessState(Enum):
    """Where a life of a process stands."""

    WAITING = auto()
    """For its start, which is due at `due_s`."""
    ASKED = auto()
    """The fork server was asked to fork it."""
    STARTING = auto()
    """It makes its simulators."""
    UP = auto()
    """It resets, steps, or waits for actions."""
    ENDING = auto()
    """It said that it ends."""
    DYING = auto()
    """It was killed, or ended, and is not reaped yet."""
    QUARANTINED = auto()
    """It was given up."""


class ProcessSlot:
    """One simulator process of a worker.

    Args:
        number: Its index among the worker's processes.
        task: What its simulators play.
        slots: int64 [k], the worker's slots that they are.
        limits: Its deadlines, and how often it may be restarted.
        adopt_spaces: Called with the task and the spaces of every incarnation; it refuses them by raising.
        parts: Into so many equal parts the simulators fall.

    Attributes:
        number: Its index among the worker's processes.
        task: What its simulators play.
        slots: int64 [k].
        record: Its failures.
        stage: Where it stands.
        due_s: Monotonic time of its next start, while it is waiting.
        life: Counts the starts; −1 before the first.
        ticket: Under which the fork server knows it; None while there is no process.
        pid: Of the process; None while there is none.
        begun_s: When this life was asked for.
        announced: Whether others were told that this life is up; the pool's to keep.
        reason: Why it is killed, or was last.
        limit: Why it was given up: which limit it passed; empty while it was not.
        failure: What it told before it ended.
        faults: Steps that went wrong while the process went on, as it told of them; the pool's to pass on.
        hung_up: Its socket has ended: there is nothing more to receive.
        retired: This life ended in good order, to be replaced.
    """

    def __init__(
        self, number: int, task: str, slots: np.ndarray, limits: SimulatorLimits,
        adopt_spaces: Callable[[str, Spaces], None], parts: int = 1,
    ) -> None:  # fmt: skip
        self.number, self.task, self.slots = number, task, slots
        self.record = RestartRecord(limits)
        self.stage, self.due_s, self.life = ProcessState.WAITING, 0.0, -1
        self.ticket: int | None = None
        self.pid: int | None = None
        self.reason = self.limit = ""
        self.failure: SimulatorFailure | None = None
        self.faults: list[Fault] = []
        self.hung_up, self.begun_s, self.announced = False, 0.0, False
        self._parts = tuple(ProcessPart(number, part, own) for part, own in enumerate(np.split(slots, parts)))
        self._step_tokens = packets_of_parts(STEP, parts)
        self._limits, self._adopt_spaces = limits, adopt_spaces
        self._channel: socket.socket | None = None
        self._pidfd: int | None = None
        self._buffer = bytearray(MOST_PACKET_BYTES)
        self._block: SharedBlock | None = None
        self._stage_since_s = 0.0
        self._sent_s = 0.0
        self._proven = False  # this life has answered an action
        self.retired = False

    def to_values(self) -> dict[str, Any]:
        """Which life of which process it is, for events."""
        return {"process": self.number, "task": self.task, "life": self.life, "pid": self.pid}

    # --- a life begins --------------------------------------------------------------------------------------------

    def open_channel(self, ticket: int, now_s: float) -> socket.socket:
        """Begins a life; returns the process's end of the socket, for the fork server."""
        mine, other = packet_socketpair()
        mine.setblocking(False)
        self._channel, self.ticket, self.life = mine, ticket, self.life + 1
        self._proven = self.retired = False
        self.failure, self.reason, self.hung_up = None, "", False
        self.begun_s, self.announced = now_s, False
        self._enter(ProcessState.ASKED, now_s)
        return other

    def forked(self, pid: int, pidfd: int, now_s: float) -> None:
        """The fork server forked it."""
        self.pid, self._pidfd = pid, pidfd
        if self.stage is ProcessState.ASKED:
            self._enter(ProcessState.STARTING, now_s)
        elif self.stage is ProcessState.DYING:
            self.kill(self.reason, now_s)

    def withdraw(self) -> tuple[int, ...]:
        """Takes back a life that could not be asked for; returns its descriptors, to be closed."""
        self.life -= 1
        self._enter(ProcessState.WAITING, self._stage_since_s)
        return self.release()

    def descriptors(self) -> tuple[int, ...]:
        """Of the socket, and of the process where it is known."""
        channel = () if self._channel is None else (self._channel.fileno(),)
        return channel if self._pidfd is None else (*channel, self._pidfd)

    # --- what it says ---------------------------------------------------------------------------------------------

    def receive(self) -> StepArrival | None:
        """Takes one packet; None where it was no arrival, or there was none."""
        if self._block is None:
            return self._receive_ready()
        assert self._channel is not None
        try:
            count = self._channel.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return None  # it ended with actions unread, which the kernel tells before what it had said
        if count == _TOKEN_BYTES and self._buffer[0] == _ARRIVED and self._buffer[1] < len(self._parts):
            return self._arrive(self._parts[self._buffer[1]])
        self._handle_packet(bytes(self._buffer[:count]))
        return None

    def _receive_ready(self) -> None:
        assert self._channel is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, MOST_PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            return
        if packet[:1] != READY or not fds:
            self._handle_packet(packet)
            return
        try:
            content = json.loads(packet[1:])
            spaces = Spaces.from_values(content["spaces"])
            self._adopt_spaces(self.task, spaces)
            self._block = SharedBlock(fds[0], spaces, len(self.slots), content.get("filmed", False))
        finally:
            os.close(fds[0])
        self._block.slots[:] = self.slots
        each = len(self.slots) // len(self._parts)
        for number, part in enumerate(self._parts):
            part.begin_life(self._block.part(number * each, (number + 1) * each))
        self._enter(ProcessState.UP, time.monotonic())
        self._sent_s = self._stage_since_s

    def _handle_packet(self, packet: bytes) -> None:
        """Anything but the token of the hot path; an empty packet is the end of the socket."""
        now_s = time.monotonic()
        self.hung_up = self.hung_up or not packet
        if packet[:1] == RETIRING:
            self.retired = True
            for part in self._parts:
                part.carry()
            self._enter(ProcessState.ENDING, now_s)
        elif packet[:1] == FAULT:
            self.faults.append(Fault.from_packet(packet))
        elif packet[:1] == FAILED:
            self.failure = SimulatorFailure.from_packet(packet)
            self._enter(ProcessState.ENDING, now_s)
        elif self.stage not in (ProcessState.ENDING, ProcessState.DYING):
            self.kill(
                f"it said {packet[:20]!r}" if packet else "", now_s
            )  # without a socket it is ending, or of no use

    def _arrive(self, part: ProcessPart) -> StepArrival | None:
        if not part.fresh and not self._proven:
            self._proven = True
            self.record.answered()
        assert self._block is not None
        return part.arrive(self._block.clock[SIMULATE_S])

    def drain(self) -> StepArrival | None:
        """Takes what a process that ended has still said; an arrival, or None when there is nothing more."""
        while self._channel is not None and not self.hung_up and self._has_spoken():
            if (arrival := self.receive()) is not None:
                return arrival
        return None

    # --- what it is told ------------------------------------------------------------------------------------------

    @property
    def film(self) -> FrameArea | None:
        """Where pictures of its present life lie."""
        return None if self._block is None else self._block.film

    def act(self, actions: Leaves, part: int = 0) -> StepArrival | None:
        """Takes the actions that answer a part's last arrival.

        Returns:
            The next arrival where it was held back for them: they are lost.

        Raises:
            ValueError: no arrival is open, or an array has a wrong shape.
        """
        taker = self._parts[part]
        if taker.act(actions):
            self._sent_s = time.monotonic()
            self._send(self._step_tokens[part])
        return taker.released()

    def close(self) -> None:
        """Asks a process to end in good order, if it listens; kills it otherwise."""
        if self.stage is ProcessState.UP:
            self._send(CLOSE)
        elif self.pid is not None:
            self.kill("", time.monotonic())

    def kill(self, reason: str, now_s: float) -> None:
        """Kills the process; the fork server kills its group and what else it started."""
        self.reason = self.reason or reason
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._enter(ProcessState.DYING, now_s)

    def ended(self) -> None:
        """The process was seen to end; how, the fork server will say."""
        if self.stage is not ProcessState.DYING:
            self._enter(ProcessState.DYING, time.monotonic())

    def _send(self, token: bytes) -> None:
        assert self._channel is not None
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):  # its end is seen by its pidfd
            self._channel.send(token)

    # --- deadlines and the end ------------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> str | None:
        """Which deadline has passed, for a person; None: none."""
        waited_s = now_s - self._stage_since_s
        if self.stage is ProcessState.ASKED and waited_s > self._limits.spawn_timeout_s + _FORK_SERVER_S:
            return "the fork server did not start it"
        if self.stage is ProcessState.STARTING and waited_s > self._limits.spawn_timeout_s:
            return self._late("making", "spawn_timeout_s", self._limits.spawn_timeout_s)
        if self.stage is ProcessState.ENDING and waited_s > (_EXIT_GRACE_S if self.failure else _RETIREMENT_S):
            return "it took too long to close"
        if self.stage is ProcessState.UP and not all(part.resting for part in self._parts):
            return self._overdue_at_work(now_s)
        return None

    def gone_for_good(self, now_s: float) -> bool:
        """Whether a killed process still is not reaped after so long that it is not waited for any more."""
        return self.stage is ProcessState.DYING and now_s - self._stage_since_s > _DYING_S

    def release(self) -> tuple[int, ...]:
        """Forgets the process. Returns its descriptors, which are the caller's to close now."""
        descriptors = self.descriptors()
        if self._channel is not None:
            self._channel.detach()
        self._channel, self._pidfd, self._block, self.pid, self.ticket = None, None, None, None, None
        for part in self._parts:
            part.end_life()
        return descriptors

    @property
    def lost_actions(self) -> int:
        """Actions that were answered as faults, since they were lost with a life."""
        return sum(part.lost_actions for part in self._parts)

    @property
    def abandoned_actions(self) -> int:
        """Actions that wait for an answer; for a process that was given up there is none to give it."""
        return sum(len(part.slots) for part in self._parts if part.waits_for_answer)

    def _overdue_at_work(self, now_s: float) -> str | None:
        assert self._block is not None
        clock, limits = self._block.clock, self._limits
        phase, since_s = int(clock[PHASE]), max(clock[SINCE], self._sent_s)
        what, field, limit_s = {
            SimulatorPhase.RESETTING: ("resetting", "reset_timeout_s", limits.reset_timeout_s),
            SimulatorPhase.BUILDING: ("building anew", "spawn_timeout_s", limits.spawn_timeout_s),
        }.get(SimulatorPhase(phase), ("stepping", "step_timeout_s", limits.step_timeout_s))
        if now_s - since_s <= limit_s or self._has_spoken():
            return None
        return self._late(f"{what} (slot {self.slots[int(clock[ROW])]})", field, limit_s)

    def _has_spoken(self) -> bool:
        """Whether something is waiting to be received: then it was in time after all."""
        assert self._channel is not None
        try:
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        return True

    def _late(self, what: str, field: str, limit_s: float) -> str:
        key = f"fleet.limits.{field}"
        return f"{what} took longer than {key} = {limit_s:g}: raise {key} if the simulator needs longer"

    def _enter(self, stage: ProcessState, now_s: float) -> None:
        self.stage, self._stage_since_s = stage, now_s

"""What a rollout worker and a simulator process say over their socket, and what a simulator process is started with.

Packets keep their bounds (``SOCK_SEQPACKET``); the first byte is the kind. On the hot path a second byte follows, the
number of the part of the process that is meant. No pickle: other content is JSON.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.types import fold

STEP = b"s"
"""To the simulators: actions of a part lie in the block. Content: the part, one byte."""
CLOSE = b"c"
"""To the simulators: close and end."""
ARRIVED = b"a"
"""From the simulators: observations and results of a part lie in the block. Content: the part, one byte."""
RETIRING = b"r"
"""From the simulators: results lie in the block, no observations; the process ends to be replaced."""
READY = b"y"
"""From the simulators: made. Content: ``{"spaces": …, "filmed": …}``; the block's file descriptor comes along."""
FAULT = b"e"
"""From the simulators: some steps were faults, and the process lives on. Content: a `Fault`."""
FAILED = b"f"
"""From the simulators: an exception, after which the process ends. Content: a `SimulatorFailure`."""

MOST_PACKET_BYTES = 1 << 16
_MOST_TRACEBACK = 8000  # characters, from the end


@dataclass(frozen=True, slots=True)
class EnvWorkerSpec:
    """What one simulator process runs.

    Attributes:
        worker_id: Of the rollout worker.
        seed: Of the run.
        process: Which process of the worker.
        life: Counts the starts of this process.
        slots: The worker's slots that its simulators are.
        task: What they play.
        id: See `penstock.fleet.SimulatorConfig`.
        kwargs: Keyword arguments of the simulator's constructor.
        max_fast_resets: See `penstock.fleet.SimulatorLimits`.
        restart_interval_s: Age at which the process ends at an episode's end, to be replaced; in seconds; None: never.
        max_failures_in_row: So many observations in a row that cannot be used fail the process; None: no limit.
        decorrelate_steps: Each simulator of a first life takes a random number of random steps below this first.
        filmed: Episodes may be filmed.
        parts: See `penstock.fleet.FleetConfig.parts_per_process`.
    """

    worker_id: str
    seed: int
    process: int
    life: int
    slots: tuple[int, ...]
    task: str
    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_fast_resets: int | None = None
    restart_interval_s: float | None = None
    decorrelate_steps: int = 0
    filmed: bool = False
    parts: int = 1
    max_failures_in_row: int | None = None

    def to_values(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "EnvWorkerSpec":
        """Reads `to_values` back."""
        return cls(**{**values, "slots": tuple(values["slots"])})


@dataclass(frozen=True, slots=True)
class SimulatorFailure:
    """Why a simulator process ends itself.

    Attributes:
        where: ``making``, ``resetting``, ``stepping``, or ``closing``.
        slot: The worker's slot of the simulator that failed.
        kind: Name of the exception's type.
        message: The exception's, and where the simulator's code raised it.
        traceback: Its end.
        blame: ``config``: it will fail again, whoever starts it; ``code``: an exception of a kind that another attempt
            does not mend; ``policy``: an action was outside its space; ``simulator``: anything else.
    """

    where: str
    slot: int
    kind: str
    message: str
    traceback: str
    blame: str

    def packet(self) -> bytes:
        """As sent."""
        values = asdict(self)
        values.update(message=self.message[:_MOST_TRACEBACK], traceback=self.traceback[-_MOST_TRACEBACK:])
        return FAILED + json.dumps(values).encode()

    @classmethod
    def from_packet(cls, packet: bytes) -> "SimulatorFailure":
        """Reads `packet` back."""
        return cls(**json.loads(packet[1:]))


@dataclass(frozen=True, slots=True)
class Fault:
    """Steps that are not trained on.

    Attributes:
        slot: The slot of the simulator that took the last of them.
        reason: What was wrong with that one.
        steps: How many they are since the last time that was told.
    """

    slot: int
    reason: str
    steps: int

    def packet(self) -> bytes:
        """As sent."""
        return FAULT + json.dumps({**asdict(self), "reason": self.reason[:_MOST_TRACEBACK]}).encode()

    @classmethod
    def from_packet(cls, packet: bytes) -> "Fault":
        """Reads `packet` back."""
        return cls(**json.loads(packet[1:]))


def packets_of_parts(kind: bytes, parts: int) -> tuple[bytes, ...]:
    """`STEP` or `ARRIVED` for each part."""
    return tuple(kind + bytes([part]) for part in range(parts))


def episode_seed(seed: int, worker_id: str, slot: int, life: int, episode: int) -> int:
    """The seed that an episode's reset gets: 31 bits, since some simulators take no more.

    Args:
        seed: Of the run.
        worker_id: Of the rollout worker.
        slot: Of the simulator.
        life: Of its process.
        episode: Counts the slot's episodes in this life.
    """
    return fold(seed, worker_id, slot, life, episode) & 0x7FFFFFFF


def packet_socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep packet bounds; no child inherits them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

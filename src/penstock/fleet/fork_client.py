"""A rollout worker's side of its fork server (`penstock.fleet.fork_server` says what they exchange).

Not thread-safe: it belongs to the thread that polls the pool.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.fleet.config import SimulatorLimits
from penstock.fleet.messages import EnvWorkerSpec, packet_socketpair
from penstock.types import RunFailed

_MOST_ANSWER_BYTES = 1 << 16
FORK_SERVER_END_S = 6.0
_LEFT_BEHIND: list[subprocess.Popen[bytes]] = []
"""Nurseries that were killed and did not end in time: kept until they do, so that no zombie stays."""
_ONE_THREAD = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OPENCV_FOR_THREADS_NUM",
)  # fmt: skip
"""Simulators share the machine's cores: each of them with a pool of threads would stand in the others' way."""


@dataclass(frozen=True, slots=True)
class ForkReply:
    """What the fork server said.

    Attributes:
        values: JSON values.
        pidfd: Of a process that it started; the receiver's to close.
    """

    values: Mapping[str, Any]
    pidfd: int | None = None


class ForkServerClient:
    """A fork server of one's own.

    Args:
        ids: Of the simulators whose modules it shall load.
        end_s: Longest wait for it to end everything when it is closed, and for its end when it is killed.
        left_out: Which of them it shall not load after all, and why.

    Attributes:
        importing: Of which simulator it is loading the modules; None where of none.
        importing_since_s: Monotonic time of when it was heard to begin with them.

    Raises:
        RunFailed: the process cannot be started.
    """

    def __init__(
        self, ids: Sequence[str], end_s: float = FORK_SERVER_END_S, left_out: Mapping[str, str] | None = None
    ) -> None:
        self.importing: str | None = None
        self.importing_since_s = 0.0
        self._end_s = end_s
        _reap_left_behind()
        self._socket, other = packet_socketpair()
        environment = {**dict.fromkeys(_ONE_THREAD, "1"), **os.environ}
        command = [sys.executable, "-m", "penstock.fleet.fork_server", str(other.fileno())]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], env=environment, start_new_session=True
            )
        except OSError as error:
            self._socket.close()
            raise RunFailed(f"the simulators' fork server cannot be started: {error}") from error
        finally:
            other.close()
        self._socket.setblocking(False)
        request = {"preload": sorted(set(ids)), "path": _import_path(), "left_out": dict(left_out or {})}
        self._socket.send(json.dumps(request).encode())

    def fileno(self) -> int:
        """Readable when the fork server says something, and when it ended."""
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        """Of the fork server."""
        return self._child.pid

    def spawn(self, ticket: int, spec: EnvWorkerSpec, channel: socket.socket) -> bool:
        """Asks for a simulator process.

        Args:
            ticket: Comes back in the answers about it.
            spec: What it shall run.
            channel: Its end of the socket to the worker; the caller closes it.

        Returns:
            Whether the request could be sent now. False: the fork server is busy, or gone; ask again.

        Raises:
            RunFailed: the arguments are too long to be sent.
        """
        request = json.dumps({"spawn": ticket, "spec": spec.to_values()}).encode()
        try:
            socket.send_fds(self._socket, [request], [channel.fileno()])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return False  # seen as its end, too
        except OSError as error:
            raise RunFailed(
                f"task {spec.task!r}: its simulator's kwargs have {len(request)} bytes as JSON, too many to send "
                f"({error}): put them into a file and pass its path"
            ) from error
        return True

    def receive(self) -> list[ForkReply] | None:
        """What it said since the last call; None: it ended."""
        answers: list[ForkReply] = []
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._socket, _MOST_ANSWER_BYTES, 1)
            except BlockingIOError:
                return answers
            except ConnectionResetError:
                continue  # it ended with requests unread, which the kernel tells before what it had said
            if not packet:
                return answers or None
            for fd in fds:
                os.set_inheritable(fd, False)
            values = json.loads(packet)
            if "importing" in values:
                self.importing, self.importing_since_s = values["importing"], time.monotonic()
                continue
            if "preloaded" in values:
                self.importing = None
            answers.append(ForkReply(values, fds[0] if fds else None))

    def overdue(self, now_s: float, limits: SimulatorLimits) -> str | None:
        """That it has imported a simulator's modules for too long, in words; None: it has not."""
        if self.importing is None or now_s - self.importing_since_s <= limits.spawn_timeout_s:
            return None
        return f"it took longer than fleet.limits.spawn_timeout_s = {limits.spawn_timeout_s:g}"

    def kill(self) -> bool:
        """Kills it; the kernel kills the simulator processes then.

        Returns:
            Whether it has ended. False: not within `end_s`, as where it is in uninterruptible sleep; it is left behind,
            and ends whenever the kernel lets it.
        """
        self._socket.close()
        self._child.kill()
        ended = self._has_ended()
        if not ended:
            _LEFT_BEHIND.append(self._child)
        return ended

    def close(self) -> bool:
        """Lets the fork server kill all that it started, and waits for its end; kills it where that takes too long.

        Returns:
            Whether it has ended; see `kill`.
        """
        self._socket.close()
        return self._has_ended() or self.kill()

    def _has_ended(self) -> bool:
        try:
            self._child.wait(self._end_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def _reap_left_behind() -> None:
    """Forgets those that have ended since."""
    for child in tuple(_LEFT_BEHIND):
        if child.poll() is not None:
            with suppress(ValueError):  # another worker's thread was first
                _LEFT_BEHIND.remove(child)


def _import_path() -> list[str]:
    """Where modules are looked for, with the working directory in place of the empty entry."""
    here = os.getcwd()
    return list(dict.fromkeys(entry or here for entry in sys.path))

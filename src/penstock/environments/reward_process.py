"""A user's reward function in a process of its own: it may be slow, crash, hang or print, and harms only its group.

Parent and child speak JSON lines over pipes (no pickle). Every exchange has a time limit; a process that crashed or
hung is killed with all that it started and begun anew at the next call. `RewardPool` runs several side by side, so
that scoring keeps up with generation.
"""

import collections
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from penstock.types import ConfigError, EnvironmentFailure

logger = logging.getLogger(__name__)

_STDERR_LINES_KEPT = 20
_STOP_TIMEOUT_S = 5.0
_PIPE_BYTES = 1 << 16


class RewardProcess:
    """One child that serves one reward function.

    Args:
        function: ``package.module.function`` or ``path/to/file.py:function``.
        start_timeout_s: Longest wait for its imports.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    def __init__(self, function: str, start_timeout_s: float) -> None:
        self._function = function
        self._buffer = b""
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES_KEPT)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "penstock.environments.reward_worker", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's to handle, and killing takes grandchildren along
        )
        assert self._child.stdin and self._child.stdout
        os.set_blocking(self._child.stdin.fileno(), False)
        self._pump = threading.Thread(target=self._surface_stderr, name=f"stderr of {function}", daemon=True)
        self._pump.start()
        self._await_ready(start_timeout_s)

    def _await_ready(self, timeout_s: float) -> None:
        try:
            reply = self._exchange(b"", timeout_s, "to start")
        except EnvironmentFailure as failure:
            raise ConfigError(str(failure)) from failure
        if "error" in reply:
            self.kill()
            raise ConfigError(reply["error"])

    def score(self, arguments: Mapping[str, Any], timeout_s: float) -> list[float]:
        """Calls the function.

        Args:
            arguments: Its keyword arguments; what JSON does not know goes as text.
            timeout_s: Longest wait for the rewards.

        Raises:
            EnvironmentFailure: it raised, returned something malformed, crashed, or hung. `alive` says whether the
                process can be used again.
        """
        request = json.dumps(arguments, default=str).encode() + b"\n"
        reply = self._exchange(request, timeout_s, "to score")
        if "error" in reply:
            raise EnvironmentFailure(reply["error"])
        return [float(reward) for reward in reply["rewards"]]

    @property
    def alive(self) -> bool:
        """Whether the process runs and is in step with its parent."""
        return self._child.poll() is None

    def kill(self) -> None:
        """Ends the process and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(_STOP_TIMEOUT_S)
        self._pump.join(_STOP_TIMEOUT_S)
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _exchange(self, request: bytes, timeout_s: float, purpose: str) -> dict[str, Any]:
        """Writes a request and reads one line; kills the process if either takes too long or it ends."""
        deadline = time.monotonic() + timeout_s
        try:
            self._write(request, deadline)
            return json.loads(self._read_line(deadline))
        except (OSError, EOFError) as error:
            self.kill()
            raise EnvironmentFailure(self._obituary(error, timeout_s, purpose)) from error

    def _write(self, request: bytes, deadline: float) -> None:
        assert self._child.stdin
        descriptor = self._child.stdin.fileno()
        while request:
            _, ready, _ = select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            request = request[os.write(descriptor, request[:_PIPE_BYTES]) :]

    def _read_line(self, deadline: float) -> bytes:
        assert self._child.stdout
        descriptor = self._child.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(descriptor, _PIPE_BYTES)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _obituary(self, error: Exception, timeout_s: float, purpose: str) -> str:
        said = f"; it last wrote: {self._stderr[-1]}" if self._stderr else ""
        if isinstance(error, TimeoutError):
            return (
                f"reward function {self._function} took longer than {timeout_s:g} s {purpose} and was stopped: "
                f"make it faster or raise reward_timeout_s{said}"
            )
        return f"reward function {self._function} ended its process (exit code {self._child.returncode}){said}"

    def _surface_stderr(self) -> None:
        assert self._child.stderr
        for raw in self._child.stderr:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._stderr.append(line)
                logger.info("%s: %s", self._function, line)


class RewardPool:
    """Several processes that serve one reward function; safe to call from several threads.

    The first starts at once, so that a function that cannot be loaded is a config error; others when they are needed.

    Args:
        function: See `RewardProcess`.
        processes: How many calls may run at once.
        timeout_s: Longest time for one call.
        start_timeout_s: Longest time for a process to start.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    def __init__(self, function: str, processes: int, timeout_s: float, start_timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._processes = processes
        self._closed = False
        self._free: queue.LifoQueue[RewardProcess | None] = queue.LifoQueue()
        for _ in range(processes - 1):
            self._free.put(None)
        self._free.put(RewardProcess(function, start_timeout_s))

    def score(self, arguments: Mapping[str, Any]) -> list[float]:
        """Calls the function in a process that is free.

        Raises:
            EnvironmentFailure: see `RewardProcess.score`; or no process became free in time.
        """
        process = self._take()
        try:
            if process is not None and not process.alive:
                process.kill()  # it ended while idle: free its pipes
                process = None
            process = process or self._start()
            return process.score(arguments, self._timeout_s)
        finally:
            self._free.put(process if process is not None and process.alive else None)

    def close(self) -> None:
        """Ends the processes, after the calls under way; later calls fail."""
        if self._closed:
            return
        self._closed = True
        for _ in range(self._processes):
            with suppress(queue.Empty):
                if process := self._free.get(timeout=self._timeout_s + self._start_timeout_s):
                    process.kill()

    def _take(self) -> RewardProcess | None:
        if self._closed:
            raise EnvironmentFailure(f"reward function {self._function}: its environment is closed")
        longest_s = self._timeout_s + self._start_timeout_s
        try:
            return self._free.get(timeout=longest_s)
        except queue.Empty:
            raise EnvironmentFailure(
                f"reward function {self._function}: none of {self._processes} processes became free in "
                f"{longest_s:g} s: raise reward_processes"
            ) from None

    def _start(self) -> RewardProcess:
        try:
            return RewardProcess(self._function, self._start_timeout_s)
        except ConfigError as error:  # it loaded when the run began, so now it is a failed group
            raise EnvironmentFailure(str(error)) from error

"""The fork server: one small process beside each rollout worker that forks its simulator processes.

Run as ``python -m penstock.fleet.fork_server FD``, FD a connected Unix packet socket. It has one thread and no JAX; it
loads Gymnasium, NumPy and the simulators' modules once, so a new simulator process costs a fork and the simulator's
own start, and nobody's ``__main__`` is imported again. It reaps what it forked, and before it reaps a simulator process
(so that no id can be another's) it kills that process's group and whatever else it left behind. When its socket closes
it kills everything and ends; its own death kills the simulator processes through the kernel.

What the simulators' ids name is imported as `make_simulator` does in the forks, which find it there. What does not fit
into a process that forks is left to each of them: whatever starts threads when it is imported (the fork server begins
anew without it, since forks would lack them), and what its parent says ended an earlier fork server.

Requests: ``{"preload": [id, …], "path": [sys.path entry, …], "left_out": {id: text}}``; ``{"spawn": ticket, "spec":
…}`` with the simulator's end of its socket. Answers: ``{"importing": id}``; ``{"preloaded": seconds, "troubles": {id:
text}}``, those that were left out among them; ``{"spawned": ticket, "pid": …}`` with a pidfd, or ``{"failed": ticket,
"reason": …}``; ``{"exited": ticket, "status": wait status, "output_tail": text}``, the last of what it and its children
wrote to standard output and error.
"""

import gc
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from penstock.environments.simulators import import_simulator, make_simulator
from penstock.environments.simulators.processes import adopt_orphans, descendants, die_with_parent, kill_trees
from penstock.fleet.env_worker import run_env_worker
from penstock.fleet.messages import EnvWorkerSpec
from penstock.fleet.process_tree import OWNER_VARIABLE, kill_group, owner_of
from penstock.types import ConfigError

MOST_REQUEST_BYTES = 1 << 18
_OUTPUT_TAIL_BYTES = 4096
_PARENT_CHECK_S = 1.0  # a parent that vanished without closing its socket (another process holds it) is seen so
_END_S = 5.0


@dataclass(slots=True)
class _Leader:
    """A simulator process: the leader of its session and process group."""

    ticket: int
    output: int
    output_tail: bytes = b""

    @property
    def owner(self) -> str:
        return _owner(self.ticket)


class ForkServer:
    """Forks, reaps and ends simulator processes for the other end of a socket.

    Args:
        link: To the rollout worker.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._parent = os.getppid()
        self._leaders: dict[int, _Leader] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._serving = True
        adopt_orphans()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, _wake_only)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(link, selectors.EVENT_READ, self._take_request)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    def serve(self) -> None:
        """Answers until the socket closes or the parent is gone; then kills everything that it started."""
        try:
            while self._serving and os.getppid() == self._parent:
                for key, _ in self._selector.select(_PARENT_CHECK_S):
                    key.data()
                self._reap()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the rollout worker has gone
        finally:
            self._end_all()

    # --- requests -------------------------------------------------------------------------------------------------

    def _take_request(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._link, MOST_REQUEST_BYTES, 1)
        if not packet:
            self._serving = False
            return
        for fd in fds:
            os.set_inheritable(fd, False)
        request = json.loads(packet)
        if "preload" in request:
            self.preload(request)
        else:
            self._spawn(int(request["spawn"]), request["spec"], fds[0])

    def preload(self, request: dict[str, Any]) -> None:
        """Imports what the forks will need, as the request says; whatever fails there fails again in them, in full."""
        began_s = time.monotonic()
        sys.path[:] = request["path"]
        troubles: dict[str, str] = request["left_out"]
        for id in request["preload"]:
            if id in troubles:
                continue
            self._say({"importing": id})
            threads = _threads()
            try:
                with _silence():
                    import_simulator(id)
            except (Exception, SystemExit) as error:  # the user's
                troubles[id] = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            if (started := _threads() - threads) > 0:
                troubles[id] = f"importing it starts {started} thread{'s' * (started > 1)}, which forks lack"
                self._begin_anew(request)
        if (threads := _threads()) > 1:
            troubles["threads"] = f"the fork server itself has {threads} threads; forks lack them"
        gc.collect()
        gc.freeze()  # collections in the forks leave the shared pages alone
        self._say({"preloaded": time.monotonic() - began_s, "troubles": troubles})

    def _begin_anew(self, request: dict[str, Any]) -> NoReturn:
        """The same process without what it has imported, or its threads. Requests wait in the socket meanwhile."""
        link = self._link.fileno()
        os.set_inheritable(link, True)
        os.execv(sys.executable, [sys.executable, "-m", "penstock.fleet.fork_server", str(link), json.dumps(request)])

    def _spawn(self, ticket: int, spec: dict[str, Any], channel: int) -> None:
        output, output_of_child = os.pipe()
        fork_server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (output, output_of_child, channel):
                os.close(fd)
            self._say({"failed": ticket, "reason": f"no process could be started: {error}"})
            return
        if pid == 0:
            self._become_simulator(ticket, spec, channel, output_of_child, fork_server)
        os.close(channel)
        os.close(output_of_child)
        os.set_blocking(output, False)
        leader = self._leaders[pid] = _Leader(ticket, output)
        self._selector.register(output, selectors.EVENT_READ, lambda: self._read_output(leader))
        pidfd = os.pidfd_open(pid)  # it is not reaped yet, so this is the process that was forked
        try:
            self._say({"spawned": ticket, "pid": pid}, [pidfd])
        finally:
            os.close(pidfd)

    def _say(self, answer: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self._link, [json.dumps(answer).encode()], fds or [])

    # --- in the fork ----------------------------------------------------------------------------------------------

    def _become_simulator(
        self, ticket: int, spec: dict[str, Any], channel: int, output: int, fork_server: int
    ) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(fork_server)
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._forget_descriptors(output)
            os.environ[OWNER_VARIABLE] = _owner(ticket, fork_server)
            code = _simulate(EnvWorkerSpec.from_values(spec), channel)
        except BaseException:  # nothing may return into the fork server's loop
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _forget_descriptors(self, output: int) -> None:
        self._selector.close()
        self._link.close()
        for fd in (self._wake_read, self._wake_write, output, *(leader.output for leader in self._leaders.values())):
            os.close(fd)

    # --- reaping --------------------------------------------------------------------------------------------------

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _read_output(self, leader: _Leader) -> bool:
        try:
            words = os.read(leader.output, 1 << 16)
        except BlockingIOError:
            return False
        if not words:
            self._selector.unregister(leader.output)  # all its ends are closed; the descriptor goes with the process
            return False
        leader.output_tail = (leader.output_tail + words)[-_OUTPUT_TAIL_BYTES:]
        return True

    def _reap(self) -> None:
        while (pid := _ended_child()) is not None:
            leader = self._leaders.pop(pid, None)
            if leader is not None:
                kill_group(pid)
                self._kill_leftovers()
            _, status = os.waitpid(pid, 0)
            if leader is not None:
                self._report_exit(leader, status)

    def _kill_leftovers(self) -> None:
        """Kills adopted processes, with all below them, unless a simulator process that lives started them."""
        living = {leader.owner for leader in self._leaders.values()}
        adopted = [child for child in psutil.Process().children() if child.pid not in self._leaders]
        kill_trees([child for child in adopted if owner_of(child) not in living])

    def _report_exit(self, leader: _Leader, status: int) -> None:
        while leader.output in self._selector.get_map() and self._read_output(leader):
            pass
        with suppress(KeyError):
            self._selector.unregister(leader.output)
        os.close(leader.output)
        words = leader.output_tail.decode(errors="replace")
        self._say({"exited": leader.ticket, "status": status, "output_tail": words})

    def _end_all(self) -> None:
        """Kills and reaps until there is no child left."""
        deadline_s = time.monotonic() + _END_S
        self._selector.close()
        while time.monotonic() < deadline_s:
            for leader in self._leaders:
                kill_group(leader)
            for process in descendants(os.getpid()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            try:
                while os.waitpid(-1, os.WNOHANG)[0] != 0:
                    pass
            except ChildProcessError:
                return
            select.select([self._wake_read], [], [], 0.05)  # until the next of them ends
            self._woken()


def _simulate(spec: EnvWorkerSpec, channel: int) -> int:
    with socket.socket(fileno=channel) as to_parent:
        return int(run_env_worker(spec, to_parent, make_simulator))


@contextmanager
def _silence() -> Iterator[None]:
    """What a module prints when it is imported belongs to no simulator, and not into the user's terminal."""
    kept, null = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(null, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(null)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _ended_child() -> int | None:
    """A child that ended and is not reaped yet."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _owner(ticket: int, fork_server: int | None = None) -> str:
    return f"{fork_server or os.getpid()}.{ticket}"


def _wake_only(signal_number: int, frame: Any) -> None:
    """A handler that does nothing: the wake-up descriptor does."""


def main() -> None:
    """Serves the socket whose descriptor is the first argument; the second is a request that begins anew."""
    with socket.socket(fileno=int(sys.argv[1])) as link:
        os.set_inheritable(link.fileno(), False)
        fork_server = ForkServer(link)
        for request in sys.argv[2:]:
            fork_server.preload(json.loads(request))
        fork_server.serve()


if __name__ == "__main__":
    main()

"""Joins a Ray cluster, or starts one that only this machine reaches; notices its loss; leaves nothing of it behind.

Ray's noise is kept out of the terminal.
"""

# pyright: reportMissingImports=false
# Ray is an extra: type checking does without it.

import logging
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.ray_constants
import ray._private.worker
import ray.exceptions

from penstock.overseer.config import RayConfig
from penstock.overseer.launch.host import ComponentLog
from penstock.overseer.ray_actor import in_one_line
from penstock.types import ConfigError, RunFailed

_JOIN_ATTEMPTS = 3
_LOOK_S = 0.5
_OWN_PATIENCE_S = 1.0
"""Nobody starts the control service of our own cluster again."""
_JOINED_PATIENCE_S = 15.0
"""That of another may come back; but after 60 s without it Ray ends the driver, without a word to the run."""
_LAST_WAIT_S = 5.0


def connect(config: RayConfig, namespace: str) -> None:
    """Joins the cluster of the config, or starts one that only this machine reaches."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "WARNING"}
    if config.runtime_env:
        options["runtime_env"] = config.runtime_env
    try:
        with _signals_unchanged(), warnings.catch_warnings():
            # Ray forks to start its daemons, which begin another program at once: JAX need not warn of it.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            if config.address is not None:
                _join(config.address, options)
            else:
                with _this_machine_only():
                    ray.init("local", num_cpus=config.num_cpus, include_dashboard=False, **options)
    except Exception as error:  # bare ones, too, where a daemon of Ray does not answer in time
        aim = "start a cluster here" if config.address is None else f"join the cluster at ray.address {config.address}"
        raise ConfigError(f"Ray could not {aim}: {in_one_line(error)}") from error


def _join(address: str, options: Mapping[str, Any]) -> None:
    """Joins a cluster. The server of ``ray://`` now and then fails to start a client's process: it is asked again."""
    for left in reversed(range(_JOIN_ATTEMPTS)):
        try:
            ray.init(address, **options)
            return
        except ConnectionAbortedError:
            if not left or not address.startswith("ray://"):
                raise
            ray.shutdown()


@contextmanager
def _signals_unchanged() -> Iterator[None]:
    """How a run ends is not Ray's to say, and a terminal that closes ends the driver in good order, not Ray's daemons.

    Ray gives the driver a handler of SIGTERM that ends it at once. Its daemons and what they start go without SIGINT by
    Ray's doing, and by ours without SIGHUP: they inherit what is blocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # where Ray gives no handler
        return
    handler = signal.getsignal(signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _this_machine_only() -> Iterator[None]:
    """Ray's servers listen on the loopback address, and ask for a secret that is written nowhere.

    Without one in the environment Ray would write its own into the user's home. It stays there for further clusters of
    this process, as Ray reads it but once. Whoever has set RAY_AUTH_MODE or a token has chosen, and keeps that.
    """
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    constants, name = ray._private.ray_constants, "ENABLE_RAY_CLUSTER"
    whole = getattr(constants, name, True)  # that other machines may join: never on some systems, otherwise always
    setattr(constants, name, False)
    try:
        yield
    finally:
        setattr(constants, name, whole)


class ControlService:
    """Whether the cluster's control service (Ray's GCS) can be reached: without it nobody can be started or found.

    What runs goes on for a while, so that a run that ends in time saves its last version. Thread-safe.

    Args:
        address: Its host and port; None where it is reached through a client only, whose calls fail by themselves.
        own: Whether this process started the cluster.
    """

    def __init__(self, address: str | None, own: bool) -> None:
        self._address = address
        self._patience_s = _OWN_PATIENCE_S if own else _JOINED_PATIENCE_S
        self._remedy = "" if own else "start the cluster again, then "
        self._closed = threading.Event()
        self._reason = ""

    @property
    def is_lost(self) -> bool:
        """Whether it was given up; then whatever would ask it must not be asked."""
        return bool(self._reason)

    def check(self) -> None:
        """Returns at once.

        Raises:
            RunFailed: it was given up.
        """
        if self._reason:
            raise RunFailed(self._reason)

    def watch(self) -> None:
        """Looks now and then; returns when this is closed.

        Raises:
            RunFailed: it was not reached for too long.
        """
        reached_at = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            error = self._try()
            if error is None:
                reached_at = time.monotonic()
            elif (silent_s := time.monotonic() - reached_at) > self._patience_s:
                self._reason = (
                    f"Ray's control service (GCS) at {self._address} was not reached for {silent_s:.0f} s ({error}), "
                    f"and no run can go on without it: {self._remedy}go on from the newest checkpoint with --resume"
                )
                self.check()

    def _try(self) -> OSError | None:
        if self._address is None:
            return None
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _LOOK_S).close()
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Nobody looks any more."""
        self._closed.set()


def disconnect() -> None:
    """Leaves the cluster; one that was started here ends, with daemons that outlive its control service."""
    node: Any = ray._private.worker._global_node
    started = [info.process.pid for infos in node.all_processes.values() for info in infos] if node is not None else []
    daemons = [process for pid in started for process in _with_descendants(pid)]
    ray.shutdown()
    for daemon in daemons:
        with suppress(psutil.NoSuchProcess):
            daemon.kill()  # by number and start: never another that got the number
    psutil.wait_procs(daemons, timeout=_LAST_WAIT_S)


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class RayLogRedirect:
    """What Ray would print in the terminal goes into a log: its logger, and the messages of its daemons."""

    def __init__(self, path: Path) -> None:
        self._log = ComponentLog(path, 0)
        self._logger = logging.getLogger("ray")
        self._before = list(self._logger.handlers), self._logger.propagate
        self._logger.handlers, self._logger.propagate = [self._log], False
        self._printer = getattr(ray._private.worker, "print_to_stdstream", None)
        if self._printer is not None:
            setattr(ray._private.worker, "print_to_stdstream", self._print)  # noqa: B010

    def note(self, text: str) -> None:
        """Keeps a text."""
        self._logger.warning("%s", text)

    def _print(self, data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self._logger.warning("%s: %s", data.get("pid"), "\n".join(data.get("lines", ())))

    def close(self) -> None:
        """Ray prints as before."""
        if self._printer is not None:
            setattr(ray._private.worker, "print_to_stdstream", self._printer)  # noqa: B010
        self._logger.handlers, self._logger.propagate = self._before
        self._log.close()

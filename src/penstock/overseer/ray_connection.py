"""Joins a Ray cluster, or starts one that only this machine reaches, and keeps Ray's noise out of the terminal."""

# pyright: reportMissingImports=false
# Ray is an extra: type checking does without it.

import logging
import os
import secrets
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.worker
import ray.exceptions

from penstock.overseer.config import RayConfig
from penstock.overseer.distributed.component_logs import ComponentLog
from penstock.overseer.ray_actor import in_one_line
from penstock.types import ConfigError

_JOIN_ATTEMPTS = 3


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
    except (ConnectionError, ImportError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
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


class Noise:
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

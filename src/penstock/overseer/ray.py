"""Components as Ray actors, and the cluster that they live in; with `ray_actor` the only module that imports Ray.

Each component is one actor, restarts by Ray off; supervision is the overseer's alone. Names of actors hold the
incarnation and a token of this launcher's life, so that nobody reaches a component of another life by chance. Ray's own
transport pickles what it carries: it stays inside a cluster that the user trusts.

What a component needs to know of a process in order to end it (its machine, its number) is known before the component
is made: one that could not tell has made nothing. A driver that dies takes its actors along: they belong to it, and on
each machine the system kills them with Ray's own daemon there, stopped ones too.

A cluster is joined, or started for this machine alone; its loss is noticed, nothing of it is left behind, and Ray's
noise is kept out of the terminal.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from penstock.types import ConfigError, RunFailed, UnreachableError

try:
    import ray
    import ray._private.ray_constants
    import ray._private.worker
    import ray.exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as missing:
    raise ConfigError('runtime: ray needs Ray, which is not installed: pip install "penstock[ray]"') from missing

from penstock.overseer.config import RayConfig, RoleConfig
from penstock.overseer.launch.host import ComponentLog
from penstock.overseer.launch.launcher import Factory, amounts, check_fits
from penstock.overseer.ray_actor import (
    RAY_ERRORS,
    ActorDefaults,
    ActorLocation,
    ComponentActor,
    answer,
    end_process,
    in_one_line,
    unreachable,
)
from penstock.overseer.supervisor.messages import Identity, Membership, Report

MOST_CALLS = 100_000
"""Calls that one actor has at once; most of them wait in coroutines, and a heartbeat must not queue behind them."""

_SAVING_S, _LAST_END_S = 20.0, 5.0
"""For the learner's last version after the loss of the cluster, and for ending what is left then."""

_ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": MOST_CALLS}
_TASK_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}

log = logging.getLogger(__name__)


class RayHandle:
    """One incarnation of a component, seen from the overseer. Made by `RayLauncher.spawn`.

    Attributes:
        identity: Who it is.
        place: Where it runs; None before that is known.
    """

    def __init__(self, launcher: "RayLauncher", identity: Identity, actor: Any) -> None:
        self.identity = identity
        self.place: ActorLocation | None = None
        self._launcher = launcher
        self._actor = actor
        self._place_ref = actor.place.remote()
        self._kept: deque[Any] = deque(maxlen=4)  # a client's reference must not end in the thread that answers
        self._place_ref.future().add_done_callback(self._on_placed)

    def _on_placed(self, place: Future[ActorLocation]) -> None:
        if place.exception() is None:  # otherwise heartbeats tell of it
            self.place = place.result()
            self._launcher.in_turn(self._begin)

    def _begin(self) -> None:
        self._kept.append(self._actor.begin.remote())

    def beat(self, view: Membership | None, acknowledged: int) -> Future[Report]:
        """Tells it the view and asks how it is; see `Handle.beat`."""
        report: Future[Report] = Future()

        def pass_on(answer: Future[Report]) -> None:
            error = answer.exception()
            if error is None:
                report.set_result(answer.result())
            else:
                self._launcher.note(self.identity, error)
                report.set_exception(UnreachableError(in_one_line(error)))  # whoever asks knows whom

        try:
            answer = self._actor.beat.remote(self._launcher.carried(view), acknowledged)
            self._kept.append(answer)
            answer.future().add_done_callback(pass_on)
        except RAY_ERRORS as error:
            report.set_exception(UnreachableError(in_one_line(error)))
        return report

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls one of the component's methods; see `Handle.call`."""
        return answer(self._actor, self.identity, None, method, args, timeout_s).result()

    def kill(self, timeout_s: float) -> None:
        """Ends the process and returns when it is gone; see `Handle.kill`."""
        deadline = time.monotonic() + timeout_s
        try:
            ray.kill(self._actor, no_restart=True)  # from now on nothing is made where nothing was yet
            if self.place is None:
                self._wait_for_place(deadline)
            gone = self.place is None or self._launcher.end_process(self.place, deadline)
        except RAY_ERRORS as error:
            raise unreachable(self.identity, error) from error
        if not gone:
            raise UnreachableError(f"{self.identity}: its process is not known to be gone after {timeout_s:g} s")
        self._launcher.forget(self)

    def _wait_for_place(self, deadline: float) -> None:
        """Until Ray says where it runs, or that it never will."""
        try:
            self.place = ray.get(self._place_ref, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise UnreachableError(f"{self.identity}: Ray says neither where it runs nor that it is dead") from error
        except ray.exceptions.RayError:
            return  # it never ran, and never will


class RayLauncher:
    """Starts components on a Ray cluster. Thread-safe.

    Make it in a thread that lives as long as the launcher: the system ends a cluster started here with that thread.

    Args:
        config: Which cluster, and the environment of user code.
        run_id: Names the run's actors, such as the run directory's name.
        run_dir: Logs go to its ``logs``.

    Raises:
        ConfigError: there is no cluster at the address, or it cannot be joined.
    """

    def __init__(self, config: RayConfig, run_id: str, run_dir: Path) -> None:
        logs = run_dir.absolute() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._life = ActorDefaults(config.namespace or f"penstock-{run_id}", secrets.token_hex(4), logs)
        self._lock = threading.Lock()
        self._handles: dict[RayHandle, dict[str, float]] = {}
        self._carried: tuple[Membership, Any] | None = None
        self._last_end: threading.Timer | None = None
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="ray-launcher")
        self._noise = RayLogRedirect(logs / "ray.jsonl")
        self._connected_here = not ray.is_initialized()
        try:
            if self._connected_here:
                connect(config, self._life.namespace)
            else:
                check_connection(config)
        except ConfigError:
            self._noise.close()
            raise
        self._actor_class: Any = ray.remote(**_ACTOR_OPTIONS)(ComponentActor)
        self._end_task: Any = ray.remote(**_TASK_OPTIONS)(end_process)
        is_client = not ray._private.worker.global_worker.connected
        context = None if is_client else ray.get_runtime_context()
        self._node_id = None if context is None else context.get_node_id()
        self._control = ControlService(None if context is None else context.gcs_address, config.address is None)

    @property
    def machines(self) -> int:
        """How many the cluster has at present, by their addresses."""
        return len({node["NodeManagerAddress"] for node in self._nodes()})

    def watch(self) -> None:
        """Looks after the cluster, in a thread of its own; returns when the launcher is closed.

        Components that have not ended by themselves some time after a loss are ended then: they may wait for an answer
        of the cluster's that never comes, and soon after that Ray ends this process without a word.

        Raises:
            RunFailed: the cluster's control service is gone.
        """
        try:
            self._control.watch()
        except RunFailed:
            self._last_end = threading.Timer(_SAVING_S, self._end_all, [_LAST_END_S])
            self._last_end.daemon = True
            self._last_end.start()
            raise

    def spawn(
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], resources: RoleConfig, view: Membership
    ) -> RayHandle:
        """Starts an incarnation; see `Launcher.spawn`.

        Raises:
            ConfigError: the cluster can never place it. Later incarnations wait for room instead: a machine may have
                died, and may come back.
            RunFailed: the cluster's control service is gone.
        """
        self._control.check()
        if identity.incarnation == 0:
            self.check_room([(identity, resources)], [])
        shows_gpus = resources.num_gpus > 0 or "CUDA_VISIBLE_DEVICES" in resources.env
        actor = self._actor_class.options(
            name=self._life.actor_name(identity),
            namespace=self._life.namespace,
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            resources=dict(resources.resources) or None,
            scheduling_strategy="SPREAD" if resources.spread else "DEFAULT",
            runtime_env={"env_vars": dict(resources.env)} if resources.env else None,
        ).remote(identity, factory, settings, view, self._life, shows_gpus)
        handle = RayHandle(self, identity, actor)
        with self._lock:
            self._handles[handle] = amounts(resources)
        return handle

    def check_room(self, newcomers: Sequence[tuple[Identity, RoleConfig]], others: Sequence[RoleConfig]) -> None:
        """Compares what they ask for with the cluster's machines; see `Launcher.check_room`."""
        with self._lock:
            reserved = [*self._handles.values(), *map(amounts, others)]
        machines = [node["Resources"] for node in self._nodes()]
        for identity, resources in newcomers:
            check_fits(identity, resources, machines, reserved)
            reserved.append(amounts(resources))

    def close(self, timeout_s: float) -> None:
        """Ends every process it started; see `Launcher.close`. A second call does nothing."""
        if self._last_end is not None:
            self._last_end.cancel()
        self._end_all(timeout_s)
        self._turns.shutdown(wait=False, cancel_futures=True)
        self._control.close()
        if self._connected_here and ray.is_initialized():
            disconnect()
        self._noise.close()

    def _end_all(self, timeout_s: float) -> None:
        with self._lock:
            handles = list(self._handles)
        with ThreadPoolExecutor(16, thread_name_prefix="ray-close") as pool:
            ends = [(handle, pool.submit(handle.kill, timeout_s)) for handle in handles]
        for handle, end in ends:
            if isinstance(end.exception(), UnreachableError):
                log.warning("%s: %s", handle.identity, end.exception())

    # --- for its handles -----------------------------------------------------------------------------------------

    def carried(self, view: Membership | None) -> Any:
        """A view as an object of Ray: pickled once, however many are told of it."""
        if view is None:
            return None
        with self._lock:
            if self._carried is None or self._carried[0] is not view:
                self._carried = view, ray.put(view)
            return self._carried[1]

    def in_turn(self, action: Callable[[], Any]) -> None:
        """Does something in a thread that may wait; Ray's own that tell of answers may not."""
        with suppress(RuntimeError):  # closed: nothing begins any more
            self._turns.submit(action)

    def note(self, identity: Identity, error: BaseException) -> None:
        """Keeps Ray's own text of an error, which is told in one line elsewhere."""
        self._noise.note(f"{identity}: {type(error).__name__}: {error}")

    def forget(self, handle: RayHandle) -> None:
        """It is gone, and reserves nothing any more."""
        with self._lock:
            self._handles.pop(handle, None)

    def end_process(self, place: ActorLocation, deadline: float) -> bool:
        """Kills a process, on this machine or another; whether it is gone."""
        remaining = max(0.0, deadline - time.monotonic())
        if place.node_id == self._node_id:
            return place.process.end(remaining)
        there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        task = self._end_task.options(scheduling_strategy=there).remote(place.process, remaining)
        while (left := deadline - time.monotonic()) > 0:
            try:
                return ray.get(task, timeout=min(1.0, left))
            except ray.exceptions.GetTimeoutError:
                if self._is_gone(place.node_id):
                    return True
            except ray.exceptions.RayError as error:
                if self._is_gone(place.node_id):
                    return True
                log.warning("ending %s: %s", place, in_one_line(error))
                time.sleep(min(0.5, left))
                task = self._end_task.options(scheduling_strategy=there).remote(place.process, left)
        return False

    def _is_gone(self, node_id: str) -> bool:
        """A machine that Ray gave up: its daemon ends itself and, by `end_with_parent`, what ran there."""
        return not self._control.is_lost and not any(node["NodeID"] == node_id for node in self._nodes())

    def _nodes(self) -> list[dict[str, Any]]:
        """The machines that Ray has not given up.

        Raises:
            RunFailed: the control service is gone, and the question would never be answered.
        """
        self._control.check()
        return [node for node in ray.nodes() if node["Alive"]]


_JOIN_ATTEMPTS = 3
_KNOCK_S = 10.0
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


def check_connection(config: RayConfig) -> None:
    """Refuses what the config asks of a connection that the program itself made before, since it would not act.

    Of an address only the port is compared: a machine has several names.
    """
    before = "this process is connected to Ray already, by its own ray.init"
    for name, is_given in (("num_cpus", config.num_cpus is not None), ("runtime_env", bool(config.runtime_env))):
        if is_given:
            raise ConfigError(
                f"ray.{name} is given, and {before}, to which it belongs: give it there, or call ray.shutdown before "
                "the run"
            )
    host, _, port = (config.address or "").rpartition(":")
    connected = ray._private.worker.global_worker.connected  # otherwise by a client, whose address nobody knows
    there = ray.get_runtime_context().gcs_address if connected else ""
    if host and there and (host.startswith("ray:") or port != there.rpartition(":")[2]):
        raise ConfigError(
            f"ray.address is {config.address}, and {before}, at {there}: leave ray.address out to take that cluster, "
            "or call ray.shutdown before the run"
        )


def _join(address: str, options: Mapping[str, Any]) -> None:
    """Joins a cluster. The server of ``ray://`` now and then fails to start a client's process: it is asked again.

    Where nobody listens Ray would try for minutes, without a word.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
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

"""Many simulated workers in few processes, as the supervisor sees them: each with an identity and a host of its own.

A `Farm` is an actor. For each worker it has a real `penstock.overseer.launch.host.ComponentHost`, which takes the
views, answers the heartbeats and refuses whom it must; the worker's calls go straight to the actor of the replay
buffer. So every message travels as in a run, but through fewer sockets: a farm's workers share one connection to each
process.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from benchmarks.scale.latencies import Latencies
from benchmarks.scale.worker import SimulatedWorker
from penstock.overseer.config import RoleConfig
from penstock.overseer.launch.host import ComponentHost
from penstock.overseer.launch.launcher import ComponentContext, Factory, Handle
from penstock.overseer.launch.process import Process
from penstock.overseer.ray import ActorDefaults, ActorLocation, RayHandle, RayLauncher
from penstock.overseer.supervisor.messages import Identity, Membership, Report
from penstock.types import UnreachableError

CALL_S = 60.0
SPAWN_S = 120.0
_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 100_000}


class Farm:
    """One process of simulated workers. Its methods are coroutines of one event loop, which is the workers' too."""

    def __init__(self, life: ActorDefaults, speed: float) -> None:
        self._life = life
        self._speed = speed
        self._hosts: dict[Identity, ComponentHost] = {}
        self._replay: tuple[Identity, Any] | None = None
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._groups: list[str] = []
        self._hurry = asyncio.Event()
        self._views: dict[Any, asyncio.Future[Membership]] = {}

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    async def place(self, identity: Identity) -> ActorLocation:
        """As of an actor of its own."""
        return ActorLocation(ray.get_runtime_context().get_node_id(), Process.this())

    async def add(self, identity: Identity, view: Membership) -> None:
        """Takes a worker in."""
        loop = asyncio.get_running_loop()

        def make(ctx: ComponentContext, settings: Mapping[str, Any]) -> SimulatedWorker:
            async def call(method: str, *args: Any) -> Any:
                return await self._call(ctx, method, args)

            return SimulatedWorker(ctx, call, loop, self._pace, self._hurry, self._groups.append)

        self._hosts[identity] = ComponentHost(identity, make, {}, view, _nobody)

    async def begin(self, identity: Identity) -> None:
        """Starts it."""
        self._hosts[identity].start()

    async def beat(self, identity: Identity, views: Sequence[Any], acknowledged: int) -> Report:
        """See `ComponentHost.beat`; a view comes as Ray's object, which is read once for all workers here."""
        view = None
        for reference in views:
            if reference not in self._views:
                self._views = {reference: asyncio.ensure_future(reference)}
            view = await self._views[reference]
        return await self._hosts[identity].beat(view, acknowledged)

    async def call(self, identity: Identity, sender: Identity | None, method: str, args: tuple[Any, ...]) -> Any:
        """See `ComponentHost.call`."""
        return await self._hosts[identity].call(sender, method, args)

    async def remove(self, identity: Identity) -> None:
        """Ends one."""
        host = self._hosts.pop(identity, None)
        if host is not None:
            host.close(0.0)

    async def hurry(self) -> None:
        """All finish at once what they began, and begin nothing more."""
        self._hurry.set()

    async def set_speed(self, speed: float) -> None:
        """Engines answer so much faster than measured."""
        self._speed = speed

    async def take(self) -> tuple[dict[str, list[float]], list[str]]:
        """Seconds of each call since the last question, by method; ids of the groups that were taken."""
        found, self._seconds = dict(self._seconds), defaultdict(list)
        groups = list(self._groups)
        self._groups.clear()
        return found, groups

    def _pace(self) -> Latencies:
        return Latencies(speed=self._speed)

    async def _call(self, ctx: ComponentContext, method: str, args: tuple[Any, ...]) -> Any:
        peer = ctx.view.peer("replay-0")
        if peer is None:
            raise UnreachableError("replay-0 is not running at present")
        actor, began = self._actor(peer.identity), time.perf_counter()
        try:
            answer = await asyncio.wait_for(actor.call.remote(ctx.identity, method, args), CALL_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise UnreachableError(f"{method}: {error}") from error
        if not (method == "acquire" and not answer.value):  # nobody was admitted: that is waiting, not answering
            self._seconds[method].append(time.perf_counter() - began)
        return answer.result()

    def _actor(self, whom: Identity) -> Any:
        if self._replay is None or self._replay[0] != whom:
            self._replay = whom, ray.get_actor(self._life.actor_name(whom), self._life.namespace)
        return self._replay[1]


def _nobody(*_: Any) -> Any:
    raise UnreachableError("a simulated worker calls the replay buffer alone")


class _Guest:
    """A worker of a farm, where an actor of its own is expected."""

    def __init__(self, farm: Any, identity: Identity) -> None:
        self.place, self.begin = _Method(farm.place, identity), _Method(farm.begin, identity)
        self.beat, self.call = _Beat(farm.beat, identity), _Method(farm.call, identity)


class _Method:
    def __init__(self, method: Any, identity: Identity) -> None:
        self._method, self._identity = method, identity

    def remote(self, *args: Any) -> Any:
        return self._method.remote(self._identity, *args)


class _Beat:
    """In a list a reference stays one on its way."""

    def __init__(self, method: Any, identity: Identity) -> None:
        self._method, self._identity = method, identity

    def remote(self, view: Any, acknowledged: int) -> Any:
        return self._method.remote(self._identity, [] if view is None else [view], acknowledged)


class TimedHandle:
    """Implements `Handle` by another one, and takes the time of its heartbeats."""

    def __init__(self, handle: RayHandle, note: Callable[[float], None], kill: Callable[[float], None]) -> None:
        self._handle, self._note, self._kill = handle, note, kill

    @property
    def identity(self) -> Identity:
        """See `Handle.identity`."""
        return self._handle.identity

    def beat(self, view: Membership | None, acknowledged: int) -> Future[Report]:
        """See `Handle.beat`."""
        began = time.perf_counter()
        answer = self._handle.beat(view, acknowledged)
        answer.add_done_callback(lambda _: self._note(time.perf_counter() - began))
        return answer

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Handle.call`."""
        return self._handle.call(method, *args, timeout_s=timeout_s)

    def kill(self, timeout_s: float) -> None:
        """See `Handle.kill`."""
        self._kill(timeout_s)


class FarmLauncher:
    """Implements `Launcher`: rollout workers live in farms, all others are actors as ever.

    Args:
        launcher: Starts those.
        farms: How many.
        speed: See `Farm.set_speed`.
    """

    def __init__(self, launcher: RayLauncher, farms: int, speed: float) -> None:
        self._launcher = launcher
        self.beats_s: list[float] = []
        self._life: ActorDefaults = launcher._life  # pyright: ignore[reportPrivateUsage]
        self._farms: list[Any] = [ray.remote(**_OPTIONS)(Farm).remote(self._life, speed) for _ in range(farms)]  # pyright: ignore
        self.pids: list[int] = ray.get([farm.pid.remote() for farm in self._farms], timeout=SPAWN_S)

    def spawn(
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], resources: RoleConfig, view: Membership
    ) -> Handle:
        """See `Launcher.spawn`."""
        if identity.role != "rollout":
            handle = self._launcher.spawn(identity, factory, settings, resources, view)
            return TimedHandle(handle, self.beats_s.append, handle.kill)
        farm = self._farms[identity.index % len(self._farms)]
        farm.add.remote(identity, view)
        handle = RayHandle(self._launcher, identity, _Guest(farm, identity))

        def kill(timeout_s: float) -> None:
            ray.get(farm.remove.remote(identity), timeout=timeout_s)

        return TimedHandle(handle, self.beats_s.append, kill)

    def check_room(self, newcomers: Sequence[tuple[Identity, RoleConfig]], others: Sequence[RoleConfig]) -> None:
        """See `Launcher.check_room`: a farm has room for all."""

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the farms; the launcher of the others belongs to somebody else."""
        for farm in self._farms:
            ray.kill(farm, no_restart=True)

    # --- for the benchmark -------------------------------------------------------------------------------------------

    def take(self) -> tuple[dict[str, list[float]], set[str]]:
        """Calls of all workers since the last question, and heartbeats; ids of the groups that were taken."""
        seconds: dict[str, list[float]] = defaultdict(list)
        groups: set[str] = set()
        for found, taken in ray.get([farm.take.remote() for farm in self._farms], timeout=CALL_S):
            for method, those in found.items():
                seconds[method] += those
            groups |= set(taken)
        seconds["heartbeat"], self.beats_s[:] = list(self.beats_s), []
        return dict(seconds), groups

    def hurry(self) -> None:
        """All workers finish at once what they began, and begin nothing more."""
        ray.get([farm.hurry.remote() for farm in self._farms], timeout=CALL_S)

    def set_speed(self, speed: float) -> None:
        """Of all engines."""
        ray.get([farm.set_speed.remote(speed) for farm in self._farms], timeout=CALL_S)


def cluster(path: Path) -> RayLauncher:
    """One for all phases of the benchmark, on this machine."""
    from penstock.overseer.config import RayConfig

    return RayLauncher(RayConfig(num_cpus=8), "scale", path)

"""A launcher of threads instead of processes, for tests: the same hosts and components, and faults on demand.

What crosses between components is copied, as it would be between processes. A thread cannot be killed: a component
that "died" can reach nobody and is reached by nobody, its `stop` is called, and what it still does is lost.
"""

import asyncio
import copy
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from penstock.overseer.config import RoleConfig
from penstock.overseer.launch.host import ComponentHost
from penstock.overseer.launch.launcher import Factory
from penstock.overseer.supervisor.messages import Identity, Membership, Reply, Report
from penstock.types import ConfigError, Stopped, UnreachableError

STOP_S = 5.0


class ThreadHandle:
    """One incarnation. Made by `ThreadLauncher.spawn`."""

    def __init__(self, identity: Identity, resources: RoleConfig) -> None:
        self.identity = identity
        self.resources = resources
        self.host: ComponentHost | None = None
        self.alive = True
        self.stuck = False
        self.thawed = threading.Event()
        self.thawed.set()
        self.waiting: list[Future[Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"{identity.name}.loop", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop was closed meanwhile
            coroutine.close()
            raise UnreachableError(f"{self.identity} is dead") from None

    def beat(self, view: Membership | None, acknowledged: int) -> Future[Report]:
        answer: Future[Report] = Future()
        if not self.alive:
            answer.set_exception(UnreachableError(f"{self.identity} is dead"))
            return answer
        self.waiting = [future for future in self.waiting if not future.done()] + [answer]
        try:
            self._submit(self._beat(copy.deepcopy(view), acknowledged, answer))
        except UnreachableError as error:
            answer.set_exception(error)
        return answer

    async def _beat(self, view: Membership | None, acknowledged: int, answer: Future[Report]) -> None:
        assert self.host is not None
        while not self.thawed.is_set():
            await asyncio.sleep(0.005)
        report = copy.deepcopy(await self.host.beat(view, acknowledged))
        if self.alive and not answer.done():
            answer.set_result(report)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self.answer(None, method, args, timeout_s).result()

    def answer(self, sender: Identity | None, method: str, args: tuple[Any, ...], timeout_s: float) -> Reply:
        if not self.alive:
            raise UnreachableError(f"{self.identity} is dead")
        assert self.host is not None
        deadline, running = time.monotonic() + timeout_s, None
        while self.alive and time.monotonic() < deadline:
            if not self.thawed.wait(0.005):
                continue
            running = running or self._submit(self.host.call(sender, method, copy.deepcopy(args)))
            if wait([running], 0.01).done and self.alive and self.thawed.is_set():
                return copy.deepcopy(running.result())
        reason = f"did not answer {method} within {timeout_s:g} s" if self.alive else f"died during {method}"
        raise UnreachableError(f"{self.identity} {reason}")

    def kill(self, timeout_s: float) -> None:
        if self.stuck:
            time.sleep(min(timeout_s, 0.05))
            raise UnreachableError(f"{self.identity} could not be ended within {timeout_s:g} s")
        self.die()

    def die(self) -> None:
        """It is gone: what waits for it is told so."""
        if not self.alive:
            return
        self.alive = False
        self.thawed.set()
        for future in self.waiting:
            if not future.done():
                future.set_exception(UnreachableError(f"{self.identity} died"))
        if self.host is not None:
            self.host.close(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


class ThreadLauncher:
    """Starts components in threads.

    Faults, by the component's name (its newest incarnation): `die`, `freeze` and `thaw`; `refuse` for the next spawns
    of a component, which then could not be made; `stick`, for a process that cannot be shown dead; `late_call`, for
    a message of an incarnation that was replaced.

    Attributes:
        handles: Every incarnation that was ever started, in order.
        settings: What each was started with.
        room: So many more may be added while the run goes on; None for no limit.
    """

    def __init__(self) -> None:
        self.handles: dict[Identity, ThreadHandle] = {}
        self.settings: dict[Identity, Mapping[str, Any]] = {}
        self.room: int | None = None
        self._refused: set[str] = set()

    def spawn(
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], resources: RoleConfig, view: Membership
    ) -> ThreadHandle:
        assert identity not in self.handles, f"{identity} was started before"
        handle = self.handles[identity] = ThreadHandle(identity, resources)
        self.settings[identity] = settings
        if identity.name in self._refused:
            self._refused.remove(identity.name)
            handle.die()
            return handle
        handle.host = ComponentHost(identity, factory, copy.deepcopy(settings), copy.deepcopy(view), self._reach)
        handle.host.start()
        return handle

    def check_room(self, newcomers: Sequence[tuple[Identity, RoleConfig]], others: Sequence[RoleConfig]) -> None:
        if self.room is not None and len(newcomers) + len(others) > self.room:
            raise ConfigError(f"there is no room for {newcomers[-1][0].name}")

    def close(self, timeout_s: float) -> None:
        for handle in self.handles.values():
            handle.die()

    def _reach(self, whom: Identity, sender: Identity, method: str, args: tuple[Any, ...], timeout_s: float) -> Reply:
        own = self.handles[sender]
        while not own.thawed.wait(0.05):  # it does nothing at all while it is stopped
            pass
        if not own.alive:
            raise Stopped(f"{sender} died")
        if whom not in self.handles:
            raise UnreachableError(f"{whom} is not there")
        return self.handles[whom].answer(sender, method, args, timeout_s)

    # --- faults --------------------------------------------------------------------------------------------------

    def newest(self, name: str) -> ThreadHandle:
        """The newest incarnation of a component."""
        return max((h for h in self.handles.values() if h.identity.name == name), key=lambda h: h.identity.incarnation)

    def incarnations(self, name: str) -> list[int]:
        """Every incarnation of a component that was started."""
        return sorted(identity.incarnation for identity in self.handles if identity.name == name)

    def die(self, name: str) -> None:
        """As SIGKILL."""
        self.newest(name).die()

    def freeze(self, name: str) -> None:
        """As SIGSTOP: it answers nothing, and says nothing."""
        self.newest(name).thawed.clear()

    def thaw(self, name: str) -> None:
        """As SIGCONT."""
        self.newest(name).thawed.set()

    def refuse(self, name: str) -> None:
        """The next start of a component fails."""
        self._refused.add(name)

    def stick(self, name: str, stuck: bool = True) -> None:
        """Its process cannot be shown dead."""
        self.newest(name).stuck = stuck

    def late_call(self, sender: Identity, name: str, method: str, *args: Any) -> Any:
        """A call by any incarnation, dead or not, to the newest one of a component."""
        return self.newest(name).answer(sender, method, args, 5.0).result()

"""A component in its own process, as a Ray actor, and how it reaches the others."""

# pyright: reportMissingImports=false
# Ray is an extra: type checking does without it.

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.worker
import ray.exceptions

from penstock.overseer.launch.host import ComponentHost, open_component_logs
from penstock.overseer.launch.launcher import Factory
from penstock.overseer.launch.process import Process, end_with_parent
from penstock.overseer.supervisor.messages import Identity, Membership, Reply, Report
from penstock.types import UnreachableError
from penstock.types.calls import in_background

RAY_ERRORS = (ray.exceptions.RayError, ConnectionError)
"""What Ray raises; the second where it is reached as a client."""


@dataclass(frozen=True, slots=True)
class ActorDefaults:
    """What all components of one launcher have in common.

    Attributes:
        namespace: Ray's, of the actors.
        token: Part of every actor's name.
        logs: Directory of the components' logs, an absolute path.
    """

    namespace: str
    token: str
    logs: Path

    def actor_name(self, identity: Identity) -> str:
        """Unique in the namespace."""
        return f"{identity}@{self.token}"


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """Where an actor runs: Ray's id of the machine, and the process there."""

    node_id: str
    process: Process


class ComponentActor:
    """The host of one component as a Ray actor. Its methods are coroutines: thousands of calls may wait at once."""

    def __init__(
        self,
        identity: Identity,
        factory: Factory,
        settings: Mapping[str, Any],
        view: Membership,
        life: ActorDefaults,
        shows_gpus: bool,
    ) -> None:
        end_with_parent()
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # calls wait in threads of their own
        if not shows_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        open_component_logs(life.logs, identity)
        self._host = ComponentHost(identity, factory, settings, view, ActorCalls(life).reach)
        _on_termination(lambda: self._host.drain("SIGTERM"))

    async def place(self) -> ActorLocation:
        """Where this is; asked before the component is made."""
        return ActorLocation(ray.get_runtime_context().get_node_id(), Process.this())

    async def begin(self) -> None:
        """Makes the component."""
        self._host.start()

    async def beat(self, view: Membership | None, acknowledged: int) -> Report:
        """One heartbeat of the component that this actor hosts."""
        return await self._host.beat(view, acknowledged)

    async def call(self, sender: Identity | None, method: str, args: tuple[Any, ...]) -> Reply:
        """Answers a call by another component, or by the overseer."""
        return await self._host.call(sender, method, args)


def _on_termination(notice: Callable[[], None]) -> None:
    """Has SIGTERM give a notice instead of ending the process.

    Ray installs a handler in every worker's main thread, which no code of an actor ever runs in; that handler ends the
    process by the function replaced here. Where another version of Ray has no such function, SIGTERM ends the process.
    """

    def give_notice(*_: Any, **__: Any) -> None:
        threading.Thread(target=notice, name="termination-notice", daemon=True).start()

    name = "raise_sys_exit_with_custom_error_message"
    if hasattr(ray._private.worker, name):
        setattr(ray._private.worker, name, give_notice)


class ActorCalls:
    """Calls other components' actors by their identities."""

    def __init__(self, life: ActorDefaults) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._actors: dict[Identity, Future[Any]] = {}

    def reach(self, whom: Identity, sender: Identity, method: str, args: tuple[Any, ...], timeout_s: float) -> Reply:
        """Calls a method of another component's actor, and waits for its reply within the limit."""
        deadline = time.monotonic() + timeout_s
        actor = self._actor(whom, timeout_s)
        return answer(actor, whom, sender, method, args, max(0.0, deadline - time.monotonic()))

    def _actor(self, whom: Identity, timeout_s: float) -> Any:
        """The first time the cluster is asked, in a thread: one that has lost its control service does not answer."""
        with self._lock:
            for old in [known for known in self._actors if known.name == whom.name and known != whom]:
                del self._actors[old]
            found = self._actors.get(whom)
            if found is None or (found.done() and found.exception() is not None):
                name = self._life.actor_name(whom), self._life.namespace
                found = self._actors[whom] = in_background(lambda: ray.get_actor(*name))
        try:
            return found.result(timeout_s)
        except TimeoutError as error:
            raise UnreachableError(f"the cluster did not say within {timeout_s:g} s where {whom} is") from error
        except (ValueError, *RAY_ERRORS) as error:
            raise UnreachableError(f"{whom} is not there: {in_one_line(error)}") from error


def answer(
    actor: Any, whom: Identity, sender: Identity | None, method: str, args: tuple[Any, ...], timeout_s: float
) -> Reply:
    """The answer of a component's actor.

    Raises:
        UnreachableError: there was none in time, or the actor is gone.
    """
    try:
        return ray.get(actor.call.remote(sender, method, args), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise UnreachableError(f"{whom} did not answer {method} within {timeout_s:g} s") from error
    except RAY_ERRORS as error:
        raise unreachable(whom, error) from error


def unreachable(whom: Identity, error: BaseException) -> UnreachableError:
    """What an error of Ray means to whoever asked a component."""
    return UnreachableError(f"{whom} cannot be reached: {in_one_line(error)}")


_MEANINGS = (
    ("NODE_OUT_OF_MEMORY", "Ray ended its process, since its machine ran out of memory"),
    ("its node has died", "its machine is gone"),
    ("killed by `ray.kill`", "it was ended by ray.kill"),
    ("its owner has died", "the process that started it is gone"),
    ("receives a SIGTERM", "its process was ended by SIGTERM"),
    ("SYSTEM_ERROR", "it was killed or crashed (SIGKILL, out of memory, SIGSEGV)"),
    ("_EXIT", "its process ended by itself"),
    ("USER_ERROR", "its process ended by itself"),
)
"""What Ray's texts hold, in this order, and what it means. Ray does not know by which signal a process ended."""
_MOST_WORDS = 200  # characters of a text that is not known


def in_one_line(error: Any) -> str:
    """An error of Ray in one line; its own go over a page, and come to the point late."""
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return _MEANINGS[0][1]
    if isinstance(error, ray.exceptions.RayActorError):
        if error.actor_init_failed:
            last = [line.strip() for line in text.splitlines() if line.strip()][-1]
            return f"its start raised {last[:_MOST_WORDS]}"
        if error.preempted:
            return "its machine was taken away"
        for sign, meaning in _MEANINGS:
            if sign in text:
                return meaning
    words = " ".join(text.split())
    words = words.partition("The actor is dead because ")[2] or words
    return f"{type(error).__name__}: {words[:_MOST_WORDS]}"


def end_process(process: Process, timeout_s: float) -> bool:
    """A task that runs on the process's machine."""
    return process.end(timeout_s)

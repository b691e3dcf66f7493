"""What surrounds a component in its process, whichever launcher made that.

The component is made and started in a thread of its own, so that heartbeats are answered meanwhile: a process that
compiles is not a process that hangs. Calls are answered on the launcher's event loop: methods that are coroutine
functions wait there, thousands at once if need be; all others run in threads, at most `CALL_THREADS` at once.
Heartbeats have a thread to themselves.

An error of the component while it is made or started is its condition `failed`; an error of a called method is the
answer of that call, and no more.
"""

import asyncio
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.overseer.distributed.answers import Answer
from penstock.overseer.distributed.component import Component, Factory
from penstock.overseer.distributed.outbox import Outbox
from penstock.overseer.distributed.records import Condition, Identity, Report, View
from penstock.overseer.distributed.senders import Senders
from penstock.types import Caller, PenstockError, SupersededError, UnreachableError

CALL_THREADS = 256
"""Blocking calls that are answered at once; they are bounded waits, so that more only queue for a while."""

OVERSEER_ONLY = frozenset({"start", "look", "condition", "drain", "stop"})
"""A component's own life is not for its peers to touch."""

Reach = Callable[[Identity, Identity, str, tuple[Any, ...], float], Answer]
"""(whom, from whom, method, arguments, limit in seconds) → answer; raises `UnreachableError`. Given by the launcher."""

log = logging.getLogger(__name__)


class Host:
    """Makes a component, passes its calls and messages on, and answers for it. Thread-safe.

    Args:
        identity: Whose process this is.
        factory: Makes the component.
        settings: Its second argument.
        view: The first view.
        reach: How other incarnations are called.
    """

    def __init__(
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], view: View, reach: Reach
    ) -> None:
        self.identity = identity
        self._reach = reach
        self._lock = threading.Lock()
        self._view = view
        self._senders = Senders()
        self._senders.look(view)
        self._outbox = Outbox()
        self._component: Component | None = None
        self._failure = ""
        self._draining = False
        self._calls = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix=f"{identity.name}.call")
        self._beats = ThreadPoolExecutor(1, thread_name_prefix=f"{identity.name}.beat")
        self._maker = threading.Thread(
            target=self._make, args=(factory, settings), name=f"{identity.name}.start", daemon=True
        )

    def start(self) -> None:
        """Begins to make the component, and returns at once."""
        self._maker.start()

    @property
    def view(self) -> View:
        """The newest."""
        return self._view

    # --- for the overseer ----------------------------------------------------------------------------------------

    async def beat(self, view: View | None, acknowledged: int) -> Report:
        """One heartbeat.

        Args:
            view: Taken when it is newer than the present one; None where it was told of the newest before.
            acknowledged: Number of the last message that was logged.
        """
        return await asyncio.get_running_loop().run_in_executor(self._beats, self._beat, view, acknowledged)

    def _beat(self, view: View | None, acknowledged: int) -> Report:
        if view is not None:
            self._look(view)
        condition = self._condition()  # before the messages: what came before a final state travels with it
        messages = self._outbox.unacknowledged(acknowledged)
        return Report(self.identity, os.getpid(), socket.gethostname(), condition, messages)

    def drain(self, reason: str) -> None:
        """Lets the component finish what it began, now or as soon as it is made; a second call does nothing."""
        with self._lock:
            if self._draining:
                return
            self._draining, component = True, self._component
        log.info("draining: %s", reason)
        self._outbox.put("event", 0, "drain_notice", {"component": str(self.identity), "reason": reason})
        if component is not None:
            component.drain()

    def close(self, timeout_s: float) -> None:
        """Stops the component, where there is one, and takes no further calls."""
        component = self._component
        if component is not None:
            component.stop(timeout_s)
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._beats.shutdown(wait=False, cancel_futures=True)

    # --- calls ---------------------------------------------------------------------------------------------------

    async def call(self, sender: Identity | None, method: str, args: tuple[Any, ...]) -> Answer:
        """Answers a call by another component, or by the overseer.

        Args:
            sender: Who calls; None is the overseer.
            method: A public method of the component.
            args: Its arguments.
        """
        try:
            target = self._target(sender, method)
            if inspect.iscoroutinefunction(target):
                return Answer(await target(*args))
            return Answer(await asyncio.get_running_loop().run_in_executor(self._calls, target, *args))
        except PenstockError as error:
            return Answer.of(error)
        except Exception as error:  # the caller's to know; this process goes on
            log.exception("%s by %s failed", method, sender or "the overseer")
            return Answer.of(error)

    def _target(self, sender: Identity | None, method: str) -> Callable[..., Any]:
        if sender is not None:
            with self._lock:
                self._senders.check(sender)
        component = self._component
        if component is None:
            reason = f"failed to start: {self._failure}" if self._failure else "is starting"
            raise UnreachableError(f"{self.identity} {reason}")
        barred = method.startswith("_") or (sender is not None and method in OVERSEER_ONLY)
        target = None if barred else getattr(component, method, None)
        if not callable(target):
            raise PenstockError(f"{type(component).__name__} of {self.identity} has no method {method} for others")
        return target

    # --- what the component is given -----------------------------------------------------------------------------

    def caller(self, name: str) -> Caller:
        """Calls the living incarnation of another component, whichever that is at the time of each call."""
        return _Caller(self, name)

    def call_peer(self, name: str, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """See `Caller.call`."""
        view = self._view
        own, peer = view.peer(self.identity.name), view.peer(name)
        if own is not None and own.identity.incarnation > self.identity.incarnation:
            raise SupersededError(f"{self.identity} was replaced by {own.identity}")
        if peer is None:
            raise UnreachableError(f"{name} is not running at present: {method} was not called")
        return self._reach(peer.identity, self.identity, method, args, timeout_s).result()

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        """Something for events.jsonl."""
        self._outbox.put("event", step, kind, fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line for metrics.jsonl."""
        self._outbox.put("metrics", step, "", values)

    def samples(self, step: int, conversations: list[Any]) -> None:
        """Sample conversations for the trackers."""
        self._outbox.put("samples", step, "", {"conversations": conversations})

    # --- inside --------------------------------------------------------------------------------------------------

    def _make(self, factory: Factory, settings: Mapping[str, Any]) -> None:
        try:
            component = factory(self, settings)
            component.start()
        except Exception as error:  # its condition from now on
            log.exception("%s could not be started", self.identity)
            self._failure = f"{type(error).__name__}: {error}"
            return
        with self._lock:
            self._component, draining = component, self._draining
            component.look(self._view)
        if draining:
            component.drain()
        log.info("%s runs", self.identity)

    def _look(self, view: View) -> None:
        with self._lock:  # also around the component's look: views arrive there in their order
            if view.number <= self._view.number:
                return
            self._senders.look(view)
            self._view = view
            if self._component is not None:
                self._component.look(view)

    def _condition(self) -> Condition:
        component = self._component
        if component is not None:
            try:
                return component.condition()
            except Exception as error:  # it must not raise; the overseer is told as of any other failure
                log.exception("the condition of %s is unknown", self.identity)
                return Condition("failed", "failed to say how it is", error=f"{type(error).__name__}: {error}")
        if self._failure:
            return Condition("failed", "failed to start", error=self._failure)
        return Condition("starting", "making the component")


class _Caller:
    def __init__(self, host: Host, name: str) -> None:
        self._host = host
        self._name = name

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self._host.call_peer(self._name, method, args, timeout_s)

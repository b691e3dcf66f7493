"""What surrounds a component in its process, whichever launcher made that.

The component is made and started in a thread of its own, so that heartbeats are answered meanwhile: a process that
compiles is not a process that hangs. Calls are answered on the launcher's event loop: methods that are coroutine
functions wait there, thousands at once if need be; all others run in threads, at most `CALL_THREADS` at once.
Heartbeats have a thread to themselves. Messages for the run's logs are kept until the overseer has written them, and
late messages of incarnations that were replaced are refused.

An error of the component while it is made or started is its condition `failed`; an error of a called method is the
answer of that call, and no more. Logs of the process are ``logs/<name>.jsonl`` (what was logged, one JSON object a
line) and ``logs/<name>.out`` (what was printed, by native code too), over all incarnations; a log that cannot be
written does not stop the component.
"""

import asyncio
import inspect
import logging
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from penstock.overseer.launch.launcher import Component, Factory, PeerCaller
from penstock.overseer.supervisor.messages import (
    REFUSALS,
    ComponentMessage,
    ComponentStatus,
    Identity,
    Membership,
    Reply,
    Report,
)
from penstock.rundir import JsonLinesLog
from penstock.rundir.logs import open_unlinked
from penstock.types import Caller, PenstockError, RunDirectoryError, SupersededError, UnreachableError


def open_component_logs(directory: Path, identity: Identity) -> None:
    """Sends all that this process logs and prints into a component's files.

    Args:
        directory: Made when missing.
        identity: Names the files; its incarnation is in every logged line.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = ComponentLog(directory / f"{identity.name}.jsonl", identity.incarnation)
        _redirect_output(directory / f"{identity.name}.out")
    except (OSError, RunDirectoryError) as error:
        logging.getLogger(__name__).warning("no logs of %s: %s", identity, error)
        return
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.INFO)
    logging.captureWarnings(True)


@contextmanager
def logged(path: Path, life: int) -> Generator[None]:
    """While it lasts, what Penstock logs goes into a file, too, such as the prints and tracebacks of reward functions.

    Args:
        path: Made by the first record.
        life: Of the run, from 0; in every logged line.
    """
    file, logger = ComponentLog(path, life, lazily=True), logging.getLogger("penstock")
    level, handlers = logger.level, list[logging.Handler]([file])
    if not logger.hasHandlers() and logging.lastResort is not None:
        handlers.append(logging.lastResort)  # which prints warnings only where there is no other
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
        file.close()


class ComponentLog(logging.Handler):
    """Writes log records as JSON lines.

    Args:
        path: The file.
        incarnation: Of the component that logs.
        lazily: The file and its folder are made by the first record.
    """

    def __init__(self, path: Path, incarnation: int, lazily: bool = False) -> None:
        super().__init__()
        self._path, self._incarnation = path, incarnation
        self._lines = None if lazily else JsonLinesLog(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record; an error in doing so is printed."""
        try:
            line = {
                "time": record.created,
                "incarnation": self._incarnation,
                "level": record.levelname,
                "logger": record.name,
                "thread": record.threadName,
                "message": record.getMessage(),
            }
            if record.exc_info and record.exc_info[1] is not None:
                line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
            if self._lines is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lines = JsonLinesLog(self._path)
            self._lines.append(line)
        except Exception:  # as every handler of the standard library
            self.handleError(record)

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()
        super().close()


def _redirect_output(path: Path) -> None:
    """Both streams into one file, below Python: native code prints there, too."""
    descriptor = open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(descriptor, number)
    finally:
        os.close(descriptor)


MOST_PER_REPORT = 1000
"""So many messages travel with one heartbeat; more wait for the next, so that no report grows without bound."""


class Outbox:
    """Numbers messages from 1 and repeats them until they are acknowledged. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[ComponentMessage] = deque()
        self._last = 0

    def put(
        self, kind: Literal["metrics", "event", "samples"], step: int, name: str, fields: Mapping[str, Any]
    ) -> None:
        """Adds a message."""
        with self._lock:
            self._last += 1
            self._messages.append(ComponentMessage(self._last, kind, step, name, dict(fields)))

    def unacknowledged(self, acknowledged: int) -> tuple[ComponentMessage, ...]:
        """Forgets messages up to a number and gives those after it, oldest first, at most `MOST_PER_REPORT`."""
        with self._lock:
            while self._messages and self._messages[0].number <= acknowledged:
                self._messages.popleft()
            return tuple(self._messages)[:MOST_PER_REPORT]


class IncarnationFence:
    """Refuses incarnations that are known to have died, by the newest view and by who has called since.

    A sender that no view has named yet is taken: a new incarnation is started only after the death of the old one,
    and may speak before the next heartbeat brings the view that names it. Thread-safe when its owner is.
    """

    def __init__(self) -> None:
        self._oldest_taken: dict[str, int] = {}
        self._view = Membership()

    def look(self, view: Membership) -> None:
        """Takes a newer view: whoever has left it is dead."""
        present = {peer.identity for peer in view.peers}
        for peer in self._view.peers:
            if peer.identity not in present:
                self._raise_to(peer.identity.name, peer.identity.incarnation + 1)
        for identity in present:
            self._raise_to(identity.name, identity.incarnation)
        self._view = view

    def check(self, sender: Identity) -> None:
        """Takes note of a sender.

        Raises:
            SupersededError: it is dead, or replaced.
        """
        oldest = self._oldest_taken.get(sender.name, 0)
        if sender.incarnation < oldest:
            raise SupersededError(f"{sender} was given up and its messages are refused: {sender.name} is at #{oldest}")
        self._raise_to(sender.name, sender.incarnation)

    def _raise_to(self, name: str, incarnation: int) -> None:
        self._oldest_taken[name] = max(incarnation, self._oldest_taken.get(name, 0))


CALL_THREADS = 256
"""Blocking calls that are answered at once; they are bounded waits, so that more only queue for a while."""

OVERSEER_ONLY = frozenset({"start", "look", "condition", "drain", "stop"})
"""A component's own life is not for its peers to touch."""

Reach = Callable[[Identity, Identity, str, tuple[Any, ...], float], Reply]
"""(whom, from whom, method, arguments, limit in seconds) → answer; raises `UnreachableError`. Given by the launcher."""

log = logging.getLogger(__name__)


class ComponentHost:
    """Makes a component, passes its calls and messages on, and answers for it. Thread-safe.

    Args:
        identity: Whose process this is.
        factory: Makes the component.
        settings: Its second argument.
        view: The first view.
        reach: How other incarnations are called.
    """

    def __init__(
        self, identity: Identity, factory: Factory, settings: Mapping[str, Any], view: Membership, reach: Reach
    ) -> None:
        self.identity = identity
        self._reach = reach
        self._lock = threading.Lock()
        self._view = view
        self._senders = IncarnationFence()
        self._senders.look(view)
        self._outbox = Outbox()
        self._component: Component | None = None
        self._failure: ComponentStatus | None = None
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
    def view(self) -> Membership:
        """The newest."""
        return self._view

    # --- for the overseer ----------------------------------------------------------------------------------------

    async def beat(self, view: Membership | None, acknowledged: int) -> Report:
        """One heartbeat.

        Args:
            view: Taken when it is newer than the present one; None where it was told of the newest before.
            acknowledged: Number of the last message that was logged.
        """
        return await asyncio.get_running_loop().run_in_executor(self._beats, self._beat, view, acknowledged)

    def _beat(self, view: Membership | None, acknowledged: int) -> Report:
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

    async def call(self, sender: Identity | None, method: str, args: tuple[Any, ...]) -> Reply:
        """Answers a call by another component, or by the overseer.

        Args:
            sender: Who calls; None is the overseer.
            method: A public method of the component.
            args: Its arguments.
        """
        try:
            target = self._target(sender, method)
            if inspect.iscoroutinefunction(target):
                return Reply(await target(*args))
            return Reply(await asyncio.get_running_loop().run_in_executor(self._calls, target, *args))
        except PenstockError as error:
            return Reply.of(error)
        except Exception as error:  # the caller's to know; this process goes on
            log.exception("%s by %s failed", method, sender or "the overseer")
            return Reply.of(error)

    def _target(self, sender: Identity | None, method: str) -> Callable[..., Any]:
        if sender is not None:
            with self._lock:
                self._senders.check(sender)
        component = self._component
        if component is None:
            reason = "is starting" if self._failure is None else f"failed to start: {self._failure.error}"
            raise UnreachableError(f"{self.identity} {reason}")
        barred = method.startswith("_") or (sender is not None and method in OVERSEER_ONLY)
        target = None if barred else getattr(component, method, None)
        if not callable(target):
            raise PenstockError(f"{type(component).__name__} of {self.identity} has no method {method} for others")
        return target

    # --- what the component is given -----------------------------------------------------------------------------

    def caller(self, name: str) -> Caller:
        """Calls the living incarnation of another component, whichever that is at the time of each call."""
        return PeerCaller(name, self.call_peer)

    def call_peer(self, name: str, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """Calls whichever incarnation lives; errors as of `Caller.call`."""
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
            refused = isinstance(error, REFUSALS)
            told = str(error) if refused else f"{type(error).__name__}: {error}"
            self._failure = ComponentStatus("failed", "failed to start", error=told, refused=refused)
            return
        with self._lock:
            self._component, draining = component, self._draining
            component.look(self._view)
        if draining:
            component.drain()
        log.info("%s runs", self.identity)

    def _look(self, view: Membership) -> None:
        with self._lock:  # also around the component's look: views arrive there in their order
            if view.number <= self._view.number:
                return
            self._senders.look(view)
            self._view = view
            if self._component is not None:
                self._component.look(view)

    def _condition(self) -> ComponentStatus:
        component = self._component
        if component is not None:
            try:
                return component.condition()
            except Exception as error:  # it must not raise; the overseer is told as of any other failure
                log.exception("the condition of %s is unknown", self.identity)
                return ComponentStatus("failed", "failed to say how it is", error=f"{type(error).__name__}: {error}")
        if self._failure is not None:
            return self._failure
        return ComponentStatus("starting", "making the component")

"""What all components of a run share: their settings, threads, tasks, busy time, and one clock for ages.

A component's work is done in threads, whose failure is its condition; the run asks for tasks by name and finds their
outcomes in its facts. The replay buffer keeps the run's clock: it begins at the time of day and goes on steadily, so
that a jump of a machine's clock makes nothing old. Others ask for it now and then: without that, a worker on a machine
whose clock is hours behind would deliver nothing but stale rollouts.
"""

import functools
import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

from typing_extensions import TypeVar

from penstock.overseer.config import RunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.supervisor.messages import REFUSALS, ComponentStatus, Identity, Membership, State
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer
from penstock.types import CompiledProgram, PenstockError, UnreachableError, WeightVersion

if TYPE_CHECKING:
    from penstock.overseer.control_config import FleetRunConfig

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BusyTime:
    """Seconds of work and of waiting since the first `begin`; any number of pieces of work may overlap.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._running = 0
        self._seconds = {True: 0.0, False: 0.0}

    def begin(self) -> None:
        """From now on it is counted."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, it works."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a piece of work that was begun waits for others."""
        self._change(-1)
        try:
            yield
        finally:
            self._change(1)

    @property
    def working(self) -> bool:
        """Whether it works at this moment, and does not wait for others."""
        with self._lock:
            return self._running > 0

    def read(self) -> tuple[float, float]:
        """Busy and idle seconds."""
        with self._lock:
            self._settle()
            return self._seconds[True], self._seconds[False]

    def _change(self, by: int) -> None:
        with self._lock:
            self._settle()
            self._running += by

    def _settle(self) -> None:
        if self._since is None:
            return
        now = self._clock()
        self._seconds[self._running > 0] += now - self._since
        self._since = now


class CallCounter:
    """Calls that a component handles for others; each is work while it lasts. Not for calls that wait by design.

    Args:
        activity: The component's.

    Attributes:
        under_way: So many are being handled.
        done: So many were, whatever came of them.
    """

    def __init__(self, activity: BusyTime) -> None:
        self.under_way = self.done = 0
        self._activity = activity
        self._lock = threading.Lock()

    def of(self, method: Callable[_P, _R]) -> Callable[_P, _R]:
        """The method, with its calls counted."""

        @functools.wraps(method)
        def handled(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.one():
                return method(*args, **kwargs)

        return handled

    @contextmanager
    def one(self) -> Iterator[None]:
        """Inside, one is handled."""
        with self._lock:
            self.under_way += 1
        try:
            with self._activity.busy():
                yield
        finally:
            with self._lock:
                self.under_way, self.done = self.under_way - 1, self.done + 1


ASK_S = 5.0
"""Seconds between two questions."""
LOOK_S = 0.25
"""So soon another replay buffer's clock is asked for, and one that did not answer is asked again."""
CALL_S = 5.0


class SteadyClock:
    """Unix seconds as they were when it was made, and from then on by a clock that never jumps.

    Args:
        wall: Unix seconds.
        steady: Monotonic seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._offset = wall() - steady()

    def now(self) -> float:
        """Unix seconds."""
        return self._offset + self._steady()


class RunClock(SteadyClock):
    """The replay buffer's clock, as another process knows it. Thread-safe.

    Args:
        ctx: Of a component, which finds the living replay buffer.
        wall: What the clock begins with, until the first answer; Unix seconds.
        steady: Monotonic seconds.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(wall, steady)
        self._ctx, self._replay = ctx, ctx.caller("replay-0")

    def ask(self) -> bool:
        """Sets the clock by the buffer's, to within the time that the answer takes; false where none came."""
        asked = self._steady()
        try:
            answer = float(self._replay.call("now", timeout_s=CALL_S))
        except UnreachableError:
            return False
        self._offset = answer - (asked + self._steady()) / 2
        return True

    def follow(self, stopping: threading.Event) -> None:
        """Asks now and then, and another replay buffer at once, until `stopping` is set."""
        asked: Identity | None = None
        due = 0.0
        while not stopping.wait(LOOK_S if due else 0.0):
            peer = self._ctx.view.peer("replay-0")
            living = None if peer is None else peer.identity
            if living != asked or self._steady() >= due:
                asked = living if self.ask() else None
                due = self._steady() + ASK_S


def note_served(ctx: ComponentContext, version: WeightVersion) -> None:
    """Logs that an engine samples with these weights from now on, by the clock of its machine."""
    me = ctx.identity
    held = [version.lineage, version.step]
    ctx.event("weights_served", component=me.name, incarnation=me.incarnation, version=held, time=time.time())


AnyConfig = TypeVar("AnyConfig", RunConfig, "FleetRunConfig", default=RunConfig)
_ConfigT = TypeVar("_ConfigT", RunConfig, "FleetRunConfig")


@dataclass(frozen=True, slots=True)
class Settings(Generic[AnyConfig]):
    """One run, as a component sees it.

    Attributes:
        config: The run's.
        directory: The run's; the same path on every machine.
        token: Secret of this run: servers demand it, clients send it. Never written anywhere.
        lineage: Of this life of the run.
        checkpoint: Where that began; None for a run that begins.
    """

    config: AnyConfig
    directory: RunDirectory
    token: str = field(repr=False)
    lineage: int = 0
    checkpoint: Path | None = None

    def dump(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "config": self.config.dump(),
            "directory": str(self.directory.path.resolve()),
            "token": self.token,
            "lineage": self.lineage,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint.resolve()),
        }

    @staticmethod
    def of(values: Mapping[str, Any], config_type: type[_ConfigT]) -> "Settings[_ConfigT]":
        """From what `dump` gave, for a run with that kind of config."""
        checkpoint = values["checkpoint"]
        return Settings(
            config_type.model_validate(values["config"]),
            RunDirectory(values["directory"]),
            str(values["token"]),
            int(values["lineage"]),
            None if checkpoint is None else Path(checkpoint),
        )

    @property
    def job(self) -> str:
        """Tells this run's servers from those of others: directories of other runs may have the same name."""
        path = self.directory.path.resolve()
        return f"{path.name}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"

    def tokenizer(self: "Settings[RunConfig]") -> Tokenizer:
        """The policy's."""
        model = self.config.model
        return Tokenizer.load(model.tokenizer_path, model.chat_template_kwargs)


POLL_S = 0.5
"""How often a waiting thread looks whether it should stop."""


class ThreadedComponent(Generic[AnyConfig]):
    """Implements `Component` for roles whose work is done in threads.

    A subclass starts its threads in `start` and says in `_describe` how it is.

    Args:
        ctx: What its host gives it.
        settings: The run, with its config, directory and lineage.

    Attributes:
        compiled: Programs so far: the progress of its start.
    """

    def __init__(self, ctx: ComponentContext, settings: Settings[AnyConfig]) -> None:
        self.ctx = ctx
        self.settings = settings
        self.config = settings.config
        self.crew = ThreadGroup()
        self.activity = BusyTime()
        self.stopping = threading.Event()
        self.view_changed = threading.Event()
        self.doing = "starting"
        self.state: State = "starting"
        self.draining = False
        self.compiled = 0
        self._finished_at: float | None = None
        self._outcomes: dict[str, dict[str, Any]] = {}

    @property
    def name(self) -> str:
        """Its own, such as ``rollout-2``."""
        return self.ctx.identity.name

    def start(self) -> None:
        """Begins its work in threads of its own and returns soon; by default it has none before the learner trains."""
        self.state, self.doing = "running", "waiting for the learner to train"

    def look(self, view: Membership) -> None:
        """Takes a new view; returns at once."""
        self.view_changed.set()

    def note_compiled(self, program: CompiledProgram) -> None:
        """Tells of one more program, at its start."""
        self.compiled += 1
        if self.state == "starting":
            self.doing = f"compiling ({program.number} of {program.of} programs, the last {program.name})"
        numbers = {"number": program.number, "of": program.of, "seconds": round(program.seconds, 3)}
        self.ctx.event("compiled", component=self.name, program=program.name, **numbers)

    def drain(self) -> None:
        """Takes nothing new and finishes what it began; its state becomes `drained`."""
        self.draining = True

    def stop(self, timeout_s: float) -> None:
        """Ends its threads, within the limit."""
        self.stopping.set()
        self.crew.join(timeout_s)

    def condition(self) -> ComponentStatus:
        """Its state, what it does, and its numbers; never raises."""
        failure = self.crew.failure
        if failure is not None:
            refused = not self._worked and isinstance(failure, REFUSALS)
            return ComponentStatus("failed", self.doing, error=_told(failure), facts=self._facts(), refused=refused)
        if self.draining:
            self._drain_if_finished()
        busy_s, idle_s = self.activity.read()
        return self._describe(busy_s, idle_s)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        return ComponentStatus(self.state, self.doing, None, busy_s, idle_s, facts=self._facts())

    @property
    def _worked(self) -> bool:
        """`ComponentStatus.worked`."""
        return self.state != "starting"

    def _has_work(self) -> bool:
        """Whether something that it began goes on; asked while it drains."""
        return False

    def _drain_if_finished(self) -> None:
        """Drained a heartbeat after its last work: by then its outcome was told, and others know that it drains."""
        now = time.monotonic()
        if self._has_work():
            self._finished_at = None
        elif self._finished_at is None:
            self._finished_at = now
        elif now - self._finished_at >= self.config.overseer.heartbeat_s:
            self.state = "drained"

    # --- tasks ---------------------------------------------------------------------------------------------------

    def begin(self, task_id: str, method: str, *args: Any) -> None:
        """Runs a method in a thread; its outcome stands in `facts` under ``tasks``. A repeat changes nothing.

        One task follows another, so that outcomes of earlier ones were read.
        """
        target: Callable[..., Any] = getattr(self, method)
        for earlier in [
            name for name, told in self._outcomes.items() if name != task_id and told["state"] != "running"
        ]:
            del self._outcomes[earlier]
        running = {"state": "running"}
        if self._outcomes.setdefault(task_id, running) is not running:
            return
        self.crew.start(f"{self.name}.{method}", lambda: self._attempt(task_id, target, args))

    def _attempt(self, task_id: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._outcomes[task_id] = {"state": "done", "result": target(*args)}
        except PenstockError as error:  # whoever asked for the task is told
            self._outcomes[task_id] = {"state": "failed", "error": type(error).__name__, "message": str(error)}

    def _facts(self, **more: Any) -> Mapping[str, Any]:
        return {"tasks": dict(self._outcomes), **more}


def _told(failure: BaseException) -> str:
    if isinstance(failure, PenstockError):
        return str(failure)
    where = traceback.extract_tb(failure.__traceback__)[-1:]
    place = f" ({where[0].filename}:{where[0].lineno})" if where else ""
    return f"{type(failure).__name__}: {failure}{place}"

"""Components of a run in this process: called directly, with threads of their own, and what they share by reference.

Nothing is restarted here, and nothing is asked by heartbeat: how a component is, is read when it is wanted, so that the
metrics of an update at staleness zero reproduce themselves. The first exception in any thread ends the run with that
very exception. A task runs in the thread that drives the phases; a component that waits in it is told by `finish`.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol, final

from penstock.overseer.component import Settings
from penstock.overseer.kind import PolicyKind, RunStart
from penstock.overseer.launch.launcher import Component
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.run import STATES, PhaseSteps, Run
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Membership, Peer, Report
from penstock.types import ConfigError, PenstockError, RunFailed, Stopped, UnreachableError

TURN_S = 0.01
"""Seconds between two turns, where a phase waits."""


class LocalComponent(Component, Protocol):
    """A component whose threads are of this process."""

    crew: ThreadGroup

    def finish(self) -> None:
        """The training or the run is to end: ends waits, and begins nothing more. Returns soon; from any thread."""
        ...


@final
class DirectTasks:
    """Implements `penstock.overseer.run.ComponentTasks`.

    Args:
        kind: What the run trains.
        settings: The run, with its config, directory and lineage.
        start: The policy, or the checkpoint to resume from.
        crew: The run's threads; a failure in any ends it.
        log: The run's single writer.

    Attributes:
        settings: As given.
        states: Of the checkpoint; None for a run that begins.
        leaving: Empty: nothing goes elsewhere.
    """

    leaving = ""

    def __init__(
        self, kind: PolicyKind, settings: Settings[Any], start: RunStart, crew: ThreadGroup, log: RunLog
    ) -> None:
        self.settings = settings
        self.states: Mapping[str, Any] | None = None if start.checkpoint is None else start.checkpoint.states
        self._kind = kind
        self._start: RunStart | None = start
        self._crew = crew
        self._log = log
        self._components: dict[str, LocalComponent] = {}

    def drive(self, run: Run) -> None:
        """Makes and starts the components, and takes the run through its phases.

        Raises:
            Stopped: a stop was asked for.
            PenstockError: what a component raised where it was called.
        """
        start, self._start = self._start, None
        assert start is not None  # a run is driven once
        made = self._kind.local_components(
            self.settings, start, lambda name: DirectContext(name, self, run, self._log), self._log
        )
        for component in made.values():
            component.crew = ThreadGroup(self._crew)
        self._components = dict(made)
        for component in made.values():
            component.start()
        try:
            for _ in run.phases():
                view = self.view
                for component in made.values():
                    component.look(view)
                time.sleep(TURN_S)
        except Exception as error:
            if not (isinstance(error, Stopped) and run.stopping):
                self._crew.fail(error)  # before the others are ended, which fail for that
            raise

    @property
    def stop_limit_s(self) -> float:
        """Twice the limit of each: the last update and checkpoint, and the components."""
        return 2 * self.settings.config.overseer.stop_timeout_s

    def interrupt(self) -> None:
        """Ends waits, and the training at its next update boundary."""
        for component in self._components.values():
            component.finish()

    def shut_down(self) -> None:
        """Ends every component; what then still runs is left behind, and said."""
        self.interrupt()
        limit = time.monotonic() + self.settings.config.overseer.stop_timeout_s
        for component in self._components.values():
            try:
                component.stop(max(0.0, limit - time.monotonic()))
            except Exception as error:  # must not hide what ended the run
                self._log.event("shutdown_failed", error=type(error).__name__, message=str(error))
        left = [name for component in self._components.values() for name in component.crew.join(0.0)]
        if left:
            self._log.event("still_running", threads=left)

    # --- what phases ask -------------------------------------------------------------------------------------------

    def find(self, name: str) -> Any:
        """A component of the run.

        Raises:
            UnreachableError: there is none of that name.
        """
        if name not in self._components:
            raise UnreachableError(f"{name} is no component of this run")
        return self._components[name]

    @property
    def view(self) -> Membership:
        """All of them, with what they say of themselves now."""
        peers = [Peer(report.identity, report.condition.address) for report in self._reports().values()]
        return Membership(0, self.settings.lineage, tuple(peers))

    @property
    def seen(self) -> ClusterSnapshot:
        """How all are now."""
        reports = self._reports()
        said = [f"{name} is at «{report.condition.doing}»" for name, report in reports.items()]
        inside: dict[str, Any] = {}
        for report in reports.values():
            inside |= report.condition.facts.get("workers", {})
        return ClusterSnapshot(
            {**{name: _described(report.condition) for name, report in reports.items()}, **inside},
            {name: r.condition.progress for name, r in reports.items() if r.condition.progress is not None},
            "; ".join(said) or "no component was started yet",
            reports,
        )

    def _reports(self) -> dict[str, Report]:
        return {
            name: Report(identity_of(name), os.getpid(), socket.gethostname(), component.condition())
            for name, component in self._components.items()
        }

    def status_of(self, name: str) -> ComponentStatus | None:
        """How it is now."""
        component = self._components.get(name)
        return None if component is None else component.condition()

    def running(self, name: str) -> PhaseSteps:
        """Waits until it runs; the overseer ends the wait where a thread failed or nothing moves."""
        while self.find(name).condition().state not in STATES:
            yield

    def call(self, name: str, method: str, *args: Any) -> PhaseSteps:
        """A call, in this thread."""
        yield from self.running(name)
        return getattr(self.find(name), method)(*args)

    task = call

    def learner_lost(self, failure: PenstockError | str) -> PhaseSteps:
        """There is no other learner.

        Raises:
            PenstockError: that failure.
        """
        raise failure if isinstance(failure, PenstockError) else RunFailed(failure)
        yield

    def names(self, role: str) -> list[str]:
        """Those that have not drained."""
        reports = self._reports().items()
        return [name for name, r in reports if r.identity.role == role and r.condition.state != "drained"]

    def any_left(self, role: str) -> bool:
        """Whether one has not drained."""
        return bool(self.names(role))

    def scale(self, role: str, count: int) -> None:
        """Not possible.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{role} cannot be scaled to {count} in one process: run under Ray (runtime: ray)")

    def drain(self, name: str, reason: str) -> None:
        """Lets it finish what it began."""
        self.find(name).drain()

    def metrics(self) -> dict[str, float]:
        """None: there is no supervision."""
        return {}


def identity_of(name: str) -> Identity:
    """Of a component's only incarnation."""
    role, _, index = name.rpartition("-")
    return Identity(role, int(index), 0)


def _described(condition: ComponentStatus) -> dict[str, Any]:
    """For status.json."""
    version = {"version": condition.facts["version"]} if "version" in condition.facts else {}
    return {"incarnation": 0, "state": condition.state, "doing": condition.doing, **version}


@final
class DirectContext:
    """Implements `ComponentContext` for a component of this process.

    Args:
        name: The component's.
        tasks: Has the others.
        run: Is told at once.
        log: The run's single writer.
    """

    def __init__(self, name: str, tasks: DirectTasks, run: Run, log: RunLog) -> None:
        self.identity = identity_of(name)
        self._tasks = tasks
        self._run = run
        self._log = log

    @property
    def view(self) -> Membership:
        """All components."""
        return self._tasks.view

    def caller(self, name: str) -> "DirectCaller":
        """Calls another component, in the caller's thread."""
        return DirectCaller(self._tasks, name)

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        """Written at once."""
        self._run.on_event(kind, step, fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Written at once, in the caller's thread; the training ends after the update that reached its goal."""
        self._run.on_metrics(self.identity.role, step, values)
        if self.identity.role == "learner" and self._run.training_may_end:
            self._tasks.find(self.identity.name).finish()

    def samples(self, step: int, conversations: list[Any]) -> None:
        """Written at once."""
        self._log.conversations(conversations)


@final
class DirectCaller:
    """Implements `penstock.types.Caller` for a component of this process.

    Args:
        tasks: Has the components.
        name: Whose methods are called.
    """

    def __init__(self, tasks: DirectTasks, name: str) -> None:
        self._tasks = tasks
        self._name = name

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls it, in this thread; whatever the method raises comes as it is."""
        return getattr(self._tasks.find(self._name), method)(*args)

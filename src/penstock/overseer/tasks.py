"""Where the components of a run live: in this process, or each in a process of its own under a supervisor.

`DirectTasks` calls objects of this process, which have threads of their own and share things by reference. Nothing is
restarted there, and nothing is asked by heartbeat: how a component is, is read when it is wanted, so that the metrics
of an update at staleness zero reproduce themselves. The first exception in any thread ends the run with that very
exception. A task runs in the thread that drives the phases; a component that waits in it is told by `finish`.

`SupervisedTasks` keeps processes alive while the phases go on. One loop does everything, turn by turn: the supervisor
looks at the components, the phases go on a step. A phase that depends on a component which died meets the component's
next incarnation, and asks it again. When the learner or the replay buffer is lost, the run goes back to its newest good
checkpoint in a new lineage, exactly as ``--resume`` would: both are started anew from it, and the phases begin again
there. All others are replaced by the supervisor alone while the run goes on.
"""

import itertools
import os
import socket
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, final

from penstock.learner import newest_good_checkpoint, read_states
from penstock.overseer.component import Settings
from penstock.overseer.kind import ESSENTIAL, ESSENTIAL_NAMES, REWOUND, PolicyKind, RunStart
from penstock.overseer.launch.launcher import Component, Launcher, PeerCaller
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.run import STATES, PhaseSteps, Run, step_of
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.supervisor.member import RunRestartBudget
from penstock.overseer.supervisor.messages import ComponentMessage, ComponentStatus, Identity, Membership, Peer, Report
from penstock.overseer.supervisor.scaling import ScaleRequests
from penstock.overseer.supervisor.supervisor import Supervisor
from penstock.replay import Lineages, repair_logs
from penstock.types import ConfigError, PenstockError, RunFailed, Stopped, UnreachableError, errors
from penstock.types.calls import in_background

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
        self._components = self._made(run)
        for component in self._components.values():
            component.start()
        try:
            for _ in run.phases():
                view = self.view
                for component in self._components.values():
                    component.look(view)
                time.sleep(TURN_S)
        except Exception as error:
            if not (isinstance(error, Stopped) and run.stopping):
                self._crew.fail(error)  # before the others are ended, which fail for that
            raise

    def _made(self, run: Run) -> dict[str, LocalComponent]:
        """All components; whoever of them needs what the run begins with has it, and nobody else keeps it."""
        start, self._start = self._start, None
        assert start is not None  # a run is driven once
        made = self._kind.local_components(
            self.settings, start, lambda name: DirectContext(name, self, run, self._log), self._log
        )
        for component in made.values():
            component.crew = ThreadGroup(self._crew)
        return dict(made)

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

    def call_peer(self, name: str, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """Calls a component for another, in this thread; whatever the method raises comes as it is."""
        return getattr(self.find(name), method)(*args)

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

    def caller(self, name: str) -> PeerCaller:
        """Calls another component, in the caller's thread."""
        return PeerCaller(name, self._tasks.call_peer)

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        """Written at once."""
        self._run.on_event(kind, step, fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Written at once, in the caller's thread; the training ends after the update that reached its goal."""
        self._run.on_metrics(self.identity.role, step, values)
        if self.identity.role == "learner":
            learner = self._tasks.find(self.identity.name)
            self._run.show_update(step, learner.batch)
            if self._run.training_may_end:
                learner.finish()

    def samples(self, step: int, conversations: list[Any]) -> None:
        """Written at once."""
        self._log.conversations(conversations, step)


SUPERVISED_TURN_S = 0.05
"""Seconds between two turns of the loop."""
LOOK_S = 0.5
"""Seconds between two looks at all components for people and the watchdog, and for requests to scale."""
CALL_S = 10.0
"""Longest wait for a component's answer to a short call."""


@final
class SupervisedTasks:
    """Implements `penstock.overseer.run.ComponentTasks`.

    Args:
        kind: What the run trains.
        settings: What every component gets.
        states: Of the components in the checkpoint that the run begins with; None for a run that begins.
        launcher: Starts the components.
        log: The run's single writer.

    Attributes:
        settings: Of this lineage.
        states: Of its checkpoint.
        supervisor: Knows who lives.
        seen: How all components were when they were last looked at.
    """

    def __init__(
        self,
        kind: PolicyKind,
        settings: Settings[Any],
        states: Mapping[str, Any] | None,
        launcher: Launcher,
        log: RunLog,
    ) -> None:
        self.settings = settings
        self.states = states
        self._kind = kind
        self._config = settings.config.overseer
        self._launcher = launcher
        self._log = log
        self._run: Run | None = None
        self.supervisor = supervisor = Supervisor(launcher, self._config, self)
        self.names, self.scale, self.drain = supervisor.names, supervisor.scale, supervisor.drain
        self.metrics = supervisor.metrics
        self._lost: list[str] = []
        self._notices: list[str] = []
        self._deaths, self._newest_step = RunRestartBudget(self._config.max_restarts), 0
        self.seen, self._look_due = ClusterSnapshot(), 0.0
        self._scale_requests = ScaleRequests(
            settings.directory.path, partial(supervisor.scale, where_there_is_room=True)
        )
        self._numbers = itertools.count(1)

    # --- the loop --------------------------------------------------------------------------------------------------

    def drive(self, run: Run) -> None:
        """Starts the components, and takes the run through its phases; begins them anew where it goes back.

        Raises:
            Stopped: a stop was asked for.
            RunFailed: a component died too often, or could not be started or ended.
        """
        self._run = run
        self.supervisor.set_lineage(self.settings.lineage)
        for spec in self._kind.components(self.settings, self.states):
            self.supervisor.add(spec)
        self._allow_scaling()
        try:
            self._turn_by_turn(run)
        except RunFailed:
            self._save_what_can_be_saved()
            raise

    def _turn_by_turn(self, run: Run) -> None:
        phases = run.phases()
        while True:
            self.supervisor.tick()
            self._look_if_due()
            if self._lost:
                phases.close()
                if self._all_are_gone():
                    self._rewind(run)
                    phases = run.phases()
            else:
                try:
                    next(phases)
                except StopIteration:
                    return
            time.sleep(SUPERVISED_TURN_S)

    def _allow_scaling(self) -> None:
        for role, make, least in self._kind.scalable(self.settings):
            self.supervisor.scalable(role, make, least)

    def _look_if_due(self) -> None:
        if time.monotonic() >= self._look_due:
            self._look_due = time.monotonic() + LOOK_S
            self._look()
            self._scale_requests.serve()

    def _look(self) -> None:
        supervisor = self.supervisor
        self.seen = ClusterSnapshot(
            supervisor.describe(), supervisor.counters(), supervisor.stalled_components(), supervisor.reports
        )

    @property
    def stop_limit_s(self) -> float:
        """Four times the limit of each: the last update and checkpoint, the components, their launcher."""
        return 4 * self._config.stop_timeout_s

    def interrupt(self) -> None:
        """Phases look for themselves at every turn."""

    def shut_down(self) -> None:
        """Ends every component and the launcher."""
        self._look()  # the last one: whoever asks later is told how it was
        left = self.supervisor.stop(self._config.stop_timeout_s)
        if left:
            self._log.event("still_running", components=left)
        self._launcher.close(self._config.stop_timeout_s)

    # --- losses ----------------------------------------------------------------------------------------------------

    @property
    def leaving(self) -> str:
        """Notices of the machines of learner and replay buffer."""
        return "; ".join(self._notices)

    def learner_lost(self, failure: PenstockError | str) -> PhaseSteps:
        """Ends the learner, and waits until the loop has noticed and begins the phases anew."""
        self._notices = []
        self.supervisor.end("learner-0", str(failure))
        while True:
            yield

    def on_event(self, kind: str, **fields: Any) -> None:
        """The supervisor's news go into the log."""
        self._log.event(kind, **fields)
        if kind == "component_death":
            self._deaths.count(str(fields.get("reason", "")))

    def on_loss(self, identity: Identity, reason: str) -> None:
        """The run goes back to its newest checkpoint at the next turn."""
        self._lost.append(f"{identity}: {reason}")

    def _all_are_gone(self) -> bool:
        """Ends what is left of learner and replay buffer: none may write a checkpoint after one was chosen."""
        left = [name for name in ESSENTIAL_NAMES if not self.supervisor.is_gone(name)]
        for name in left:
            if self.supervisor.view.peer(name) is not None:
                self.supervisor.end(name, "the run goes back to its newest checkpoint")
        return not left

    def _rewind(self, run: Run) -> None:
        """Back to the newest good checkpoint, in a new lineage."""
        reasons, self._lost, self._notices = "; ".join(self._lost), [], []
        directory = self.settings.directory
        checkpoint = newest_good_checkpoint(directory.checkpoints, self._log.damage)
        repair_logs(directory, self._log.damage)
        lineage = max(self.settings.lineage, Lineages(directory.lineages_path).newest) + 1
        self.settings = replace(self.settings, lineage=lineage, checkpoint=checkpoint)
        self.states = None if checkpoint is None else read_states(checkpoint)
        run.begin_at(step_of(checkpoint))
        self._log.event(
            "rewind", reason=reasons, lineage=lineage, checkpoint=None if checkpoint is None else checkpoint.name
        )
        self.supervisor.set_lineage(lineage)
        for spec in self._kind.components(self.settings, self.states):
            if spec.name in REWOUND:
                self.supervisor.respawn(spec.name, spec.settings)
        self._allow_scaling()

    def _save_what_can_be_saved(self) -> None:
        """The run failed for another component's sake: the learner may still save its last version."""
        try:
            self.supervisor.call("learner-0", "finish", timeout_s=self._config.heartbeat_timeout_s)
        except UnreachableError:
            return  # then the newest checkpoint is what remains
        limit = time.monotonic() + self._config.stop_timeout_s
        self._look()  # what was seen before may be from before it trained
        while time.monotonic() < limit and self.seen.facts("learner-0").get("training"):
            time.sleep(SUPERVISED_TURN_S)
            with suppress(RunFailed):  # told already
                self.supervisor.tick()
            self._look()

    # --- what components say ---------------------------------------------------------------------------------------

    def on_message(self, identity: Identity, message: ComponentMessage) -> None:
        """Events and numbers go to the run, samples into the log."""
        run = self._run
        assert run is not None  # components were started by it
        match message.kind:
            case "event":
                run.on_event(message.name, message.step, {"component": identity.name, **message.fields})
                if message.name == "drain_notice" and identity.role in ESSENTIAL:
                    self._notices.append(f"{identity} was told to end by its machine")
            case "samples":
                self._log.conversations(message.fields["conversations"], message.step)
            case "metrics":
                run.on_metrics(identity.role, message.step, message.fields)
                if identity.role == "learner" and message.step > self._newest_step:
                    self._newest_step = message.step
                    self._deaths.forget()

    # --- what phases ask -------------------------------------------------------------------------------------------

    @property
    def view(self) -> Membership:
        """Who lives."""
        return self.supervisor.view

    def any_left(self, role: str) -> bool:
        """Whether one has a process, or is to have one again."""
        return any(name.startswith(f"{role}-") for name in self.supervisor.describe())

    def running(self, name: str) -> Generator[None, None, Identity]:
        """Waits until the living incarnation of a component runs."""
        while (report := self._report(name)) is None or report.condition.state not in STATES:
            yield
        return report.identity

    def status_of(self, name: str) -> ComponentStatus | None:
        """The newest of the living incarnation."""
        report = self._report(name)
        return None if report is None else report.condition

    def _report(self, name: str) -> Report | None:
        peer, report = self.supervisor.view.peer(name), self.supervisor.reports.get(name)
        return report if peer is not None and report is not None and report.identity == peer.identity else None

    def call(self, name: str, method: str, *args: Any) -> PhaseSteps:
        """A short call, repeated until a living incarnation has answered it."""
        while True:
            yield from self.running(name)
            answer: Future[Any] = in_background(lambda: self.supervisor.call(name, method, *args, timeout_s=CALL_S))
            while not answer.done():
                yield
            try:
                return answer.result()
            except UnreachableError:
                yield  # the next incarnation, or a moment later

    def task(self, name: str, method: str, *args: Any) -> PhaseSteps:
        """Has a long method run to its end, again if the component dies meanwhile; returns its result.

        Raises:
            PenstockError: what it raised.
        """
        task_id = f"{method}-{next(self._numbers)}"
        while True:
            identity = yield from self.running(name)
            yield from self.call(name, "begin", task_id, method, *args)
            while (report := self._report(name)) is not None and report.identity == identity:
                outcome: Mapping[str, Any] = report.condition.facts.get("tasks", {}).get(task_id, {})
                if outcome.get("state") == "done":
                    return outcome["result"]
                if outcome.get("state") == "failed":
                    raise _raised(outcome)
                yield


def _raised(outcome: Mapping[str, Any]) -> PenstockError:
    """The error that ended a task, of its own type."""
    kind = getattr(errors, str(outcome["error"]), RunFailed)
    return kind(str(outcome["message"]))

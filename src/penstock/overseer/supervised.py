"""Components under a supervisor, each in a process of its own: kept alive while a run's phases go on.

One loop does everything, turn by turn: the supervisor looks at the components, the phases go on a step. A phase that
depends on a component which died meets the component's next incarnation, and asks it again.

When the learner or the replay buffer is lost, the run goes back to its newest good checkpoint in a new lineage, exactly
as ``--resume`` would: both are started anew from it, and the phases begin again there. All others are replaced by
the supervisor alone while the run goes on.
"""

import itertools
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from penstock.learner import newest_good_checkpoint, read_states
from penstock.overseer.component import Settings
from penstock.overseer.kind import ESSENTIAL, ESSENTIAL_NAMES, REWOUND, PolicyKind
from penstock.overseer.launch.launcher import Launcher
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.run import STATES, PhaseSteps, Run, step_of
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.member import RunRestartBudget
from penstock.overseer.supervisor.messages import ComponentMessage, ComponentStatus, Identity, Membership, Report
from penstock.overseer.supervisor.scaling import ScaleRequests
from penstock.overseer.supervisor.stopping import in_background
from penstock.overseer.supervisor.supervisor import Supervisor
from penstock.replay import Lineages, repair_logs
from penstock.types import PenstockError, RunFailed, UnreachableError, errors

TURN_S = 0.05
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
        self.supervisor = Supervisor(launcher, self._config, self)
        self._lost: list[str] = []
        self._notices: list[str] = []
        self._deaths, self._newest_step = RunRestartBudget(self._config.max_restarts), 0
        self.seen, self._look_due = ClusterSnapshot(), 0.0
        self._scale_requests = ScaleRequests(
            settings.directory.path, partial(self.supervisor.scale, where_there_is_room=True)
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
            time.sleep(TURN_S)

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
            time.sleep(TURN_S)
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
                self._log.conversations(message.fields["conversations"])
            case "metrics":
                run.on_metrics(identity.role, message.step, message.fields)
                if identity.role == "learner" and message.step > self._newest_step:
                    self._newest_step = message.step
                    self._deaths.forget()

    def metrics(self) -> dict[str, float]:
        """``overseer/…`` numbers."""
        return self.supervisor.metrics()

    # --- what phases ask -------------------------------------------------------------------------------------------

    @property
    def view(self) -> Membership:
        """Who lives."""
        return self.supervisor.view

    def names(self, role: str) -> list[str]:
        """The components of a role that are there and not leaving, whether they live at present or not."""
        return self.supervisor.names(role)

    def any_left(self, role: str) -> bool:
        """Whether one has a process, or is to have one again."""
        return any(name.startswith(f"{role}-") for name in self.supervisor.describe())

    def scale(self, role: str, count: int) -> None:
        """As many as find room."""
        self.supervisor.scale(role, count)

    def drain(self, name: str, reason: str) -> None:
        """Lets it finish what it began, within ``overseer.no_progress_s``."""
        self.supervisor.drain(name, reason)

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

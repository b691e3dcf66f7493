"""A run: its phases, written once for every kind of policy, over components that a supervisor keeps alive.

One loop does everything, turn by turn: the supervisor looks at the components, the phases go on a step. Phases are
generators: each ``yield`` gives the loop a turn. Nothing in them waits by itself, and nothing in them restarts
anything: a phase that depends on a component which died meets the component's next incarnation, and asks it again.

When the learner or the replay buffer is lost, the run goes back to its newest good checkpoint in a new lineage, exactly
as ``--resume`` would: both are started anew from it, and the phases begin again there. All others are replaced by
the supervisor alone while the run goes on. Not covered: what is trained, which is the `PolicyKind`'s.
"""

import itertools
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

from penstock.learner import newest_good_checkpoint, read_states
from penstock.learner.checkpoints import read_state
from penstock.overseer.component import Settings
from penstock.overseer.kind import ESSENTIAL, ESSENTIAL_NAMES, REWOUND, PolicyKind
from penstock.overseer.launch.launcher import Launcher
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.results import Results, read_results, read_stats, require_results, write_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.member import RunRestartBudget
from penstock.overseer.supervisor.messages import ComponentMessage, Identity, Report
from penstock.overseer.supervisor.scaling import ScaleRequests
from penstock.overseer.supervisor.stopping import in_background
from penstock.overseer.supervisor.supervisor import Supervisor
from penstock.replay import Lineages, salvage_logs
from penstock.types import PenstockError, RunFailed, Stopped, SupersededError, UnreachableError, errors

PhaseSteps = Generator[None, None, Any]
_Found = TypeVar("_Found")

TURN_S = 0.05
"""Seconds between two turns of the loop."""
LOOK_S = 0.5
"""Seconds between two looks at all components for people and the watchdog, and for requests to scale."""
CALL_S = 10.0
"""Longest wait for a component's answer to a short call."""
STATES = frozenset({"running", "finished", "drained"})


@final
class Run:
    """One run in many processes, whatever it trains.

    Args:
        kind: What it trains.
        settings: What every component gets.
        states: Of the components in the checkpoint that it begins with; None for a run that begins.
        launcher: Starts the components.
        log: The run's single writer.

    Attributes:
        results: Of evaluations, by when they were made.
        training_s: Seconds spent in training, by this process.
        tasks: Waits for components, and calls them.
        log: As given.
        config: The run's.
        lineage: Of this life of the run.
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
        self._kind = kind
        self._settings = settings
        self._states = states
        self.results = self._results_so_far()
        self.training_s = 0.0
        self.lineage = settings.lineage
        self.config = settings.config
        self._directory = settings.directory
        self._launcher = launcher
        self.log = log
        self._updates = kind.make_update_log(settings.config, log)
        self._supervisor = Supervisor(
            launcher, settings.config.overseer, self._on_message, self._on_event, self._on_loss
        )
        self.tasks = SupervisedTasks(self._supervisor)
        self._stopping = threading.Event()
        self._lost: list[str] = []
        self._notices: list[str] = []
        self._deaths, self._newest_step = RunRestartBudget(self.config.overseer.max_restarts), 0
        self.seen, self._look_due = ClusterSnapshot(), 0.0
        self._scale_desk = ScaleRequests(
            self._directory.path, partial(self._supervisor.scale, where_there_is_room=True)
        )
        self._phases = 0

    # --- what the overseer asks ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Takes the run through its phases; returns at the last step or after `stop`.

        Raises:
            RunFailed: a component died too often, or could not be started or ended.
        """
        self.log.progress.phase = "starting components"
        self._supervisor.set_lineage(self.lineage)
        for spec in self._kind.components(self._settings, self._states):
            self._supervisor.add(spec)
        self._allow_scaling()
        script = self._phases_of_run()
        try:
            while True:
                self._supervisor.tick()
                self._look_if_due()
                if self._lost:
                    script.close()
                    if self._all_are_gone():
                        self._rewind()
                        script = self._phases_of_run()
                else:
                    try:
                        next(script)
                    except StopIteration:
                        return
                time.sleep(TURN_S)
        except Stopped:
            if not self._stopping.is_set():
                raise
        except RunFailed:
            self._save_what_can_be_saved()
            raise
        finally:
            self._shut_down()

    def _allow_scaling(self) -> None:
        for role, make, least in self._kind.scalable(self._settings):
            self._supervisor.scalable(role, make, least)

    def _look_if_due(self) -> None:
        if time.monotonic() >= self._look_due:
            self._look_due = time.monotonic() + LOOK_S
            self._look()
            self._scale_desk.serve()

    def _look(self) -> None:
        supervisor = self._supervisor
        self.seen = ClusterSnapshot(
            supervisor.describe(), supervisor.counters(), supervisor.stalled_components(), supervisor.reports
        )

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take: the last update and checkpoint, the components, their launcher."""
        return 4 * self.config.overseer.stop_timeout_s

    def stop(self) -> None:
        """Asks the run to end at the next update boundary, with a checkpoint."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping.is_set()

    @property
    def supervisor(self) -> Supervisor:
        """Knows who lives."""
        return self._supervisor

    @property
    def step(self) -> int:
        """The learner's version, as far as it was told."""
        return self._updates.step

    @property
    def lessons(self) -> dict[str, str]:
        """Each lesson's status in words."""
        return dict(self.seen.facts("replay-0").get("lessons", {}))

    @property
    def failed_groups(self) -> int:
        """How much of the experience failed in this life of the run, as far as living workers know."""
        return self._kind.failures(self)[0]

    @property
    def last_failure(self) -> str:
        """What the last of them said."""
        return self._kind.failures(self)[1]

    @property
    def complete(self) -> bool:
        """Whether the run reached its goal, the last step or the last graduation, and was evaluated there."""
        return "after" in self.results

    def refresh(self) -> None:
        """Brings the view up to date."""
        progress, replay = self.log.progress, self.seen.facts("replay-0")
        progress.units_per_s = self._kind.units_per_s(self)
        progress.ledger = dict(replay.get("ledger", progress.ledger))
        progress.lessons = dict(replay.get("lessons", progress.lessons))

    def counters(self) -> dict[str, float]:
        """What changes while the run makes progress."""
        return {**self.seen.counters, "phases": float(self._phases)}

    def stalled_components(self) -> str:
        """In words, for the error that ends a silent run."""
        waiting = self.seen.facts("replay-0").get("waiting_for", "")
        return f"the run is at «{self.log.progress.phase}»; {self.seen.owes}; {waiting}"

    def status(self) -> dict[str, Any]:
        """For status.json."""
        replay = self.seen.facts("replay-0")
        return {
            "phase": self.log.progress.phase,
            "step": self._updates.step,
            "steps": self.config.steps,
            "lineage": self.lineage,
            "runtime": "ray",
            "components": self.seen.components,
            "ledger": replay.get("ledger", {}),
            "lessons": replay.get("lessons", {}),
            "waiting_for": "; ".join(filter(None, (self.log.no_room, replay.get("waiting_for", "")))),
            "bottleneck": self._updates.bottleneck,
            "rollout_storage": replay.get("rollout_storage", {}),
            "numbers": self.seen.numbers(),
            **self._kind.status(self),
        }

    # --- phases ----------------------------------------------------------------------------------------------------

    def _phases_of_run(self) -> PhaseSteps:
        tasks = self.tasks
        self.phase("starting components")
        for name in ("replay-0", "learner-0"):
            yield from self.until_stopped(tasks.running(name))
        self._updates.begin_at(self.learner_step() or 0)
        yield from self._kind.prepared(self)
        if self._settings.checkpoint is None:
            yield from self._kind.before_training(self)
        yield from self._kind.checked(self)
        self.phase("training")
        yield from self._train()
        self.phase("evaluating the trained policy")
        yield from self._kind.after_training(self)
        self.results["after"] = yield from self.evaluate("after")

    def _train(self) -> PhaseSteps:
        started = time.monotonic()
        try:
            yield from self._train_to_the_end()
        except (UnreachableError, SupersededError) as failure:  # it lost the replay buffer before we noticed
            yield from self._lose_learner(str(failure))
        finally:
            self.training_s += time.monotonic() - started

    def _train_to_the_end(self) -> PhaseSteps:
        """Until the last step, a stop request, or the last graduation; saved and begun anew where a machine goes."""
        training = self.tasks.task("learner-0", "train", write_results(self.results))
        asked = False
        while True:
            try:
                next(training)
            except StopIteration:
                break
            if not asked and (self._stopping.is_set() or self._kind.goal_reached(self) or self._notices):
                yield from self.tasks.call("learner-0", "finish")
                asked = True
            yield
        if self._notices and not self._stopping.is_set():  # its newest version is saved
            notices, self._notices = "; ".join(self._notices), []
            yield from self._lose_learner(notices)

    def _lose_learner(self, reason: str) -> PhaseSteps:
        """Waits until the loop has noticed, and begins the script anew."""
        self._supervisor.end("learner-0", reason)
        while True:
            yield

    def evaluate(self, when: str) -> Generator[None, None, Results]:
        """A full evaluation of the learner's version; `when` is its name among the results.

        Raises:
            RunFailed: of the last evaluation, that no group of it could be rolled out.
        """
        step = yield from self.tasks.until(self.learner_step)
        rows = yield from self.until_stopped(self.tasks.task("evaluator-0", "evaluate", step))
        results = read_stats(rows)
        self.log.evaluation(when, step, results, self._kind.metrics_of(results))
        if when == "after":
            require_results(results, self._directory.path)
        return results

    def learner_step(self) -> int | None:
        """The version of the living learner; None while there is none."""
        report = self.tasks.report("learner-0")
        return None if report is None else report.condition.facts.get("step")

    def until_stopped(self, steps: PhaseSteps) -> PhaseSteps:
        """As `steps`, but a stop request ends it."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            if self._stopping.is_set():
                raise Stopped(self.log.progress.phase)
            yield

    def phase(self, words: str) -> None:
        """The next phase begins.

        Raises:
            Stopped: a stop was asked for.
        """
        if self._stopping.is_set():
            raise Stopped(words)
        self._phases += 1
        self.log.phase(words)

    # --- losses ----------------------------------------------------------------------------------------------------

    def _on_event(self, kind: str, **fields: Any) -> None:
        self.log.event(kind, **fields)
        if kind == "component_death":
            self._deaths.count(str(fields.get("reason", "")))

    def _on_loss(self, identity: Identity, reason: str) -> None:
        self._lost.append(f"{identity}: {reason}")

    def _all_are_gone(self) -> bool:
        """Ends what is left of learner and replay buffer: none may write a checkpoint after one was chosen."""
        left = [name for name in ESSENTIAL_NAMES if not self._supervisor.is_gone(name)]
        for name in left:
            if self._supervisor.view.peer(name) is not None:
                self._supervisor.end(name, "the run goes back to its newest checkpoint")
        return not left

    def _rewind(self) -> None:
        """Back to the newest good checkpoint, in a new lineage."""
        reasons, self._lost, self._notices = "; ".join(self._lost), [], []
        checkpoint = newest_good_checkpoint(self._directory.checkpoints, self.log.damage)
        salvage_logs(self._directory, self.log.damage)
        self.lineage = max(self.lineage, Lineages(self._directory.lineages_path).newest) + 1
        self._settings = replace(self._settings, lineage=self.lineage, checkpoint=checkpoint)
        self._states = None if checkpoint is None else read_states(checkpoint)
        self._updates.begin_at(step_of(checkpoint))
        self.log.event(
            "rewind", reason=reasons, lineage=self.lineage, checkpoint=None if checkpoint is None else checkpoint.name
        )
        self._supervisor.set_lineage(self.lineage)
        for spec in self._kind.components(self._settings, self._states):
            if spec.name in REWOUND:
                self._supervisor.respawn(spec.name, spec.settings)
        self._allow_scaling()
        self.results = self._results_so_far()

    def _results_so_far(self) -> dict[str, Results]:
        return {} if self._states is None else read_results(self._states["run"]["results"])

    def _save_what_can_be_saved(self) -> None:
        """The run failed for another component's sake: the learner may still save its last version."""
        try:
            self._supervisor.call("learner-0", "finish", timeout_s=self.config.overseer.heartbeat_timeout_s)
        except UnreachableError:
            return  # then the newest checkpoint is what remains
        limit = time.monotonic() + self.config.overseer.stop_timeout_s
        self._look()  # what was seen before may be from before it trained
        while time.monotonic() < limit and self.seen.facts("learner-0").get("training"):
            time.sleep(TURN_S)
            with suppress(RunFailed):  # told already
                self._supervisor.tick()
            self._look()

    def _shut_down(self) -> None:
        self._look()  # the last one: whoever asks later is told how it was
        left = self._supervisor.stop(self.config.overseer.stop_timeout_s)
        if left:
            self.log.event("still_running", components=left)
        self._launcher.close(self.config.overseer.stop_timeout_s)

    # --- what components tell --------------------------------------------------------------------------------------

    def _on_message(self, identity: Identity, message: ComponentMessage) -> None:
        match message.kind:
            case "event":
                fields = {"component": identity.name, **message.fields}
                self.log.event(message.name, message.step or None, **fields)
                self._kind.on_event(self, message)
                if message.name == "drain_notice" and identity.role in ESSENTIAL:
                    self._notices.append(f"{identity} was told to end by its machine")
            case "samples":
                self.log.conversations(message.fields["conversations"])
            case "metrics" if identity.role == "learner" and "time/update" in message.fields:
                self._updates.add(message.step, message.fields, self.seen, self._supervisor.metrics())
                if message.step > self._newest_step:
                    self._newest_step = message.step
                    self._deaths.forget()
            case "metrics":
                self.log.metrics(message.step, message.fields)
                self.log.note_rewards(message.fields)


def step_of(checkpoint: Path | None) -> int:
    """The version that a checkpoint, as `resume_point` gave it, holds; 0 for a run that begins."""
    return 0 if checkpoint is None else int(read_state(checkpoint)["step"])


@final
class SupervisedTasks:
    """What phases are made of: waiting for components, calling them, and having tasks done.

    Args:
        supervisor: Knows who lives.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._tasks = itertools.count(1)

    def until(self, found: Callable[[], _Found | None]) -> Generator[None, None, _Found]:
        """Looks at every turn, until there is something."""
        while (result := found()) is None:
            yield
        return result

    def running(self, name: str) -> Generator[None, None, Identity]:
        """Waits until the living incarnation of a component runs."""
        return self.until(lambda: self._running(name))

    def _running(self, name: str) -> Identity | None:
        report = self.report(name)
        return report.identity if report is not None and report.condition.state in STATES else None

    def report(self, name: str) -> Report | None:
        """The newest of the living incarnation."""
        peer, report = self._supervisor.view.peer(name), self._supervisor.reports.get(name)
        return report if peer is not None and report is not None and report.identity == peer.identity else None

    def call(self, name: str, method: str, *args: Any) -> Generator[None, None, Any]:
        """A short call, repeated until a living incarnation has answered it."""
        while True:
            yield from self.running(name)
            answer: Future[Any] = in_background(lambda: self._supervisor.call(name, method, *args, timeout_s=CALL_S))
            while not answer.done():
                yield
            try:
                return answer.result()
            except UnreachableError:
                yield  # the next incarnation, or a moment later

    def task(self, name: str, method: str, *args: Any) -> Generator[None, None, Any]:
        """Has a long method run to its end, again if the component dies meanwhile; returns its result.

        Raises:
            PenstockError: what it raised.
        """
        task_id = f"{method}-{next(self._tasks)}"
        while True:
            identity = yield from self.running(name)
            yield from self.call(name, "begin", task_id, method, *args)
            while (report := self.report(name)) is not None and report.identity == identity:
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

"""What conductors of distributed runs have in common: components, phases, losses, logs.

One loop does everything, turn by turn: the supervisor looks at the components, the script of phases goes on a step.

When the learner or the replay buffer is lost, the run goes back to its newest good checkpoint in a new lineage, exactly
as ``--resume`` would: both are started anew from it, and the script begins again there. All others are replaced by
the supervisor alone while the run goes on. Not covered: what is trained; a subclass names the phases around it.
"""

import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from penstock.learner import newest_good_checkpoint, read_states
from penstock.overseer.distributed.launcher import Launcher
from penstock.overseer.distributed.look import Look
from penstock.overseer.distributed.planning import ESSENTIAL, ESSENTIAL_NAMES, ProcessPlan
from penstock.overseer.distributed.records import Identity, Message
from penstock.overseer.distributed.restarts import DeathToll
from penstock.overseer.distributed.roles.settings import AnyConfig
from penstock.overseer.distributed.scaling import ScaleDesk
from penstock.overseer.distributed.script import Stage, Turns
from penstock.overseer.distributed.supervisor import Supervisor
from penstock.overseer.distributed.updates import UpdateLog
from penstock.overseer.result_rows import Results, read_results, read_stats, require_results, write_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.run_opening import step_of
from penstock.replay import Lineages, salvage_logs
from penstock.types import RunFailed, Stopped, SupersededError, UnreachableError

TURN_S = 0.05
"""Seconds between two turns of the loop."""
LOOK_S = 0.5
"""Seconds between two looks at all components for people and the watchdog, and for requests to scale."""


class ProcessConductor(Generic[AnyConfig]):
    """One run in many processes, whatever it trains; a subclass knows its phases.

    Args:
        plan: Its components.
        launcher: Starts them.
        log: The run's single writer.
        updates: Writes the learner's updates there.
    """

    def __init__(self, plan: ProcessPlan[AnyConfig], launcher: Launcher, log: RunLog, updates: UpdateLog) -> None:
        settings = plan.settings
        self._plan = plan
        self.results = self._results_so_far()
        self.training_s = 0.0
        self.lineage = settings.lineage
        self._config = settings.config
        self._directory = settings.directory
        self._launcher = launcher
        self._log = log
        self._updates = updates
        self._supervisor = Supervisor(
            launcher, settings.config.overseer, self._on_message, self._on_event, self._on_loss
        )
        self._stage = Stage(self._supervisor)
        self._stopping = threading.Event()
        self._lost: list[str] = []
        self._notices: list[str] = []
        self._deaths, self._newest_step = DeathToll(self._config.overseer.max_restarts), 0
        self._seen, self._look_due = Look(), 0.0
        self._scale_desk = ScaleDesk(self._directory.path, partial(self._supervisor.scale, where_there_is_room=True))
        self._phases = 0

    # --- what the overseer asks ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Takes the run through its phases; returns at the last step or after `stop`.

        Raises:
            RunFailed: a component died too often, or could not be started or ended.
        """
        self._log.progress.phase = "starting components"
        self._supervisor.set_lineage(self.lineage)
        for spec in self._plan.components():
            self._supervisor.add(spec)
        for role, make, least in self._plan.scalable():
            self._supervisor.scalable(role, make, least)
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

    def _look_if_due(self) -> None:
        if time.monotonic() >= self._look_due:
            self._look_due = time.monotonic() + LOOK_S
            self._look()
            self._scale_desk.serve()

    def _look(self) -> None:
        supervisor = self._supervisor
        self._seen = Look(
            supervisor.describe(), supervisor.counters(), supervisor.who_owes_progress(), supervisor.reports
        )

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take: the last update and checkpoint, the components, their launcher."""
        return 4 * self._config.overseer.stop_timeout_s

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
        return dict(self._seen.facts("replay-0").get("lessons", {}))

    @property
    def failed_groups(self) -> int:
        """Groups whose environment or reward function failed, as far as living workers know."""
        return self._seen.failed_groups

    @property
    def last_failure(self) -> str:
        """What the last of them said."""
        return self._seen.last_failure

    @property
    def complete(self) -> bool:
        """Whether the run reached its goal, the last step or the last graduation, and was evaluated there."""
        return "after" in self.results

    def refresh(self) -> None:
        """Brings the view up to date."""
        progress, replay = self._log.progress, self._seen.facts("replay-0")
        progress.units_per_s = self._units_per_s()
        progress.ledger = dict(replay.get("ledger", progress.ledger))
        progress.lessons = dict(replay.get("lessons", progress.lessons))

    def counters(self) -> dict[str, float]:
        """What changes while the run makes progress."""
        return {**self._seen.counters, "phases": float(self._phases)}

    def who_owes_progress(self) -> str:
        """In words, for the error that ends a silent run."""
        waiting = self._seen.facts("replay-0").get("waiting_for", "")
        return f"the run is at «{self._log.progress.phase}»; {self._seen.owes}; {waiting}"

    def status(self) -> dict[str, Any]:
        """For status.json."""
        replay = self._seen.facts("replay-0")
        return {
            "phase": self._log.progress.phase,
            "step": self._updates.step,
            "steps": self._config.steps,
            "lineage": self.lineage,
            "runtime": "ray",
            "components": self._seen.components,
            "ledger": replay.get("ledger", {}),
            "lessons": replay.get("lessons", {}),
            "waiting_for": "; ".join(filter(None, (self._log.no_room, replay.get("waiting_for", "")))),
            "bottleneck": self._updates.bottleneck,
            "rollout_storage": replay.get("rollout_storage", {}),
            "groups": {"failed": self._seen.failed_groups, "last_failure": self._seen.last_failure},
            "numbers": self._seen.numbers(),
        }

    # --- what a subclass knows -------------------------------------------------------------------------------------

    def _units_per_s(self) -> float | None:
        """The speed that the view shows; None where it is not known yet."""
        raise NotImplementedError

    def _metrics_of(self, results: Results) -> dict[str, float]:
        """Results of an evaluation as metrics."""
        raise NotImplementedError

    def _prepared(self) -> Turns:
        """What comes after the learner runs and before everything else, in each life of the run."""
        yield from ()

    def _before_training(self) -> Turns:
        """Evaluations of a run that begins."""
        yield from ()

    def _checked(self) -> Turns:
        """What is checked before the training, in each life of the run."""
        yield from ()

    def _after_training(self) -> Turns:
        """What ends with the training, before the last evaluation."""
        yield from ()

    @property
    def _goal_reached(self) -> bool:
        """Whether training may end before its last step."""
        return False

    def _heard(self, message: Message) -> None:
        """An event of a component was logged."""

    # --- phases ----------------------------------------------------------------------------------------------------

    def _phases_of_run(self) -> Turns:
        stage = self._stage
        self._phase("starting components")
        for name in ("replay-0", "learner-0"):
            yield from self._ending_with_the_run(stage.running(name))
        self._updates.begin_at(self._learner_step() or 0)
        yield from self._prepared()
        if self._plan.settings.checkpoint is None:
            yield from self._before_training()
        yield from self._checked()
        self._phase("training")
        yield from self._train()
        self._phase("evaluating the trained policy")
        yield from self._after_training()
        self.results["after"] = yield from self._evaluate("after")

    def _train(self) -> Turns:
        started = time.monotonic()
        try:
            yield from self._train_to_the_end()
        except (UnreachableError, SupersededError) as failure:  # it lost the replay buffer before we noticed
            yield from self._lose_learner(str(failure))
        finally:
            self.training_s += time.monotonic() - started

    def _train_to_the_end(self) -> Turns:
        """Until the last step, a stop request, or the last graduation; saved and begun anew where a machine goes."""
        training = self._stage.task("learner-0", "train", write_results(self.results))
        asked = False
        while True:
            try:
                next(training)
            except StopIteration:
                break
            if not asked and (self._stopping.is_set() or self._goal_reached or self._notices):
                yield from self._stage.call("learner-0", "finish")
                asked = True
            yield
        if self._notices and not self._stopping.is_set():  # its newest version is saved
            notices, self._notices = "; ".join(self._notices), []
            yield from self._lose_learner(notices)

    def _lose_learner(self, reason: str) -> Turns:
        """Waits until the loop has noticed, and begins the script anew."""
        self._supervisor.end("learner-0", reason)
        while True:
            yield

    def _evaluate(self, when: str) -> Generator[None, None, Results]:
        step = yield from self._stage.until(self._learner_step)
        rows = yield from self._ending_with_the_run(self._stage.task("evaluator-0", "evaluate", step))
        results = read_stats(rows)
        self._log.evaluation(when, step, results, self._metrics_of(results))
        if when == "after":
            require_results(results, self._directory.path)
        return results

    def _learner_step(self) -> int | None:
        report = self._stage.report("learner-0")
        return None if report is None else report.condition.facts.get("step")

    def _ending_with_the_run(self, turns: Turns) -> Turns:
        """As `turns`, but a stop request ends it."""
        while True:
            try:
                next(turns)
            except StopIteration as end:
                return end.value
            if self._stopping.is_set():
                raise Stopped(self._log.progress.phase)
            yield

    def _phase(self, words: str) -> None:
        if self._stopping.is_set():
            raise Stopped(words)
        self._phases += 1
        self._log.phase(words)

    # --- losses ----------------------------------------------------------------------------------------------------

    def _on_event(self, kind: str, **fields: Any) -> None:
        self._log.event(kind, **fields)
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
        checkpoint = newest_good_checkpoint(self._directory.checkpoints, self._log.damage)
        salvage_logs(self._directory, self._log.damage)
        self.lineage = max(self.lineage, Lineages(self._directory.lineages_path).newest) + 1
        settings = replace(self._plan.settings, lineage=self.lineage, checkpoint=checkpoint)
        self._updates.begin_at(step_of(checkpoint))
        self._log.event(
            "rewind", reason=reasons, lineage=self.lineage, checkpoint=None if checkpoint is None else checkpoint.name
        )
        self._supervisor.set_lineage(self.lineage)
        for name, values in self._plan.go_back(settings, checkpoint and read_states(checkpoint)).items():
            self._supervisor.respawn(name, values)
        self.results = self._results_so_far()

    def _results_so_far(self) -> dict[str, Results]:
        states = self._plan.states
        return {} if states is None else read_results(states["run"]["results"])

    def _save_what_can_be_saved(self) -> None:
        """The run failed for another component's sake: the learner may still save its last version."""
        try:
            self._supervisor.call("learner-0", "finish", timeout_s=self._config.overseer.heartbeat_timeout_s)
        except UnreachableError:
            return  # then the newest checkpoint is what remains
        limit = time.monotonic() + self._config.overseer.stop_timeout_s
        self._look()  # what was seen before may be from before it trained
        while time.monotonic() < limit and self._seen.facts("learner-0").get("training"):
            time.sleep(TURN_S)
            with suppress(RunFailed):  # told already
                self._supervisor.tick()
            self._look()

    def _shut_down(self) -> None:
        self._look()  # the last one: whoever asks later is told how it was
        left = self._supervisor.stop(self._config.overseer.stop_timeout_s)
        if left:
            self._log.event("still_running", components=left)
        self._launcher.close(self._config.overseer.stop_timeout_s)

    # --- what components tell --------------------------------------------------------------------------------------

    def _on_message(self, identity: Identity, message: Message) -> None:
        match message.kind:
            case "event":
                fields = {"component": identity.name, **message.fields}
                self._log.event(message.name, message.step or None, **fields)
                self._heard(message)
                if message.name == "drain_notice" and identity.role in ESSENTIAL:
                    self._notices.append(f"{identity} was told to end by its machine")
            case "samples":
                self._log.conversations(message.fields["conversations"])
            case "metrics" if identity.role == "learner" and "time/update" in message.fields:
                self._updates.add(message.step, message.fields, self._seen, self._supervisor.metrics())
                if message.step > self._newest_step:
                    self._newest_step = message.step
                    self._deaths.forget()
            case "metrics":
                self._log.metrics(message.step, message.fields)
                self._log.note_rewards(message.fields)

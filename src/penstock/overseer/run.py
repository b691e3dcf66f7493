"""A run: its phases, written once for every kind of policy, wherever its components live.

Phases are generators: each ``yield`` gives whoever drives them a turn. Nothing in them waits by itself, and nothing in
them restarts anything. What differs between components under a supervisor and those of this process stands behind
`ComponentTasks`, with two implementations in `penstock.overseer.tasks`. Not covered: what is trained, which is the
`PolicyKind`'s.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from penstock.learner.checkpoints import read_state
from penstock.overseer.component import Settings
from penstock.overseer.kind import PolicyKind
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.results import Results, read_results, read_stats, require_results, write_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.messages import ComponentStatus, Membership
from penstock.types import PenstockError, Stopped, SupersededError, TrainingBatch, UnreachableError

if TYPE_CHECKING:
    from penstock.overseer.update_loop import UpdateFeed

PhaseSteps = Generator[None, None, Any]
_Found = TypeVar("_Found")

STATES = frozenset({"running", "finished", "drained"})
"""Of a component that can be asked."""


class ComponentTasks(Protocol):
    """The components of a run, as its phases know them: waited for, called, given tasks, and ended."""

    settings: Settings[Any]
    states: Mapping[str, Any] | None
    """Of the components in the checkpoint that this life of the run begins with; None for a run that begins."""

    @property
    def seen(self) -> ClusterSnapshot:
        """How all components were when they were last looked at."""
        ...

    @property
    def view(self) -> Membership:
        """Who lives."""
        ...

    @property
    def leaving(self) -> str:
        """Why learner or replay buffer have to go elsewhere, with the newest version saved; empty where they stay."""
        ...

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take: the last update and checkpoint, the components, their launcher."""
        ...

    def drive(self, run: "Run") -> None:
        """Starts the components, and takes the run through its phases to their end.

        Raises:
            Stopped: a stop was asked for.
            RunFailed: a component died too often, or could not be started or ended.
        """
        ...

    def interrupt(self) -> None:
        """A stop was asked for: ends what phases would wait for in vain. Returns soon; from any thread."""
        ...

    def shut_down(self) -> None:
        """Ends every component, within limits."""
        ...

    def status_of(self, name: str) -> ComponentStatus | None:
        """How the living incarnation of a component was lately; None where it has not said yet."""
        ...

    def running(self, name: str) -> PhaseSteps:
        """Waits until a component runs."""
        ...

    def call(self, name: str, method: str, *args: Any) -> PhaseSteps:
        """A short call, answered for certain; returns its result."""
        ...

    def task(self, name: str, method: str, *args: Any) -> PhaseSteps:
        """Has a long method run to its end; returns its result.

        Raises:
            PenstockError: what it raised.
        """
        ...

    def learner_lost(self, failure: PenstockError | str) -> PhaseSteps:
        """The learner cannot go on: the run goes back to its newest checkpoint, or ends with that failure."""
        ...

    def names(self, role: str) -> list[str]:
        """The components of a role that are there and not leaving."""
        ...

    def any_left(self, role: str) -> bool:
        """Whether a component of a role is there, leaving or not."""
        ...

    def scale(self, role: str, count: int) -> None:
        """Changes how many components of a role there are."""
        ...

    def drain(self, name: str, reason: str) -> None:
        """Lets a component finish what it began, and ends it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the supervision itself, for metrics.jsonl."""
        ...


@final
class Run:
    """One run, whatever it trains and wherever its components are.

    Args:
        kind: What it trains.
        tasks: Its components.
        log: The run's single writer.
        feed: Where each update is looked at before the next one, by whoever loops over them.

    Attributes:
        results: Of evaluations, by when they were made.
        training_s: Seconds spent in training, by this process.
        step: The learner's version, as far as it was told.
        tasks: The components, as given.
        log: The run's writer, as given.
        config: Of the run, validated.
        newest_metrics: The last update's line, by this process; empty before the first.
    """

    def __init__(self, kind: PolicyKind, tasks: ComponentTasks, log: RunLog, feed: "UpdateFeed | None" = None) -> None:
        self._kind = kind
        self.tasks = tasks
        self.log = log
        self.config = tasks.settings.config
        self.results = self._results_so_far()
        self.training_s = 0.0
        self.step = log.step
        self._updates = kind.make_update_log(self.config, log)
        self.newest_metrics: Mapping[str, float] = {}
        self._feed = feed
        self._stopping = threading.Event()
        self._phases = 0
        if feed is not None:
            feed.opened(self)

    # --- what the overseer asks ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Takes the run through its phases; returns at the last step or after `stop`.

        Raises:
            RunFailed: a component died too often, or could not be started or ended.
        """
        self.log.progress.begin_phase("starting components")
        try:
            self.tasks.drive(self)
        except Stopped:
            if not self.stopping:
                raise
        finally:
            self.tasks.shut_down()

    def stop(self) -> None:
        """Asks the run to end at the next update boundary, with a checkpoint."""
        self._stopping.set()
        if self._feed is not None:
            self._feed.release()
        self.tasks.interrupt()

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping.is_set()

    @property
    def training_may_end(self) -> bool:
        """Whether the training is to end before its last step: a stop was asked for, or its goal is reached."""
        return self.stopping or self._kind.goal_reached(self)

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take."""
        return self.tasks.stop_limit_s

    @property
    def lineage(self) -> int:
        """Which life of the run this is."""
        return self.tasks.settings.lineage

    @property
    def seen(self) -> ClusterSnapshot:
        """How all components were when they were last looked at."""
        return self.tasks.seen

    @property
    def lessons(self) -> dict[str, str]:
        """Each lesson's status in words."""
        return dict(self.seen.facts("replay-0").get("lessons", {}))

    @property
    def failures(self) -> tuple[int, str]:
        """How much of the experience failed in this life of the run, as far as is known, and what the last one said."""
        return self._kind.failures(self)

    @property
    def complete(self) -> bool:
        """Whether it reached its goal, the last step or the last graduation, and was evaluated, where it can be."""
        return "after" in self.results

    def refresh(self) -> None:
        """Brings the view up to date."""
        progress, seen = self.log.progress, self.seen
        replay = seen.facts("replay-0")
        progress.units_per_s = self._updates.pace(seen)
        progress.ledger = dict(replay.get("ledger", progress.ledger))
        progress.lessons = dict(replay.get("lessons", progress.lessons))

    def counters(self) -> dict[str, float]:
        """What changes while the run makes progress."""
        held = {} if self._feed is None else self._feed.counters()
        return {**self.seen.counters, "phases": float(self._phases), **held}

    def stalled_components(self) -> str:
        """In words, for the error that ends a silent run."""
        seen = self.seen
        waiting = seen.facts("replay-0").get("waiting_for", "")
        return f"the run is at «{self.log.progress.phase}»; {seen.owes}; {waiting}"

    def status(self) -> dict[str, Any]:
        """For status.json."""
        seen = self.seen
        replay, no_room = seen.facts("replay-0"), seen.facts("learner-0").get("no_room", "")
        return {
            "phase": self.log.progress.phase,
            "step": self.step,
            "steps": self.config.steps,
            "lineage": self.lineage,
            "runtime": self.config.runtime,
            "components": seen.components,
            "ledger": replay.get("ledger", {}),
            "lessons": replay.get("lessons", {}),
            "waiting_for": "; ".join(filter(None, (no_room or self.log.no_room, replay.get("waiting_for", "")))),
            "bottleneck": self.log.bottleneck_words,
            "rollout_storage": replay.get("rollout_storage", {}),
            "numbers": seen.numbers(),
            "training": self.log.progress.status(),
            **self._kind.status(self),
        }

    # --- phases ----------------------------------------------------------------------------------------------------

    def phases(self) -> PhaseSteps:
        """All of them, from the start or from the checkpoint that this life of the run begins with."""
        self.results = self._results_so_far()
        self.phase("starting components")
        for name in ("replay-0", "learner-0"):
            yield from self.until_stopped(self.tasks.running(name))
        self.begin_at(self.learner_step() or 0)
        yield from self._kind.prepared(self)
        yield from self._kind.checked(self)
        if self.tasks.settings.checkpoint is None:
            yield from self._kind.before_training(self)
        self.phase("training")
        yield from self._train()
        if not self._kind.evaluates:
            if self.step >= self.config.steps:
                self.results["after"] = {}
            return
        self.phase("evaluating the trained policy")
        yield from self._kind.after_training(self)
        self.results["after"] = yield from self.evaluate("after")

    def _train(self) -> PhaseSteps:
        started = time.monotonic()
        try:
            yield from self._train_to_the_end()
        except (UnreachableError, SupersededError) as failure:  # it lost the replay buffer before we noticed
            yield from self.tasks.learner_lost(failure)
        finally:
            self.training_s += time.monotonic() - started

    def _train_to_the_end(self) -> PhaseSteps:
        """Until the last step, a stop request, or the last graduation; saved and begun anew where a machine goes."""
        training = self.tasks.task("learner-0", "train", write_results(self.results))
        asked = False
        while True:
            if not asked and (self.training_may_end or self.tasks.leaving):
                yield from self.tasks.call("learner-0", "finish")
                asked = True
            try:
                next(training)
            except StopIteration:
                break
            yield
        if self.tasks.leaving and not self.stopping:  # its newest version is saved
            yield from self.tasks.learner_lost(self.tasks.leaving)

    def evaluate(self, when: str) -> Generator[None, None, Results]:
        """A full evaluation of the learner's version; `when` is its name among the results.

        Raises:
            RunFailed: of the last evaluation, that no group of it could be rolled out.
        """
        step = yield from until(self.learner_step)
        rows = yield from self.until_stopped(self.tasks.task("evaluator-0", "evaluate", step, when))
        results = read_stats(rows)
        metrics, best = self._kind.metrics_of(results), self.config.overseer.keep_best
        warmed = when == "untrained" and getattr(self.config.learner, "warm_start", None) is not None
        if best is not None and not warmed:  # no checkpoint has the weights from before a warm start
            yield from self.tasks.call("learner-0", "note_evaluation", step, metrics.get(best))
        self.log.evaluation(when, step, results, metrics)
        if when == "after":
            require_results(results, self.tasks.settings.directory.path)
        return results

    def learner_step(self) -> int | None:
        """The version of the living learner; None while there is none."""
        status = self.tasks.status_of("learner-0")
        return None if status is None else status.facts.get("step")

    def until_stopped(self, steps: PhaseSteps) -> PhaseSteps:
        """As `steps`, but a stop request ends it."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            if self.stopping:
                raise Stopped(self.log.progress.phase)
            yield

    def phase(self, words: str) -> None:
        """The next phase begins.

        Raises:
            Stopped: a stop was asked for.
        """
        if self.stopping:
            raise Stopped(words)
        self._phases += 1
        self.log.phase(words)
        self._updates.begin_phase()

    def begin_at(self, step: int) -> None:
        """The run goes on from that version."""
        self.step = self.log.step = step

    def _results_so_far(self) -> dict[str, Results]:
        states = self.tasks.states
        return {} if states is None else read_results(states["run"]["results"])

    # --- what components say ---------------------------------------------------------------------------------------

    def on_event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """An event of a component; step 0 stands for the present one."""
        self.log.event(kind, step or None, **fields)

    def on_metrics(self, role: str, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics of a component; an update's, where it is the learner's and has its times."""
        if role == "learner" and "time/update" in values:
            self.newest_metrics = self._updates.add(step, values, self.seen, self.tasks.metrics())
            self.step = step  # whoever sees it finds its metrics
        else:
            self.log.metrics(step, values)
            self.log.progress.note_rollouts(values)

    def show_update(self, step: int, batch: TrainingBatch[Any] | None) -> None:
        """An update was made on a batch and its metrics are written; returns when it was looked at, if somebody loops.

        Metrics of the learner without a batch are no update's.
        """
        if self._feed is not None and batch is not None:
            self._feed.give(step, self.newest_metrics, batch, self.tasks.settings.directory)


def until(found: Callable[[], _Found | None]) -> Generator[None, None, _Found]:
    """Looks at every turn, until there is something."""
    while (result := found()) is None:
        yield
    return result


def step_of(checkpoint: Path | None) -> int:
    """The version that a checkpoint, as `resume_point` gave it, holds; 0 for a run that begins."""
    return 0 if checkpoint is None else int(read_state(checkpoint)["step"])

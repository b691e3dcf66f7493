"""The learner of a run as a component, with the server that its weights are fetched from.

It loads, compiles and publishes its first version by itself; training is a task that the run asks for. Batches come
from the replay service, and checkpoints are taken here: the replay service and the evaluator give their states as of
the update boundary. Not covered: what is trained, which is the `PolicyKind`'s.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, final

from typing_extensions import override

from penstock.learner import BestCheckpoint, save_checkpoint
from penstock.learner.checkpoints import SavedLearner
from penstock.model.programs import LazyPrograms, arithmetic, compile_programs
from penstock.overseer.component import POLL_S, Settings, ThreadedComponent
from penstock.overseer.full_disk import when_there_is_room
from penstock.overseer.kind import PolicyKind, RunStart, SharedParts
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus, Membership
from penstock.overseer.training_loop import TrainingLoop, UpdatingLearner
from penstock.replay import RemoteBatches
from penstock.types import NoProgressError, PenstockError, Stopped, TrainingBatch, UnreachableError, WeightVersion
from penstock.weights import Broadcaster, open_broadcaster, trained_arrays

ANNOUNCE_S = 5.0
"""Longest wait for replay before a first version is offered."""
STATES_S = 120.0
"""Longest wait for replay's states at a checkpoint."""
EVALUATOR_S = 5.0
"""And for the evaluator's, without which there is a checkpoint, too. A run that lost its cluster has 20 s for its last
one, and cannot find an evaluator that it has not asked before."""


@final
class CheckpointWriter:
    """Writes a run's checkpoints one after the other: in the caller's thread, or beside it from a snapshot.

    Args:
        ctx: The learner's; the run's log gets the events `checkpoint`, `best_checkpoint`, `disk_full`.
        settings: The run, with its directory.
        on_saved: Given the step of each checkpoint that is on the disk.
        on_failure: Called where one that is written beside cannot be; `wait` raises why.
        start: Runs a function in a thread by a name.
        stopping: Set where nobody waits for room on a full disk any more.

    Attributes:
        no_room: In words, how long there has been no room; empty where there is.
        best: Which of them is the best.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings[Any],
        on_saved: Callable[[int], object],
        on_failure: Callable[[], object],
        start: Callable[[str, Callable[[], None]], None],
        stopping: threading.Event,
    ) -> None:
        self.no_room = ""
        self.best = BestCheckpoint(settings.directory.checkpoints, settings.config.overseer.keep_best)
        self._ctx = ctx
        self._settings = settings
        self._on_saved, self._on_failure = on_saved, on_failure
        self._start, self._stopping = start, stopping
        self._step = -1
        self._written = threading.Event()
        self._written.set()
        self._failure: BaseException | None = None

    def write(self, step: int, learner: SavedLearner, codec: Any, states: Mapping[str, Any]) -> None:
        """Returns when it is on the disk; waits for room on a full one.

        Raises:
            RunFailed: the disk was full for too long.
            Stopped: meanwhile nobody waits any more.
        """
        limits, folder = self._settings.config.overseer, self._settings.directory.checkpoints
        kept = limits.keep_checkpoints, limits.keep_every, self.best
        limit_s, before = self._settings.config.replay.store.full_disk_s, self.best.record
        path = when_there_is_room(
            lambda: save_checkpoint(folder, step, learner, codec, states, *kept), limit_s, self._wait_for_room
        )
        self._on_saved(step)
        self._ctx.event("checkpoint", step, path=str(path))
        if self.best.record != before or self.best.failure:
            self.tell_best()

    def write_beside(self, step: int, snapshot: SavedLearner, codec: Any, states: Mapping[str, Any]) -> None:
        """`write` in a thread; nothing else may be being written."""

        def attempt() -> None:
            try:
                self.write(step, snapshot, codec, states)
            except BaseException as error:  # raised by `wait`
                self._failure = error
                self._on_failure()
            finally:
                self._written.set()

        self._step = step
        self._written.clear()
        self._start(f"{self._ctx.identity.name}.checkpoint", attempt)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            NoProgressError: it took longer than ``overseer.no_progress_s``, with room on the disk.
            BaseException: what the last failed with.
        """
        limit_s, since = self._settings.config.overseer.no_progress_s, time.monotonic()
        while not self._written.wait(POLL_S):
            if self.no_room:  # which has a limit of its own
                since = time.monotonic()
            elif time.monotonic() - since > limit_s:
                raise NoProgressError(
                    f"the checkpoint of step {self._step} was not written within {limit_s:g} s "
                    f"(overseer.no_progress_s): does the disk of {self._settings.directory.checkpoints} answer?"
                )
        if self._failure is not None:
            raise self._failure

    def tell_best(self) -> None:
        """The run's log gets what is the best now, or why it could not be recorded."""
        record = self.best.record
        if self.best.failure:
            self._ctx.event("best_checkpoint_not_recorded", reason=self.best.failure)
        elif record is not None:
            values = {"metric": record.metric, "value": record.value, "evaluated": record.evaluated_step}
            self._ctx.event("best_checkpoint", record.step, **values)

    def _wait_for_room(self, seconds: float, why: str) -> None:
        self._ctx.event("disk_full", reason=why)
        self.no_room = why
        if self._stopping.wait(seconds):
            raise Stopped(why)
        self.no_room = ""


@final
class LearnerComponent(ThreadedComponent[Any]):
    """Runs one learner and its `TrainingLoop`.

    Args:
        ctx: What its host gives it.
        settings: The run, with its config, directory and lineage.
        kind: What it trains.
        shared: What it has by reference, where all components are in one process.
        start: What it begins with, where that is loaded already; given away when it starts.

    Attributes:
        shared: As given.
        batch: Of the update that is being made; None between two.
        coming_batch: Gives the batch of a later update, by its step; None where it is not known.
        wait_until_saved: Returns when every checkpoint is on the disk; raises what one failed with.
        expect_evaluation: Given the version of an evaluation that begins, by which the best checkpoint is chosen.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings[Any],
        kind: PolicyKind,
        shared: SharedParts | None = None,
        start: RunStart | None = None,
    ) -> None:
        super().__init__(ctx, settings)
        self.shared = shared
        self._start = start
        self._kind = kind
        self._codec: Any = None
        self._replay = ctx.caller("replay-0")
        # Those that give batches are stopped first: nobody waits for one then.
        self._batches = RemoteBatches(self._replay, settings.lineage) if shared is None else shared.batches
        self._commits = RemoteBatches(self._replay, settings.lineage) if shared is None else shared.batches
        self._finishing = threading.Event()
        self._can_update = threading.Event()  # or need not
        self._learner: UpdatingLearner | None = None
        self._loop: TrainingLoop | None = None
        self._broadcaster: Broadcaster | None = None
        self._publishing = threading.Lock()
        self._published: tuple[WeightVersion, Mapping[str, Any]] | None = None
        self._training = False
        self._writer = CheckpointWriter(
            ctx,
            settings,
            self._commits.checkpoint_saved,
            self._batches.stop,
            lambda name, target: self.crew.start(name, target),  # another crew, once the run has it
            self.stopping,
        )
        self.coming_batch = self._batches.peek
        self.wait_until_saved, self.expect_evaluation = self._writer.wait, self._writer.best.expect
        self._results: dict[str, Any] = {}
        self._evaluator_state: dict[str, Any] = {}
        self.batch: TrainingBatch[Any] | None = None
        self._steps_done = 0
        self._seconds = {"busy": 0.0, "idle": 0.0}
        self._more = kind.learner_tasks(ctx, self)
        for name, method in self._more.methods.items():
            setattr(self, name, method)

    @property
    def learner(self) -> UpdatingLearner:
        """Parameters and optimiser.

        Raises:
            PenstockError: it is not loaded yet.
        """
        if self._learner is None:
            raise PenstockError("the learner is not loaded yet: wait until it runs")
        return self._learner

    @property
    def finishing(self) -> bool:
        """Whether it was asked to end what it does."""
        return self._finishing.is_set()

    def note_step(self) -> None:
        """Counts a step of a task other than training."""
        self._steps_done += 1

    # --- starting ------------------------------------------------------------------------------------------------

    @override
    def start(self) -> None:
        self.crew.start(f"{self.name}.load", self._load)

    def _load(self) -> None:
        self.doing = "loading"
        start, self._start = self._start or self._loaded(), None
        self._codec = start.codec
        if start.checkpoint is not None:
            self._evaluator_state = start.checkpoint.states["evaluator"]
            self._results = start.checkpoint.states["run"]["results"]
        self._learner = self._kind.make_learner(self.config, start)
        self.ctx.event("arithmetic", self._learner.step, **arithmetic())
        with self._publishing:
            self._open_broadcaster()  # others fetch while it compiles
        self.doing = "compiling"
        for program in compile_programs(self._kind.scoring_programs(self._learner), begun=start.begun):
            self.note_compiled(program)
        self.doing, self.state = "waiting to be told what to do", "running"
        self.crew.start(f"{self.name}.compile", partial(self._compile_update, start.begun))

    def _compile_update(self, begun: LazyPrograms | None = None) -> None:
        """While others begin: nothing of it is needed before the first batch is there."""
        try:
            programs = self._kind.update_programs(self.learner, self.config)
            for program in compile_programs(programs, urgent=False, begun=begun):
                self.note_compiled(program)
                if self.stopping.is_set():
                    return
        finally:
            self._can_update.set()

    def wait_until_compiled(self) -> None:
        """Returns when an update needs nothing compiled any more, or is not asked for.

        Raises:
            NoProgressError: no program was compiled within `overseer.start_timeout_s`.
        """
        limit_s, seen = self.config.overseer.start_limit_s, -1
        self.doing = "waiting for the programs of an update"
        while not self._can_update.wait(limit_s):
            if self.compiled == seen:
                raise NoProgressError(
                    f"{self.ctx.identity} compiled no further program of an update within {limit_s:g} s: if the model "
                    "takes longer, raise overseer.start_timeout_s"
                )
            seen = self.compiled

    def _loaded(self) -> RunStart:
        settings = self.settings
        if settings.checkpoint is None:
            return self._kind.begin(settings.config)
        return self._kind.resume(settings.config, settings.checkpoint)

    def look(self, view: Membership) -> None:
        """Takes a new view."""
        self._more.on_view(view)
        super().look(view)

    # --- weights -------------------------------------------------------------------------------------------------

    def _open_broadcaster(self) -> None:
        """A new server; it offers what was published last, or else the learner's present version."""
        settings = self.settings
        version, arrays = self._published or self._present()
        self._announce(version, arrays, patiently=False)
        broadcaster: Broadcaster
        if self.shared is not None:
            broadcaster = self.shared.weights
            broadcaster.reopen()
        else:
            default_url = str(settings.directory.path / "weights")
            broadcaster = open_broadcaster(self.config.weights, settings.job, settings.token, default_url)
        broadcaster.publish(version, self._travelling(arrays))
        self._broadcaster, self._published = broadcaster, (version, arrays)

    def _present(self) -> tuple[WeightVersion, Mapping[str, Any]]:
        """The version that the learner holds, and its parameters by name."""
        learner = self.learner
        return WeightVersion(self.settings.lineage, learner.step), learner.named_arrays()

    def publish(self) -> None:
        """Offers the learner's version to whoever fetches; what is published already is not published again."""
        version, arrays = self._present()
        self._announce(version, arrays, patiently=True)
        with self._publishing:
            assert self._broadcaster is not None  # opened before there is anything to publish
            if self._broadcaster.latest() != version:
                self._broadcaster.publish(version, self._travelling(arrays))
                self._published = version, arrays

    def _announce(self, version: WeightVersion, arrays: Mapping[str, Any], patiently: bool) -> None:
        """Tells replay what a version is, before anybody can serve it.

        Impatiently where others wait for a server: before it trains, all of it is told again.
        """
        digests = self._more.digests(arrays)
        if digests and patiently:
            self._commits.expect_digests(version.step, digests)
        elif digests:
            with suppress(UnreachableError):
                told = version.lineage, version.step, digests
                self._replay.call("expect_digests", *told, timeout_s=ANNOUNCE_S)

    def _travelling(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.shared is not None:
            return arrays
        return trained_arrays(arrays, self.learner.optimizer.frozen)

    def publish_anew(self) -> None:
        """Offers the learner's present version again, with other weights than before."""
        self._published = None
        self.restart_broadcaster()

    def restart_broadcaster(self) -> None:
        """Another server for the same version; clients find it by its new incarnation. May be called at any time."""
        with self._publishing:
            if self._broadcaster is None:
                raise UnreachableError(f"{self.ctx.identity} has no broadcaster yet: wait until it runs")
            self._broadcaster.close()
            self._open_broadcaster()

    # --- tasks ---------------------------------------------------------------------------------------------------

    def train(self, results: Mapping[str, Any]) -> int:
        """Updates until the last step, or until `finish`; returns the version reached.

        Args:
            results: Evaluations so far; they travel in the checkpoints.
        """
        self._results = dict(results)
        learner = self.learner
        loop = TrainingLoop(
            learner,
            self._batches,
            self._commits,
            self,
            self.config.steps,
            publish_first=not self.config.replay.synchronous,
        )
        if self.settings.checkpoint is None:
            self.save(learner.step)
            self.wait_until_saved()
        else:
            self._ask_evaluator()  # it answers then even where the cluster is lost before the first checkpoint
        self.publish()  # replay must know what it is before anything of it arrives
        self._replay.call("admit", timeout_s=STATES_S)
        self._training = True
        try:
            self.wait_until_compiled()
            self._loop = loop
            if self._finishing.is_set():
                loop.stop()
            loop.run()
        finally:
            self._training = False
        self.doing = f"done at step {learner.step}"
        return learner.step

    def finish(self) -> None:
        """Training ends at the next update boundary, with a checkpoint; one that has not begun ends at once."""
        self._finishing.set()
        self._can_update.set()
        if self._loop is not None:
            self._loop.stop()
        self._batches.stop()

    def drain(self) -> None:
        """The overseer hears of the notice, has the newest version saved, and begins anew elsewhere."""

    @override
    def stop(self, timeout_s: float) -> None:
        self.stopping.set()
        self.finish()
        self._commits.stop()
        super().stop(timeout_s)
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._more.on_stop()

    def before_update(self, batch: TrainingBatch[Any]) -> None:
        """The kind's task beside an update begins.

        Raises:
            MismatchError: engines and learner disagree about the version that the learner holds; nothing was applied.
        """
        self.batch = batch
        self._more.before_update(batch)

    def after_update(self) -> Mapping[str, float]:
        """It ends, before the new version is offered; gives metrics.

        Raises:
            MismatchError: engines and learner disagree about the version before.
        """
        return self._more.after_update()

    # --- checkpoints and reports -----------------------------------------------------------------------------------

    def checkpoint_due(self, step: int) -> bool:
        """Every `overseer.checkpoint_every` updates; the last version has one in any case."""
        return step % self.config.overseer.checkpoint_every == 0

    def save(self, step: int) -> None:
        """Writes a checkpoint as soon as there is room: at staleness zero now, else beside the training.

        Before it, the one before is waited for.
        """
        self._writer.wait()
        self.settings.directory.check_is_there()
        states = self._states(step)
        if self.config.replay.synchronous:
            self._writer.write(step, self.learner, self._codec, states)
        else:
            self._writer.write_beside(step, self.learner.snapshot(), self._codec, states)

    def note_evaluation(self, step: int, value: float | None) -> None:
        """It is over, and gave this value of ``overseer.keep_best``, or none."""
        best = self._writer.best
        if best.note(step, value) is not None or best.failure:
            self._writer.tell_best()

    def _states(self, step: int) -> dict[str, Any]:
        """Of all components but the learner, as of its boundary before update `step`."""
        self._ask_evaluator()  # before the others: an evaluation that counts as done is in the curriculum's state, too
        return self._commits.checkpoint_states(step, STATES_S) | {
            "evaluator": self._evaluator_state,
            "run": {"lineage": self.settings.lineage, "results": self._results},
        }

    def _ask_evaluator(self) -> None:
        """One that does not answer will go on from its older state: an evaluation is made again."""
        with suppress(UnreachableError):
            self._evaluator_state = self.ctx.caller("evaluator-0").call("evaluation_state", timeout_s=EVALUATOR_S)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of an update; `step` is the version reached."""
        self._steps_done += 1
        self._seconds["idle"] += metrics["time/wait_for_batch"]
        self._seconds["busy"] += metrics["time/update"] + metrics["time/checkpoint"]
        assert self._broadcaster is not None  # it published this version's parent
        self.ctx.metrics(step, {**metrics, **self._broadcaster.metrics()})
        self.batch = None

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        training = self._training  # others generate while programs of an update are compiled
        doing = self._loop.doing if training and self._loop is not None else self.doing
        owes_none = bool(self._writer.no_room) or doing.startswith(("waiting", "done"))
        progress = float(self.compiled + self._steps_done)
        address = {} if self._broadcaster is None else {"weights": self._broadcaster.endpoint(), "training": training}
        step = 0 if self._learner is None else self._learner.step
        return ComponentStatus(
            self.state,
            doing,
            None if owes_none else progress,
            self._seconds["busy"],
            self._seconds["idle"],
            address,
            facts=self._facts(step=step, training=training, no_room=self._writer.no_room),
        )

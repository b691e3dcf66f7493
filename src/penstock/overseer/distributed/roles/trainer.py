"""A learner in a process of its own, whatever it trains, with the server that its weights are fetched from.

It loads, compiles and publishes its first version by itself; training is a task that the overseer asks for. Batches
come from the replay service, and checkpoints are taken here: the replay service and the evaluator give their states as
of the update boundary. Not covered: how the learner is made, and further tasks; those are a subclass's.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from penstock.learner import Checkpoint, load_checkpoint, save_checkpoint
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition
from penstock.overseer.distributed.roles.base import ThreadedComponent
from penstock.overseer.distributed.roles.settings import AnyConfig, Settings
from penstock.overseer.full_disk import when_there_is_room
from penstock.overseer.training_loop import TrainingLoop, UpdatingLearner
from penstock.replay import RemoteBatches
from penstock.types import PenstockError, Stopped, UnreachableError, WeightVersion
from penstock.weights import Broadcaster, open_broadcaster

STATES_S = 120.0
"""Longest wait for the other components' states at a checkpoint."""


class _Batches(Protocol):
    """Makes the replay service's client."""

    def __call__(self, caller: Any, lineage: int) -> RemoteBatches: ...


class TrainerRole(ThreadedComponent[AnyConfig]):
    """Runs one learner and its `TrainingLoop`.

    Args:
        around: What its host gives it.
        settings: The run.
        batches: Makes the client of the replay service.
    """

    def __init__(self, around: Surroundings, settings: Settings[AnyConfig], batches: _Batches = RemoteBatches) -> None:
        super().__init__(around, settings)
        self._replay = around.caller("replay-0")
        self._batches = batches(self._replay, settings.lineage)  # stopped first, so that nobody waits for a batch
        self._commits = batches(self._replay, settings.lineage)
        self._loop: TrainingLoop | None = None
        self._broadcaster: Broadcaster | None = None
        self._publishing = threading.Lock()
        self._published: tuple[WeightVersion, Mapping[str, Any]] | None = None
        self._training = self._waiting_for_room = False
        self._results: dict[str, Any] = {}
        self._evaluator_state: dict[str, Any] = {}
        self._steps_done = 0
        self._seconds = {"busy": 0.0, "idle": 0.0}

    # --- what a subclass knows -----------------------------------------------------------------------------------

    def _make(self, checkpoint: Checkpoint | None) -> None:
        """Makes the learner, anew or from a checkpoint."""
        raise NotImplementedError

    def _compile(self) -> None:
        """Compiles what training needs."""
        raise NotImplementedError

    def _current(self) -> UpdatingLearner | None:
        """The learner; None before it is made."""
        raise NotImplementedError

    def _arrays(self) -> Mapping[str, Any]:
        """Its parameters by name."""
        raise NotImplementedError

    def _travelling(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of them that are published; by default all."""
        return arrays

    def _write_checkpoint(self, save: Any, step: int, states: Mapping[str, Any]) -> Any:
        """Calls `save` (`penstock.learner.save_checkpoint`) and returns the path."""
        raise NotImplementedError

    # --- starting ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See `Component.start`."""
        self.crew.start(f"{self.name}.load", self._load)

    def _load(self) -> None:
        self.doing = "loading"
        path = self.settings.checkpoint
        checkpoint = None if path is None else load_checkpoint(path)
        if checkpoint is not None:
            self._evaluator_state = checkpoint.states["evaluator"]
            self._results = checkpoint.states["run"]["results"]
        self._make(checkpoint)
        with self._publishing:
            self._open_broadcaster()  # others fetch while it compiles
        self.doing = "compiling"
        self._compile()
        self.doing, self.state = "waiting to be told what to do", "running"

    # --- weights -------------------------------------------------------------------------------------------------

    def _open_broadcaster(self) -> None:
        """A new server; it offers what was published last, or else the learner's present version."""
        settings = self.settings
        version, arrays = self._published or (self._version(), self._arrays())
        default_url = str(settings.directory.path / "weights")
        broadcaster = open_broadcaster(self.config.weights, settings.job, settings.token, default_url)
        broadcaster.publish(version, self._travelling(arrays))
        self._broadcaster, self._published = broadcaster, (version, arrays)

    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """See `WeightSink.publish`; what is published already is not published again."""
        with self._publishing:
            assert self._broadcaster is not None  # opened before there is anything to publish
            if self._broadcaster.latest() != version:
                self._broadcaster.publish(version, self._travelling(arrays))
                self._published = version, arrays

    def restart_broadcaster(self) -> None:
        """Another server for the same version; clients find it by its new incarnation. May be called at any time."""
        with self._publishing:
            if self._broadcaster is None:
                raise UnreachableError(f"{self.around.identity} has no broadcaster yet: wait until it runs")
            self._broadcaster.close()
            self._open_broadcaster()

    # --- tasks ---------------------------------------------------------------------------------------------------

    def train(self, results: Mapping[str, Any]) -> int:
        """Updates until the last step, or until `finish`; returns the version reached.

        Args:
            results: Evaluations so far; they travel in the checkpoints.
        """
        self._results = dict(results)
        learner = self._living()
        loop = TrainingLoop(
            learner,
            self._arrays,
            self._batches,
            self._commits,
            self,
            lineage=self.settings.lineage,
            steps=self.config.steps,
            batch_timeout_s=self.config.overseer.no_progress_s,
            progress=time.monotonic,  # who owes progress is seen by the overseer alone
            on_step=self._on_step,
            checkpoint=self._save,
            checkpoint_every=self.config.overseer.checkpoint_every,
        )
        if self.settings.checkpoint is None:
            self._save(learner.step)
        else:
            threading.Thread(target=self._meet_evaluator, name="meet-evaluator", daemon=True).start()
        self._replay.call("admit", timeout_s=STATES_S)
        self._loop, self._training = loop, True
        if self.stopping.is_set():
            loop.stop()
        try:
            loop.run()
        finally:
            self._training = False
        self.doing = f"done at step {learner.step}"
        return learner.step

    def publish_last(self) -> None:
        """The version that training reached, for the last evaluation; a task after `train`."""
        self.publish(self._version(), self._arrays())

    def finish(self) -> None:
        """Training ends at the next update boundary, with a checkpoint."""
        if self._loop is not None:
            self._loop.stop()
        self._batches.stop()

    def drain(self) -> None:
        """The overseer hears of the notice, has the newest version saved, and begins anew elsewhere."""

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self.stopping.set()
        self.finish()
        self._commits.stop()
        super().stop(timeout_s)
        if self._broadcaster is not None:
            self._broadcaster.close()

    def _living(self) -> UpdatingLearner:
        learner = self._current()
        if learner is None:
            raise PenstockError("the learner is not loaded yet: wait until it runs")
        return learner

    def _version(self) -> WeightVersion:
        """The version that the learner holds."""
        return WeightVersion(self.settings.lineage, self._living().step)

    # --- checkpoints and reports -----------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        self.settings.directory.check_is_there()
        try:  # before the others' states: an evaluation that counts as done is in the curriculum's state, too
            self._evaluator_state = self.around.caller("evaluator-0").call("evaluation_state", timeout_s=STATES_S)
        except UnreachableError:
            pass  # it is being replaced, and will go on from this older state: an evaluation is made again
        states = self._commits.checkpoint_states(step, STATES_S) | {
            "evaluator": self._evaluator_state,
            "run": {"lineage": self.settings.lineage, "results": self._results},
        }
        path = when_there_is_room(
            lambda: self._write_checkpoint(save_checkpoint, step, states),
            self.config.replay.store.full_disk_s,
            self._wait_for_room,
        )
        self._commits.checkpoint_saved(step)
        self.around.event("checkpoint", step, path=str(path))

    def _meet_evaluator(self) -> None:
        """The first call asks the cluster where it is, and may come too late for a last save without a cluster."""
        with suppress(PenstockError):
            self.around.caller("evaluator-0").call("evaluation_state", timeout_s=STATES_S)

    def _wait_for_room(self, seconds: float, why: str) -> None:
        self.around.event("disk_full", reason=why)
        self._waiting_for_room = True
        if self.stopping.wait(seconds):
            raise Stopped(why)
        self._waiting_for_room = False

    def _on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps_done += 1
        self._seconds["idle"] += metrics["time/wait_for_batch"]
        self._seconds["busy"] += metrics["time/update"] + metrics["time/checkpoint"]
        assert self._broadcaster is not None  # it published this version's parent
        self.around.metrics(step, {**metrics, **self._broadcaster.metrics()})

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        training = self._training and self._loop is not None
        doing = self._loop.doing if training and self._loop is not None else self.doing
        owes_none = self.state == "starting" or self._waiting_for_room or doing.startswith(("waiting", "done"))
        address = {} if self._broadcaster is None else {"weights": self._broadcaster.endpoint(), "training": training}
        learner = self._current()
        step = 0 if learner is None else learner.step
        return Condition(
            self.state,
            doing,
            None if owes_none else float(self._steps_done),
            self._seconds["busy"],
            self._seconds["idle"],
            address,
            facts=self._facts(step=step, training=training),
        )

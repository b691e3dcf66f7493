"""The learner's loop: a batch in, one update, new weights out. Reads as pseudocode; the parts do the work.

The order inside an update is the run's commit protocol: the batch file (the intent) is written before the batch is
handed out; fates follow the update; the checkpoint's rename is the only commit; and the replay buffer hears of a
version before it is published, so that a rollout with a newer stamp is truly from the future. Where generation runs
ahead, a version is published before it is saved, and what is saved is a snapshot that is written while training goes
on, so that nobody waits for the disk: a version that is never saved is of a life that ended, as those between two
checkpoints are. At staleness zero checkpoint and metrics come first: everything else stands still then, so they
reproduce themselves. The loop ends when its last checkpoint is on the disk. The last version is not published: nothing
would be trained on what it generates.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from penstock.learner.checkpoints import SavedLearner
from penstock.learner.config import OptimizerConfig
from penstock.learner.snapshot import LearnerSnapshot
from penstock.types import BatchSource, NoProgressError, Stopped, TrainingBatch

if TYPE_CHECKING:
    from penstock.overseer.trainer import LearnerComponent


class Commit(Protocol):
    """What the replay buffer hears of the learner's steps."""

    def finish_update(self, step: int) -> None:
        """Update `step` was applied: its rollouts are trained."""
        ...

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step` now."""
        ...


class UpdatingLearner(SavedLearner, Protocol):
    """What the loop and its owner need of a learner, whatever it trains."""

    def snapshot(self) -> LearnerSnapshot:
        """All that a checkpoint needs, as it is now."""
        ...

    @property
    def step(self) -> int:
        """The version of the current parameters."""
        ...

    def named_arrays(self) -> Mapping[str, Any]:
        """The current parameters by name, as weights travel."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig:
        """Of the optimiser; arrays that are its `frozen` never change."""
        ...

    def update(self, batch: TrainingBatch[Any], version_step: int) -> Mapping[str, float]:
        """One update on one batch; returns its metrics."""
        ...


WAIT_S = 60.0
"""Seconds of one wait for a batch. There is always another: who owes progress is seen by the overseer alone."""


class TrainingLoop:
    """Runs updates until the last step or a stop request.

    Args:
        learner: Holds parameters and optimiser.
        source: Where batches come from.
        commit: The replay buffer, which hears of updates.
        owner: Publishes, saves, and takes metrics.
        goal: Step of the version to reach.
        publish_first: Whether a version is published before its checkpoint is written.
    """

    def __init__(
        self,
        learner: UpdatingLearner,
        source: BatchSource,
        commit: Commit,
        owner: "LearnerComponent",
        goal: int,
        publish_first: bool,
    ) -> None:
        self._learner = learner
        self._source = source
        self._commit = commit
        self._owner = owner
        self._goal = goal
        self._publish_first = publish_first
        self._published_step = -1
        self._stopping = threading.Event()
        self._saved_step = learner.step
        self._publish_s = 0.0
        self.doing = "nothing yet"

    def stop(self) -> None:
        """Asks the loop to end at the next update boundary, with a checkpoint."""
        self._stopping.set()

    def run(self) -> None:
        """Trains; on return, and when no batch can come, the last version's checkpoint is durable."""
        while self._learner.step < self._goal and not self._stopping.is_set():
            self._publish()
            started = time.perf_counter()
            try:
                batch = self._next_batch(self._learner.step)
            except Stopped:
                break
            except Exception as error:  # whatever it is, the learner is sound: its last version is kept
                self._save_after(error)
                raise
            self._update(batch, started)
        self._save_last()
        self.doing = f"done at step {self._learner.step}"

    def _publish(self) -> None:
        step = self._learner.step
        if step == self._published_step:
            return
        started = time.perf_counter()
        self._owner.publish()
        self._publish_s = time.perf_counter() - started
        self._published_step = step

    def _update(self, batch: TrainingBatch, started: float) -> None:
        step = batch.step
        received = time.perf_counter()
        self.doing = f"update {step}"
        self._owner.before_update(batch)
        metrics: dict[str, Any] = {**batch.metrics, **self._learner.update(batch, step), **self._owner.after_update()}
        updated = time.perf_counter()
        self._commit.finish_update(step)
        self._commit.set_current_step(step + 1)
        publish_s, checkpoint_s = self._publish_s, 0.0
        if self._publish_first and step + 1 < self._goal:
            self._publish()
        if self._owner.checkpoint_due(step + 1):
            saving = time.perf_counter()
            self._save(step + 1)
            checkpoint_s = time.perf_counter() - saving
        metrics |= {
            "time/wait_for_batch": received - started,
            "time/update": updated - received,
            "time/checkpoint": checkpoint_s,
            "weights/publish_s": publish_s,
        }
        self._owner.on_step(step + 1, metrics)

    def _next_batch(self, step: int) -> TrainingBatch:
        self.doing = f"waiting for the batch of update {step}"
        while True:
            with suppress(NoProgressError):
                return self._source.next_batch(step, WAIT_S)

    def _save_after(self, error: Exception) -> None:
        try:
            self._save_last()
        except Exception as second:  # must not hide what ended the run
            error.add_note(f"and the checkpoint of step {self._learner.step} could not be saved: {second}")

    def _save_last(self) -> None:
        self._save(self._learner.step)
        self.doing = f"saving the checkpoint of step {self._learner.step}"
        self._owner.wait_until_saved()

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        self.doing = f"saving the checkpoint of step {step}"
        self._owner.save(step)
        self._saved_step = step

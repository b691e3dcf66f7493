"""The learner's side of a replay service: batches, what was trained on them, and the states of a checkpoint.

Every method may be called again with the same arguments, because the answer to the first call was lost, and does
nothing twice. A learner of another lineage than the run's present one is refused: it must end.
"""

import threading
from collections.abc import Callable
from typing import Any

from penstock.replay.buffer import ReplayBuffer
from penstock.replay.paced import PacedReplayBuffer
from penstock.types import BatchSource, NoProgressError, SupersededError, TrainingBatch


class LearnerDesk:
    """Serves one learner. Thread-safe.

    Args:
        lineage: Of the run.
        buffer: Whose batches they are.
        batches: Where they come from: a source over the buffer, or the buffer.
        states: Gives the states that belong into a checkpoint, by name; called while the buffer stands still.

    Attributes:
        repeated: Calls that had been answered before.
    """

    def __init__(
        self, lineage: int, buffer: ReplayBuffer | PacedReplayBuffer, batches: BatchSource,
        states: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.repeated = 0
        self._lineage = lineage
        self._buffer = buffer
        self._batches = batches
        self._gather = states
        self._learning = threading.Lock()
        self._batch: TrainingBatch[Any] | None = None
        self._finished: int | None = None
        self._states: tuple[int, dict[str, Any]] | None = None

    def next_batch(self, lineage: int, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of an update; the same one until that is finished.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            SupersededError: the learner is of another lineage.
            Stopped: the service is closed.
            RunFailed: no batch can come.
        """
        self._check(lineage)
        if not self._learning.acquire(timeout=timeout_s):
            raise NoProgressError(f"an earlier call for a batch is still waiting: {self._buffer.waiting_for()}")
        try:
            if self._batch is None or self._batch.step != step:
                self._batch = self._batches.next_batch(step, timeout_s)
            return self._batch
        finally:
            self._learning.release()

    def finish_update(self, lineage: int, step: int) -> None:
        """Update `step` was applied.

        Raises:
            SupersededError: the learner is of another lineage.
            RunFailed: it has no batch.
        """
        self._check(lineage)
        with self._learning:
            if self._finished is not None and step <= self._finished:
                self.repeated += 1
                return
            self._buffer.finish_update(step)
            self._finished, self._batch = step, None

    def set_current_step(self, lineage: int, step: int) -> None:
        """The learner holds version `step`.

        Raises:
            SupersededError: the learner is of another lineage.
        """
        self._check(lineage)
        self._buffer.set_current_step(step)

    def checkpoint_states(self, lineage: int, step: int) -> dict[str, Any]:
        """The states that belong into the checkpoint of version `step`, by name.

        Asked again for the same version it gives the same states.

        Raises:
            SupersededError: the learner is of another lineage.
        """
        self._check(lineage)
        with self._learning:
            if self._states is None or self._states[0] != step:
                with self._buffer.boundary():
                    self._states = (step, self._gather())
            return self._states[1]

    def checkpoint_saved(self, lineage: int, step: int) -> None:
        """The checkpoint with the states of version `step` is there: files that nobody needs any more may go.

        Raises:
            SupersededError: the learner is of another lineage.
        """
        self._check(lineage)
        with self._learning:
            if self._states is not None and self._states[0] == step:
                self._buffer.checkpoint_saved()

    def _check(self, lineage: int) -> None:
        if lineage != self._lineage:
            raise SupersededError(f"the learner is of lineage {lineage}, and the run's is {self._lineage}")

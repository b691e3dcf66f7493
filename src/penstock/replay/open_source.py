"""What a learner of fragments trains from: an open buffer as a `penstock.types.BatchSource`, and what it commits to.

Nothing is formed ahead: whole fragments need no preparation, and a batch that is formed late holds newer ones. Not
covered: who learns from it (`penstock.overseer.training_loop` calls these in the order of the commit protocol).
"""

from typing import Any

from penstock.replay.buffer import ReplayBuffer
from penstock.types import ConfigError, NoProgressError, TrainingBatch


class SampledBatches:
    """Implements `penstock.types.BatchSource` over a `ReplayBuffer` without tickets.

    Args:
        buffer: Open.
        fragments_per_batch: Of each update, in the batch maker's units.

    Raises:
        ConfigError: `fragments_per_batch` is below 1, or more than the buffer lets wait.
    """

    def __init__(self, buffer: ReplayBuffer, fragments_per_batch: int) -> None:
        if fragments_per_batch < 1:
            raise ConfigError(f"fragments_per_batch is {fragments_per_batch}: a batch has at least 1")
        most = buffer.most_waiting
        if most is not None and most < fragments_per_batch:
            raise ConfigError(
                f"fragments_per_batch is {fragments_per_batch}, but replay.max_waiting lets {most} wait: raise that"
            )
        self._buffer = buffer
        self._fragments_per_batch = fragments_per_batch

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of update `step`, with its fragments and itself durable; waits for it, woken by each arrival.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the buffer was closed.
            RunFailed: the disk has been full for too long, or writing failed otherwise.
        """
        batch = self._buffer.await_batch(step, timeout_s, lambda: True, self._fragments_per_batch)
        if batch is None:
            raise NoProgressError(f"no batch within {timeout_s:.1f} s: {self._buffer.waiting_for()}")
        return batch

    def finish_update(self, step: int) -> None:
        """Update `step` was applied: its fragments were used."""
        self._buffer.finish_update(step)

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`; called before that is published."""
        self._buffer.set_current_step(step)


OpenBatchSource = SampledBatches
"""The earlier name."""

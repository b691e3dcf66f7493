"""How a learner comes to its batches: formed ahead in a background thread, or sampled when they are asked for.

Working ahead changes nothing but the wait: files are sealed early and stragglers aborted only once the learner itself
waits, and a batch that was formed ahead counts as outstanding until its update is finished. Of fragments nothing is
formed ahead: whole ones need no preparation, and a batch that is formed late holds newer ones.

Not covered: who learns from it (`penstock.overseer.training_loop` calls these in the order of the commit protocol).
"""

import threading
import time
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from penstock.replay.buffer import ReplayBuffer
from penstock.replay.paced import PacedReplayBuffer
from penstock.types import ConfigError, NoProgressError, PenstockError, Stopped, TrainingBatch

_RECHECK_S = 0.2
"""Longest wait for a batch before the thread looks whether it should stop."""


class ReplayDataLoader:
    """Implements `penstock.types.BatchSource` over a replay buffer. The thread starts with the first `next_batch`.

    Args:
        buffer: Paced, or open: then batches have `groups_per_batch` units.
        prefetch: Batches formed ahead; 0 forms each when it is asked for, in the caller's thread.
        until: No batch is formed for this update or a later one; None means no end.
    """

    def __init__(self, buffer: ReplayBuffer | PacedReplayBuffer, prefetch: int = 1, until: int | None = None) -> None:
        self._buffer = buffer
        self._prefetch = prefetch
        self._until = until
        self._changed = threading.Condition()
        self._ready: deque[TrainingBatch] = deque()
        self._wanted = False
        self._stopping = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the thread."""
        self.stop()

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch:
        """See `BatchSource.next_batch`; steps must follow one another.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the buffer or this loader was stopped.
            RunFailed: no batch can come.
        """
        if not self._prefetch:
            return self._buffer.next_batch(step, timeout_s)
        self._start(step)
        started = time.monotonic()
        self._want(True)
        try:
            with self._changed:
                if not self._changed.wait_for(self._is_settled, timeout_s):
                    raise NoProgressError(f"no batch within {timeout_s:.1f} s: {self._buffer.waiting_for()}")
                if not self._ready:
                    raise self._failure or Stopped("the data loader was stopped")
                batch = self._ready.popleft()
                self._changed.notify_all()
        finally:
            self._want(False)
        if batch.step != step:
            raise PenstockError(f"the batch of update {step} was asked for, but {batch.step} is next")
        return replace(batch, metrics={**batch.metrics, "replay/wait_s": time.monotonic() - started})

    def peek(self, step: int) -> TrainingBatch[Any] | None:
        """The batch of a later update, where it is formed already; `next_batch` gives it all the same. Never waits."""
        with self._changed:
            return self._ready[0] if self._ready and self._ready[0].step == step else None

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ends the thread; batches that nobody took stay what they were before: waiting, after a resume.

        Raises:
            NoProgressError: it did not end in time.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._buffer.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise NoProgressError(f"the data loader did not stop within {timeout_s:.1f} s: it writes a batch")

    def _is_settled(self) -> bool:
        return bool(self._ready) or self._failure is not None or self._stopping

    def _start(self, step: int) -> None:
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, args=(step,), name="replay-data-loader", daemon=True)
            thread.start()
            self._thread = thread  # once it runs: `stop`, of another thread, joins it

    def _want(self, wanted: bool) -> None:
        self._wanted = wanted and not self._ready
        if self._wanted:
            self._buffer.wake()

    def _run(self, step: int) -> None:
        try:
            while not self._stopping and (self._until is None or step < self._until):
                batch = self._buffer.await_batch(step, _RECHECK_S, lambda: self._wanted)
                if batch is None:
                    continue
                step += 1
                with self._changed:
                    self._ready.append(batch)
                    self._wanted = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._ready) < self._prefetch or self._stopping)
        except Exception as error:  # whatever it is, the learner raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()


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

    def peek(self, step: int) -> None:
        """None: of fragments nothing is formed ahead."""

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

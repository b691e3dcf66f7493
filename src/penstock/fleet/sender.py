"""Fragments on their way from a worker to the replay buffer: a bounded queue, and a thread's loop that empties it.

Every step that enters the queue is in exactly one place of its account: waiting (in the queue or being sent), sent and
trainable, sent but faulty, cut off as stale, dropped by policy, or abandoned at the end.

A full queue blocks the simulators (`block`) or loses its oldest fragment (`drop_oldest`); both are counted. Where the
worker is to end nothing waits for room any more: a fragment that finds none is abandoned. Steps by versions further
back than `max_staleness` are cut off just before sending. A sink that raises ends the loop with that error; what it did
not take is abandoned.

Not covered: the thread (`RolloutWorkerWrapper`), and what the sink does with fragments.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from penstock.fleet.accounting import StepBooks
from penstock.fleet.fragments import UnsentFragment
from penstock.types import NoProgressError, RolloutBatch, RolloutGroup, RolloutSink, SampleFragment, WeightVersion

POLL_S = 0.2
"""How often an idle loop looks whether it should stop; a fragment wakes it at once."""

MOST_AT_ONCE = 16
"""Fragments that are handed to the sink in one call."""

_BY_STEP = (
    "rewards", "terminated", "truncated", "faults", "logprobs", "weight_steps", "episodes", "first", "values",
)  # fmt: skip


class FragmentQueue:
    """Bounded, first in first out. One thread puts, one takes, any reads.

    Args:
        capacity: Most fragments that wait.
        when_full: Block, or drop the oldest.
        timeout_s: Longest that `put` blocks.
        books: Told where the steps go that wait.

    Attributes:
        books: As given.
    """

    def __init__(
        self, capacity: int, when_full: Literal["block", "drop_oldest"], timeout_s: float, books: StepBooks
    ) -> None:
        self._capacity, self._when_full, self._timeout_s, self.books = capacity, when_full, timeout_s, books
        self._changed = threading.Condition()
        self._waiting: deque[UnsentFragment] = deque()
        self._fragments_sent = self._fragments_dropped = 0
        self._blocked_s = 0.0
        self._blocked_since: float | None = None
        self._blocks = True
        self._closed = False

    def put(self, unsent: UnsentFragment) -> bool:
        """Queues a fragment.

        Returns:
            False where the queue was closed, or was full and does not block any more: the fragment is abandoned.

        Raises:
            NoProgressError: there was no room for too long. The fragment is abandoned.
        """
        with self._changed:
            if self._when_full == "drop_oldest":
                self._make_room()
            elif not self._wait_for_room():
                self.books.settle(unsent.fragment.length, "abandoned")
                raise NoProgressError(
                    f"the queue of {self._capacity} fragments stayed full for {self._timeout_s:g} s "
                    "(fleet.send_timeout_s): the replay buffer takes nothing; see that the learner runs"
                )
            if self._closed or not self._has_room:
                self.books.settle(unsent.fragment.length, "abandoned")
                return False
            self._waiting.append(unsent)
            self._changed.notify_all()
            return True

    def take(self, most: int, timeout_s: float) -> list[UnsentFragment]:
        """Up to `most` of the oldest; none at the timeout. They count as waiting until they are settled."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._changed.notify_all()
            return taken

    def count_sent(self, fragments: int) -> None:
        """The sink has so many more fragments."""
        with self._changed:
            self._fragments_sent += fragments

    def stop_blocking(self) -> None:
        """From here on `put` waits for nothing, nor does one that waits already. What waits can still be taken."""
        with self._changed:
            self._blocks = False
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing can be put any more; waiters wake. What waits can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Closes it, and gives up every step that waits, also of fragments that were taken and never settled."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self.books.abandon()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def metrics(self) -> dict[str, float]:
        """Depth, and seconds for which simulators were blocked."""
        with self._changed:
            blocking_s = 0.0 if self._blocked_since is None else time.monotonic() - self._blocked_since
            return {
                "fleet/queue_depth": float(len(self._waiting)),
                "fleet/blocked_s": self._blocked_s + blocking_s,
                "fleet/fragments_sent": float(self._fragments_sent),
                "fleet/fragments_dropped": float(self._fragments_dropped),
            }

    @property
    def _has_room(self) -> bool:
        return len(self._waiting) < self._capacity

    def _make_room(self) -> None:
        while not self._has_room:
            self.books.settle(self._waiting.popleft().fragment.length, "dropped")
            self._fragments_dropped += 1

    def _wait_for_room(self) -> bool:
        """Whether the wait is over in time: there is room, or none is waited for any more."""
        if self._has_room or self._closed or not self._blocks:
            return True
        self._blocked_since = time.monotonic()
        try:
            return self._changed.wait_for(lambda: self._has_room or self._closed or not self._blocks, self._timeout_s)
        finally:
            self._blocked_s += time.monotonic() - self._blocked_since
            self._blocked_since = None


class Sender:
    """Empties a queue into a sink.

    Args:
        queue: Where fragments wait.
        sink: The replay buffer, or what leads to it.
        newest: The newest version that is known; None before the first.
        max_staleness: See `FleetConfig.max_staleness`.
        on_lag: Called with each fragment's steps: how many versions they lie back, int64 [T].
    """

    def __init__(
        self,
        queue: FragmentQueue,
        sink: RolloutSink,
        newest: Callable[[], WeightVersion | None],
        max_staleness: int | None,
        on_lag: Callable[[np.ndarray], None] = lambda lag: None,
    ) -> None:
        self._queue, self._sink, self._newest = queue, sink, newest
        self._max_staleness = max_staleness
        self._on_lag = on_lag

    def run(self) -> None:
        """Sends until the queue is closed and empty."""
        while not (self.send_some(POLL_S) == 0 and self._queue.closed):
            pass

    def send_some(self, timeout_s: float) -> int:
        """Sends what waits, at most `MOST_AT_ONCE` fragments; waits for the first.

        Returns:
            Fragments taken out of the queue.
        """
        taken = self._queue.take(MOST_AT_ONCE, timeout_s)
        fresh = [kept for unsent in taken if (kept := self._fresh(unsent)) is not None]
        if not fresh:
            return len(taken)
        groups = [RolloutGroup(fragment.task, (fragment,), fragment.group_id) for fragment in fresh]
        self._sink.add_batches([RolloutBatch.of((group,)) for group in groups])
        for fragment in fresh:
            self._queue.books.settle(fragment.trainable_steps, "sent")
            self._queue.books.settle(fragment.length - fragment.trainable_steps, "sent_faults")
        self._queue.count_sent(len(fresh))
        return len(taken)

    def _fresh(self, unsent: UnsentFragment) -> SampleFragment | None:
        newest, fragment = self._newest(), unsent.fragment
        assert fragment.metadata is not None  # the cutter attached it
        if newest is None or newest.lineage != fragment.metadata.lineage:
            return fragment  # whether an older lineage's steps are valid is the buffer's to decide
        self._on_lag(np.maximum(newest.step - fragment.weight_steps.astype(np.int64), 0))
        if self._max_staleness is None:
            return fragment
        kept = cut_stale(unsent, newest.step - self._max_staleness)
        self._queue.books.settle(fragment.length - (0 if kept is None else kept.length), "stale")
        return kept


def cut_stale(unsent: UnsentFragment, oldest: int) -> SampleFragment | None:
    """The fragment from its first step on after the last one that is too old; None where nothing is left.

    A policy with recurrent state can only begin where that state is known: where the version changed, which is where
    staleness ends, too.

    Args:
        unsent: The fragment with its states.
        oldest: The oldest version that is not too old.
    """
    fragment = unsent.fragment
    too_old = np.flatnonzero(fragment.weight_steps < oldest)
    if not len(too_old):
        return fragment
    begin = int(too_old[-1]) + 1
    if begin == fragment.length:
        return None
    assert fragment.metadata is not None  # the cutter attached it
    finals = fragment.final_steps >= begin
    return replace(
        fragment,
        **{name: getattr(fragment, name)[begin:] for name in _BY_STEP},
        observations={leaf: array[begin:] for leaf, array in fragment.observations.items()},
        actions={leaf: array[begin:] for leaf, array in fragment.actions.items()},
        final_steps=fragment.final_steps[finals] - np.int32(begin),
        final_observations={leaf: array[finals] for leaf, array in fragment.final_observations.items()},
        initial_state=unsent.states[begin] if fragment.initial_state else {},
        metadata=replace(fragment.metadata, weight_step=int(fragment.weight_steps[begin:].min())),
    )

"""The rollout worker's loop: arrivals in, one inference for many simulators, actions out, and a report of the batch.

An inference begins when the batch is full, or `max_wait_ms` after its first slot came, whichever is first. Full means
`config.most_in_batch` slots, or fewer where fewer could come: those whose process is quarantined, and those in the
inference that runs, are not waited for. What arrived together acts together, so a batch ends with the last arrival that
fits.

Two batches take turns: while one is in inference, arrivals fill the other. A `BatchFiller`'s arrays are allocated once;
it is filled, decided on, acted on and reported, then filled again. Large leaves (frames) are copied when they arrive,
which overlaps with inference; small ones and the scalars of all processes are joined in one call each when the batch
begins.

The loop never spins: it sleeps in `poll` (epoll) or in the policy's result. `progress_handler` is called once per
batch, after its actions were sent and, where the next batch is full already, after its inference began.

Not covered: what becomes of the steps (`FragmentCutter`, `EpisodeTracker`), and threads and weights
(`RolloutWorkerWrapper`).
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.fleet.config import FleetConfig
from penstock.fleet.pipeline_monitor import PipelineMonitor
from penstock.fleet.policy import Pending, PolicyRunner, Simulators
from penstock.fleet.steps import (
    STEP_ROW,
    ActionBatch,
    Leaves,
    StepArrival,
    StepBatch,
    StepRows,
    aligned_zeros,
    whole_rows,
)
from penstock.types import LeafSpace, Spaces

LARGE_BYTES = 1024
"""Leaves of at least so many bytes are copied one by one; smaller ones are joined, or scattered over all slots."""


class BatchFiller(StepRows):
    """Room for one inference batch of at most `capacity` slots.

    Args:
        spaces: Spaces of the observations that arrive and of the actions that answer them.
        capacity: Most slots; at least those of one arrival.

    Attributes:
        count: Slots in it.
        first_at: When the first of them came, in the caller's seconds.
        rows: `STEP_ROW` [n], after `join`.
    """

    def __init__(self, spaces: Spaces, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.first_at = 0.0
        self._arrivals: list[StepArrival] = []
        self._rows = np.zeros(capacity, STEP_ROW)
        self.rows = self._rows[:0]
        self._observations = {
            leaf.name: aligned_zeros((capacity, *leaf.shape), np.dtype(leaf.dtype)) for leaf in spaces.observations
        }
        self._finals = {leaf.name: leaf.zeros(capacity) for leaf in spaces.observations}
        self._large = [leaf.name for leaf in spaces.observations if is_large(leaf)]
        self._small = [leaf.name for leaf in spaces.observations if not is_large(leaf)]

    def takes(self, arrival: StepArrival) -> bool:
        """Whether there is room for all of its slots."""
        return self.count + len(arrival.rows) <= self.capacity

    def add(self, arrival: StepArrival, now: float) -> None:
        """Takes an arrival in."""
        if self.count == 0:
            self.first_at = now
        begin, end = self.count, self.count + len(arrival.rows)
        for name in self._large:
            self._observations[name][begin:end] = arrival.observations[name]
        self._arrivals.append(arrival)
        self.count = end

    def join(self) -> None:
        """Joins what was not copied yet; after it nothing refers to the arrivals' own arrays."""
        count, arrivals = self.count, self._arrivals
        self.rows = self._rows[:count]
        np.concatenate([whole_rows(arrival.rows) for arrival in arrivals], out=whole_rows(self.rows))
        for name in self._small:
            np.concatenate([arrival.observations[name] for arrival in arrivals], out=self._observations[name][:count])
        if self.has_final.any():
            self._copy_finals()

    def _copy_finals(self) -> None:
        begin = 0
        for arrival in self._arrivals:
            for row in np.flatnonzero(arrival.has_final):
                for name, array in self._finals.items():
                    array[begin + row] = arrival.final_observations[name][row]
            begin += len(arrival.rows)

    @property
    def room(self) -> Leaves:
        """By leaf name, [capacity, …]: the observations of the n slots, after `join`, and old ones."""
        return self._observations

    def simulate_s(self) -> Sequence[float]:
        """How long each arrival took."""
        return [arrival.simulate_s for arrival in self._arrivals]

    def shares(self, actions: Leaves) -> Iterator[tuple[StepArrival, Leaves]]:
        """Each arrival with its share of the actions, as views."""
        begin = 0
        for arrival in self._arrivals:
            end = begin + len(arrival.rows)
            yield arrival, {name: array[begin:end] for name, array in actions.items()}
            begin = end

    def reported(self, decision: ActionBatch, inference_s: float = 0.0) -> StepBatch:
        """What progress handlers are told; views that hold until `clear`."""
        count = self.count
        sizes = [len(arrival.rows) for arrival in self._arrivals]
        return StepBatch(
            rows=self.rows,
            observations={name: array[:count] for name, array in self._observations.items()},
            final_observations={name: array[:count] for name, array in self._finals.items()},
            decision=decision,
            simulate_s=np.repeat(self.simulate_s(), sizes),
            inference_s=inference_s,
        )

    def clear(self) -> None:
        """Makes it empty."""
        self.count = 0
        self._arrivals = []


def is_large(leaf: LeafSpace) -> bool:
    """Whether a leaf's arrays are worth a copy of their own."""
    return leaf.nbytes >= LARGE_BYTES


POLL_S = 0.2
"""How often an idle loop looks whether it should stop; an arrival wakes it at once."""

_EPOLL_TICK_S = 0.001
"""`select.epoll` rounds its waits up to this: shorter ones are not worth the call."""


class RolloutWorker:
    """Drives the slots of one pool with one policy. One thread at a time.

    Args:
        pool: The simulators, already started.
        runner: The policy, with weights.
        config: Batch size and longest wait.
        progress_handler: Called with every batch; its arrays hold until it returns, so it copies what it keeps.
        monitor: Told how long each stage took.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: Simulators,
        runner: PolicyRunner,
        config: FleetConfig,
        progress_handler: Callable[[StepBatch], None],
        monitor: PipelineMonitor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._handler = progress_handler
        self._monitor = monitor or PipelineMonitor(config.most_in_batch)
        self._clock = clock
        self._least = config.envs_per_part
        self._most = max(config.most_in_batch, self._least)
        self._max_wait_s = config.max_wait_ms / 1000
        self._filling = BatchFiller(pool.spaces, self._most)
        self._spare = BatchFiller(pool.spaces, self._most)
        self._inferring: BatchFiller | None = None
        self._pending: Pending | None = None
        self._began = 0.0
        self._usual_inference_s = 0.0
        self._backlog: deque[tuple[StepArrival, float]] = deque()  # each with when it came

    def run(self, stopping: threading.Event) -> None:
        """Turns until asked to stop; what is in inference then is finished, so that every action is accounted for."""
        while not stopping.is_set():
            self.run_once(POLL_S)
        self.finish()

    def run_once(self, timeout_s: float) -> int:
        """One turn: begins an inference when it is time, or finishes the one that runs.

        Args:
            timeout_s: Longest wait for arrivals.

        Returns:
            Slots that were decided and acted on; 0 where no inference ended.
        """
        if self._pending is not None:
            self._receive_meanwhile(self._pending)
            return self.finish()
        if not self._begin_if_due():
            self._receive(self._patience_s(timeout_s))
            self._begin_if_due()
        self._fill_from_backlog()
        return 0

    def finish(self) -> int:
        """Ends the inference that runs, if one does: actions out, the next one begun if it is full, the batch reported.

        Returns:
            Slots that were decided and acted on.
        """
        batch, pending = self._inferring, self._pending
        if batch is None or pending is None:
            return 0
        decision = pending.result()
        decided = self._clock()
        waited_s, inference_s = self._began - batch.first_at, decided - self._began
        self._usual_inference_s += 0.1 * (inference_s - self._usual_inference_s)
        self._pending, self._inferring, self._spare = None, None, batch
        self._act(batch, decision)
        sent = self._clock()
        self._begin_if_due()
        reporting = self._clock()
        self._handler(batch.reported(decision, inference_s))
        ended = self._clock()
        self._monitor.note_batch(batch.count, waited_s, inference_s, sent - decided, ended - reporting)
        self._monitor.note_steps(batch.simulate_s())
        count = batch.count
        batch.clear()
        self._fill_from_backlog()
        return count

    def _act(self, batch: BatchFiller, decision: ActionBatch) -> None:
        try:
            for arrival, actions in batch.shares(decision.actions):
                self._pool.act(arrival.process, actions, arrival.part)
        except BaseException:
            self._handler(batch.reported(decision))  # some may have acted: their steps are accounted for
            raise

    def _begin_if_due(self) -> bool:
        batch, now = self._filling, self._clock()
        if not batch.count or not (self._is_full(batch) or now - batch.first_at >= self._max_wait_s):
            return False
        batch.join()
        self._began = now
        self._pending = self._runner.decide(batch.slots, batch.room, batch.first)
        self._inferring, self._filling = batch, self._spare
        return True

    def _is_full(self, batch: BatchFiller) -> bool:
        return batch.count >= self._pool.live_slots or batch.count + self._least > self._most

    def _patience_s(self, timeout_s: float) -> float:
        if not self._filling.count:
            return timeout_s
        return max(0.0, min(timeout_s, self._filling.first_at + self._max_wait_s - self._clock()))

    def _receive_meanwhile(self, pending: Pending) -> None:
        """Takes arrivals for as long as inference usually lasts, and then for as long as there are any."""
        while not pending.done():
            left_s = self._began + self._usual_inference_s - self._clock()
            ticks = max(0, math.floor(left_s / _EPOLL_TICK_S))
            if not self._receive(ticks * _EPOLL_TICK_S) and ticks == 0:
                return

    def _receive(self, timeout_s: float) -> bool:
        arrivals = self._pool.poll(timeout_s)
        if not arrivals:
            return False
        began = self._clock()
        self._backlog.extend((arrival, began) for arrival in arrivals)
        self._fill_from_backlog()
        self._monitor.note_receive(self._clock() - began)
        return True

    def _fill_from_backlog(self) -> None:
        while self._backlog and self._filling.takes(self._backlog[0][0]):
            self._filling.add(*self._backlog.popleft())

"""The rollout worker: weights in, rollouts out, metrics and sample conversations to the tracker.

It computes nothing itself; the `RolloutManager` does. Two loops run side by side:

- *weights*: waits for a newer version, hands it to the manager's engine, evaluates where an evaluation is due
  (the weights stay at that version meanwhile), and tells the issuer which version serves now;
- *tickets*: acquires as many tickets as it has room for and generates each in a thread of its own, so that no
  group waits for another. At staleness zero the tickets of one call form a cohort that generates in lockstep
  and is delivered in ticket order.

An environment's failure is a counted failed group; many in a row, or any other error, end the run.
"""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, cast

from penstock.rollout.config import RolloutConfig
from penstock.rollout.lockstep import Lockstep
from penstock.rollout.manager import RolloutManager
from penstock.types import (
    EnvironmentFailure,
    InferenceContext,
    InvalidRolloutError,
    ManyInferenceContext,
    RolloutBatch,
    RolloutSink,
    RunFailed,
    Stopped,
    Ticket,
    TicketSource,
    WeightSource,
    WeightVersion,
)

POLL_S = 0.5
"""How often a waiting loop looks whether it should stop; what it waits for wakes it at once."""


_Outcome = RolloutBatch | EnvironmentFailure | InvalidRolloutError | Stopped


class SampleLog(Protocol):
    """Where sample conversations go."""

    def __call__(self, batch: RolloutBatch) -> None:
        """Logs a batch's conversations."""
        ...


class RolloutWorker:
    """Runs the rollout loops until stopped.

    Args:
        worker_id: Unique in the run.
        manager: Generates and evaluates.
        tickets: Admission.
        sink: Takes finished groups.
        weights: Newer versions come from here.
        config: See `RolloutConfig`.
        concurrency: Most groups in generation at once.
        lockstep: Generate cohorts in lockstep (staleness zero).
        evaluate: Called with each new version before (lockstep) or after it starts to serve.
        log_samples: Called every `config.log_freq` groups.
        lockstep_timeout_s: Longest wait of one group for its round.
    """

    def __init__(
        self,
        worker_id: str,
        manager: RolloutManager,
        tickets: TicketSource,
        sink: RolloutSink,
        weights: WeightSource,
        config: RolloutConfig,
        *,
        concurrency: int,
        lockstep: bool,
        evaluate: Callable[[WeightVersion], None],
        log_samples: SampleLog,
        lockstep_timeout_s: float = 600.0,
    ) -> None:
        self.worker_id = worker_id
        self._manager = manager
        self._tickets = tickets
        self._sink = sink
        self._weights = weights
        self._config = config
        self._concurrency = config.max_concurrent_groups or concurrency
        self._lockstep = lockstep
        self._evaluate = evaluate
        self._log_samples = log_samples
        self._lockstep_timeout_s = lockstep_timeout_s
        self._stopping = threading.Event()
        self._version: WeightVersion | None = None
        self._failures_in_a_row = 0
        self.groups_finished = 0
        self.groups_failed = 0
        self.rollouts_finished = 0
        self.last_failure = ""

    def stop(self) -> None:
        """Asks both loops to end; running groups are aborted."""
        self._stopping.set()

    def run_weights(self) -> None:
        """The weights loop; returns after `stop`."""
        while not self._stopping.is_set():
            version = self._weights.wait_for(self._version, POLL_S)
            if version is None:
                continue
            self._manager.update_model(version, self._weights.fetch(version))
            self._version = version
            if self._lockstep:  # a barrier: nothing is generated while the version is evaluated
                self._evaluate(version)
                self._tickets.set_serving_step(version.step)
            else:
                self._tickets.set_serving_step(version.step)
                self._evaluate(version)

    def run_tickets(self) -> None:
        """The tickets loop; returns after `stop`, when no group runs any more."""
        running: dict[Future[_Outcome], Ticket] = {}
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix=self.worker_id) as pool:
            try:
                while not self._stopping.is_set() and not self._exhausted():
                    room = self._concurrency - len(running)
                    for future, ticket in self._start(pool, self._acquire(room) if room else []):
                        running[future] = ticket
                    self._deliver_finished(running, block=not room)
                self._deliver_all(running)
            finally:
                self._stopping.set()

    def _exhausted(self) -> bool:
        limit = self._config.max_rollouts
        return limit is not None and self.rollouts_finished >= limit

    def _acquire(self, room: int) -> list[Ticket]:
        try:
            return self._tickets.acquire(room, POLL_S)
        except Stopped:
            self._stopping.set()
            return []

    def _start(self, pool: ThreadPoolExecutor, tickets: list[Ticket]) -> list[tuple[Future[_Outcome], Ticket]]:
        if not self._lockstep:
            return [(pool.submit(self._generate, ticket, None), ticket) for ticket in tickets]
        cohort = Lockstep(cast(ManyInferenceContext, self._manager.context), len(tickets), self._lockstep_timeout_s)
        futures = [pool.submit(self._in_step, cohort, i, ticket) for i, ticket in enumerate(tickets)]
        for ticket, future in zip(tickets, futures, strict=True):  # in ticket order, not as they finish
            self._deliver(ticket, future.result(self._lockstep_timeout_s))
        return []

    def _in_step(self, cohort: Lockstep, index: int, ticket: Ticket) -> _Outcome:
        try:
            return self._generate(ticket, cohort.participant(index))
        finally:
            cohort.leave(index)

    def _generate(self, ticket: Ticket, context: InferenceContext | None) -> _Outcome:
        n = self._manager.group_size(ticket.lesson_id)
        try:
            batch, _ = self._manager.sample_batch(
                ticket.lesson_id,
                1,
                n,
                "train",
                ticket.seed,
                ticket.admitted_step,
                self.worker_id,
                group_ids=[ticket.ticket_id],
                context=context,
            )
        except (EnvironmentFailure, InvalidRolloutError, Stopped) as ending:
            return ending
        return batch

    def _deliver_finished(self, running: dict[Future[_Outcome], Ticket], block: bool) -> None:
        if block:
            wait(running, POLL_S, FIRST_COMPLETED)
        for future in [future for future in running if future.done()]:
            self._deliver(running.pop(future), future.result())

    def _deliver_all(self, running: dict[Future[_Outcome], Ticket]) -> None:
        """Lets the groups that still run end; the stopping engine cuts their requests short."""
        for future, ticket in running.items():
            self._deliver(ticket, future.result(self._lockstep_timeout_s))

    def _deliver(self, ticket: Ticket, outcome: _Outcome) -> None:
        if self._stopping.is_set() or isinstance(outcome, Stopped):
            return  # its ticket stays outstanding, so that a resumed run generates it again
        if isinstance(outcome, Exception):
            self._count_failure(ticket, outcome)
        elif not outcome.groups:
            self._tickets.fail(ticket, "invalid", "the environment returned no group")
        else:
            self._hand_over(outcome)

    def _hand_over(self, outcome: RolloutBatch) -> None:
        self._failures_in_a_row = 0
        self.groups_finished += 1
        self.rollouts_finished += len(outcome.groups[0].rollouts)
        if self.groups_finished % self._config.log_freq == 1 % self._config.log_freq:
            self._log_samples(outcome)
        self._sink.add_batches([outcome])

    def _count_failure(self, ticket: Ticket, failure: Exception) -> None:
        self._failures_in_a_row += 1
        self.groups_failed += 1
        self.last_failure = str(failure)
        self._tickets.fail(ticket, "invalid", str(failure))
        if self._failures_in_a_row >= self._config.max_consecutive_failures:
            raise RunFailed(
                f"{self._failures_in_a_row} groups in a row failed (rollout.max_consecutive_failures); "
                f"the last, of lesson {ticket.lesson_id!r}: {failure}"
            ) from failure

"""The rollout worker: weights in, rollouts out, metrics and sample conversations to the tracker.

It computes nothing itself; the `RolloutManager` does. Two loops run side by side:

- *weights*: waits for a newer version, hands it to the manager's engine, evaluates where an evaluation is due
  (the weights stay at that version meanwhile), and tells the issuer which version serves now;
- *tickets*: acquires as many tickets as it has room for and generates each in a daemon thread of its own, so that no
  group waits for another, and none that hangs keeps the process from ending. At staleness zero the tickets of one call
  form a cohort that generates in lockstep and is delivered in ticket order.

Where the engines are in other processes, which fetch their own weights, only the second loop runs.

`Lockstep` fixes the engine's schedule: floating-point results may depend on which rows share a batch, so bit-for-bit
reproduction needs the engine to see the same batches in every run. Every participant waits at a gate; when all that are
still active have arrived, the last arrival submits everybody's prompts, in ticket order, in one call. Nothing else of
the engine changes. With a staleness above zero there is no gate: groups call the engine as they come.

An environment's failure is a counted failed group; many in a row, or any other error, end the run.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.rollout.config import RolloutConfig
from penstock.rollout.manager import RolloutManager
from penstock.types import (
    Completion,
    Decoding,
    EnvironmentFailure,
    GenerationCall,
    InferenceContext,
    InvalidRolloutError,
    ManyInferenceContext,
    NoProgressError,
    RolloutBatch,
    RolloutSink,
    RunFailed,
    Stopped,
    TextCodec,
    Ticket,
    TicketSource,
    WeightsError,
    WeightSource,
    WeightVersion,
)
from penstock.types.calls import DaemonThreads, in_background


@dataclass(slots=True)
class _PendingCall:
    call: GenerationCall
    result: list[list[Completion]] | Exception | None = None


class Lockstep:
    """Lets `size` participants share one inference context, round by round.

    Args:
        context: The context to submit to.
        size: Number of participants; participant i uses ``participant(i)`` and ends with ``leave(i)``.
        timeout_s: Longest wait at the gate.
    """

    def __init__(self, context: ManyInferenceContext, size: int, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._gate = threading.Condition()
        self._active = set(range(size))
        self._waiting: dict[int, _PendingCall] = {}

    def participant(self, index: int) -> InferenceContext:
        """The context that participant `index` generates with."""
        return _LockstepContext(self, index)

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's tokenizer."""
        return self._context.tokenizer

    def leave(self, index: int) -> None:
        """Participant `index` will not generate again; the others no longer wait for it."""
        with self._gate:
            self._active.discard(index)
            arrivals = self._complete_round()
        self._submit(arrivals)

    def arrive(self, index: int, arrival: _PendingCall) -> list[list[Completion]]:
        """Waits for the round and returns this participant's share of its results."""
        with self._gate:
            self._waiting[index] = arrival
            arrivals = self._complete_round()
        self._submit(arrivals)
        with self._gate:
            done = self._gate.wait_for(lambda: arrival.result is not None, self._timeout_s)
        if not done or arrival.result is None:
            raise NoProgressError(
                f"lockstep: group {index} waited {self._timeout_s:g} s for its round (rollout.lockstep_timeout_s)"
            )
        if isinstance(arrival.result, Exception):
            raise arrival.result
        return arrival.result

    def _complete_round(self) -> list[_PendingCall]:
        if not self._waiting or self._active - self._waiting.keys():
            return []
        arrivals = [self._waiting[index] for index in sorted(self._waiting)]
        self._waiting = {}
        return arrivals

    def _submit(self, arrivals: list[_PendingCall]) -> None:
        if not arrivals:
            return
        results: list[list[list[Completion]] | Exception]
        try:
            results = list(self._context.generate_many([arrival.call for arrival in arrivals]))
        except Exception as failure:  # the engine failed: every participant raises it
            results = [failure] * len(arrivals)
        with self._gate:
            for arrival, result in zip(arrivals, results, strict=True):
                arrival.result = result
            self._gate.notify_all()


class _LockstepContext:
    def __init__(self, lockstep: Lockstep, index: int) -> None:
        self._lockstep = lockstep
        self._index = index

    @property
    def tokenizer(self) -> TextCodec:
        return self._lockstep.tokenizer

    @property
    def ordered(self) -> bool:
        return True

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        return self._lockstep.arrive(self._index, _PendingCall(GenerationCall(prompts, n, decoding, seeds)))


POLL_S = 0.5
"""How often a waiting loop looks whether it should stop; what it waits for wakes it at once."""


ContextOf = Callable[[Ticket], AbstractContextManager[InferenceContext | None]]
_Outcome = tuple[RolloutBatch, Mapping[str, float]] | EnvironmentFailure | InvalidRolloutError | Stopped


class RolloutWorker:
    """Runs the rollout loops until stopped.

    Args:
        worker_id: Unique in the run.
        manager: Generates and evaluates.
        tickets: Source of the tickets; each admits one group.
        sink: Takes finished groups.
        weights: Newer versions come from here; None where engines fetch their own.
        config: See `RolloutConfig`.
        concurrency: Most groups in generation at once.
        lockstep: Generate cohorts in lockstep (staleness zero).
        evaluate: Called with each new version before (lockstep) or after it starts to serve.
        log_samples: Called every `config.log_freq` groups; never where that is 0.
        on_failure: Called with every failed group and why.
        on_environment: Called with the lesson of every group that ended, and the environment's metrics of it; of all,
            `failed_groups` and `failed_rollouts` say how many did not come.
        context_of: Gives the inference context in which a ticket's group is generated; by default the manager's own.
            Not used in lockstep.

    Attributes:
        concurrency: May be changed while it runs.
    """

    def __init__(
        self,
        worker_id: str,
        manager: RolloutManager,
        tickets: TicketSource,
        sink: RolloutSink,
        weights: WeightSource | None,
        config: RolloutConfig,
        *,
        concurrency: int,
        lockstep: bool,
        evaluate: Callable[[WeightVersion], None] = lambda version: None,
        log_samples: Callable[[RolloutBatch], None],
        on_failure: Callable[[Ticket, str], None] = lambda ticket, reason: None,
        on_environment: Callable[[str, Mapping[str, float]], None] = lambda lesson_id, metrics: None,
        context_of: ContextOf = lambda ticket: nullcontext(),
    ) -> None:
        self.worker_id = worker_id
        self._manager = manager
        self._tickets = tickets
        self._sink = sink
        self._weights = weights
        self._config = config
        self.concurrency = config.max_concurrent_groups or concurrency
        self._lockstep = lockstep
        self._evaluate = evaluate
        self._log_samples = log_samples
        self._on_failure = on_failure
        self._on_environment = on_environment
        self._context_of = context_of
        self._groups = DaemonThreads(f"{worker_id}.group")
        self._draining = threading.Event()
        self._stopping = threading.Event()
        self._version: WeightVersion | None = None
        self._counting = threading.Lock()
        self._failures_in_a_row = 0
        self._rollouts_begun = 0
        self.running = 0
        self.groups_finished = 0
        self.groups_failed = 0
        self.last_failure = ""

    def stop(self) -> None:
        """Asks both loops to end; running groups are aborted."""
        self._stopping.set()

    def drain(self) -> None:
        """Asks the tickets loop to end when the groups that run have ended; it takes no new ones."""
        self._draining.set()

    def run(self) -> None:
        """Both loops, until `stop`, until `drain` and the last group, or until tickets end; a failure ends both.

        Raises:
            NoProgressError: an evaluation goes on for more than ``rollout.lockstep_timeout_s`` after the last group.
        """
        following = None if self._weights is None else in_background(self.run_weights, f"{self.worker_id}.weights")
        if following is None:
            self.run_tickets()
            return
        following.add_done_callback(lambda ended: self.stop())
        self.run_tickets()
        limit_s = self._config.lockstep_timeout_s
        if not wait([following], limit_s).done:
            raise NoProgressError(
                f"{self.worker_id}: its evaluation did not end within {limit_s:g} s (rollout.lockstep_timeout_s)"
            )
        following.result()

    def run_weights(self) -> None:
        """The weights loop; returns after `stop`."""
        weights = self._weights
        assert weights is not None  # whoever starts this loop gave the worker a source
        while not self._stopping.is_set():
            newer = self._fetch_newer(weights)
            if newer is None:
                continue
            self._version, arrays = newer
            try:
                self._manager.update_model(self._version, arrays)
                self._serve(self._version)
            except Stopped:
                return

    def _fetch_newer(self, weights: WeightSource) -> tuple[WeightVersion, Mapping[str, Any]] | None:
        version = weights.wait_for(self._version, POLL_S)
        if version is None:
            return None
        try:
            return version, weights.fetch(version)
        except WeightsError:
            if weights.latest() == version:
                raise
            return None  # superseded between the two calls: the next turn takes the newer one

    def _serve(self, version: WeightVersion) -> None:
        if self._lockstep:  # a barrier: nothing is generated while the version is evaluated
            self._evaluate(version)
            self._tickets.set_serving_step(version.step)
        else:
            self._tickets.set_serving_step(version.step)
            self._evaluate(version)

    def run_tickets(self) -> None:
        """The tickets loop; returns soon after `stop`. Groups that hang then are left behind."""
        running: set[Future[Any]] = set()
        try:
            while not self._stopping.is_set():
                room = self.concurrency - len(running)
                if self._draining.is_set() and not running:
                    break
                if room <= 0 or self._draining.is_set():
                    wait(running, POLL_S, FIRST_COMPLETED)
                elif self._lockstep:
                    self._run_cohort(self._acquire(room))
                else:
                    running |= {self._groups.submit(self._run_group, ticket) for ticket in self._acquire(room)}
                running = _still_running(running)
                self.running = len(running)
            wait(running, POLL_S)
            _still_running(running)
        finally:
            self._stopping.set()
            self._groups.close()

    def _acquire(self, room: int) -> list[Ticket]:
        try:
            tickets = self._tickets.acquire(room, POLL_S)
        except Stopped:
            self._stopping.set()
            return []
        self._rollouts_begun += sum(self._manager.group_size(ticket.lesson_id) for ticket in tickets)
        if self._config.max_rollouts is not None and self._rollouts_begun >= self._config.max_rollouts:
            self.drain()
        return tickets

    def _run_group(self, ticket: Ticket) -> None:
        with self._context_of(ticket) as context:
            outcome = self._generate(ticket, context)
        self._deliver(ticket, outcome)

    def _run_cohort(self, tickets: list[Ticket]) -> None:
        if not tickets:
            return
        context = cast(ManyInferenceContext, self._manager.context)
        limit_s = self._config.lockstep_timeout_s
        cohort = Lockstep(context, len(tickets), limit_s)
        futures = [self._groups.submit(self._in_step, cohort, i, ticket) for i, ticket in enumerate(tickets)]
        _, late = wait(futures, limit_s)
        if late:
            names = [ticket.ticket_id for ticket, future in zip(tickets, futures, strict=True) if future in late]
            raise NoProgressError(f"groups {names} did not end within {limit_s:g} s (rollout.lockstep_timeout_s)")
        for ticket, future in zip(tickets, futures, strict=True):  # in ticket order, not as they finish
            self._deliver(ticket, future.result())

    def _in_step(self, cohort: Lockstep, index: int, ticket: Ticket) -> _Outcome:
        try:
            return self._generate(ticket, cohort.participant(index))
        finally:
            cohort.leave(index)

    def _generate(self, ticket: Ticket, context: InferenceContext | None) -> _Outcome:
        n = self._manager.group_size(ticket.lesson_id)
        try:
            return self._manager.sample_batch(
                ticket.lesson_id,
                1,
                n,
                "train",
                ticket.seed,
                ticket.admitted_step,
                self.worker_id,
                group_ids=[ticket.ticket_id],
                context=context,
                problems=None if ticket.problem is None else [ticket.problem],
            )
        except (EnvironmentFailure, InvalidRolloutError, Stopped) as ending:
            return ending

    def _deliver(self, ticket: Ticket, outcome: _Outcome) -> None:
        if self._stopping.is_set() or isinstance(outcome, Stopped):
            return  # its ticket stays outstanding, so that a resumed run generates it again
        if isinstance(outcome, Exception):
            self._note_environment(ticket, {}, failed=1)
            self._count_failure(ticket, outcome)
            return
        batch, metrics = outcome
        self._note_environment(ticket, metrics, failed=0 if batch.groups else 1)
        if batch.groups:
            self._hand_over(batch)
        else:
            self._tickets.fail(ticket, "invalid", "the environment returned no group")

    def _note_environment(self, ticket: Ticket, metrics: Mapping[str, float], failed: int) -> None:
        rollouts = failed * self._manager.group_size(ticket.lesson_id)
        lost = {"failed_groups": float(failed), "failed_rollouts": float(rollouts)}
        self._on_environment(ticket.lesson_id, {**metrics, **lost})

    def _hand_over(self, batch: RolloutBatch) -> None:
        with self._counting:
            self._failures_in_a_row = 0
            self.groups_finished += 1
            every = self._config.log_freq
            log_due = every > 0 and self.groups_finished % every == 1 % every
        if log_due:
            self._log_samples(batch)
        try:
            self._sink.add_batches([batch])
        except Stopped:
            self._stopping.set()  # as for a group that was cut short

    def _count_failure(self, ticket: Ticket, failure: Exception) -> None:
        with self._counting:
            self._failures_in_a_row += 1
            self.groups_failed += 1
            self.last_failure = str(failure)
            in_a_row = self._failures_in_a_row
        self._tickets.fail(ticket, "invalid", str(failure))
        self._on_failure(ticket, str(failure))
        if in_a_row >= self._config.max_consecutive_failures:
            raise RunFailed(
                f"{in_a_row} groups in a row failed (rollout.max_consecutive_failures); "
                f"the last, of lesson {ticket.lesson_id!r}: {failure}"
            ) from failure


def _still_running(futures: set[Future[Any]]) -> set[Future[Any]]:
    """Those not done; an exception of one that is done is raised here."""
    done = {future for future in futures if future.done()}
    for future in done:
        future.result()
    return futures - done

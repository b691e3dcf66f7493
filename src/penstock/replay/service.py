"""The replay buffer as a service: what rollout workers, inference servers, learner and evaluator call from elsewhere.

Every method may be called again with the same arguments, because the answer to the first call was lost, and does
nothing twice. Messages of another lineage than the run's present one are of no use and are refused: a worker that has
not heard yet of the new lineage gets no tickets and its groups are not taken; a learner of another lineage must end.

`acquire` is a coroutine, so that thousands may wait in it; all others return soon, but for `next_batch`, which takes
its caller's thread. Not covered: how calls get here (`penstock.types.Caller`).
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Literal

from penstock.replay.issuer import TicketIssuer
from penstock.replay.learner_desk import LearnerDesk
from penstock.replay.memory_storage import MemoryRolloutStorage
from penstock.replay.paced import PacedReplayBuffer
from penstock.replay.receiver import RolloutReceiver
from penstock.replay.serving import ServingVersions
from penstock.replay.ticket_desk import TicketDesk, holder_of
from penstock.replay.transfer import batch_from_buffer
from penstock.types import (
    BatchSource,
    CurriculumRecord,
    RolloutBatchStats,
    Ticket,
    TrainingBatch,
)

Acceptance = Literal["taken", "full", "refused"]
"""What became of a delivery: it is here, now or since an earlier call; there is no room at present; it is of no use."""


class ReplayService:
    """Replay for a run of many processes. `start` it, and `stop` it.

    Args:
        issuer: Of the present lineage; restored, where the run resumes.
        buffer: Over the same issuer; likewise.
        batches: Where the learner's batches come from: a data loader over the buffer, or the buffer.
        storage: Where delivered groups wait for the receiver.
        receiver: From the storage to the buffer; the service runs it.
        curriculum: Where evaluations are recorded, and whose state travels in checkpoints.
        needs_clearance: A version serves only when the evaluator has cleared it (staleness zero).
        on_refusal: Told of deliveries that could not be read, by worker, and why.
    """

    def __init__(
        self,
        issuer: TicketIssuer,
        buffer: PacedReplayBuffer,
        batches: BatchSource,
        storage: MemoryRolloutStorage,
        receiver: RolloutReceiver,
        curriculum: CurriculumRecord,
        *,
        needs_clearance: bool = False,
        on_refusal: Callable[[str, str], None] = lambda worker, reason: None,
    ) -> None:
        self.lineage = issuer.lineage
        self._issuer = issuer
        self._buffer = buffer
        self._storage = storage
        self._receiver = receiver
        self._curriculum = curriculum
        self._on_refusal = on_refusal
        self._desk = TicketDesk(issuer)
        self._serving = ServingVersions(issuer, needs_clearance)
        self._lock = threading.Lock()
        self._delivered: dict[str, int] = {}
        self._delivering: set[str] = set()
        self._evaluations: dict[str, tuple[int, RolloutBatchStats]] = {}
        self._learner = LearnerDesk(issuer.lineage, buffer, batches, self._states)
        self._counts: Counter[str] = Counter()
        self._receiver_thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self) -> None:
        """Starts the threads that hand out tickets and take groups in."""
        self._desk.start()
        self._receiver_thread = threading.Thread(target=self._receive, name="replay-receiver", daemon=True)
        self._receiver_thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends every wait with `Stopped`; what was delivered is still stored.

        Returns:
            Whether the threads ended; within the limit, either way.
        """
        ended = self._desk.stop(timeout_s)
        self._buffer.close()
        self._storage.close()
        return self._receiver.stop(timeout_s) and ended

    @property
    def failure(self) -> Exception | None:
        """What ended one of the threads; the service is of no use then."""
        return self._failure or self._desk.failure

    def _receive(self) -> None:
        try:
            self._receiver.run()
        except Exception as error:  # told by `failure`, since nobody joins this thread
            self._failure = error

    # --- for rollout workers -------------------------------------------------------------------------------------

    async def acquire(
        self,
        worker: str,
        incarnation: int,
        lineage: int,
        number: int,
        most: int,
        timeout_s: float,
        lessons: Collection[str] | None = None,
    ) -> list[Ticket]:
        """Between 1 and `most` tickets; none at the timeout.

        Args:
            worker: Who asks.
            incarnation: Which life of it.
            lineage: Of the run, as the worker knows it.
            number: Counts the worker's requests from 1; repeated until it was answered.
            most: Tickets at once.
            timeout_s: Longest wait.
            lessons: Only of these; None means any.

        Raises:
            SupersededError: that incarnation was released, or replaced.
            Stopped: the service is closed.
        """
        if lineage != self.lineage:
            self._desk.check(worker, incarnation)
            self._counts["refused"] += 1
            await asyncio.sleep(timeout_s)
            return []
        future = asyncio.wrap_future(self._desk.ask(worker, incarnation, number, most, lessons))
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        return future.result() if done else self._desk.withdraw(worker, number)

    def deliver(self, worker: str, incarnation: int, lineage: int, number: int, message: bytes) -> Acceptance:
        """Takes one batch over; returns at once.

        Args:
            worker: Whose.
            incarnation: Which life of it.
            lineage: Of the run, as the worker knows it.
            number: Counts the worker's batches from 1; they come one after the other.
            message: Made by `penstock.replay.batch_to_buffer`.

        Raises:
            SupersededError: that incarnation was released, or replaced.
            TransferError: the message was damaged on its way: send it again.
            InvalidRolloutError: a rollout in it is not valid.
            Stopped: the service is closed.
        """
        self._desk.check(worker, incarnation)
        if lineage != self.lineage:
            self._counts["refused"] += 1
            return "refused"
        holder = holder_of(worker, incarnation)
        with self._lock:
            if number <= self._delivered.get(holder, 0):
                self._counts["repeated"] += 1
                return "taken"
            if holder in self._delivering:
                return "full"  # an earlier call with it is still at it
            self._delivering.add(holder)
        try:
            if not self._storage.offer(worker, batch_from_buffer(message)):
                return "full"
            with self._lock:
                self._delivered[holder] = number
                self._counts["bytes"] += len(message)
            return "taken"
        except Exception as error:
            self._counts["unreadable"] += 1
            self._on_refusal(worker, str(error))
            raise
        finally:
            with self._lock:
                self._delivering.discard(holder)

    def fail(
        self, worker: str, incarnation: int, lineage: int, ticket: Ticket, fate: Literal["invalid", "aborted"],
        reason: str,
    ) -> None:  # fmt: skip
        """See `TicketSource.fail`; a ticket that the worker does not hold (any more) is left alone.

        Raises:
            SupersededError: that incarnation was released, or replaced.
        """
        self._desk.check(worker, incarnation)
        with self._issuer.changed:
            if lineage == self.lineage and ticket.ticket_id in self._issuer.held_by(holder_of(worker, incarnation)):
                self._issuer.fail(ticket, fate, reason)
            else:
                self._counts["refused"] += 1

    def release(self, worker: str, incarnation: int) -> None:
        """A worker's incarnation is dead: its tickets go to others first of all, and what it still says is refused."""
        self._desk.release(worker, incarnation)
        with self._lock:
            self._delivered.pop(holder_of(worker, incarnation), None)

    # --- for inference servers and the evaluator -----------------------------------------------------------------

    def server_holds(self, server: str, incarnation: int, lineage: int, step: int, held_back: bool = False) -> bool:
        """A server holds a version now; tickets are stamped with the oldest that any server holds.

        Args:
            server: Which.
            incarnation: Which life of it.
            lineage: Of the version.
            step: Of the version.
            held_back: An evaluation keeps it there; nobody waits for it while there are other servers.

        Returns:
            Whether it counts; one of another lineage does not.

        Raises:
            SupersededError: a newer incarnation of the server has spoken.
        """
        return self._serving.hold(server, incarnation, lineage, step, held_back)

    def forget_server(self, server: str, incarnation: int) -> None:
        """An incarnation of a server is dead: nobody waits for its version any more."""
        self._serving.forget(server, incarnation)

    def cleared(self, lineage: int, step: int) -> bool:
        """Nothing is to be evaluated at this version, or nothing any more; returns whether it counts."""
        return self._serving.clear(lineage, step)

    def update_evaluation(self, stats: RolloutBatchStats, step: int) -> None:
        """A full evaluation of one lesson; the same one again changes nothing."""
        with self._lock:
            if self._evaluations.get(stats.lesson_id) == (step, stats):
                self._counts["repeated"] += 1
                return
            self._evaluations[stats.lesson_id] = (step, stats)
        self._curriculum.update_evaluation(stats, step)

    # --- for the learner -----------------------------------------------------------------------------------------

    def next_batch(self, lineage: int, step: int, timeout_s: float) -> TrainingBatch:
        """See `LearnerDesk.next_batch`."""
        return self._learner.next_batch(lineage, step, timeout_s)

    def finish_update(self, lineage: int, step: int) -> None:
        """See `LearnerDesk.finish_update`."""
        self._learner.finish_update(lineage, step)

    def set_current_step(self, lineage: int, step: int) -> None:
        """See `LearnerDesk.set_current_step`."""
        self._learner.set_current_step(lineage, step)

    def checkpoint_states(self, lineage: int, step: int) -> dict[str, Any]:
        """See `LearnerDesk.checkpoint_states`: ``curriculum``, ``issuer``, ``replay``."""
        return self._learner.checkpoint_states(lineage, step)

    def checkpoint_saved(self, lineage: int, step: int) -> None:
        """See `LearnerDesk.checkpoint_saved`."""
        self._learner.checkpoint_saved(lineage, step)

    def _states(self) -> dict[str, Any]:
        return {
            "curriculum": self._curriculum.state(),
            "issuer": self._issuer.state(),
            "replay": self._buffer.state(),
        }

    # --- how it is -----------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Grows while groups come in and updates are finished."""
        return float(self._receiver.groups_received + self._receiver.groups_refused + self._issuer.update)

    def waiting_for(self) -> str:
        """In words, what the next update waits for."""
        return self._buffer.waiting_for()

    def metrics(self) -> dict[str, float]:
        """``replay/…``, ``rollout_storage/…`` and ``curriculum/…`` numbers of this moment."""
        return {
            **self._buffer.metrics(),
            **self._storage.metrics(),
            **self._receiver.metrics(),
            **self._curriculum.metrics(),
            "rollout_storage/received_bytes": float(self._counts["bytes"]),
            "replay/waiting_workers": float(self._desk.waiting),
            "replay/reissued_tickets": float(self._desk.reissued),
            "replay/refused_messages": float(self._counts["refused"] + self._counts["unreadable"]),
            "replay/repeated_messages": float(self._counts["repeated"] + self._learner.repeated),
        }

    def status(self) -> dict[str, Any]:
        """For status.json."""
        return {
            "lineage": self.lineage,
            "update": self._issuer.update,
            "serving_step": self._issuer.serving_step,
            "servers": self._serving.describe(),
            "ledger": self._issuer.ledger.snapshot(),
            "lessons": self._curriculum.describe(),
            "waiting_for": self._buffer.waiting_for(),
            "waiting_workers": self._desk.waiting,
            "rollout_storage": {
                "receiver": self._receiver.doing,
                **self._storage.metrics(),
                **self._receiver.metrics(),
            },
        }

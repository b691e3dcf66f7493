"""The replay buffer as a service: what rollout workers and the learner call from elsewhere, for rollouts and fragments.

Every method may be called again with the same arguments, because the answer to the first call was lost, and does
nothing twice. A message for which there is no room is answered ``full`` at once, and sent again later: no call waits
for the learner, but `next_batch`, which takes its caller's thread. A learner of another lineage than the run's present
one is refused: it must end. Messages are read, never executed: nothing of what workers send is pickled.

Not covered: tickets (`ticket_service`), how calls get here (`penstock.types.Caller`), and what workers say of
themselves.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from penstock.replay.buffer import ReplayBuffer
from penstock.replay.history import LANGUAGE, ExperienceFormat
from penstock.replay.messages import BatchMessage
from penstock.replay.paced import PacedReplayBuffer
from penstock.replay.queue import MemoryRolloutStorage
from penstock.replay.receiver import RolloutReceiver
from penstock.types import (
    BatchSource,
    ConfigError,
    DuplicateGroupError,
    InvalidRolloutError,
    NoProgressError,
    RolloutBatch,
    RolloutGroup,
    SchemaVersionError,
    SupersededError,
    TrainingBatch,
    TransferError,
)

DeliveryAnswer = Literal["taken", "full", "refused"]
"""What became of a message: all of it is here, now or since an earlier call; there is no room for all of it yet; it is
of another lineage, and of no use."""


class ReplayService:
    """Replay for a run of many processes. Where it has a receiver, `start` it, and `stop` it.

    Args:
        buffer: Restored, where the run resumes.
        batches: Where the learner's batches come from, over the same buffer.
        experience: What is delivered and trained.
        lineage: Of the run.
        receiver: Hands groups on to the buffer from a `MemoryRolloutStorage`, where they wait; the service runs it.
            None gives them to the buffer, which must be open, in the caller's thread.
        check_sender: Raises `SupersededError` for a worker's incarnation (name, number) that is over.
        states: Gives what else belongs into the checkpoint, by name; called while the buffer stands still.
        on_refusal: Told of messages that could not be read: the worker, and why.
        on_delivery: Told of every piece that an open buffer took; of one that was sent twice once.

    Raises:
        ConfigError: without a receiver the buffer is paced, or with one its storage is of files.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | PacedReplayBuffer,
        batches: BatchSource,
        experience: ExperienceFormat = LANGUAGE,
        *,
        lineage: int,
        receiver: RolloutReceiver | None = None,
        check_sender: Callable[[str, int], None] = lambda worker, incarnation: None,
        states: Callable[[], dict[str, Any]] = dict,
        on_refusal: Callable[[str, str], None] = lambda worker, reason: None,
        on_delivery: Callable[[Any], None] = lambda experience: None,
    ) -> None:
        self.lineage = lineage
        self._buffer = buffer
        self._batches = batches
        self._experience = experience
        self._receiver = receiver
        self._inlet = _inlet_of(buffer, receiver)
        self._check_sender = check_sender
        self._more_states = states
        self._on_refusal, self._on_delivery = on_refusal, on_delivery
        self._lock = threading.Lock()
        self._taken: dict[str, tuple[int, int]] = {}
        self._delivering: set[tuple[str, int]] = set()
        self._counts: Counter[str] = Counter()
        self._learning = threading.Lock()
        self._batch: TrainingBatch[Any] | BatchMessage | None = None
        self._finished: int | None = None
        self._states: tuple[int, dict[str, Any]] | None = None
        self._failure: Exception | None = None

    def start(self) -> None:
        """Starts the thread that takes groups out of the queue, where there is one."""
        if self._receiver is not None:
            threading.Thread(target=self._receive, args=(self._receiver,), name="replay-receiver", daemon=True).start()

    def stop(self, timeout_s: float) -> bool:
        """Ends every wait with `Stopped`; what was delivered is still stored.

        Returns:
            Whether the thread ended; within the limit, either way.
        """
        self._buffer.close()
        if isinstance(self._inlet, MemoryRolloutStorage):
            self._inlet.close()
        return self._receiver is None or self._receiver.stop(timeout_s)

    @property
    def failure(self) -> Exception | None:
        """What ended the thread; the service is of no use then."""
        return self._failure

    def _receive(self, receiver: RolloutReceiver) -> None:
        try:
            receiver.run()
        except Exception as error:  # told by `failure`, since nobody joins this thread
            self._failure = error

    # --- for rollout workers -------------------------------------------------------------------------------------

    def deliver(
        self, worker: str, incarnation: int, lineage: int | None, number: int, message: bytes
    ) -> DeliveryAnswer:
        """Takes the groups of a message over, as far as there is room; returns at once.

        Args:
            worker: Its name.
            incarnation: Which life of it.
            lineage: Of the run, as the worker knows it; None where the buffer judges by the weights alone.
            number: Counts the worker's messages from 1; they come one after the other.
            message: Made by `ExperienceFormat.to_message`.

        Raises:
            SupersededError: that incarnation was released, or replaced.
            TransferError: the message was damaged on its way: send it again.
            SchemaVersionError: a newer Penstock wrote it.
            InvalidRolloutError: something in it is not valid, or it is too large.
            Stopped: the service is closed.
        """
        self._check_sender(worker, incarnation)
        if lineage is not None and lineage != self.lineage:
            self._count("refused")
            return "refused"
        sender = (worker, incarnation)
        with self._lock:
            known, last = self._taken.get(worker, (incarnation, 0))
            if known == incarnation and number <= last:
                self._counts["repeated"] += 1
                return "taken"
            if sender in self._delivering:
                return "full"  # an earlier call with it is still at it
            self._delivering.add(sender)
        try:
            if not self._take(worker, message):
                return "full"
            with self._lock:
                self._taken[worker] = (incarnation, number)
            return "taken"
        except (TransferError, InvalidRolloutError, SchemaVersionError) as error:
            self._count("unreadable")
            self._on_refusal(worker, str(error))
            raise
        finally:
            with self._lock:
                self._delivering.discard(sender)

    def has_room(self, worker: str, groups: int = 1) -> bool:
        """Whether a message of a worker might be taken now: all of it, or the first of its groups by an open buffer."""
        if isinstance(self._inlet, MemoryRolloutStorage):
            return self._inlet.has_room(worker, groups)
        return self._inlet.has_room

    def _take(self, worker: str, message: bytes) -> bool:
        groups = self._experience.from_message(message)
        if isinstance(self._inlet, MemoryRolloutStorage):
            taken = self._inlet.offer(worker, RolloutBatch.of(tuple(groups)))
            self._count("bytes", len(message) if taken else 0)
            return taken
        self._count("bytes", len(message))
        return self._offer(self._inlet, groups)

    def _offer(self, buffer: ReplayBuffer, groups: Sequence[RolloutGroup[Any]]) -> bool:
        """Gives groups to the buffer up to the first for which it has no room."""
        for group in groups:
            try:
                if not buffer.offer(group):
                    self._count("full")
                    return False
            except DuplicateGroupError:
                self._count("repeated")
                continue
            self._count("groups")
            for experience in group.rollouts:
                self._on_delivery(experience)
        return True

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    # --- for the learner -----------------------------------------------------------------------------------------

    def next_batch(
        self, lineage: int, step: int, timeout_s: float, known: str = ""
    ) -> TrainingBatch[Any] | BatchMessage:
        """The batch of an update; the same one until that is finished.

        Args:
            lineage: Of the learner.
            step: Number of the update that is asked for.
            timeout_s: Seconds of the longest wait for it.
            known: Id of the batch that the learner has from `formed_batch`: that one comes without its examples.

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
                self._batch = self._experience.batch_to_message(self._batches.next_batch(step, timeout_s))
            if isinstance(self._batch, TrainingBatch) and self._batch.batch_id == known:
                return replace(self._batch, examples=())
            return self._batch
        finally:
            self._learning.release()

    def formed_batch(self, lineage: int, step: int) -> TrainingBatch[Any] | None:
        """The batch of a later update, where it is formed already; answers at once.

        Raises:
            SupersededError: the learner is of another lineage.
        """
        self._check(lineage)
        return self._batches.peek(step)

    def finish_update(self, lineage: int, step: int) -> None:
        """Update `step` was applied.

        Raises:
            SupersededError: the learner is of another lineage.
            RunFailed: it has no batch.
        """
        self._check(lineage)
        with self._learning:
            if self._finished is not None and step <= self._finished:
                self._count("repeated")
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
        """The states that belong into the checkpoint of version `step`, by name: ``replay`` and what else there is.

        Asked again for the same version it gives the same states.

        Raises:
            SupersededError: the learner is of another lineage.
        """
        self._check(lineage)
        with self._learning:
            if self._states is None or self._states[0] != step:
                with self._buffer.boundary():
                    self._states = (step, {**self._more_states(), "replay": self._buffer.state()})
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
        if lineage != self.lineage:
            raise SupersededError(f"the learner is of lineage {lineage}, and the run's is {self.lineage}")

    # --- how it is -----------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Grows while groups come in and updates are finished."""
        receiver, finished = self._receiver, self._finished
        groups = self._counts["groups"] if receiver is None else receiver.groups_received + receiver.groups_refused
        return float(groups + (0 if finished is None else finished + 1))

    def waiting_for(self) -> str:
        """In words, what the next update waits for."""
        return self._buffer.waiting_for()

    def metrics(self) -> dict[str, float]:
        """``replay/…`` and, with a queue, ``rollout_storage/…`` numbers of this moment."""
        with self._lock:
            counts = Counter(self._counts)
        if self._receiver is None:
            numbers = {
                "replay/received_bytes": float(counts["bytes"]),
                "replay/received_fragments": float(counts["groups"]),
                "replay/full_answers": float(counts["full"]),
            }
        else:
            received = {"rollout_storage/received_bytes": float(counts["bytes"])}
            numbers = {**self._receiver.storage.metrics(), **self._receiver.metrics(), **received}
        return {
            **self._buffer.metrics(),
            **numbers,
            "replay/refused_messages": float(counts["refused"] + counts["unreadable"]),
            "replay/repeated_messages": float(counts["repeated"]),
        }

    def status(self) -> dict[str, Any]:
        """For status.json."""
        status: dict[str, Any] = {"waiting_for": self._buffer.waiting_for()}
        if self._receiver is not None:
            numbers = {**self._receiver.storage.metrics(), **self._receiver.metrics()}
            status["rollout_storage"] = {"receiver": self._receiver.doing, **numbers}
        return status


def _inlet_of(
    buffer: ReplayBuffer | PacedReplayBuffer, receiver: RolloutReceiver | None
) -> ReplayBuffer | MemoryRolloutStorage:
    """What delivered groups are offered to."""
    inlet = buffer if receiver is None else receiver.storage
    if not isinstance(inlet, ReplayBuffer | MemoryRolloutStorage):
        raise ConfigError(
            f"delivered groups cannot wait in a {type(inlet).__name__}: give a paced buffer's service a "
            "RolloutReceiver over a MemoryRolloutStorage"
        )
    return inlet

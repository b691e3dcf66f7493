"""An open replay buffer as a service: what rollout workers and the learner of a fleet run call from elsewhere.

Fragments come as messages of `fragment_transfer`, and go to the learner as such; nothing is pickled here. A message
whose fragments do not all find room is answered ``full`` at once, and sent again later: no call waits for the learner.
Every fragment has an id of its own, so that one that was sent twice is taken once. Fragments of weights that the
present lineage has left behind are the buffer's to refuse.

Not covered: how calls get here (`penstock.types.Caller`), and what workers tell of themselves.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from penstock.replay.buffer import ReplayBuffer
from penstock.replay.fragment_transfer import fragments_from_buffer, fragments_to_buffer
from penstock.replay.learner_desk import LearnerDesk
from penstock.types import (
    BatchSource,
    DuplicateGroupError,
    FragmentExample,
    InvalidRolloutError,
    RolloutGroup,
    SampleFragment,
    SchemaVersionError,
    TrainingBatch,
    TransferError,
)

Acceptance = Literal["taken", "full"]
"""What became of a message: all of it is here, now or since an earlier call; there is no room for all of it yet."""


class BatchMessage(NamedTuple):
    """A training batch of fragments on its way to the learner.

    Attributes:
        batch_id: As of `TrainingBatch`.
        step: Likewise.
        group_ids: Likewise.
        metrics: Likewise.
        fragments: The examples' fragments, in their order, as a message.
    """

    batch_id: str
    step: int
    group_ids: tuple[str, ...]
    metrics: dict[str, float]
    fragments: bytes

    @classmethod
    def of(cls, batch: TrainingBatch[FragmentExample]) -> "BatchMessage":
        """Writes a batch."""
        fragments = [example.fragment for example in batch.examples]
        groups = [RolloutGroup(fragment.task, (fragment,), fragment.group_id) for fragment in fragments]
        message = bytes(memoryview(fragments_to_buffer(groups)))
        return cls(batch.batch_id, batch.step, batch.group_ids, batch.metrics, message)

    def read(self) -> TrainingBatch[FragmentExample]:
        """The batch.

        Raises:
            TransferError: the message was damaged on its way.
        """
        groups = fragments_from_buffer(self.fragments)
        examples = tuple(FragmentExample(group.rollouts[0]) for group in groups)
        return TrainingBatch(self.batch_id, self.step, examples, self.group_ids, self.metrics)


class FragmentService:
    """Replay for a fleet run of many processes.

    Args:
        lineage: Of the run.
        buffer: Open; restored, where the run resumes.
        batches: Where the learner's batches come from, over the same buffer.
        states: Gives what else belongs into the checkpoint, by name.
        on_refusal: Told of messages that could not be read, by worker, and why.
        on_delivery: Told of every fragment that the buffer took; of one that was sent twice once.
    """

    def __init__(
        self,
        lineage: int,
        buffer: ReplayBuffer,
        batches: BatchSource,
        *,
        states: Callable[[], dict[str, Any]] = dict,
        on_refusal: Callable[[str, str], None] = lambda worker, reason: None,
        on_delivery: Callable[[SampleFragment], None] = lambda fragment: None,
    ) -> None:
        self._buffer = buffer
        self._more_states = states
        self._on_refusal, self._on_delivery = on_refusal, on_delivery
        self._learner = LearnerDesk(lineage, buffer, batches, self._states)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._sent: tuple[TrainingBatch[Any], BatchMessage] | None = None
        self.finish_update = self._learner.finish_update
        self.set_current_step = self._learner.set_current_step
        self.checkpoint_states = self._learner.checkpoint_states
        self.checkpoint_saved = self._learner.checkpoint_saved

    # --- for rollout workers -------------------------------------------------------------------------------------

    def deliver(self, worker: str, message: bytes) -> Acceptance:
        """Takes fragments over, as many as there is room for; returns at once.

        Args:
            worker: Whose, for the log.
            message: Made by `fragments_to_buffer`.

        Raises:
            TransferError: the message was damaged on its way: send it again.
            InvalidRolloutError: a fragment in it is not valid, or the message is too large.
            Stopped: the buffer is closed.
        """
        try:
            groups = fragments_from_buffer(message)
            self._count("bytes", len(message))
            return "taken" if all(self._take(group) for group in groups) else "full"
        except (TransferError, InvalidRolloutError, SchemaVersionError) as error:
            self._count("unreadable")
            self._on_refusal(worker, str(error))
            raise

    def has_room(self) -> bool:
        """Whether at least one more fragment would be taken now."""
        return self._buffer.has_room

    def _take(self, group: RolloutGroup[Any]) -> bool:
        try:
            taken = self._buffer.offer(group)
        except DuplicateGroupError:
            self._count("repeated")
            return True
        self._count("fragments" if taken else "full")
        for fragment in group.rollouts if taken else ():
            self._on_delivery(fragment)
        return taken

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    # --- for the learner -----------------------------------------------------------------------------------------

    def next_batch(self, lineage: int, step: int, timeout_s: float) -> BatchMessage:
        """See `LearnerDesk.next_batch`."""
        batch = self._learner.next_batch(lineage, step, timeout_s)
        with self._lock:
            sent = self._sent
        if sent is None or sent[0] is not batch:
            sent = batch, BatchMessage.of(batch)
            with self._lock:
                self._sent = sent
        return sent[1]

    def _states(self) -> dict[str, Any]:
        return {"replay": self._buffer.state(), **self._more_states()}

    # --- how it is -----------------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """In words, what the next update waits for."""
        return self._buffer.waiting_for()

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of this moment."""
        with self._lock:
            counts = Counter(self._counts)
        return {
            **self._buffer.metrics(),
            "replay/received_bytes": float(counts["bytes"]),
            "replay/received_fragments": float(counts["fragments"]),
            "replay/full_answers": float(counts["full"]),
            "replay/refused_messages": float(counts["unreadable"]),
            "replay/repeated_messages": float(counts["repeated"] + self._learner.repeated),
        }

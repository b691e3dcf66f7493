"""An open replay buffer from another process: what a fleet's rollout workers and learner are given in its place.

Fragments travel as Arrow messages of a bounded size. A buffer that is full answers so at once; the sender asks again
until there is room, and only then sends again: no call waits on the other side, and nothing travels in vain for long.
Each call is repeated while the service is dead or silent, up to a limit that names it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.replay.fragment_service import BatchMessage
from penstock.replay.fragment_transfer import fragments_to_buffer
from penstock.replay.remote import CALL_S, LIMIT_S, SENDINGS, SERVICE, RemoteBatches
from penstock.types import (
    Caller,
    NoProgressError,
    PersistentCaller,
    RolloutBatch,
    RolloutGroup,
    SampleFragment,
    TrainingBatch,
    TransferError,
)

MESSAGE_BYTES = 8 * 1024 * 1024
"""Fragments are sent together up to about so many bytes of arrays; a larger one goes alone."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1


class RemoteFragments:
    """Implements `penstock.types.RolloutSink`, of fragments alone. One thread sends.

    Args:
        caller: Reaches the service.
        worker: Name of the rollout worker.
        limit_s: So long the service may be out of reach.
        full_limit_s: So long it may be full.
        message_bytes: See `MESSAGE_BYTES`.

    Attributes:
        waiting: Whether it waits at this moment: for room, or for the service.
        blocked_s: Seconds of waiting for room so far.
        sent_bytes: Bytes of all messages that were sent, repeats included.
    """

    def __init__(
        self, caller: Caller, worker: str, *, limit_s: float = LIMIT_S, full_limit_s: float = LIMIT_S,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:  # fmt: skip
        self.waiting = False
        self.blocked_s = 0.0
        self.sent_bytes = 0
        self._calls = PersistentCaller(caller, SERVICE, limit_s)
        self._worker = worker
        self._full_limit_s = full_limit_s
        self._message_bytes = message_bytes

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """See `RolloutSink.add_batches`; returns when the service has all of them.

        Raises:
            NoProgressError: the service is full for `full_limit_s`, or out of reach for `limit_s`.
            SupersededError: this worker was replaced.
            TransferError: a message was damaged on its way again and again.
            InvalidRolloutError: a fragment has no metadata, or is not valid.
            Stopped: after `stop`, and when the service is closed.
        """
        for groups in in_messages((group for batch in batches for group in batch.groups), self._message_bytes):
            message = bytes(memoryview(fragments_to_buffer(groups)))
            self.waiting = True
            try:
                self._send(message)
            finally:
                self.waiting = False

    def stop(self) -> None:
        """Ends every wait with `Stopped`."""
        self._calls.stop()

    def _send(self, message: bytes) -> None:
        while self._deliver(message) == "full":
            started = time.monotonic()
            try:
                self._wait_for_room(started)
            finally:
                self.blocked_s += time.monotonic() - started

    def _wait_for_room(self, started: float) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._calls.pause(pause_s)
            if self._calls.call("has_room", timeout_s=CALL_S):
                return
            waited_s = time.monotonic() - started
            if waited_s > self._full_limit_s:
                raise NoProgressError(
                    f"{self._worker} waited {waited_s:.0f} s (replay.max_waiting_s) to hand fragments over: {SERVICE} "
                    "is full (replay.max_waiting); see that the learner runs"
                )
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _deliver(self, message: bytes) -> str:
        for sending in range(1, SENDINGS + 1):
            self.sent_bytes += len(message)
            try:
                return self._calls.call("deliver", self._worker, message, timeout_s=CALL_S)
            except TransferError:
                if sending == SENDINGS:
                    raise
        raise AssertionError("unreachable")


class RemoteFragmentBatches(RemoteBatches):
    """The learner's side of a fleet run; batches come as messages."""

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """See `RemoteBatches.next_batch`.

        Raises:
            TransferError: the batch was damaged on its way again and again.
        """
        for sending in range(1, SENDINGS + 1):
            answer: Any = super().next_batch(step, timeout_s)
            try:
                return BatchMessage(*answer).read()
            except TransferError:
                if sending == SENDINGS:
                    raise
        raise AssertionError("unreachable")


def in_messages(
    groups: Iterable[RolloutGroup[SampleFragment]], most_bytes: int
) -> Iterator[list[RolloutGroup[SampleFragment]]]:
    """Groups in their order, as many together as stay below the limit, and at least one."""
    together: list[RolloutGroup[SampleFragment]] = []
    size = 0
    for group in groups:
        more = sum(_nbytes(fragment) for fragment in group.rollouts)
        if together and size + more > most_bytes:
            yield together
            together, size = [], 0
        together.append(group)
        size += more
    if together:
        yield together


def _nbytes(fragment: SampleFragment) -> int:
    leaves = (fragment.observations, fragment.actions, fragment.final_observations, fragment.initial_state)
    return 64 * fragment.length + sum(array.nbytes for arrays in leaves for array in arrays.values())

"""Replay from another process: what workers and learner are given in place of issuer, storage and buffer.

Experience travels as messages (`messages`). A service that is full answers so at once; the sink asks again until there
is room, and only then sends again: no call waits on the other side, and nothing travels in vain for long. Each call is
repeated while the service is dead or silent, up to a limit that names it; the service notices repeats. A service that
was started anew knows nothing of what was said to the one before, and is of another lineage: what belongs to the old
one is refused there and counted here.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from penstock.replay.history import LANGUAGE, ExperienceFormat
from penstock.replay.messages import BatchMessage, in_messages
from penstock.types import (
    Caller,
    NoProgressError,
    PenstockError,
    RetryingCaller,
    RolloutBatch,
    RolloutGroup,
    Ticket,
    TrainingBatch,
    TransferError,
    UnreachableError,
)

_T = TypeVar("_T")

SERVICE = "replay-0"
"""The service's name, for errors."""
PEEK_S = 1.0
"""Longest wait for an answer that nobody waits for."""
CALL_S = 30.0
"""Longest wait for the answer to a call that does not wait itself."""
LIMIT_S = 300.0
"""So long the service may be out of reach."""
_MARGIN_S = 10.0
"""How much longer than the wait that it asks for a caller waits for the answer."""
_SLICE_S = 5.0
"""Longest wait for a batch in one call."""
SENDINGS = 3
"""So often a message that was damaged on its way is sent."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1


class RemoteTickets:
    """Implements `penstock.types.TicketSource`. Thread-safe.

    Args:
        caller: Reaches the service.
        worker: Name of the rollout worker.
        incarnation: Which life of it.
        lineage: Of the run.
        lessons: Tickets of these only; None means any.
        limit_s: So long the service may be out of reach.

    Attributes:
        lineage: Of the run; set it when that changes.
    """

    def __init__(
        self,
        caller: Caller,
        worker: str,
        incarnation: int,
        lineage: int = 0,
        *,
        lessons: Collection[str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.lineage = lineage
        self._calls = RetryingCaller(caller, SERVICE, limit_s)
        self._worker = worker
        self._incarnation = incarnation
        self._lessons = None if lessons is None else tuple(lessons)
        self._asking = threading.Lock()
        self._number = 1

    def acquire(self, most: int, timeout_s: float) -> list[Ticket]:
        """See `TicketSource.acquire`; an empty list, too, while the service is out of reach.

        Raises:
            NoProgressError: it has been for `limit_s`.
            SupersededError: this worker was replaced.
            Stopped: after `stop`, and when the service is closed.
        """
        limit = time.monotonic() + timeout_s
        with self._asking:
            asked = (self._worker, self._incarnation, self.lineage, self._number, most, timeout_s, self._lessons)
            try:
                tickets = self._calls.attempt("acquire", *asked, timeout_s=timeout_s + _MARGIN_S)
            except UnreachableError:
                self._calls.pause(max(0.0, min(timeout_s, limit - time.monotonic())))
                return []
            self._number += 1  # not before it is answered: the service may hold tickets for this number
            return tickets

    def set_serving_step(self, step: int) -> None:
        """Does nothing: inference servers say themselves what they hold."""

    def fail(self, ticket: Ticket, fate: Literal["invalid", "aborted"], reason: str) -> None:
        """See `TicketSource.fail`.

        Raises:
            NoProgressError: the service is out of reach for `limit_s`.
            SupersededError: this worker was replaced.
            Stopped: after `stop`.
        """
        self._calls.call("fail", self._worker, self._incarnation, self.lineage, ticket, fate, reason, timeout_s=CALL_S)

    def stop(self) -> None:
        """Ends every wait with `Stopped`."""
        self._calls.stop()


class RemoteSink:
    """Implements `penstock.types.RolloutSink`. Thread-safe; messages go one after the other.

    Args:
        caller: Reaches the service.
        worker: Name of the rollout worker.
        incarnation: Which life of it.
        lineage: Of the run; None where the buffer judges by the weights alone.
        experience: What is sent.
        limit_s: So long the service may be out of reach.
        full_limit_s: So long it may be full; None means `limit_s`.

    Attributes:
        lineage: Of the run; set it when that changes.
        refused: Messages that were of no use, because they belong to another lineage.
        waiting: Whether it waits at this moment: for room, or for the service.
        blocked_s: Seconds of waiting for room so far.
        sent_bytes: Bytes of all messages that were sent, repeats included.
    """

    def __init__(
        self, caller: Caller, worker: str, incarnation: int, lineage: int | None = 0, *,
        experience: ExperienceFormat = LANGUAGE, limit_s: float = LIMIT_S, full_limit_s: float | None = None,
    ) -> None:  # fmt: skip
        self.lineage = lineage
        self.refused = 0
        self.waiting = False
        self.blocked_s = 0.0
        self.sent_bytes = 0
        self._calls = RetryingCaller(caller, SERVICE, limit_s)
        self._worker = worker
        self._incarnation = incarnation
        self._experience = experience
        self._full_limit_s = limit_s if full_limit_s is None else full_limit_s
        self._sending = threading.Lock()
        self._number = 0

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """Returns when the service has all of them, or has no use for them.

        Raises:
            NoProgressError: the service is full for `full_limit_s`, or out of reach for `limit_s`.
            SupersededError: this worker was replaced.
            TransferError: a message was damaged on its way again and again.
            InvalidRolloutError: a rollout or fragment has no metadata, or is not valid.
            Stopped: after `stop`, and when the service is closed.
        """
        for groups in self._together(batches):
            message = bytes(memoryview(self._experience.to_message(groups)))
            with self._sending:
                self._number += 1
                self.waiting = True
                try:
                    self._send(message, len(groups))
                finally:
                    self.waiting = False

    def stop(self) -> None:
        """Ends every wait with `Stopped`."""
        self._calls.stop()

    def _together(self, batches: Sequence[RolloutBatch[Any]]) -> Iterable[Sequence[RolloutGroup[Any]]]:
        """What goes in one message."""
        if self._experience.most_bytes is None:
            return [batch.groups for batch in batches if batch.groups]
        return in_messages((group for batch in batches for group in batch.groups), self._experience.most_bytes)

    def _send(self, message: bytes, groups: int) -> None:
        while (answer := self._deliver(message)) == "full":
            started = time.monotonic()
            try:
                self._wait_for_room(started, groups)
            finally:
                self.blocked_s += time.monotonic() - started
        self.refused += answer == "refused"

    def _wait_for_room(self, started: float, groups: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._calls.pause(pause_s)
            if self._calls.call("has_room", self._worker, groups, timeout_s=CALL_S):
                return
            waited_s = time.monotonic() - started
            if waited_s > self._full_limit_s:
                raise NoProgressError(
                    f"{self._worker} waited {waited_s:.0f} s to hand {self._experience.folder} over: {SERVICE} is "
                    f"full; {self._experience.when_full}"
                )
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _deliver(self, message: bytes) -> str:
        sender = (self._worker, self._incarnation, self.lineage)

        def send() -> str:
            self.sent_bytes += len(message)
            return self._calls.call("deliver", *sender, self._number, message, timeout_s=CALL_S)

        return _sent_again(send)


def _sent_again(send: Callable[[], _T]) -> _T:
    """What a message brings; one that was damaged on its way is sent `SENDINGS` times."""
    for _ in range(SENDINGS - 1):
        with suppress(TransferError):
            return send()
    return send()


class RemoteBatches:
    """The learner's side: implements `penstock.types.BatchSource`, and what a training loop commits to.

    Args:
        caller: Reaches the service.
        lineage: Of the run.
        limit_s: So long the service may be out of reach.
        on_wait: Told in words what is waited for, every few seconds.
    """

    def __init__(
        self,
        caller: Caller,
        lineage: int,
        *,
        limit_s: float = LIMIT_S,
        on_wait: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._calls = RetryingCaller(caller, SERVICE, limit_s)
        self._lineage = lineage
        self._on_wait = on_wait
        self._formed: TrainingBatch[Any] | None = None

    def peek(self, step: int) -> TrainingBatch[Any] | None:
        """The batch of a later update, where the service has formed it already and says so at once.

        Whatever is wrong with the service, `next_batch` tells it.
        """
        if self._formed is None or self._formed.step != step:
            with suppress(PenstockError):
                self._formed = self._calls.attempt("formed_batch", self._lineage, step, timeout_s=PEEK_S)
        return self._formed

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of update `step`; it comes as it is, or as a message.

        Raises:
            TransferError: the message was damaged on its way again and again.
            NoProgressError: at the timeout, saying what was waited for; or the service is out of reach for `limit_s`.
            SupersededError: this learner is of another lineage than the run.
            Stopped: after `stop`, and when the service is closed.
            RunFailed: no batch can come.
        """
        return _sent_again(lambda: self._read(self._ask_for_batch(step, timeout_s)))

    def _read(self, answer: Any) -> TrainingBatch[Any]:
        if not isinstance(answer, TrainingBatch):
            return BatchMessage(*answer).read()
        return self._whole(cast(TrainingBatch[Any], answer))

    def _whole(self, answer: TrainingBatch[Any]) -> TrainingBatch[Any]:
        """With the examples that came before, where they did."""
        formed, self._formed = self._formed, None
        return answer if answer.examples or formed is None else replace(answer, examples=formed.examples)

    def _ask_for_batch(self, step: int, timeout_s: float) -> Any:
        limit = time.monotonic() + timeout_s
        known = () if self._formed is None else (self._formed.batch_id,)
        while True:
            slice_s = max(0.0, min(_SLICE_S, limit - time.monotonic()))
            try:
                return self._call("next_batch", step, slice_s, *known, timeout_s=slice_s + CALL_S)
            except NoProgressError as error:
                if time.monotonic() >= limit or self._calls.silent:
                    raise
                self._on_wait(str(error))

    def finish_update(self, step: int) -> None:
        """Update `step` was applied."""
        self._call("finish_update", step, timeout_s=CALL_S)

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`."""
        self._call("set_current_step", step, timeout_s=CALL_S)

    def expect_digests(self, step: int, digests: Mapping[str, str]) -> None:
        """Version `step`, which is about to be offered, has arrays with these digests."""
        self._call("expect_digests", step, digests, timeout_s=CALL_S)

    def checkpoint_states(self, step: int, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        """States of curriculum, issuer and replay for the checkpoint of version `step`, by those names."""
        return self._call("checkpoint_states", step, timeout_s=timeout_s)

    def checkpoint_saved(self, step: int) -> None:
        """That checkpoint is there."""
        self._call("checkpoint_saved", step, timeout_s=CALL_S)

    def stop(self) -> None:
        """Ends every wait with `Stopped`."""
        self._calls.stop()

    def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self._calls.call(method, self._lineage, *args, timeout_s=timeout_s)

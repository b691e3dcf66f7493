"""The loop between a rollout storage and the replay buffer: receive, hand over, acknowledge.

A batch is acknowledged when the buffer has taken it; where the storage outlives the process, when its groups are in
files. So one that is under way when the process dies is delivered again, and the buffer refuses a second delivery. A
batch with a group that the buffer refuses as invalid is put aside and counted; any other error ends the loop and is
the caller's. Groups are handed over one by one, in the order in which the storage gives them.
"""

import threading
import time
from collections import deque

from penstock.replay.buffer import ReplayBuffer
from penstock.replay.paced import PacedReplayBuffer
from penstock.replay.queue import Delivery, RolloutStorage
from penstock.types import DuplicateGroupError, InvalidRolloutError, RolloutBatch, RolloutSink, Stopped

POLL_S = 0.5
"""How often a waiting receiver looks whether it should stop; rollouts wake it at once."""


class RolloutReceiver:
    """Feeds the buffer until it is stopped. One per storage.

    Args:
        storage: Rollouts come from here.
        sink: And go there: the replay buffer.
        keeper: The replay buffer, which knows when a group is in a file; None acknowledges at once.

    Attributes:
        storage: As given.
        groups_received: Groups that the sink took.
        groups_refused: Groups that it had before, or that were not valid.
    """

    def __init__(
        self, storage: RolloutStorage, sink: RolloutSink, keeper: ReplayBuffer | PacedReplayBuffer | None = None
    ) -> None:
        self.storage = storage
        self._sink = sink
        self._keeper = keeper
        self._unsafe: deque[Delivery] = deque()
        self._stopping = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._since = time.monotonic()
        self._doing = "not started"
        self.groups_received = 0
        self.groups_refused = 0

    @property
    def doing(self) -> str:
        """In words, what it is at, and for how long; for the error that ends a silent run."""
        return f"{self._doing} for {time.monotonic() - self._since:.0f} s"

    def run(self) -> None:
        """Receives until `stop`, or until storage or sink is closed."""
        self._idle.clear()
        try:
            self.storage.redeliver()
            while not self._stopping.is_set():
                self._now("waiting for rollouts")
                delivery = self.storage.receive(POLL_S)
                if delivery is not None:
                    self._hand_over(delivery)
                elif self._unsafe and self._keeper is not None:
                    self._keeper.flush()  # writers may wait for room, and then nothing comes that would fill a file
                self._acknowledge()
        except Stopped:
            self._acknowledge()  # what is not safe stays in the storage
        finally:
            self._now("stopped")
            self._idle.set()

    def stop(self, timeout_s: float) -> bool:
        """Asks the loop to end, and waits for it.

        Returns:
            Whether it has ended; within the limit, either way.
        """
        self._stopping.set()
        return self._idle.wait(timeout_s)

    def metrics(self) -> dict[str, float]:
        """Groups that the sink took and refused."""
        return {
            "rollout_storage/groups_received": float(self.groups_received),
            "rollout_storage/groups_refused": float(self.groups_refused),
        }

    def _hand_over(self, delivery: Delivery) -> None:
        refusals: list[str] = []
        for batch in delivery.batches:
            self._now(f"handing {len(batch.groups)} groups from {delivery.source} to the replay buffer")
            for group in batch.groups:
                try:
                    self._sink.add_batches([RolloutBatch.of((group,))])
                    self.groups_received += 1
                except DuplicateGroupError:
                    self.groups_refused += 1
                except InvalidRolloutError as error:
                    self.groups_refused += 1
                    refusals.append(str(error))
        if refusals:
            delivery.quarantine("; ".join(refusals))
        else:
            self._unsafe.append(delivery)

    def _acknowledge(self) -> None:
        while self._unsafe and self._is_safe(self._unsafe[0]):
            self._unsafe.popleft().acknowledge()

    def _is_safe(self, delivery: Delivery) -> bool:
        keeper = self._keeper
        ids = (group.group_id for batch in delivery.batches for group in batch.groups)
        return keeper is None or all(keeper.is_stored(group_id) for group_id in ids)

    def _now(self, doing: str) -> None:
        if doing != self._doing:
            self._doing, self._since = doing, time.monotonic()

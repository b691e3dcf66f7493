"""What lies between rollout workers and the replay buffer: the protocol, and its configuration.

A storage takes batches from any number of writers and gives them to one reader, which acknowledges each once it is
safe. Every kind keeps these promises (tests/replay/test_rollout_storage.py holds all of them to it):

- a writer's batches arrive in the order in which it wrote them; writers are served in turn;
- a batch that was not acknowledged is delivered again after `redeliver`, so each arrives at least once. That it counts
  once is the replay buffer's business: it takes one delivery per ticket and refuses the others;
- a writer waits while its share is full, for a limited time, and that it waits can be seen;
- what cannot be read or used is put aside and counted, never deleted, and holds up nothing else;
- after `close` everybody gets `Stopped`, also those who wait.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from penstock.types import InvalidRolloutError, RolloutBatch, RolloutSink

OnQuarantine = Callable[[str, str], None]
"""Told what was put aside, and why."""


class RolloutStorageConfig(BaseModel):
    """Where finished rollouts wait for the learner; docs/rollout_storage.md.

    Attributes:
        kind: `memory` for threads of one process; `file` for processes that share only a file system.
        capacity_groups: Most groups of one writer that wait; then it waits itself. A larger batch passes alone.
        write_timeout_s: Longest such wait.
        path: Folder of the files; None means ``rollout_storage`` in the run directory.
        poll_s: How often a folder is looked into; what the same process wrote is seen at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["memory", "file"] = "memory"
    capacity_groups: int = Field(default=64, ge=1)
    write_timeout_s: float = Field(default=300.0, gt=0)
    path: str | None = None
    poll_s: float = Field(default=0.2, gt=0, le=60)


@runtime_checkable
class Delivery(Protocol):
    """Batches that were received; exactly one of `acknowledge` and `quarantine` ends it."""

    @property
    def source(self) -> str:
        """Where it came from, in words."""
        ...

    @property
    def batches(self) -> tuple[RolloutBatch, ...]:
        """What was written together."""
        ...

    def acknowledge(self) -> None:
        """The reader has them: they need not be kept. A second call changes nothing."""
        ...

    def quarantine(self, reason: str) -> None:
        """The reader cannot use them: they are put aside and counted."""
        ...


@runtime_checkable
class RolloutStorage(Protocol):
    """Between rollout workers and the replay buffer. Thread-safe."""

    def writer(self, writer_id: str) -> RolloutSink:
        """The writing end for one worker.

        Its `add_batches` raises `NoProgressError` when there was no room for too long, saying who does not read,
        `Stopped` after `close`, and `InvalidRolloutError` for a rollout without metadata.

        Args:
            writer_id: Any text, unique among the workers that run at one time.
        """
        ...

    def receive(self, timeout_s: float) -> Delivery | None:
        """The next delivery; None at the timeout.

        Raises:
            Stopped: after `close`.
        """
        ...

    def redeliver(self) -> None:
        """A reader begins: what an earlier one received without acknowledging it is delivered again."""
        ...

    def close(self) -> None:
        """Wakes everybody with `Stopped`. What waits stays where it is: in files for the next reader, or gone."""
        ...

    def metrics(self) -> dict[str, float]:
        """``rollout_storage/…`` numbers of this moment; never waits for a disk.

        `depth` (groups that wait to be received), `blocked_writers` (now), `blocked_s` (all waits so far),
        `received` and `quarantined` (batches since the start).
        """
        ...


def check_metadata(batch: RolloutBatch) -> None:
    """Refuses a batch that no reader could judge.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    for rollout in batch.rollouts():
        if rollout.metadata is None:
            raise InvalidRolloutError(f"rollout {rollout.rollout_id!r} has no metadata: it cannot be handed over")

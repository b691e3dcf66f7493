"""The kinds of rollout storage, and what tests put in and take out.

A new kind joins by one class in `KINDS`. Writers in processes of their own import this too.
"""

from pathlib import Path

import numpy as np

from penstock.replay import Delivery, FileRolloutStorage, MemoryRolloutStorage, RolloutStorage, RolloutStorageConfig
from penstock.types import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata, RolloutSink

LIMIT_S = 280.0
"""No wait of these tests takes so long unless something hangs."""


class MemoryKind:
    """Threads of one process."""

    def __init__(self, folder: Path) -> None:
        self.quarantined: list[tuple[str, str]] = []

    def open(self, **config) -> RolloutStorage:
        return MemoryRolloutStorage(
            RolloutStorageConfig(kind="memory", **{"write_timeout_s": LIMIT_S} | config), self._note
        )

    def restart_reader(self, storage: RolloutStorage) -> RolloutStorage:
        storage.redeliver()
        return storage

    def _note(self, source: str, reason: str) -> None:
        self.quarantined.append((source, reason))


class FileKind(MemoryKind):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "storage"
        self.config = RolloutStorageConfig()

    def open(self, **config) -> RolloutStorage:
        self.config = RolloutStorageConfig(kind="file", **{"poll_s": 0.02, "write_timeout_s": LIMIT_S} | config)
        return FileRolloutStorage(self.path, self.config, self._note)

    def restart_reader(self, storage: RolloutStorage) -> RolloutStorage:
        return FileRolloutStorage(self.path, self.config, self._note)


KINDS = {"memory": MemoryKind, "file": FileKind}


def make_rollout(rollout_id: str, metadata: RolloutMetadata | None) -> Rollout:
    return Rollout(
        env_name="cats",
        env_example_id="1",
        prompt_tokens=np.array([1, 2], np.int32),
        response_tokens=np.array([3, 4], np.int32),
        response_logprobs=np.array([-0.5, -1.0], np.float32),
        token_rewards=np.array([0.0, 1.0], np.float32),
        episode_reward=1.0,
        metadata=metadata,
        rollout_id=rollout_id,
    )


STAMP = RolloutMetadata("w", 1.0, 0)


def make_batch(*names: str, metadata: RolloutMetadata | None = STAMP) -> RolloutBatch:
    """One group of one rollout per name."""
    return RolloutBatch.of(tuple(RolloutGroup("k", (make_rollout(f"{name}/0", metadata),), name) for name in names))


def write(writer: RolloutSink, *names: str) -> None:
    for name in names:
        writer.add_batches([make_batch(name)])


def names_of(delivery: Delivery) -> list[str]:
    return [group.group_id for batch in delivery.batches for group in batch.groups]


def drain(storage: RolloutStorage, most: int = 10_000) -> list[str]:
    """Receives and acknowledges what there is."""
    found: list[str] = []
    while len(found) < most and (delivery := storage.receive(0.1)) is not None:
        found += names_of(delivery)
        delivery.acknowledge()
    return found


def blocked(storage: RolloutStorage) -> float:
    return storage.metrics()["rollout_storage/blocked_writers"]

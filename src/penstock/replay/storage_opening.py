"""From the configuration of a rollout storage to the storage."""

from pathlib import Path

from penstock.replay.file_storage import FileRolloutStorage
from penstock.replay.memory_storage import MemoryRolloutStorage
from penstock.replay.storage import OnQuarantine, RolloutStorage, RolloutStorageConfig


def open_rollout_storage(
    config: RolloutStorageConfig,
    default_path: str | Path,
    on_quarantine: OnQuarantine = lambda source, reason: None,
) -> RolloutStorage:
    """Makes the storage that a run's configuration asks for.

    Args:
        config: Its kind and limits.
        default_path: Folder of its files where the configuration names none.
        on_quarantine: Told of what was put aside, and why.
    """
    if config.kind == "memory":
        return MemoryRolloutStorage(config, on_quarantine)
    return FileRolloutStorage(config.path or default_path, config, on_quarantine)

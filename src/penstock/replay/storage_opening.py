"""From the configuration of a rollout storage to the storage."""

from pathlib import Path

from penstock.replay.file_storage import FileRolloutStorage
from penstock.replay.memory_storage import MemoryRolloutStorage
from penstock.replay.storage import OnQuarantine, RolloutStorage, RolloutStorageConfig
from penstock.types import ConfigError


def open_rollout_storage(
    config: RolloutStorageConfig,
    default_path: str | Path,
    on_quarantine: OnQuarantine = lambda source, reason: None,
    *,
    new_run: bool = False,
) -> RolloutStorage:
    """Makes the storage that a run's configuration asks for.

    Args:
        config: Its kind and limits.
        default_path: Folder of its files where the configuration names none.
        on_quarantine: Told of what was put aside, and why.
        new_run: Nothing was generated yet: what waits in the folder is another run's, whose ticket ids may be the same.

    Raises:
        ConfigError: rollouts of another run wait there.
    """
    if config.kind == "memory":
        return MemoryRolloutStorage(config, on_quarantine)
    storage = FileRolloutStorage(config.path or default_path, config, on_quarantine)
    if new_run and (waiting := storage.count_files()):
        raise ConfigError(
            f"rollout.storage.path {storage.path} holds {waiting} files of another run: name another folder, or "
            "delete its w-* folders"
        )
    return storage

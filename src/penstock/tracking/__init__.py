"""Where a run's metrics and sample conversations go besides the run directory: one protocol, several services."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.tracking.config import TensorBoardConfig, TrackingConfig, WandbConfig
    from penstock.tracking.conversations import conversation_of
    from penstock.tracking.making import make_tracker
    from penstock.tracking.samples_file import JsonlTracker
    from penstock.tracking.tensorboard import TensorBoardTracker
    from penstock.tracking.tracker import MultiTracker, Tracker
    from penstock.tracking.wandb import WandbTracker

_EXPORTS = {
    "JsonlTracker": "samples_file",
    "MultiTracker": "tracker",
    "TensorBoardConfig": "config",
    "TensorBoardTracker": "tensorboard",
    "Tracker": "tracker",
    "TrackingConfig": "config",
    "WandbConfig": "config",
    "WandbTracker": "wandb",
    "conversation_of": "conversations",
    "make_tracker": "making",
}

__all__ = [
    "JsonlTracker", "MultiTracker", "TensorBoardConfig", "TensorBoardTracker", "Tracker", "TrackingConfig",
    "WandbConfig", "WandbTracker", "conversation_of", "make_tracker",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Where a run's metrics and sample conversations go besides the run directory: one protocol, several services."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.tracking.config import TrackingConfig
    from penstock.tracking.conversations import conversation_of
    from penstock.tracking.making import make_tracker
    from penstock.tracking.samples_file import JsonlTracker
    from penstock.tracking.tensorboard import TensorBoardConfig, TensorBoardTracker
    from penstock.tracking.tracker import MultiTracker, ServiceConfig, Tracker
    from penstock.tracking.wandb import WandbConfig, WandbTracker

_EXPORTS = {
    "JsonlTracker": "samples_file",
    "MultiTracker": "tracker",
    "ServiceConfig": "tracker",
    "TensorBoardConfig": "tensorboard",
    "TensorBoardTracker": "tensorboard",
    "Tracker": "tracker",
    "TrackingConfig": "config",
    "WandbConfig": "wandb",
    "WandbTracker": "wandb",
    "conversation_of": "conversations",
    "make_tracker": "making",
}

__all__ = [
    "JsonlTracker", "MultiTracker", "ServiceConfig", "TensorBoardConfig", "TensorBoardTracker", "Tracker",
    "TrackingConfig", "WandbConfig", "WandbTracker", "conversation_of", "make_tracker",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

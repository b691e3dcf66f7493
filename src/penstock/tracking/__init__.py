"""Where a run's metrics and sample conversations go besides the run directory: one protocol, several services."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.tracking.config import TrackingConfig
    from penstock.tracking.tracker import (
        JsonlTracker,
        MultiTracker,
        ServiceConfig,
        TensorBoardConfig,
        TensorBoardTracker,
        Tracker,
        WandbConfig,
        WandbTracker,
        conversation_of,
        make_tracker,
    )

_EXPORTS = {
    "JsonlTracker": "tracker",
    "MultiTracker": "tracker",
    "ServiceConfig": "tracker",
    "TensorBoardConfig": "tracker",
    "TensorBoardTracker": "tracker",
    "Tracker": "tracker",
    "TrackingConfig": "config",
    "WandbConfig": "tracker",
    "WandbTracker": "tracker",
    "conversation_of": "tracker",
    "make_tracker": "tracker",
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

"""Where a run's metrics and sample conversations go besides the run directory: one protocol, several services."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.tracking.config import PrometheusConfig, TrackingConfig
    from penstock.tracking.tracker import (
        JsonlTracker,
        MlflowConfig,
        MlflowTracker,
        MultiTracker,
        ServiceConfig,
        TensorBoardConfig,
        TensorBoardTracker,
        Tracker,
        TrackioConfig,
        TrackioTracker,
        WandbConfig,
        WandbTracker,
        conversation_of,
        make_tracker,
    )

_EXPORTS = {
    "config": ["PrometheusConfig", "TrackingConfig"],
    "tracker": [
        "JsonlTracker", "MlflowConfig", "MlflowTracker", "MultiTracker", "ServiceConfig", "TensorBoardConfig",
        "TensorBoardTracker", "Tracker", "TrackioConfig", "TrackioTracker", "WandbConfig", "WandbTracker",
        "conversation_of", "make_tracker",
    ],
}  # fmt: skip

__all__ = [
    "JsonlTracker", "MlflowConfig", "MlflowTracker", "MultiTracker", "PrometheusConfig", "ServiceConfig",
    "TensorBoardConfig", "TensorBoardTracker", "Tracker", "TrackingConfig", "TrackioConfig", "TrackioTracker",
    "WandbConfig", "WandbTracker", "conversation_of", "make_tracker",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

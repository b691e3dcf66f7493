"""Versioned weights on their way from the learner to the inference engines; knows no model class."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.weights.broadcaster import merged_arrays, trained_arrays
    from penstock.weights.config import WeightsConfig
    from penstock.weights.in_process import InProcessBroadcaster
    from penstock.weights.protocol import Broadcaster, WeightClient
    from penstock.weights.transports import open_broadcaster, open_client

_EXPORTS = {
    "broadcaster": ["merged_arrays", "trained_arrays"],
    "config": ["WeightsConfig"],
    "in_process": ["InProcessBroadcaster"],
    "protocol": ["Broadcaster", "WeightClient"],
    "transports": ["open_broadcaster", "open_client"],
}

__all__ = [
    "Broadcaster",
    "InProcessBroadcaster",
    "WeightClient",
    "WeightsConfig",
    "merged_arrays",
    "open_broadcaster",
    "open_client",
    "trained_arrays",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

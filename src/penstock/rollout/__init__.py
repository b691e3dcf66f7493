"""Rollout generation and evaluation for language policies.

`RolloutManager` generates and evaluates, alone or under a `RolloutWorker`, which adds the loop, the weights,
the storage and the tracker. Not to be confused with the fleet's classes of the same names.
"""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.rollout.config import RolloutConfig
    from penstock.rollout.manager import RolloutManager
    from penstock.rollout.worker import Lockstep, RolloutWorker

_EXPORTS = {
    "config": ["RolloutConfig"],
    "manager": ["RolloutManager"],
    "worker": ["Lockstep", "RolloutWorker"],
}

__all__ = ["Lockstep", "RolloutConfig", "RolloutManager", "RolloutWorker"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

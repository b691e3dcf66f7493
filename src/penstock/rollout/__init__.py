"""Rollout generation and evaluation for language policies.

`RolloutManager` generates and evaluates, alone or under a `RolloutWorker`, which adds the loop, the weights,
the storage and the tracker. Not to be confused with the fleet's classes of the same names.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.rollout.config import RolloutConfig
    from penstock.rollout.manager import RolloutManager
    from penstock.rollout.worker import Lockstep, RolloutWorker

_EXPORTS = {
    "Lockstep": "worker",
    "RolloutConfig": "config",
    "RolloutManager": "manager",
    "RolloutWorker": "worker",
}

__all__ = ["Lockstep", "RolloutConfig", "RolloutManager", "RolloutWorker"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

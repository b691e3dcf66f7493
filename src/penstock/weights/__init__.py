"""Versioned weights on their way from the learner to the inference engines; knows no model class."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.weights.broadcaster import InProcessBroadcaster

_EXPORTS = {"InProcessBroadcaster": "broadcaster"}

__all__ = ["InProcessBroadcaster"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

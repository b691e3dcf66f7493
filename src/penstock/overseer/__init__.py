"""The overseer: wires the components of a run, watches them, ends the run; and offline evaluation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.overseer.config import OverseerConfig, RunConfig
    from penstock.overseer.config_loading import load_config
    from penstock.overseer.evaluation import evaluate
    from penstock.overseer.evaluation_report import EvaluationReport
    from penstock.overseer.summary import RunSummary, print_summary
    from penstock.overseer.training import train

_EXPORTS = {
    "EvaluationReport": "evaluation_report",
    "OverseerConfig": "config",
    "RunConfig": "config",
    "RunSummary": "summary",
    "evaluate": "evaluation",
    "load_config": "config_loading",
    "print_summary": "summary",
    "train": "training",
}

__all__ = [
    "EvaluationReport", "OverseerConfig", "RunConfig", "RunSummary", "evaluate", "load_config",
    "print_summary", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""The overseer: wires the components of a run, watches them, ends the run; and offline evaluation."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.overseer.config import OverseerConfig, RunConfig
    from penstock.overseer.config_loading import load_config
    from penstock.overseer.control.autotune import AutotuneReport, autotune
    from penstock.overseer.control.evaluation import FleetEvaluationReport, evaluate_fleet
    from penstock.overseer.control_config import FleetRunConfig
    from penstock.overseer.evaluation_report import EvaluationReport
    from penstock.overseer.fitting.search import fit
    from penstock.overseer.language.evaluation import evaluate
    from penstock.overseer.language.generation import GenerationReport, generate
    from penstock.overseer.terminal import RunSummary, print_summary
    from penstock.overseer.training import train
    from penstock.overseer.update_loop import Update, UpdateLoop, updates

_EXPORTS = {
    "config": ["OverseerConfig", "RunConfig"],
    "config_loading": ["load_config"],
    "control.autotune": ["AutotuneReport", "autotune"],
    "control.evaluation": ["FleetEvaluationReport", "evaluate_fleet"],
    "control_config": ["FleetRunConfig"],
    "evaluation_report": ["EvaluationReport"],
    "fitting.search": ["fit"],
    "language.evaluation": ["evaluate"],
    "language.generation": ["GenerationReport", "generate"],
    "terminal": ["RunSummary", "print_summary"],
    "training": ["train"],
    "update_loop": ["Update", "UpdateLoop", "updates"],
}

__all__ = [
    "AutotuneReport", "EvaluationReport", "FleetEvaluationReport", "FleetRunConfig", "GenerationReport",
    "OverseerConfig", "RunConfig", "RunSummary", "Update", "UpdateLoop", "autotune", "evaluate", "evaluate_fleet",
    "fit", "generate", "load_config", "print_summary", "train", "updates",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

"""What is to be solved, and the score: environments, their loading, and graders.

An environment turns a policy's answers into rewards and knows nothing of workers or weights. Not covered: simulators
(`penstock.fleet`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.environments.arithmetic import ArithmeticEnvironment
    from penstock.environments.base import Environment, Prompt, Reference
    from penstock.environments.calculator import CalculatorEnvironment
    from penstock.environments.cats import CatsEnvironment
    from penstock.environments.digits import DigitsEnvironment
    from penstock.environments.episode import Episode
    from penstock.environments.example_environment import ExampleEnvironment
    from penstock.environments.examples import Example
    from penstock.environments.jsonl import JsonlEnvironment
    from penstock.environments.loading import load_environment
    from penstock.environments.multiple_choice import MultipleChoiceEnvironment
    from penstock.environments.single_turn import GroupScoredEnvironment, SingleTurnEnvironment
    from penstock.environments.validation import validate_groups, validate_metrics

_EXPORTS = {
    "ArithmeticEnvironment": "arithmetic",
    "CalculatorEnvironment": "calculator",
    "CatsEnvironment": "cats",
    "DigitsEnvironment": "digits",
    "Environment": "base",
    "Episode": "episode",
    "Example": "examples",
    "ExampleEnvironment": "example_environment",
    "GroupScoredEnvironment": "single_turn",
    "JsonlEnvironment": "jsonl",
    "MultipleChoiceEnvironment": "multiple_choice",
    "Prompt": "base",
    "Reference": "base",
    "SingleTurnEnvironment": "single_turn",
    "load_environment": "loading",
    "validate_groups": "validation",
    "validate_metrics": "validation",
}

__all__ = [
    "ArithmeticEnvironment", "CalculatorEnvironment", "CatsEnvironment", "DigitsEnvironment", "Environment",
    "Episode", "Example", "ExampleEnvironment", "GroupScoredEnvironment", "JsonlEnvironment",
    "MultipleChoiceEnvironment", "Prompt", "Reference", "SingleTurnEnvironment", "load_environment",
    "validate_groups", "validate_metrics",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""What is to be solved, and the score: environments, their loading, and graders.

An environment turns a policy's answers into rewards and knows nothing of workers or weights. Not covered: simulators
(`penstock.fleet`).
"""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.environments.agents import AgentEnvironment
    from penstock.environments.arithmetic import ArithmeticEnvironment
    from penstock.environments.base import Environment, Prompt, Reference, Scores, validate_groups, validate_metrics
    from penstock.environments.calculator import CalculatorEnvironment
    from penstock.environments.cats import CatsEnvironment
    from penstock.environments.digits import DigitsEnvironment
    from penstock.environments.episode import EpisodeBuilder, GroupScoredEnvironment, SingleTurnEnvironment
    from penstock.environments.example_environment import Example, ExampleEnvironment
    from penstock.environments.jsonl import JsonlEnvironment
    from penstock.environments.loading import load_environment
    from penstock.environments.multi_turn import Conversation, MultiTurnEnvironment
    from penstock.environments.multiple_choice import MultipleChoiceEnvironment
    from penstock.environments.reasoning_gym import ReasoningGymEnvironment
    from penstock.environments.tools import ToolEnvironment
    from penstock.environments.verifiers import VerifiersEnvironment

_EXPORTS = {
    "agents": ["AgentEnvironment"],
    "arithmetic": ["ArithmeticEnvironment"],
    "base": ["Environment", "Prompt", "Reference", "Scores", "validate_groups", "validate_metrics"],
    "calculator": ["CalculatorEnvironment"],
    "cats": ["CatsEnvironment"],
    "digits": ["DigitsEnvironment"],
    "episode": ["EpisodeBuilder", "GroupScoredEnvironment", "SingleTurnEnvironment"],
    "example_environment": ["Example", "ExampleEnvironment"],
    "jsonl": ["JsonlEnvironment"],
    "loading": ["load_environment"],
    "multi_turn": ["Conversation", "MultiTurnEnvironment"],
    "multiple_choice": ["MultipleChoiceEnvironment"],
    "reasoning_gym": ["ReasoningGymEnvironment"],
    "tools": ["ToolEnvironment"],
    "verifiers": ["VerifiersEnvironment"],
}

__all__ = [
    "AgentEnvironment", "ArithmeticEnvironment", "CalculatorEnvironment", "CatsEnvironment", "Conversation",
    "DigitsEnvironment", "Environment", "EpisodeBuilder", "Example", "ExampleEnvironment", "GroupScoredEnvironment",
    "JsonlEnvironment", "MultiTurnEnvironment", "MultipleChoiceEnvironment", "Prompt", "ReasoningGymEnvironment",
    "Reference", "Scores", "SingleTurnEnvironment", "ToolEnvironment", "VerifiersEnvironment", "load_environment",
    "validate_groups", "validate_metrics",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

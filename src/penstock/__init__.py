"""Penstock: asynchronous reinforcement learning for language models and simulator agents.

``import penstock`` is cheap: everything is loaded at its first use.
"""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.batch import BatchMaker, DeadlineBatchMaker, GrpoBatchMaker, RecencyBatchMaker
    from penstock.curriculum import Curriculum
    from penstock.environments import (
        Environment,
        Example,
        JsonlEnvironment,
        MultiTurnEnvironment,
        SingleTurnEnvironment,
        ToolEnvironment,
    )
    from penstock.inference import EngineContext, InferenceEngine, ScriptedContext
    from penstock.learner import Learner
    from penstock.model.language import Decoder
    from penstock.overseer import (
        EvaluationReport,
        RunConfig,
        RunSummary,
        Update,
        evaluate,
        generate,
        load_config,
        train,
        updates,
    )
    from penstock.replay import ReplayBuffer, ReplayBufferConfig, ReplayDataLoader, RolloutStore, TicketIssuer
    from penstock.rollout import RolloutManager, RolloutWorker
    from penstock.text import Tokenizer
    from penstock.types import ConfigError, PenstockError
    from penstock.weights import InProcessBroadcaster

_EXPORTS = {
    "batch": ["BatchMaker", "DeadlineBatchMaker", "GrpoBatchMaker", "RecencyBatchMaker"],
    "curriculum": ["Curriculum"],
    "environments": [
        "Environment", "Example", "JsonlEnvironment", "MultiTurnEnvironment", "SingleTurnEnvironment",
        "ToolEnvironment",
    ],
    "inference": ["EngineContext", "InferenceEngine", "ScriptedContext"],
    "learner": ["Learner"],
    "model.language": ["Decoder"],
    "overseer": [
        "EvaluationReport", "RunConfig", "RunSummary", "Update", "evaluate", "generate", "load_config", "train",
        "updates",
    ],
    "replay": ["ReplayBuffer", "ReplayBufferConfig", "ReplayDataLoader", "RolloutStore", "TicketIssuer"],
    "rollout": ["RolloutManager", "RolloutWorker"],
    "text": ["Tokenizer"],
    "types": ["ConfigError", "PenstockError"],
    "weights": ["InProcessBroadcaster"],
}  # fmt: skip

__all__ = [
    "BatchMaker", "ConfigError", "Curriculum", "DeadlineBatchMaker", "Decoder", "EngineContext", "Environment",
    "EvaluationReport", "Example", "GrpoBatchMaker", "InProcessBroadcaster", "InferenceEngine", "JsonlEnvironment",
    "Learner", "MultiTurnEnvironment", "PenstockError", "RecencyBatchMaker", "ReplayBuffer", "ReplayBufferConfig",
    "ReplayDataLoader", "RolloutManager", "RolloutStore", "RolloutWorker", "RunConfig", "RunSummary",
    "ScriptedContext", "SingleTurnEnvironment", "TicketIssuer", "Tokenizer", "ToolEnvironment", "Update", "evaluate",
    "generate", "load_config", "train", "updates",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

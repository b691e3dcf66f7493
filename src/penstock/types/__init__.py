"""Records, protocols and errors shared by every component. Imports NumPy and nothing of ours."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.types.calls import Caller, CompiledProgram, RetryingCaller
    from penstock.types.errors import (
        CheckpointError,
        ConfigError,
        DuplicateGroupError,
        EnvironmentFailure,
        InvalidRolloutError,
        MismatchError,
        NonFiniteError,
        NoProgressError,
        PenstockError,
        RunDirectoryError,
        RunFailed,
        SchemaVersionError,
        Stopped,
        SupersededError,
        SupersededVersionError,
        TransferError,
        UnreachableError,
        WeightsError,
    )
    from penstock.types.fragments import FRAGMENT_SCHEMA_VERSION, SampleFragment
    from penstock.types.generation import (
        SAMPLING_FIELDS,
        Alternatives,
        Completion,
        Decoding,
        FinishReason,
        GenerationCall,
        PromptScores,
        WeightVersion,
    )
    from penstock.types.idle_keys import IdleKeyError, refuse_idle
    from penstock.types.packed import AnyRollout, PackedRollout
    from penstock.types.protocols import (
        AgentContext,
        AgentSession,
        BatchSource,
        Checkpointable,
        Clock,
        CurriculumRecord,
        EnvironmentSpec,
        InferenceContext,
        LessonChooser,
        ManyInferenceContext,
        Message,
        Mode,
        RLLossModule,
        RolloutSink,
        TextCodec,
        TicketSource,
        WeightSink,
        WeightSource,
    )
    from penstock.types.rollouts import (
        SCHEMA_VERSION,
        Experience,
        Role,
        Rollout,
        RolloutBatch,
        RolloutBatchStats,
        RolloutGroup,
        RolloutMetadata,
        RolloutRecord,
        TrainingExample,
        Turn,
    )
    from penstock.types.seeds import as_seed, fold, generator
    from penstock.types.spaces import LeafKind, LeafSpace, Spaces
    from penstock.types.training import Fate, FragmentExample, ProblemSet, RLExample, Ticket, TrainingBatch

_EXPORTS = {
    "AgentContext": "protocols",
    "AgentSession": "protocols",
    "Alternatives": "generation",
    "AnyRollout": "packed",
    "BatchSource": "protocols",
    "Caller": "calls",
    "CheckpointError": "errors",
    "Checkpointable": "protocols",
    "Clock": "protocols",
    "CompiledProgram": "calls",
    "Completion": "generation",
    "ConfigError": "errors",
    "CurriculumRecord": "protocols",
    "Decoding": "generation",
    "DuplicateGroupError": "errors",
    "EnvironmentFailure": "errors",
    "EnvironmentSpec": "protocols",
    "Experience": "rollouts",
    "FRAGMENT_SCHEMA_VERSION": "fragments",
    "Fate": "training",
    "FinishReason": "generation",
    "FragmentExample": "training",
    "GenerationCall": "generation",
    "IdleKeyError": "idle_keys",
    "InferenceContext": "protocols",
    "InvalidRolloutError": "errors",
    "LeafKind": "spaces",
    "LeafSpace": "spaces",
    "LessonChooser": "protocols",
    "ManyInferenceContext": "protocols",
    "Message": "protocols",
    "MismatchError": "errors",
    "Mode": "protocols",
    "NoProgressError": "errors",
    "NonFiniteError": "errors",
    "PackedRollout": "packed",
    "PenstockError": "errors",
    "ProblemSet": "training",
    "PromptScores": "generation",
    "RLExample": "training",
    "RLLossModule": "protocols",
    "RetryingCaller": "calls",
    "Role": "rollouts",
    "Rollout": "rollouts",
    "RolloutBatch": "rollouts",
    "RolloutBatchStats": "rollouts",
    "RolloutGroup": "rollouts",
    "RolloutMetadata": "rollouts",
    "RolloutRecord": "rollouts",
    "RolloutSink": "protocols",
    "RunDirectoryError": "errors",
    "RunFailed": "errors",
    "SAMPLING_FIELDS": "generation",
    "SCHEMA_VERSION": "rollouts",
    "SampleFragment": "fragments",
    "SchemaVersionError": "errors",
    "Spaces": "spaces",
    "Stopped": "errors",
    "SupersededError": "errors",
    "SupersededVersionError": "errors",
    "TextCodec": "protocols",
    "Ticket": "training",
    "TicketSource": "protocols",
    "TrainingBatch": "training",
    "TrainingExample": "rollouts",
    "TransferError": "errors",
    "Turn": "rollouts",
    "UnreachableError": "errors",
    "WeightSink": "protocols",
    "WeightSource": "protocols",
    "WeightVersion": "generation",
    "WeightsError": "errors",
    "as_seed": "seeds",
    "fold": "seeds",
    "generator": "seeds",
    "refuse_idle": "idle_keys",
}

__all__ = [
    "AgentContext", "AgentSession", "Alternatives",
    "AnyRollout", "BatchSource", "Caller", "CheckpointError", "Checkpointable", "Clock", "CompiledProgram",
    "Completion", "ConfigError", "CurriculumRecord", "Decoding", "DuplicateGroupError", "EnvironmentFailure",
    "EnvironmentSpec", "Experience", "FRAGMENT_SCHEMA_VERSION", "Fate", "FinishReason", "FragmentExample",
    "GenerationCall", "IdleKeyError", "InferenceContext", "InvalidRolloutError", "LeafKind", "LeafSpace",
    "LessonChooser", "ManyInferenceContext", "Message", "MismatchError", "Mode", "NoProgressError", "NonFiniteError",
    "PackedRollout",
    "PenstockError", "ProblemSet", "PromptScores", "RLExample", "RLLossModule", "RetryingCaller", "Role", "Rollout",
    "RolloutBatch", "RolloutBatchStats", "RolloutGroup", "RolloutMetadata", "RolloutRecord", "RolloutSink",
    "RunDirectoryError",
    "RunFailed", "SAMPLING_FIELDS", "SCHEMA_VERSION", "SampleFragment", "SchemaVersionError", "Spaces", "Stopped",
    "SupersededError", "SupersededVersionError", "TextCodec", "Ticket", "TicketSource", "TrainingBatch",
    "TrainingExample", "TransferError", "Turn", "UnreachableError", "WeightSink", "WeightSource", "WeightVersion",
    "WeightsError", "as_seed", "fold", "generator", "refuse_idle",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Records, protocols and errors shared by every component. Imports NumPy and nothing of ours."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

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
        PromptTooLong,
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
    "calls": ["Caller", "CompiledProgram", "RetryingCaller"],
    "errors": [
        "CheckpointError", "ConfigError", "DuplicateGroupError", "EnvironmentFailure", "InvalidRolloutError",
        "MismatchError", "NoProgressError", "NonFiniteError", "PenstockError", "PromptTooLong", "RunDirectoryError",
        "RunFailed", "SchemaVersionError", "Stopped", "SupersededError", "SupersededVersionError", "TransferError",
        "UnreachableError", "WeightsError",
    ],
    "fragments": ["FRAGMENT_SCHEMA_VERSION", "SampleFragment"],
    "generation": [
        "Alternatives", "Completion", "Decoding", "FinishReason", "GenerationCall", "PromptScores", "SAMPLING_FIELDS",
        "WeightVersion",
    ],
    "idle_keys": ["IdleKeyError", "refuse_idle"],
    "packed": ["AnyRollout", "PackedRollout"],
    "protocols": [
        "AgentContext", "AgentSession", "BatchSource", "Checkpointable", "Clock", "CurriculumRecord", "EnvironmentSpec",
        "InferenceContext", "LessonChooser", "ManyInferenceContext", "Message", "Mode", "RLLossModule", "RolloutSink",
        "TextCodec", "TicketSource", "WeightSink", "WeightSource",
    ],
    "rollouts": [
        "Experience", "Role", "Rollout", "RolloutBatch", "RolloutBatchStats", "RolloutGroup", "RolloutMetadata",
        "RolloutRecord", "SCHEMA_VERSION", "TrainingExample", "Turn",
    ],
    "seeds": ["as_seed", "fold", "generator"],
    "spaces": ["LeafKind", "LeafSpace", "Spaces"],
    "training": ["Fate", "FragmentExample", "ProblemSet", "RLExample", "Ticket", "TrainingBatch"],
}  # fmt: skip

__all__ = [
    "AgentContext", "AgentSession", "Alternatives",
    "AnyRollout", "BatchSource", "Caller", "CheckpointError", "Checkpointable", "Clock", "CompiledProgram",
    "Completion", "ConfigError", "CurriculumRecord", "Decoding", "DuplicateGroupError", "EnvironmentFailure",
    "EnvironmentSpec", "Experience", "FRAGMENT_SCHEMA_VERSION", "Fate", "FinishReason", "FragmentExample",
    "GenerationCall", "IdleKeyError", "InferenceContext", "InvalidRolloutError", "LeafKind", "LeafSpace",
    "LessonChooser", "ManyInferenceContext", "Message", "MismatchError", "Mode", "NoProgressError", "NonFiniteError",
    "PackedRollout", "PenstockError", "ProblemSet", "PromptScores", "PromptTooLong",
    "RLExample", "RLLossModule", "RetryingCaller", "Role", "Rollout",
    "RolloutBatch", "RolloutBatchStats", "RolloutGroup", "RolloutMetadata", "RolloutRecord", "RolloutSink",
    "RunDirectoryError",
    "RunFailed", "SAMPLING_FIELDS", "SCHEMA_VERSION", "SampleFragment", "SchemaVersionError", "Spaces", "Stopped",
    "SupersededError", "SupersededVersionError", "TextCodec", "Ticket", "TicketSource", "TrainingBatch",
    "TrainingExample", "TransferError", "Turn", "UnreachableError", "WeightSink", "WeightSource", "WeightVersion",
    "WeightsError", "as_seed", "fold", "generator", "refuse_idle",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

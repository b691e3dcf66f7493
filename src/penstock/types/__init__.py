"""Records, protocols and errors shared by every component. Imports NumPy and nothing of ours."""

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
    Completion,
    Decoding,
    FinishReason,
    GenerationCall,
    WeightVersion,
)
from penstock.types.packed import AnyRollout, PackedRollout
from penstock.types.protocols import (
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

__all__ = [
    "AnyRollout", "BatchSource", "Caller", "CheckpointError", "Checkpointable", "Clock", "CompiledProgram",
    "Completion", "ConfigError", "CurriculumRecord", "Decoding", "DuplicateGroupError", "EnvironmentFailure",
    "EnvironmentSpec", "Experience", "FRAGMENT_SCHEMA_VERSION", "Fate", "FinishReason", "FragmentExample",
    "GenerationCall", "InferenceContext", "InvalidRolloutError", "LeafKind", "LeafSpace", "LessonChooser",
    "ManyInferenceContext", "Message", "MismatchError", "Mode", "NoProgressError", "NonFiniteError", "PackedRollout",
    "PenstockError", "ProblemSet", "RLExample", "RLLossModule", "RetryingCaller", "Role", "Rollout", "RolloutBatch",
    "RolloutBatchStats", "RolloutGroup", "RolloutMetadata", "RolloutRecord", "RolloutSink", "RunDirectoryError",
    "RunFailed", "SAMPLING_FIELDS", "SCHEMA_VERSION", "SampleFragment", "SchemaVersionError", "Spaces", "Stopped",
    "SupersededError", "SupersededVersionError", "TextCodec", "Ticket", "TicketSource", "TrainingBatch",
    "TrainingExample", "TransferError", "Turn", "UnreachableError", "WeightSink", "WeightSource", "WeightVersion",
    "WeightsError", "as_seed", "fold", "generator",
]  # fmt: skip

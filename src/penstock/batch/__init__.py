"""From finished rollouts to training rows: advantages, examples, packing and batch makers. NumPy only."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.batch.advantages import (
        ADVANTAGES,
        AdvantageName,
        GroupAdvantage,
        compute_advantages,
        dr_grpo,
        grpo,
        has_signal,
        reinforce_pp,
        rloo,
        turn,
        valid_rollouts,
        with_kl_in_reward,
    )
    from penstock.batch.config import (
        BUILT_IN_MAKERS,
        BatchMakerConfig,
    )
    from penstock.batch.deadline import (
        DeadlineBatchMaker,
    )
    from penstock.batch.examples import (
        batch_metadata,
        check_trainable,
        example_from_pair,
        example_from_rollout,
        longest_sample,
        minibatches_of,
        sample_spans_of,
        samples_of,
        trainable_tokens,
    )
    from penstock.batch.factory import (
        make_batch_maker,
    )
    from penstock.batch.filters import (
        GroupFilters,
        overlong_penalty,
    )
    from penstock.batch.fragments import (
        FragmentBatchMaker,
    )
    from penstock.batch.maker import (
        BatchMaker,
        Dropped,
        PacedBatchMaker,
        Unit,
    )
    from penstock.batch.packing import (
        PackedBatch,
        Placement,
        RowShape,
        pack,
        place,
        shapes_for,
        stack,
        unpack,
    )
    from penstock.batch.recency import (
        RecencyBatchMaker,
    )
    from penstock.batch.reservoir import (
        GrpoBatchMaker,
    )

_EXPORTS = {
    "advantages": [
        "ADVANTAGES", "AdvantageName", "GroupAdvantage", "compute_advantages", "dr_grpo", "grpo", "has_signal",
        "reinforce_pp", "rloo", "turn", "valid_rollouts", "with_kl_in_reward",
    ],
    "config": ["BUILT_IN_MAKERS", "BatchMakerConfig"],
    "deadline": ["DeadlineBatchMaker"],
    "examples": [
        "batch_metadata", "check_trainable", "example_from_pair", "example_from_rollout", "longest_sample",
        "minibatches_of", "sample_spans_of", "samples_of", "trainable_tokens",
    ],
    "factory": ["make_batch_maker"],
    "filters": ["GroupFilters", "overlong_penalty"],
    "fragments": ["FragmentBatchMaker"],
    "maker": ["BatchMaker", "Dropped", "PacedBatchMaker", "Unit"],
    "packing": ["PackedBatch", "Placement", "RowShape", "pack", "place", "shapes_for", "stack", "unpack"],
    "recency": ["RecencyBatchMaker"],
    "reservoir": ["GrpoBatchMaker"],
}  # fmt: skip

__all__ = [
    "ADVANTAGES", "AdvantageName", "BUILT_IN_MAKERS", "BatchMaker", "BatchMakerConfig", "DeadlineBatchMaker",
    "Dropped", "FragmentBatchMaker", "GroupAdvantage", "GroupFilters", "GrpoBatchMaker", "PacedBatchMaker",
    "PackedBatch", "Placement", "RecencyBatchMaker", "RowShape", "Unit", "batch_metadata", "check_trainable",
    "compute_advantages", "dr_grpo", "example_from_pair", "example_from_rollout", "grpo", "has_signal",
    "longest_sample", "make_batch_maker", "minibatches_of", "overlong_penalty", "pack", "place", "reinforce_pp",
    "rloo", "sample_spans_of", "samples_of", "shapes_for", "stack", "trainable_tokens", "turn", "unpack",
    "valid_rollouts", "with_kl_in_reward",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

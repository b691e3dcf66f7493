"""From finished rollouts to training rows: advantages, examples, packing and batch makers. NumPy only."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batch.advantages import (
        ADVANTAGES,
        AdvantageName,
        compute_advantages,
        dr_grpo,
        grpo,
        has_signal,
        reinforce_pp,
        rloo,
        valid_rollouts,
    )
    from penstock.batch.examples import (
        check_trainable,
        example_from_pair,
        example_from_rollout,
        trainable_tokens,
    )
    from penstock.batch.makers import BatchMaker, DeadlineBatchMaker
    from penstock.batch.packing import PackedBatch, Placement, pack, place, stack, unpack

_EXPORTS = {
    "ADVANTAGES": "advantages",
    "AdvantageName": "advantages",
    "BatchMaker": "makers",
    "DeadlineBatchMaker": "makers",
    "PackedBatch": "packing",
    "Placement": "packing",
    "check_trainable": "examples",
    "compute_advantages": "advantages",
    "dr_grpo": "advantages",
    "example_from_pair": "examples",
    "example_from_rollout": "examples",
    "grpo": "advantages",
    "has_signal": "advantages",
    "pack": "packing",
    "place": "packing",
    "reinforce_pp": "advantages",
    "rloo": "advantages",
    "stack": "packing",
    "trainable_tokens": "examples",
    "unpack": "packing",
    "valid_rollouts": "advantages",
}

__all__ = [
    "ADVANTAGES", "AdvantageName", "BatchMaker", "DeadlineBatchMaker", "PackedBatch", "Placement",
    "check_trainable", "compute_advantages", "dr_grpo", "example_from_pair", "example_from_rollout", "grpo",
    "has_signal", "pack", "place", "reinforce_pp", "rloo", "stack", "trainable_tokens", "unpack",
    "valid_rollouts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

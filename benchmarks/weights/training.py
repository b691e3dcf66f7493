"""Weights of a real run as its learner publishes them, one set per update: `penstock train cats` with a larger model.

Rollouts, advantages, loss and AdamW are Penstock's own, in this process and one after the other (a staleness budget of
zero), so that a run is the same every time. Master weights are float32 and the published ones bfloat16. The recipe's
model is made wider so that a version is worth sending, and its batches smaller so that the recording is over soon.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from penstock import load_config, train
from penstock.types import WeightVersion
from penstock.weights import InProcessBroadcaster
from penstock.weights.broadcaster import host_arrays


@dataclass(frozen=True)
class Size:
    """Of the recipe's model, and of its batches in groups of eight rollouts."""

    hidden: int = 512
    intermediate: int = 1536
    layers: int = 5
    heads: int = 8
    groups: int = 4


TINY = Size(hidden=32, intermediate=64, layers=2, heads=2, groups=2)


def record(size: Size, learning_rate: float, updates: int) -> list[dict[str, np.ndarray]]:
    """Published weights before the first update and after each: bfloat16 arrays by name.

    Args:
        size: Of the run.
        learning_rate: Of all its updates; there is no warm-up.
        updates: How many.
    """
    published: list[dict[str, np.ndarray]] = []
    publish = InProcessBroadcaster.publish

    def recording(self: InProcessBroadcaster, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        published.append(host_arrays(arrays, bfloat16=True))
        publish(self, version, arrays)

    words = [
        f"steps={updates + 1}",
        f"model.init.hidden_size={size.hidden}",
        f"model.init.intermediate_size={size.intermediate}",
        f"model.init.num_hidden_layers={size.layers}",
        f"model.init.num_attention_heads={size.heads}",
        f"model.init.num_key_value_heads={size.heads // 2}",
        f"replay.groups_per_batch={size.groups}",
        "replay.staleness_budget=0",
        "curriculum.eval_n_examples=1",
        f"inference.max_slots={8 * size.groups}",
        f"learner.optimizer.learning_rate={learning_rate}",
        "learner.optimizer.warmup_steps=0",
    ]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(InProcessBroadcaster, "publish", recording):
        train(load_config("cats", words), Path(folder) / "run", recipe="cats", quiet=True)
    return published[: updates + 1]

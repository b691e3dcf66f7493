"""Facts about a training batch, the same for every batch maker here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.types import RLExample, RolloutGroup


def batch_metadata(groups: Sequence[RolloutGroup], flat: Sequence[bool], batch: Sequence[RLExample]) -> dict[str, Any]:
    """What a batch consists of.

    Args:
        groups: What it was made of: of each group those rollouts that are in the batch.
        flat: For each of them whether the rewards of the whole group are all equal.
        batch: Its examples.

    Returns:
        ``group_ids`` and ``rollout_ids`` (tuples, in batch order), ``metrics`` (``train/reward_mean``,
        ``train/reward_std``, ``train/response_tokens``, ``train/zero_variance_groups``: a share).
    """
    rewards = np.array([r.episode_reward for group in groups for r in group.rollouts], np.float32)
    sampled = [int(np.count_nonzero(example.loss_mask)) for example in batch]
    return {
        "group_ids": tuple(group.group_id for group in groups),
        "rollout_ids": tuple(rollout_id for example in batch for rollout_id in example.rollout_ids),
        "metrics": {
            "train/reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
            "train/reward_std": float(rewards.std()) if len(rewards) else 0.0,
            "train/response_tokens": float(np.mean(sampled)) if sampled else 0.0,
            "train/zero_variance_groups": float(np.mean(flat)) if flat else 0.0,
        },
    }

"""Small groups and batches to store, each told apart by its contents, and what can be said of a folder of them."""

from pathlib import Path

import numpy as np

from penstock.types import RLExample, Rollout, RolloutMetadata, RolloutRecord


def group_records(group_id: str, size: int = 2) -> list[RolloutRecord]:
    """A group's records."""
    return [RolloutRecord(_rollout(f"{group_id}/{index}", index), group_id, "words:1") for index in range(size)]


def _rollout(rollout_id: str, index: int) -> Rollout:
    return Rollout(
        env_name="words",
        env_example_id="1",
        prompt_tokens=np.arange(4, dtype=np.int32),
        response_tokens=np.arange(3, dtype=np.int32) + index,
        response_logprobs=np.full(3, -0.5 - index, np.float32),
        token_rewards=np.zeros(3, np.float32),
        episode_reward=0.0,
        metadata=RolloutMetadata("worker-0", 100.0, 0),
        rollout_id=rollout_id,
        lesson_id="words",
        response_weight_steps=np.zeros(3, np.int32),
        timings={"generate_s": 0.5},
    )


def example(*rollout_ids: str) -> RLExample:
    """A training example of some rollouts."""
    return RLExample(
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        segment_ids=np.ones(4, np.int32),
        position_ids=np.arange(4, dtype=np.int32),
        advantage=np.array([0, 0, 1, 1], np.float32),
        generator_log_probs=np.zeros(4, np.float32),
        reference_log_probs=None,
        temperature=np.ones(4, np.float32),
        weight_steps=np.array([-1, -1, 0, 0], np.int32),
        rollout_ids=rollout_ids,
    )


def parts_in(root: Path) -> list[str]:
    """Names of the parts on the local disk."""
    return sorted(path.name for path in (root / "rollouts").glob("*.parquet"))


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Unix seconds."""
        return self.now

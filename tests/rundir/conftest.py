"""Rollouts of every shape that the rows must hold."""

import numpy as np
import pytest

from penstock.types import Decoding, Rollout, RolloutMetadata, RolloutRecord, Turn


def full_record(rollout_id: str = "cats-0-3/1") -> RolloutRecord:
    rollout = Rollout(
        env_name="cats",
        env_example_id="17",
        prompt_tokens=np.array([5, 6, 7], np.int32),
        response_tokens=np.array([8, 9, 2], np.int32),
        response_logprobs=np.array([-0.5, 0.0, -2.25], np.float32),
        token_rewards=np.array([0, 0, 0.75], np.float32),
        episode_reward=0.75,
        metadata=RolloutMetadata("worker-0", 1700000000.25, 4, 1),
        rollout_id=rollout_id,
        lesson_id="cats",
        response_mask=np.array([True, False, True]),
        response_weight_steps=np.array([4, -1, 6], np.int32),
        oldest_weight_step=4,
        turns=(Turn("user", "Say “cat”", 0, 3), Turn("assistant", "", 3, 6)),
        decoding=Decoding(0.7, 40, 0.9, 32, (2, 3), ("\n\n", "END")),
        finish_reason="length",
        timings={"decode_s": 0.25, "generate_s": 0.4},
    )
    return RolloutRecord(rollout, rollout_id.rpartition("/")[0], "cats:17")


def bare_record() -> RolloutRecord:
    """A rollout with nothing but what is required, and an empty response."""
    rollout = Rollout(
        env_name="cats",
        env_example_id="18",
        prompt_tokens=np.array([5], np.int32),
        response_tokens=np.zeros(0, np.int32),
        response_logprobs=np.zeros(0, np.float32),
        token_rewards=np.zeros(0, np.float32),
        episode_reward=0.0,
        metadata=RolloutMetadata("worker-1", 1.0, 0),
        rollout_id="cats-0-4/0",
        lesson_id="cats",
    )
    return RolloutRecord(rollout, "cats-0-4")


@pytest.fixture
def records() -> list[RolloutRecord]:
    return [full_record(), bare_record()]

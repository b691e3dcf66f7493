import json

import numpy as np

from penstock.tracking import conversation_of
from penstock.types import Rollout, RolloutMetadata, Turn

ROLLOUT = Rollout(
    env_name="cats",
    env_example_id="17",
    prompt_tokens=np.array([1, 2], np.int32),
    response_tokens=np.array([3, 4, 5], np.int32),
    response_logprobs=np.zeros(3, np.float32),
    token_rewards=np.array([0, 0, 0.25], np.float32),
    episode_reward=np.float32(0.25),  # type: ignore[arg-type]  # environments do return these
    turns=(Turn("user", "say cat", 0, 2), Turn("assistant", "cat", 2, 5)),
    finish_reason="length",
)


def test_a_conversation_says_who_said_what_for_which_reward():
    rollout = ROLLOUT.with_metadata(RolloutMetadata("worker-0", 1.0, 7), "easy-0-3/1", "easy")
    conversation = conversation_of(rollout)
    assert conversation == {
        "mode": "train",
        "rollout_id": "easy-0-3/1",
        "lesson_id": "easy",
        "env_name": "cats",
        "env_example_id": "17",
        "reward": 0.25,
        "weight_step": 7,
        "response_tokens": 3,
        "finish_reason": "length",
        "turns": [{"role": "user", "content": "say cat"}, {"role": "assistant", "content": "cat"}],
    }
    assert json.loads(json.dumps(conversation)) == conversation


def test_without_metadata_the_weight_step_is_none():
    assert conversation_of(ROLLOUT)["weight_step"] is None

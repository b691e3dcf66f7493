"""Rollouts and groups for the tests of `penstock.batch`."""

from collections.abc import Callable

import numpy as np
import pytest

from penstock.types import Rollout, RolloutGroup, RolloutMetadata

MakeRollout = Callable[..., Rollout]
MakeGroup = Callable[..., RolloutGroup]


@pytest.fixture
def make_rollout() -> MakeRollout:
    """A rollout of prompt 10, 11, … and response 20, 21, …, log-probabilities −1, −2, …."""

    def make(
        reward: float = 0.0,
        prompt: int = 2,
        response: int = 3,
        rollout_id: str = "lesson-0-0/0",
        weight_step: int = 5,
        **fields: object,
    ) -> Rollout:
        rewards = np.zeros(response, np.float32)
        if response:
            rewards[-1] = reward
        made = Rollout(
            env_name="env",
            env_example_id="example",
            prompt_tokens=np.arange(10, 10 + prompt, dtype=np.int32),
            response_tokens=np.arange(20, 20 + response, dtype=np.int32),
            response_logprobs=-np.arange(1, response + 1, dtype=np.float32),
            token_rewards=rewards,
            episode_reward=reward,
            **fields,  # type: ignore[arg-type]
        )
        return made.with_metadata(RolloutMetadata("worker", 1.0, weight_step), rollout_id, "lesson")

    return make


@pytest.fixture
def make_group(make_rollout: MakeRollout) -> MakeGroup:
    """A group with these rewards; `empty` lists members that sampled nothing, `aborted` those cut off."""

    def make(
        rewards: list[float],
        group_id: str = "lesson-0-0",
        empty: tuple[int, ...] = (),
        aborted: tuple[int, ...] = (),
    ) -> RolloutGroup:
        rollouts = [
            make_rollout(
                reward,
                rollout_id=f"{group_id}/{index}",
                response_mask=np.full(3, index not in empty),
                finish_reason="aborted" if index in aborted else "stop",
            )
            for index, reward in enumerate(rewards)
        ]
        return RolloutGroup("env:example", tuple(rollouts), group_id)

    return make

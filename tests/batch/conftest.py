"""Rollouts and groups for the tests of `penstock.batch`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.batch import BatchMaker, PacedBatchMaker
from penstock.types import PackedRollout, RLExample, Rollout, RolloutGroup, RolloutMetadata

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


@pytest.fixture
def add() -> Callable[..., None]:
    """Adds a group with these rewards to a batch maker."""

    def add(
        maker: BatchMaker,
        group_id: str,
        deadline_step: int | None = None,
        rewards: Sequence[float] = (0.0, 1.0),
        **fields: Any,
    ) -> None:
        for rollout in small_group(group_id, rewards, **fields):
            maker.add_rollout(rollout)
        if deadline_step is not None and isinstance(maker, PacedBatchMaker):
            maker.set_deadline(group_id, deadline_step)

    return add


def small_group(
    group_id: str, rewards: Sequence[float] = (0.0, 1.0), env: str = "env", example: str = "example", step: int = 0
) -> list[PackedRollout]:
    """Rollouts of one prompt and one response token, packed as a buffer keeps them."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.float32)
    return [
        PackedRollout(
            Rollout(env, example, one, one, zero, np.full(1, reward, np.float32), reward).with_metadata(
                RolloutMetadata("worker", 1.0, step), f"{group_id}/{index}", "lesson"
            )
        )
        for index, reward in enumerate(rewards)
    ]


def ids_of(batch: list[RLExample] | None) -> list[str]:
    """The rollouts of a batch."""
    assert batch is not None
    return [example.rollout_ids[0] for example in batch]


def groups_of(batch: list[RLExample] | None) -> list[str]:
    """The groups of a batch, in order."""
    return list(dict.fromkeys(rollout_id.rpartition("/")[0] for rollout_id in ids_of(batch)))


def advantages_of(batch: list[RLExample] | None) -> dict[str, float]:
    """Rollout to advantage."""
    assert batch is not None
    return {example.rollout_ids[0]: float(example.advantage[-1]) for example in batch}

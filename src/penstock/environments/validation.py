"""Checks of what an environment or a reward function returned. Nothing malformed reaches replay.

Every failure names the field, what was found, and what was expected; it costs its own group and no other.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.types import EnvironmentFailure, Rollout, RolloutGroup

REWARD_LIMIT = 1e6
"""Largest reward, and the largest of one token. Losses are float32: some orders beyond it nothing is finite."""
_BEYOND = f"rewards lie within ±{REWARD_LIMIT:g}, so scale it"


def check_rewards(rewards: Any, expected: int, source: str) -> list[float]:
    """One finite number per completion.

    Args:
        rewards: What a reward function returned: a list, tuple or array.
        expected: Number of completions.
        source: Who returned it, for the message.

    Raises:
        EnvironmentFailure: wrong count, or an entry that is no finite number within `REWARD_LIMIT`.
    """
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    wanted = f"it must return a list of {expected} finite numbers, one per completion"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise EnvironmentFailure(f"{source} returned {_shown(values)}: {wanted}")
    if len(values) != expected:
        raise EnvironmentFailure(f"{source} returned {len(values)} rewards for {expected} completions: {wanted}")
    return [_number(value, position, source, wanted) for position, value in enumerate(values)]


def _number(value: Any, position: int, source: str, wanted: str) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFailure(f"{source} returned {_shown(value)} as reward {position}: {wanted}")
    if abs(value) > REWARD_LIMIT:
        raise EnvironmentFailure(f"{source} returned {value:g} as reward {position}: {_BEYOND}")
    return float(value)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, float):
        return str(value)
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def validate_groups(groups: Any, n_examples: int, n_generations: int, env_name: str) -> list[RolloutGroup]:
    """Checks the groups that an environment's `sample` returned.

    Args:
        groups: What it returned as groups.
        n_examples: How many were asked for; fewer are accepted.
        n_generations: Rollouts that each must have.
        env_name: For the messages.

    Raises:
        EnvironmentFailure: naming the group, the field, and what was expected.
    """
    if not isinstance(groups, list | tuple):
        raise EnvironmentFailure(f"environment {env_name!r} returned {_shown(groups)}: expected a list of RolloutGroup")
    if len(groups) > n_examples:
        raise EnvironmentFailure(f"environment {env_name!r} returned {len(groups)} groups for {n_examples} examples")
    for position, group in enumerate(groups):
        _validate_group(group, n_generations, f"environment {env_name!r}, group {position}")
    return list(groups)


def _validate_group(group: Any, n_generations: int, where: str) -> None:
    if not isinstance(group, RolloutGroup):
        raise EnvironmentFailure(f"{where} is {_shown(group)}: expected a RolloutGroup")
    if not isinstance(group.key, str) or not group.key:
        raise EnvironmentFailure(f"{where}: key is {_shown(group.key)}: expected '<environment>:<example>'")
    if len(group.rollouts) != n_generations:
        raise EnvironmentFailure(f"{where}: rollouts has {len(group.rollouts)} members, expected {n_generations}")
    for index, rollout in enumerate(group.rollouts):
        _validate_rollout(rollout, f"{where}, rollout {index}")


def _validate_rollout(rollout: Any, where: str) -> None:
    if not isinstance(rollout, Rollout):
        raise EnvironmentFailure(f"{where} is {_shown(rollout)}: expected a Rollout")
    if rollout.sampled_tokens == 0:
        raise EnvironmentFailure(f"{where}: response_mask is all false: the policy sampled none of its tokens")
    if rollout.response_logprobs[~rollout.response_mask].any():
        raise EnvironmentFailure(f"{where}: response_logprobs must be 0 where response_mask is false")
    length = len(rollout.prompt_tokens) + len(rollout.response_tokens)
    for name, value in _largest_rewards(rollout).items():
        if not abs(value) <= REWARD_LIMIT:
            raise EnvironmentFailure(f"{where}: {name} is {value:g}: {_BEYOND}")
    for turn in rollout.turns:
        if not 0 <= turn.start <= turn.stop <= length:
            raise EnvironmentFailure(f"{where}: turns has the span {turn.start}..{turn.stop} in {length} tokens")


def _largest_rewards(rollout: Rollout) -> dict[str, float]:
    """By field, the reward that is the farthest from 0."""
    largest = {"episode_reward": float(rollout.episode_reward)}
    if len(rollout.token_rewards):
        position = int(np.argmax(np.abs(rollout.token_rewards)))
        largest[f"token_rewards[{position}]"] = float(rollout.token_rewards[position])
    return largest


def validate_metrics(metrics: Any, env_name: str) -> dict[str, float]:
    """Checks the metrics that an environment's `sample` returned.

    Raises:
        EnvironmentFailure: not a mapping of names to finite numbers.
    """
    if not isinstance(metrics, Mapping):
        raise EnvironmentFailure(f"environment {env_name!r} returned metrics {_shown(metrics)}: expected a dict")
    for name, value in metrics.items():
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise EnvironmentFailure(
                f"environment {env_name!r}: metric {name!r} is {_shown(value)}: not a finite number"
            )
    return {str(name): float(value) for name, value in metrics.items()}

"""A rollout as people read it: who said what, what it was worth, and under which weights."""

from typing import Any

from penstock.types import AnyRollout


def conversation_of(rollout: AnyRollout) -> dict[str, Any]:
    """The conversation of one rollout as plain data.

    Returns:
        ``rollout_id``, ``lesson_id``, ``env_name``, ``env_example_id``, ``reward``, ``weight_step`` (None before
        the metadata is attached), ``response_tokens`` (how many), ``finish_reason`` and ``turns``, a list of
        ``{"role": …, "content": …}``.
    """
    return {
        "rollout_id": rollout.rollout_id,
        "lesson_id": rollout.lesson_id,
        "env_name": rollout.env_name,
        "env_example_id": rollout.env_example_id,
        "reward": float(rollout.episode_reward),
        "weight_step": None if rollout.metadata is None else rollout.metadata.weight_step,
        "response_tokens": len(rollout.response_tokens),
        "finish_reason": rollout.finish_reason,
        "turns": [{"role": turn.role, "content": turn.content} for turn in rollout.turns],
    }

"""One rollout as one training example: prompt and response end to end, aligned token by token.

Every array is aligned with `tokens`: position t holds what belongs to the token at t (its advantage, its
behaviour log-probability, the version that sampled it), not to the prediction made there. A sequence is taken
whole or refused; nothing is ever cut, because a cut answer would be trained with a reward it did not earn.
"""

import numpy as np

from penstock.types import InvalidRolloutError, RLExample, Rollout


def check_trainable(rollout: Rollout, max_tokens: int, allow_truncated_sampling: bool = False) -> None:
    """Refuses a rollout that no update could learn from.

    Args:
        rollout: With metadata.
        max_tokens: Longest sequence, prompt and response together.
        allow_truncated_sampling: Accept top-k and top-p, whose sampled distribution is not the one the
            learner differentiates. Temperature 0 is never accepted.

    Raises:
        InvalidRolloutError: naming the rollout, the field, and what to do.
    """
    name = f"rollout {rollout.rollout_id or '(no id)'}"
    length = len(rollout.prompt_tokens) + len(rollout.response_tokens)
    if rollout.metadata is None:
        raise InvalidRolloutError(f"{name} has no metadata: attach it with Rollout.with_metadata")
    if rollout.sampled_tokens == 0:
        raise InvalidRolloutError(f"{name} has an empty loss mask: the policy sampled none of its tokens")
    if rollout.finish_reason == "aborted":
        raise InvalidRolloutError(f"{name} was aborted: its reward belongs to an answer it did not finish")
    if length > max_tokens:
        raise InvalidRolloutError(
            f"{name} has {length} tokens, a training row {max_tokens}: "
            "raise learner.row_length or lower max_output_tokens"
        )
    if rollout.decoding.temperature == 0:
        raise InvalidRolloutError(
            f"{name} was decoded with temperature 0: greedy samples have no probability to learn from"
        )
    if rollout.decoding.truncated and not allow_truncated_sampling:
        raise InvalidRolloutError(
            f"{name} was sampled with top_k={rollout.decoding.top_k}, top_p={rollout.decoding.top_p}: train "
            "on untruncated sampling, or set learner.allow_truncated_sampling: true"
        )


def trainable_tokens(example: RLExample) -> int:
    """How many positions the loss sees."""
    return int(example.loss_mask.sum())


def example_from_rollout(
    rollout: Rollout, advantage: float, max_tokens: int, allow_truncated_sampling: bool = False
) -> RLExample:
    """Makes the example of one rollout.

    Args:
        rollout: With metadata; p prompt and r response tokens.
        advantage: One number for every sampled token.
        max_tokens: Longest sequence, p + r.
        allow_truncated_sampling: See `check_trainable`.

    Returns:
        An example of p + r positions and one segment.

    Raises:
        InvalidRolloutError: the rollout cannot be trained on; see `check_trainable`.
    """
    check_trainable(rollout, max_tokens, allow_truncated_sampling)
    prompt = len(rollout.prompt_tokens)
    length = prompt + len(rollout.response_tokens)
    mask = np.concatenate([np.zeros(prompt, np.bool_), rollout.response_mask])
    logprobs = np.zeros(length, np.float32)
    logprobs[prompt:] = rollout.response_logprobs
    return RLExample(
        tokens=np.concatenate([rollout.prompt_tokens, rollout.response_tokens]),
        loss_mask=mask,
        segment_ids=np.ones(length, np.int32),
        position_ids=np.arange(length, dtype=np.int32),
        advantage=np.where(mask, np.float32(advantage), np.float32(0)),
        generator_log_probs=np.where(mask, logprobs, np.float32(0)),
        reference_log_probs=None,
        temperature=np.full(length, rollout.decoding.temperature, np.float32),
        weight_steps=_weight_steps(rollout, mask),
        rollout_ids=(rollout.rollout_id,),
    )


def example_from_pair(prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> RLExample:
    """Makes a supervised example: every response token is a target, with advantage 1 and temperature 1.

    Args:
        prompt_tokens: int32 [p], p ≥ 1.
        response_tokens: int32 [r], r ≥ 1.

    Raises:
        InvalidRolloutError: one of the two is empty.
    """
    if len(prompt_tokens) == 0 or len(response_tokens) == 0:
        raise InvalidRolloutError(
            f"supervised pair has {len(prompt_tokens)} prompt and {len(response_tokens)} response tokens: "
            "both need at least one"
        )
    tokens = np.concatenate([prompt_tokens, response_tokens]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt_tokens)
    return RLExample(
        tokens=tokens,
        loss_mask=mask,
        segment_ids=np.ones(len(tokens), np.int32),
        position_ids=np.arange(len(tokens), dtype=np.int32),
        advantage=mask.astype(np.float32),
        generator_log_probs=np.zeros(len(tokens), np.float32),
        reference_log_probs=None,
        temperature=np.ones(len(tokens), np.float32),
        weight_steps=np.full(len(tokens), -1, np.int32),
        rollout_ids=("",),
    )


def _weight_steps(rollout: Rollout, mask: np.ndarray) -> np.ndarray:
    """The version per token, −1 outside the mask.

    A prompt cache older than the first sampled token makes the whole sequence as old as that cache.
    """
    assert rollout.metadata is not None  # check_trainable ran
    oldest = rollout.metadata.weight_step
    if rollout.oldest_weight_step is not None:
        oldest = min(oldest, rollout.oldest_weight_step)
    steps = np.full(len(mask), -1, np.int32)
    recorded = rollout.response_weight_steps
    if recorded is not None and int(recorded[rollout.response_mask].min()) <= oldest:
        steps[len(rollout.prompt_tokens) :] = recorded
    else:
        steps[:] = oldest
    return np.where(mask, steps, np.int32(-1))

"""One rollout as one training example: prompt and response end to end, aligned token by token; and facts about a batch.

An example of a rollout of several samples has a segment for each, as a packed row has for each sequence; wherever the
two meet (packing, scoring), its samples go their own ways (`samples_of`).

Every array is aligned with `tokens`: position t holds what belongs to the token at t (its advantage, its
behaviour log-probability, the version that sampled it), not to the prediction made there. A sample is taken
whole or refused; nothing is ever cut, because a cut answer would be trained with a reward it did not earn.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from jaxtyping import Int64

from penstock.types import AnyRollout, InvalidRolloutError, RLExample, RolloutGroup

Advantage = float | np.floating[Any] | np.ndarray
"""Of a rollout: a number for all of its sampled tokens, or float32 [r], one for each response token."""


def check_trainable(rollout: AnyRollout, max_tokens: int, allow_truncated_sampling: bool = False) -> None:
    """Refuses a rollout that no update could learn from.

    Args:
        rollout: The rollout to check, with its metadata.
        max_tokens: Longest sample, context and answers together.
        allow_truncated_sampling: Accept `Decoding.truncation`, whose sampled distribution is not the one the
            learner differentiates. Temperature 0 is never accepted.

    Raises:
        InvalidRolloutError: naming the rollout, the field, and what to do.
    """
    name = f"rollout {rollout.rollout_id or '(no id)'}"
    length = rollout.longest_sample
    if rollout.metadata is None:
        raise InvalidRolloutError(f"{name} has no metadata: attach it with Rollout.with_metadata")
    if not rollout.sampled_tokens:
        raise InvalidRolloutError(f"{name} has an empty loss mask: the policy sampled none of its tokens")
    if rollout.finish_reason == "aborted":
        raise InvalidRolloutError(f"{name} was aborted: its reward belongs to an answer it did not finish")
    if length > max_tokens:
        what = "has" if len(rollout.sample_starts) == 1 else "has a sample of"
        raise InvalidRolloutError(
            f"{name} {what} {length} tokens, a training row {max_tokens}: "
            "raise learner.row_length or lower max_output_tokens"
        )
    if rollout.decoding.temperature == 0:
        raise InvalidRolloutError(
            f"{name} was decoded with temperature 0: greedy samples have no probability to learn from"
        )
    if rollout.decoding.truncated and not allow_truncated_sampling:
        values = ", ".join(f"{name}={value}" for name, value in rollout.decoding.truncation.items())
        raise InvalidRolloutError(
            f"{name} was sampled with {values}: train on untruncated sampling, or set "
            "learner.allow_truncated_sampling: true"
        )


def trainable_tokens(example: RLExample) -> int:
    """How many positions the loss sees."""
    return int(np.count_nonzero(example.loss_mask))


def example_from_rollout(
    rollout: AnyRollout, advantage: Advantage, max_tokens: int, allow_truncated_sampling: bool = False
) -> RLExample:
    """Makes the example of one rollout.

    Args:
        rollout: With metadata; p prompt and r response tokens.
        advantage: One number for every sampled token, or float32 [r] with one for each response token; what the policy
            did not sample gets 0.
        max_tokens: Longest sample; p + r of a rollout that is one.
        allow_truncated_sampling: See `check_trainable`.

    Returns:
        An example of p + r positions, with a segment for each sample.

    Raises:
        InvalidRolloutError: the rollout cannot be trained on; see `check_trainable`.
    """
    check_trainable(rollout, max_tokens, allow_truncated_sampling)
    return assemble_example(rollout, advantage)


def assemble_example(rollout: AnyRollout, advantage: Advantage) -> RLExample:
    """The example of a rollout that `check_trainable` let pass; see `example_from_rollout`."""
    return _assembled([rollout], [advantage])[0]


def assemble_examples(
    groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray | Sequence[Advantage]]
) -> list[RLExample]:
    """The examples of all rollouts of groups, with the advantages of each group in the order of its rollouts.

    They are views of one memory: what keeps one keeps all.
    """
    pairs = [
        pair
        for group, of_group in zip(groups, advantages, strict=True)
        for pair in zip(group.rollouts, of_group, strict=True)
    ]
    return _assembled([rollout for rollout, _ in pairs], [advantage for _, advantage in pairs])


def _assembled(rollouts: Sequence[AnyRollout], advantages: Sequence[Advantage]) -> list[RLExample]:
    """All of them end to end, and then a part for each: of a hundred short answers what NumPy's calls take is most."""
    if not rollouts:
        return []
    prompts = [rollout.prompt_tokens for rollout in rollouts]
    answers = [rollout.response_tokens for rollout in rollouts]
    shapes = np.array([(len(prompt), len(answer)) for prompt, answer in zip(prompts, answers, strict=True)])
    lengths, of_answers = shapes.sum(1), shapes[:, 1]
    stops = lengths.cumsum()
    answered = np.repeat(np.tile([False, True], len(rollouts)), shapes.ravel())
    sampled = np.concatenate([rollout.response_mask for rollout in rollouts])
    mask = np.zeros(len(answered), np.bool_)
    mask[answered] = sampled

    def spread(values: np.ndarray, fill: float, dtype: type[np.generic]) -> np.ndarray:
        """Values of all answers' tokens at their positions, and another wherever the policy did not sample."""
        found = np.full(len(mask), fill, dtype)
        found[mask] = values[sampled]
        return found

    if any(isinstance(one, np.ndarray) and one.ndim for one in advantages):
        each = [np.broadcast_to(one, count) for one, count in zip(advantages, of_answers, strict=True)]
        of_tokens = np.concatenate(each)
    else:
        of_tokens = np.repeat(np.array(advantages, np.float32), of_answers)
    segments, positions = np.ones(len(mask), np.int32), np.arange(len(mask), dtype=np.int32)
    positions -= np.repeat(stops - lengths, lengths).astype(np.int32)
    columns = {
        "tokens": np.concatenate([part for pair in zip(prompts, answers, strict=True) for part in pair]),
        "loss_mask": mask,
        "segment_ids": segments,
        "position_ids": positions,
        "advantage": spread(of_tokens, 0.0, np.float32),
        "generator_log_probs": spread(np.concatenate([r.response_logprobs for r in rollouts]), 0.0, np.float32),
        "temperature": np.repeat([rollout.decoding.temperature for rollout in rollouts], lengths).astype(np.float32),
        "weight_steps": spread(_weight_steps(rollouts, sampled, of_answers), -1, np.int32),
    }
    spans = [slice(*span) for span in zip((stops - lengths).tolist(), stops.tolist(), strict=True)]
    for rollout, span in zip(rollouts, spans, strict=True):
        for start in rollout.sample_starts[1:]:
            segments[span][start:] += 1
            positions[span][start:] -= positions[span][start]
    return [
        RLExample(
            **{name: column[span] for name, column in columns.items()},
            reference_log_probs=None,
            rollout_ids=(rollout.rollout_id,),
        )
        for rollout, span in zip(rollouts, spans, strict=True)
    ]


def _weight_steps(rollouts: Sequence[AnyRollout], sampled: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The version of every answer's tokens, end to end.

    A prompt cache older than the first sampled token makes the whole sequence as old as that cache.
    """
    oldest = np.array([_oldest_step(rollout) for rollout in rollouts])
    at_least = np.repeat(oldest, lengths)
    recorded = [rollout.response_weight_steps for rollout in rollouts]
    if any(steps is None for steps in recorded):
        parts = np.split(at_least, lengths.cumsum()[:-1])
        recorded = [part if steps is None else steps for part, steps in zip(parts, recorded, strict=True)]
    steps = np.concatenate([part for part in recorded if part is not None])
    latest = np.iinfo(np.int32).max
    first = np.minimum.reduceat(np.where(sampled, steps, latest), lengths.cumsum() - lengths)
    return np.where(np.repeat(first <= oldest, lengths), steps, at_least)


def _oldest_step(rollout: AnyRollout) -> int:
    assert rollout.metadata is not None  # check_trainable ran
    oldest = rollout.metadata.weight_step
    return oldest if rollout.oldest_weight_step is None else min(oldest, rollout.oldest_weight_step)


def sample_starts_of(example: RLExample) -> list[int]:
    """The first position of each sample of a rollout's example."""
    if example.segment_ids[0] == example.segment_ids[-1]:  # nearly always, and they ascend: nothing is searched
        return [0]
    return [0, *(np.flatnonzero(np.diff(example.segment_ids)) + 1).tolist()]


def sample_spans_of(example: RLExample) -> list[slice]:
    """The positions of each sample of a rollout's example."""
    starts = sample_starts_of(example)
    return [slice(*span) for span in zip(starts, [*starts[1:], None], strict=True)]


def samples_of(example: RLExample) -> list[RLExample]:
    """The samples of a rollout's example as examples of one segment each; all have its id."""
    spans = sample_spans_of(example)
    return [example] if len(spans) == 1 else [_part(example, span) for span in spans]


def longest_sample(example: RLExample) -> int:
    """Tokens of the longest sample of a rollout's example."""
    return int(np.diff([*sample_starts_of(example), len(example.tokens)]).max())


def _part(example: RLExample, span: slice) -> RLExample:
    values = {each.name: getattr(example, each.name) for each in fields(RLExample) if each.name != "rollout_ids"}
    parts: dict[str, Any] = {name: None if array is None else array[span] for name, array in values.items()}
    parts["segment_ids"] = np.ones_like(parts["segment_ids"])
    return RLExample(**parts, rollout_ids=example.rollout_ids)


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


def batch_metadata(groups: Sequence[RolloutGroup], flat: Sequence[bool], batch: Sequence[RLExample]) -> dict[str, Any]:
    """What a batch consists of.

    Args:
        groups: What it was made of: of each group those rollouts that are in the batch.
        flat: For each of them whether the rewards of the whole group are all equal.
        batch: The examples made of these groups, in batch order.

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


def minibatches_of(
    examples: Sequence[RLExample], count: int, rng: np.random.Generator
) -> list[Int64[np.ndarray, " n"]]:
    """Indices of the examples of each optimiser step: whole groups, of nearly equal numbers of groups.

    A group is the part of a rollout's id before the last slash. Fewer groups give as many steps as there are groups.

    Args:
        examples: Of an update.
        count: Optimiser steps; 1 keeps the order.
        rng: Draws which groups go together.
    """
    if count == 1:
        return [np.arange(len(examples))]
    names = [example.rollout_ids[0].rpartition("/")[0] for example in examples]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    group = np.array([numbers[name] for name in names])
    parts = np.array_split(rng.permutation(len(numbers)), min(count, len(numbers)))
    return [np.flatnonzero(np.isin(group, part)) for part in parts]

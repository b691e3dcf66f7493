"""Advantages from rewards: how much better a rollout did than its peers, in its group or under its policy version.

NumPy only. r_i is the episode reward; `turn` alone asks where in the episode it fell (`Rollout.token_rewards`). Only
*valid* rollouts enter a baseline: one without a sampled token, or one that was aborted, has advantage 0 and changes
nobody else's. An overlong rollout is valid. A group that shrank to one valid rollout has advantage 0. No noise is
added: equal rewards give exactly 0.

Not covered: values and current log-probabilities, which the learner has (`penstock.learner.critic`, V-trace).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int

from penstock.batch.examples import assemble_examples
from penstock.batch.group_pool import group_of
from penstock.types import AnyRollout, ConfigError, RLExample, Rollout, RolloutGroup

AdvantageName = Literal["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "turn", "gae"]

GroupAdvantage = Callable[[RolloutGroup], np.ndarray]
"""A group's rollouts to float32 [n], one advantage each."""

OF_THE_BATCH = ("reinforce_pp", "reinforce_pp_baseline")
"""Advantages that change with whatever else is in the batch."""

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""


def valid_rollouts(group: RolloutGroup) -> Bool[np.ndarray, " n"]:
    """Which rollouts count: those that sampled at least one token and were not aborted."""
    return np.array([r.sampled_tokens > 0 and r.finish_reason != "aborted" for r in group.rollouts], np.bool_)


def has_signal(group: RolloutGroup) -> bool:
    """Whether the valid rewards of a group differ, so that a group baseline leaves something to learn from."""
    return len(np.unique(group.rewards[valid_rollouts(group)])) > 1


def rloo(group: RolloutGroup) -> Float32[np.ndarray, " n"]:
    """A_i = r_i − mean of the other rewards (leave-one-out); [0, 1, 0] -> [−.5, 1, −.5].

    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
    """
    return _over_valid(group, RolloutGroup.compute_rloo_advantages)


def grpo(group: RolloutGroup) -> Float32[np.ndarray, " n"]:
    """A_i = (r_i − mean) / (std + 1e-6), sample std (n − 1); [0, 1, 0] -> [−.57735, 1.15470, −.57735].

    Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    return _over_valid(
        group, lambda valid: _standardised(valid.rewards.astype(np.float64), np.ones(len(valid.rewards)))
    )


def dr_grpo(group: RolloutGroup) -> Float32[np.ndarray, " n"]:
    """A_i = r_i − mean: GRPO without the division, which favours easy and hard prompts.

    [0, 1, 0] -> [−1/3, 2/3, −1/3]. Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    """
    return _over_valid(group, lambda valid: _centred(valid.rewards).astype(np.float32))


def turn(group: RolloutGroup) -> list[Float32[np.ndarray, " _"]]:
    """A_{i,k} = G_{i,k} − mean of the others' G_{·,k}, where G_{i,k} is what rollout i earned from its turn k on.

    A turn is a run of tokens that the policy sampled; what it is told afterwards, and any reward that falls there,
    belongs to it. The mean is over the members that have a turn k; for the only one that has, A is 0. The sum over
    later rewards and leave-one-out baselines are those of REINFORCE with rewards-to-go (Sutton and Barto 2018, section
    13.3, http://incompleteideas.net/book/the-book-2nd.html); one turn equals `rloo`. Turns that earn [0, 1], [1, 0] and
    [0] -> [.5, 1], [.5, −1], [−1].

    Returns:
        Of each rollout, float32 [r], the advantage of each response token: that of its turn, 0 for what the policy did
        not sample.
    """
    turns = [_turn_of_token(rollout.response_mask) for rollout in group.rollouts]
    returns = {i: _rewards_to_go(group.rollouts[i], turns[i]) for i in map(int, np.flatnonzero(valid_rollouts(group)))}
    advantages = [np.zeros(len(numbers), np.float32) for numbers in turns]
    for k in range(max(map(len, returns.values()), default=0)):
        having = {i: earned[k] for i, earned in returns.items() if len(earned) > k}
        better = _leave_one_out(np.array(list(having.values()), np.float32))
        for i, value in zip(having, better, strict=True):
            advantages[i][(turns[i] == k) & group.rollouts[i].response_mask] = value
    return advantages


def rewards_to_go(group: RolloutGroup) -> list[Float32[np.ndarray, " _"]]:
    """Of ``gae``: at each sampled token the rewards from it on; the learner, which has values, makes advantages of it.

    What falls before the first sampled token counts to that one. Token rewards 1, 0, 2 under the mask [no, yes, yes] ->
    [0, 3, 2]. An invalid rollout has 0.
    """
    found: list[np.ndarray] = []
    for rollout, valid in zip(group.rollouts, valid_rollouts(group), strict=True):
        mask = rollout.response_mask
        later = np.cumsum(rollout.token_rewards[::-1].astype(np.float64))[::-1] * valid
        if valid:
            later[int(mask.argmax())] = rollout.episode_reward
        found.append(np.where(mask, later, 0).astype(np.float32))
    return found


def _turn_of_token(response_mask: Bool[np.ndarray, " r"]) -> Int[np.ndarray, " r"]:
    """To which of the policy's turns, from 0 on, each token counts; what stands before the first counts to it."""
    begins = response_mask & ~np.concatenate([np.zeros(1, np.bool_), response_mask[:-1]])
    return np.maximum(np.cumsum(begins) - 1, 0)


def _rewards_to_go(rollout: AnyRollout, turns: Int[np.ndarray, " r"]) -> Float64[np.ndarray, " k"]:
    """What was earned from each turn on; from the first, the episode's reward."""
    by_turn = np.bincount(turns, weights=rollout.token_rewards)
    later = np.cumsum(by_turn[::-1])[::-1]  # from the end, so that equal endings have equal sums
    later[0] = rollout.episode_reward
    return later


def reinforce_pp(groups: Sequence[RolloutGroup], baseline: bool = False) -> list[Float32[np.ndarray, " n"]]:
    """A_i = (r_i − mean) / (std + 1e-6), mean and sample std over the sampled *tokens* of all valid rollouts.

    Every token carries its rollout's r_i, so that a long answer counts as often as it has tokens. Rewards 0 and 1 of
    1 and 3 tokens: mean .75, std .5 -> [−1.5, .5]. Hu 2025, https://arxiv.org/abs/2501.03262. A batch with a single
    valid rollout gives 0.

    Args:
        groups: Of the batch.
        baseline: Take r_i − mean of its group's valid rewards for r_i; a rollout that is alone in its group has 0.
    """
    masks = [valid_rollouts(group) for group in groups]
    if not masks:
        return []
    mask = np.concatenate(masks)
    tokens = np.array([r.sampled_tokens for group in groups for r in group.rollouts], np.float64)[mask]
    returns = [
        _centred(group.rewards[own]) if baseline else group.rewards[own]
        for group, own in zip(groups, masks, strict=True)
    ]
    advantages = np.zeros(len(mask), np.float32)
    advantages[mask] = _standardised(np.concatenate(returns).astype(np.float64), tokens)
    return np.split(advantages, np.cumsum([len(own) for own in masks])[:-1])


ADVANTAGES: dict[str, Callable[[RolloutGroup], np.ndarray]] = {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo}
"""The advantages that need one group only and are one number per rollout, by name."""


def compute_advantages(
    name: AdvantageName | GroupAdvantage, groups: Sequence[RolloutGroup]
) -> Sequence[np.ndarray | Sequence[np.ndarray]]:
    """The advantages of a batch, by name or by one's own function: for each group, in order, one for each rollout.

    Returns:
        Of each group float32 [n]; under ``turn`` and ``gae`` n arrays, float32 [r], one number per response token.

    Raises:
        ConfigError: one's own function gave anything but one finite number for each rollout.
    """
    if callable(name):
        return [_by_own(name, group) for group in groups]
    if name in OF_THE_BATCH:
        return reinforce_pp(groups, baseline=name == "reinforce_pp_baseline")
    if name == "turn":
        return [turn(group) for group in groups]
    if name == "gae":
        return [rewards_to_go(group) for group in groups]
    return [ADVANTAGES[name](group) for group in groups]


def with_kl_in_reward(
    name: AdvantageName | GroupAdvantage,
    rollouts: Sequence[AnyRollout],
    examples: Sequence[RLExample],
    coefficient: float,
) -> list[RLExample]:
    """Examples whose advantages are of r_i − β Σ_t m_t (ℓ_b − ℓ_ref): a KL to a reference in the reward, by k1.

    ℓ_b stands for the policy: the reward is of a sample, and of what drew it. Each token's share is taken from its
    `token_rewards`, so that `turn` sees where the penalty fell. Ouyang et al. 2022, https://arxiv.org/abs/2203.02155.
    Rewards 1 and 0, Σ(ℓ_b − ℓ_ref) of 2 and 0, β = .25: r = .5 and 0, rloo -> [.5, −.5].

    Args:
        name: As of `compute_advantages`.
        rollouts: Of a batch of whole groups.
        examples: Of these rollouts, with `reference_log_probs`.
        coefficient: β.

    Raises:
        ConfigError: one's own function gave anything but one finite number for each rollout.
    """
    by_id = {example.rollout_ids[0]: example for example in examples}
    members: dict[str, list[AnyRollout]] = {}
    for rollout in rollouts:
        members.setdefault(rollout.group_id, []).append(_penalised(rollout, by_id[rollout.rollout_id], coefficient))
    groups = [group_of(of_one) for of_one in members.values()]
    for made in assemble_examples(groups, compute_advantages(name, groups)):
        (rollout_id,) = made.rollout_ids
        by_id[rollout_id] = replace(by_id[rollout_id], advantage=made.advantage)
    return [by_id[example.rollout_ids[0]] for example in examples]


def _penalised(rollout: AnyRollout, example: RLExample, coefficient: float) -> Rollout:
    assert example.reference_log_probs is not None  # the batch was scored
    mask, reference = rollout.response_mask, example.reference_log_probs[len(rollout.prompt_tokens) :]
    penalties = coefficient * np.where(mask, rollout.response_logprobs - reference, 0).astype(np.float64)
    plain = rollout if isinstance(rollout, Rollout) else rollout.unpacked()
    rewards = (plain.token_rewards - penalties).astype(np.float32)
    return replace(plain, token_rewards=rewards, episode_reward=float(plain.episode_reward - penalties.sum()))


def _by_own(function: Callable[[RolloutGroup], np.ndarray], group: RolloutGroup) -> Float32[np.ndarray, " n"]:
    """By a function of the user's."""
    try:
        given: Any = function(group)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(
            f"learner.loss.module: compute_advantages raised {type(error).__name__}: {error} for group "
            f"{group.group_id} (PENSTOCK_TRACEBACK=1 shows where)"
        ) from error
    advantages = _numbers(given)
    if advantages is None or advantages.shape != (len(group.rollouts),) or not np.isfinite(advantages).all():
        shown = given if advantages is None else advantages.tolist()
        raise ConfigError(
            f"learner.loss.module: compute_advantages gave {shown!s:.200} for group {group.group_id}: "
            f"it must be one finite number for each of its {len(group.rollouts)} rollouts"
        )
    return advantages


def _numbers(given: Any) -> np.ndarray | None:
    """float32; None where it is no array of real numbers."""
    if inspect.iscoroutine(given):
        given.close()
        return None
    try:
        with np.errstate(over="ignore"):  # an infinite one is told with its group
            found = np.asarray(given)
            return None if found.dtype.kind in "OSUc" else found.astype(np.float32)
    except (TypeError, ValueError):
        return None


def _over_valid(group: RolloutGroup, formula: Callable[[RolloutGroup], np.ndarray]) -> np.ndarray:
    """Applies a formula to the group's valid rollouts; zero elsewhere, and where fewer than two are valid."""
    mask = valid_rollouts(group)
    advantages = np.zeros(len(mask), np.float32)
    if mask.sum() > 1:
        kept = tuple(r for r, valid in zip(group.rollouts, mask, strict=True) if valid)
        advantages[mask] = formula(RolloutGroup(group.key, kept, group.group_id))
    return advantages


def _centred(rewards: Float32[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Rewards minus their mean. n·r − Σr is exact in float64 for float32 rewards, so equal ones give 0."""
    exact = rewards.astype(np.float64)
    return (exact * len(exact) - exact.sum()) / len(exact)


def _leave_one_out(rewards: Float32[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Rewards minus the mean of the others; 0 for a single one."""
    exact = rewards.astype(np.float64)
    return (exact * len(exact) - exact.sum()) / max(len(exact) - 1, 1)


def _standardised(returns: Float64[np.ndarray, " n"], tokens: Float64[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
    """Each return less their mean over tokens, by their sample deviation over tokens; exactly 0 where all are equal."""
    total = tokens.sum()
    centred = (returns * total - (returns * tokens).sum()) / max(total, 1.0)  # exact for rewards of float32 precision
    if len(returns) < 2:
        return np.zeros(len(returns), np.float32)
    std = np.sqrt((np.square(centred) * tokens).sum() / max(total - 1.0, 1.0))
    return (centred / (std + STD_FLOOR)).astype(np.float32)

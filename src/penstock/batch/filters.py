"""Filters: what of a delivered group is left out before any batch maker sees it, or earns less for its length.

One mechanism, asked once when a group arrives, in this order: a group of the wrong difficulty leaves whole; overlong
rollouts leave one by one, or are penalised; a group whose rewards are then all equal leaves whole. What leaves is in no
batch: neither numerator nor denominator of a loss nor any baseline knows of it. NumPy only, without locks.

Not covered: the fate of what leaves, which is `filtered`, and its line in the log (`penstock.replay`); rollouts that a
batch maker gives up by itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np

from penstock.batch.advantages import has_signal, valid_rollouts
from penstock.batch.config import BatchMakerConfig
from penstock.types import AnyRollout, Rollout, RolloutGroup

_KEY = "replay.batch_maker"
_DIFFERING = (
    "make rewards differ (an easier lesson, a warm start, a higher temperature, a larger n_generations_per_prompt)"
)


class FilteredGroup(NamedTuple):
    """A group behind the filters.

    Attributes:
        kept: With the members that are left and the rewards that they are trained with; None where none is left.
        left: Ids of those that leave, by the reason.
    """

    kept: RolloutGroup[Any] | None
    left: dict[str, list[str]]


def overlong_penalty(rollout: AnyRollout, fraction: float, most: float) -> float:
    """What is taken from a reward for the response's length |y|: DAPO's soft overlong punishment.

    most · clip((|y| − (L − c)) / c, 0, 1), L the rollout's ``max_output_tokens`` and c = fraction · L; all of it for
    one that was cut. L = 10, c = 2, most 1: 8 tokens 0, 9 tokens .5, 10 tokens 1. Yu et al. 2025, equation 13,
    https://arxiv.org/abs/2503.14476.

    Args:
        rollout: What the environment said in between counts as length, as it does for the limit.
        fraction: c / L.
        most: The largest penalty, in units of the reward.
    """
    if rollout.finish_reason == "length":
        return most
    limit = rollout.decoding.max_output_tokens
    begin = (1 - fraction) * limit
    return most * min(max((len(rollout.response_mask) - begin) / (limit - begin), 0.0), 1.0)


@final
class GroupFilters:
    """The filters of a config.

    Args:
        config: Which there are.

    Attributes:
        counts: Rollouts that each filter left out since the last `take_metrics`, by its name.
    """

    def __init__(self, config: BatchMakerConfig) -> None:
        self._config = config
        self.counts: Counter[str] = Counter()

    def judge(self, group: RolloutGroup[Any]) -> FilteredGroup:
        """What of an arriving group may be trained, with what rewards; counts what may not."""
        outside = self._outside_band(group)
        if outside:
            return self._without(group, "difficulty", outside)
        members = self.members(group.rollouts)
        ids = {rollout.rollout_id for rollout in members}
        overlong = [rollout.rollout_id for rollout in group.rollouts if rollout.rollout_id not in ids]
        left: dict[str, list[str]] = {}
        if overlong:
            self.counts["overlong"] += len(overlong)
            left[f"it was cut at its longest ({_KEY}.filter_overlong: mask)"] = overlong
        if not members:
            return FilteredGroup(None, left)
        kept = RolloutGroup(group.key, members, group.group_id)
        if self._config.filter_zero_variance and not has_signal(kept):
            flat = self._without(kept, "zero_variance", "the group's valid rewards are all equal")
            return FilteredGroup(None, left | flat.left)
        return FilteredGroup(kept, left)

    def members(self, rollouts: Iterable[Any]) -> tuple[Any, ...]:
        """Of rollouts those that are not masked, with the rewards that they are trained with."""
        if self._config.filter_overlong == "mask":
            return tuple(rollout for rollout in rollouts if rollout.finish_reason != "length")
        if self._config.filter_overlong == "penalise":
            return tuple(_penalised(rollout, self._penalty(rollout)) for rollout in rollouts)
        return tuple(rollouts)

    def take_metrics(self, rollouts: Sequence[Any]) -> dict[str, float]:
        """``replay/filtered_…``, rollouts that each filter left out since the last call; ``train/overlong_penalty``.

        Args:
            rollouts: Of the batch, over which the penalty's mean is.
        """
        config = self._config
        on = {
            "difficulty": config.filter_difficulty is not None,
            "overlong": config.filter_overlong == "mask",
            "zero_variance": config.filter_zero_variance,
        }
        metrics = {f"replay/filtered_{name}": float(self.counts[name]) for name, is_on in on.items() if is_on}
        self.counts.clear()
        if config.filter_overlong == "penalise" and rollouts:
            metrics["train/overlong_penalty"] = float(np.mean([self._penalty(rollout) for rollout in rollouts]))
        return metrics

    def describe(self) -> tuple[str, str]:
        """In words, why rollouts were left out since the last `take_metrics`, and what to do.

        Where it was no filter, it was the batch maker.
        """
        told = {
            "zero_variance": (
                "all rewards of a group were equal",
                f"{_DIFFERING}, or set {_KEY}.filter_zero_variance: false",
            ),
            "difficulty": ("mean rewards were outside of its band", f"widen {_KEY}.filter_difficulty"),
            "overlong": ("answers were cut", f"raise max_output_tokens or set {_KEY}.filter_overlong: null"),
        }
        found = [(count, *told[name]) for name, count in self.counts.most_common()]
        if not found:
            by_maker = f"{_DIFFERING}, or choose another {_KEY}.name"
            return "the batch maker found no advantage in them", by_maker
        causes = "; ".join(f"{why} ({count:,} rollouts)" for count, why, _ in found)
        return causes, ", or ".join(remedy for _, _, remedy in found)

    def _outside_band(self, group: RolloutGroup[Any]) -> str:
        """Why the group's difficulty is wrong; empty where it is not."""
        band = self._config.filter_difficulty
        if band is None:
            return ""
        rewards = group.rewards[valid_rollouts(group)]
        mean = float(rewards.mean(dtype=np.float64)) if len(rewards) else 0.0
        if band[0] <= mean <= band[1]:
            return ""
        return f"the group's mean reward {mean:.4g} is outside {band[0]:g} to {band[1]:g} ({_KEY}.filter_difficulty)"

    def _without(self, group: RolloutGroup[Any], name: str, reason: str) -> FilteredGroup:
        self.counts[name] += len(group.rollouts)
        return FilteredGroup(None, {reason: [rollout.rollout_id for rollout in group.rollouts]})

    def _penalty(self, rollout: AnyRollout) -> float:
        return overlong_penalty(rollout, self._config.overlong_fraction, self._config.overlong_penalty)


def _penalised(rollout: AnyRollout, penalty: float) -> AnyRollout:
    """With the penalty at the last token that the policy sampled."""
    if not penalty or not rollout.sampled_tokens:
        return rollout
    plain = rollout if isinstance(rollout, Rollout) else rollout.unpacked()
    rewards = plain.token_rewards.copy()
    rewards[np.flatnonzero(plain.response_mask)[-1]] -= penalty
    return replace(plain, token_rewards=rewards, episode_reward=plain.episode_reward - penalty)

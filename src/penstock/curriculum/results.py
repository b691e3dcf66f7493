"""What a batch of training groups says about a lesson, group by group."""

from dataclasses import dataclass

from penstock.types import RolloutBatchStats


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One training group in numbers.

    Attributes:
        success_rate: Share of its rollouts that succeeded.
        reward_mean: Their mean reward.
        rollouts: How many.
    """

    success_rate: float
    reward_mean: float
    rollouts: int


def success_rate(stats: RolloutBatchStats, threshold: float) -> float:
    """Share of rollouts with reward ≥ threshold; the recorded share where the rewards themselves are not there."""
    return _share(stats.rewards, threshold) if stats.rewards else stats.success_rate


def group_results(stats: RolloutBatchStats, threshold: float) -> list[GroupResult]:
    """One result per group of equal size; where sizes are not known, all groups alike."""
    n = max(1, stats.groups)
    size, rest = divmod(len(stats.rewards), n)
    if size == 0 or rest:
        return [GroupResult(success_rate(stats, threshold), stats.reward_mean, stats.rollouts // n)] * n
    groups = [stats.rewards[start : start + size] for start in range(0, len(stats.rewards), size)]
    return [GroupResult(_share(group, threshold), sum(group) / size, size) for group in groups]


def _share(rewards: tuple[float, ...], threshold: float) -> float:
    return sum(reward >= threshold for reward in rewards) / len(rewards)

"""What the advantages of one problem under one policy version are measured against.

A baseline counts every rollout that was ever added under its key, those included that were filtered, used or discarded
since: they are answers of the same policy to the same problem, whatever became of them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from penstock.batch.holding import HeldGroup

Retention = Literal["newest", "all"]

REMEMBERED = 4096
"""Problems without a waiting rollout whose version and baseline are remembered; the longest unused are forgotten."""

Key = tuple[str, str] | tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Baseline:
    """The rewards of one problem under one policy version.

    Attributes:
        key: Environment and example; with the version, where all versions are kept.
        version: Weight step. What waits in one buffer is of one surviving path, on which a step is a version.
        count: Rollouts so far.
        total: Their rewards' sum.
        groups: Those with a rollout that waits.
    """

    key: Key
    version: int
    count: int = 0
    total: float = 0.0
    groups: list[HeldGroup] = field(default_factory=list[HeldGroup])

    def add(self, group: HeldGroup) -> None:
        """A group's rewards enter."""
        group.baseline = self
        self.groups.append(group)
        rollouts = group.rollouts()
        self.count += len(rollouts)
        self.total += sum(float(np.float32(rollout.episode_reward)) for rollout in rollouts)

    def advantage(self, reward: float) -> float:
        """RLOO: the reward minus the mean of all others; 0 for the only one.

        n·r − Σr is exact in float64 for rewards of float32 precision, so equal rewards give exactly 0.
        """
        if self.count < 2:
            return 0.0
        return (float(np.float32(reward)) * self.count - self.total) / (self.count - 1)


@final
class Baselines:
    """Every baseline, by key.

    Args:
        retention: ``newest``: one version of each problem; ``all``: each version for itself.
    """

    def __init__(self, retention: Retention) -> None:
        self._retention: Retention = retention
        self._baselines: dict[Key, Baseline] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._baselines)

    def find(self, group: HeldGroup) -> Baseline:
        """The baseline of a group's problem; where only the newest is kept, maybe of another version than its own."""
        first, version = group.rollouts()[0], version_of(group)
        key: Key = (first.env_name, first.env_example_id)
        if self._retention == "all":
            key = (*key, version)
        if key not in self._baselines:
            self._baselines[key] = Baseline(key, version)
        return self._baselines[key]

    def renew(self, baseline: Baseline, version: int) -> Baseline:
        """A newer version of its problem begins."""
        self._baselines[baseline.key] = Baseline(baseline.key, version)
        return self._baselines[baseline.key]

    def enter(self, baseline: Baseline, group: HeldGroup) -> None:
        """A group's rewards enter the baseline of its problem."""
        self._idle.pop(baseline.key, None)
        baseline.add(group)

    def leave(self, group: HeldGroup) -> None:
        """A group has no rollout left."""
        baseline = group.baseline
        if baseline is None:
            return
        baseline.groups.remove(group)
        if not baseline.groups and self._baselines.get(baseline.key) is baseline:
            self._idle[baseline.key] = None
            if len(self._idle) > REMEMBERED:
                oldest, _ = self._idle.popitem(last=False)
                del self._baselines[oldest]


def version_of(group: HeldGroup) -> int:
    """Lineage and weight step of the oldest weights behind a group, so that one that straddles a swap stays one."""
    stamps = [rollout.metadata for rollout in group.rollouts() if rollout.metadata is not None]
    return min(stamp.weight_step for stamp in stamps)

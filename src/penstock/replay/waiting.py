"""The groups that wait to be trained, indexed so that dropping costs what is dropped and not what is kept.

In memory only, without locks; `ReplayBuffer` holds its own. Rollouts leave one by one (freshness is decided
rollout by rollout), groups when their last rollout has left or when a batch takes them.
"""

import heapq
from dataclasses import dataclass

from penstock.replay.freshness import FreshnessWindow, Verdict
from penstock.types import Rollout, RolloutGroup, RolloutMetadata


@dataclass(slots=True)
class WaitingGroup:
    """One group.

    Attributes:
        group_id: Its ticket.
        key: Environment and example.
        env_name: Capacity is counted by it.
        rollouts: The members that may still be trained.
        deadline_step: The last update that may train it for the first time.
        uses: In how many batches it was.
        offered: Whether the batch maker holds it.
    """

    group_id: str
    key: str
    env_name: str
    rollouts: list[Rollout]
    deadline_step: int
    uses: int = 0
    offered: bool = False

    @classmethod
    def of(cls, group: RolloutGroup, deadline_step: int, uses: int = 0) -> "WaitingGroup":
        """A group as it enters."""
        first = group.rollouts[0]
        return cls(group.group_id, group.key, first.env_name, list(group.rollouts), deadline_step, uses)


class WaitingGroups:
    """Waiting groups by arrival, by weight step, by time, and by environment.

    Args:
        window: What is fresh.
        capacity: Most rollouts per environment.
    """

    def __init__(self, window: FreshnessWindow, capacity: int) -> None:
        self._window = window
        self._capacity = capacity
        self._groups: dict[str, WaitingGroup] = {}
        self._by_step: dict[int, dict[str, str]] = {}
        self._by_time: list[tuple[float, str, str]] = []
        self._by_environment: dict[str, dict[str, None]] = {}
        self._counts: dict[str, int] = {}
        self.rollouts = 0

    def __len__(self) -> int:
        """How many groups wait."""
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        """Whether a group waits."""
        return group_id in self._groups

    def get(self, group_id: str) -> WaitingGroup:
        """A waiting group."""
        return self._groups[group_id]

    def ids(self) -> list[str]:
        """Group ids by arrival."""
        return list(self._groups)

    def add(self, group: WaitingGroup) -> None:
        """Takes a group with at least one rollout."""
        self._groups[group.group_id] = group
        self._by_environment.setdefault(group.env_name, {})[group.group_id] = None
        for rollout in group.rollouts:
            metadata = _metadata(rollout)
            self._by_step.setdefault(metadata.weight_step, {})[rollout.rollout_id] = group.group_id
            if self._window.timestamp_delay_s is not None:
                heapq.heappush(self._by_time, (metadata.timestamp, rollout.rollout_id, group.group_id))
        self._count(group.env_name, len(group.rollouts))

    def remove(self, group_id: str) -> WaitingGroup:
        """Gives a group up, with the rollouts that it still has."""
        group = self._groups.pop(group_id)
        del self._by_environment[group.env_name][group_id]
        for rollout in group.rollouts:
            self._forget_step(rollout)
        self._count(group.env_name, -len(group.rollouts))
        self._tidy_times()
        return group

    def drop(self, group_id: str, rollout: Rollout) -> WaitingGroup:
        """Takes one rollout out of its group; a group without any left is removed."""
        group = self._groups[group_id]
        group.rollouts.remove(rollout)
        self._forget_step(rollout)
        self._count(group.env_name, -1)
        return group if group.rollouts else self.remove(group_id)

    def expired(self, current: int, now: float) -> list[tuple[str, Rollout, Verdict]]:
        """(group id, rollout, why) of every rollout that is no longer fresh; none is dropped yet."""
        found: dict[str, tuple[str, Rollout, Verdict]] = {}
        oldest = self._window.oldest_step(current)
        for step in [step for step in self._by_step if step < oldest]:
            for rollout_id, group_id in self._by_step[step].items():
                self._judge(group_id, rollout_id, current, now, found)
        while self._by_time and self._by_time[0][0] <= self._window.oldest_timestamp(now):
            _, rollout_id, group_id = heapq.heappop(self._by_time)
            if group_id in self._groups:
                self._judge(group_id, rollout_id, current, now, found)
        return list(found.values())

    def over_capacity(self, env_name: str) -> str | None:
        """The oldest group of an environment that has too many rollouts waiting; None where it has not."""
        if self._counts.get(env_name, 0) <= self._capacity:
            return None
        return next(iter(self._by_environment[env_name]))

    def _judge(
        self,
        group_id: str,
        rollout_id: str,
        current: int,
        now: float,
        found: dict[str, tuple[str, Rollout, Verdict]],
    ) -> None:
        for rollout in self._groups[group_id].rollouts:
            if rollout.rollout_id == rollout_id:
                verdict = self._window.judge(_metadata(rollout), current, now)
                if verdict is not None:
                    found[rollout_id] = (group_id, rollout, verdict)

    def _forget_step(self, rollout: Rollout) -> None:
        step = _metadata(rollout).weight_step
        del self._by_step[step][rollout.rollout_id]
        if not self._by_step[step]:
            del self._by_step[step]

    def _count(self, env_name: str, change: int) -> None:
        self._counts[env_name] = self._counts.get(env_name, 0) + change
        self.rollouts += change

    def _tidy_times(self) -> None:
        """Rebuilds the heap when most of its entries belong to rollouts that have left."""
        if len(self._by_time) > 2 * self.rollouts + 64:
            self._by_time = [
                (_metadata(rollout).timestamp, rollout.rollout_id, group.group_id)
                for group in self._groups.values()
                for rollout in group.rollouts
            ]
            heapq.heapify(self._by_time)


def _metadata(rollout: Rollout) -> RolloutMetadata:
    assert rollout.metadata is not None  # ingest let nothing else in
    return rollout.metadata

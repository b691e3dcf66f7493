"""The groups that wait to be trained, indexed so that dropping costs what is dropped and not what is kept.

In memory only, without locks; `ReplayBuffer` holds its own. Rollouts leave one by one (freshness is decided rollout
by rollout), groups with their last rollout. Groups are filed by their oldest weight step and their oldest time, in
queues whose entries outlive the groups and are swept when most of them are dead. Rollouts are packed
(`PackedRollout`), and not looked into otherwise.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.replay.freshness import FreshnessRules, FreshnessWindow, Verdict
from penstock.types import Experience, PackedRollout, Rollout, RolloutGroup, RolloutMetadata


@dataclass(slots=True, eq=False)
class WaitingGroup:
    """One group.

    Attributes:
        group_id: Its id.
        key: Environment and example.
        env_name: Capacity is counted by it.
        lesson_id: Tolerances go by it.
        rollouts: The members that may still be trained.
        deadline_step: The last update that may train it for the first time; None without deadline.
        first_use: The update that trained it first; None before.
        offered: Whether the batch maker was given it.
        uses: How often each member was used; None while none was.
    """

    group_id: str
    key: str
    env_name: str
    lesson_id: str
    rollouts: list[Experience]
    deadline_step: int | None = None
    first_use: int | None = None
    offered: bool = False
    uses: dict[str, int] | None = None

    @classmethod
    def of(cls, group: RolloutGroup[Experience], deadline_step: int | None = None) -> "WaitingGroup":
        """A delivered group, its rollouts packed."""
        packed: list[Experience] = []
        for rollout in group.rollouts:
            neighbour = packed[0] if packed and isinstance(packed[0], PackedRollout) else None
            packed.append(PackedRollout(rollout, neighbour) if isinstance(rollout, Rollout) else rollout)
        first = group.rollouts[0]
        return cls(group.group_id, group.key, first.env_name, first.lesson_id, packed, deadline_step)

    def count_use(self, rollout_id: str) -> int:
        """One more use of a member; returns how many it has now."""
        if self.uses is None:
            self.uses = {}
        self.uses[rollout_id] = self.uses.get(rollout_id, 0) + 1
        return self.uses[rollout_id]

    def uses_of(self, rollout_id: str) -> int:
        """How often a member was used."""
        return 0 if self.uses is None else self.uses.get(rollout_id, 0)


@dataclass(slots=True)
class _Files:
    """Group ids by the oldest weight step and time among their members, for lessons of one window."""

    by_step: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    steps: list[int] = field(default_factory=list[int])
    by_time: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])


class WaitingGroups:
    """Waiting groups by id, by weight step, by time, and by environment.

    Args:
        rules: What is fresh.
        capacity: Most rollouts per environment.
    """

    def __init__(self, rules: FreshnessRules, capacity: int) -> None:
        self._rules = rules
        self._capacity = capacity
        self._groups: dict[str, WaitingGroup] = {}
        self._files: dict[FreshnessWindow, _Files] = {}
        self._by_environment: dict[str, deque[str]] = {}
        self._counts: dict[str, int] = {}
        self._departed = 0
        self.rollouts = 0

    def __len__(self) -> int:
        """How many groups wait."""
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        """Whether a group waits."""
        return group_id in self._groups

    def __iter__(self) -> Iterator[WaitingGroup]:
        """By arrival."""
        return iter(self._groups.values())

    def get(self, group_id: str) -> WaitingGroup:
        """A waiting group."""
        return self._groups[group_id]

    def find(self, rollout_id: str) -> tuple[WaitingGroup, Experience] | None:
        """A rollout that waits, with its group; None where it does not."""
        group = self._groups.get(rollout_id.rpartition("/")[0])
        if group is None:
            return None
        return next(((group, rollout) for rollout in group.rollouts if rollout.rollout_id == rollout_id), None)

    def add(self, group: WaitingGroup) -> None:
        """Takes a group with at least one rollout."""
        self._groups[group.group_id] = group
        self._by_environment.setdefault(group.env_name, deque()).append(group.group_id)
        self._file(group)
        self._count(group.env_name, len(group.rollouts))

    def drop(self, group: WaitingGroup, rollout: Experience) -> None:
        """Takes one rollout out of its group; a group without any left is removed."""
        group.rollouts.remove(rollout)
        self._count(group.env_name, -1)
        if not group.rollouts:
            del self._groups[group.group_id]
            self._departed += 1
            self._sweep()

    def expired(self, current: int, now: float) -> list[tuple[WaitingGroup, Experience, Verdict]]:
        """(group, rollout, why) of every rollout that is no longer fresh; the caller must drop them."""
        suspects: dict[str, FreshnessWindow] = {}
        for window, files in self._files.items():
            for group_id in _older(files, window.oldest_step(current), window.oldest_timestamp(now)):
                suspects[group_id] = window
        found: list[tuple[WaitingGroup, Experience, Verdict]] = []
        for group_id, window in suspects.items():
            group = self._groups.get(group_id)
            if group is not None:
                found += self._judge(group, window, current, now)
        return found

    def over_capacity(self, env_name: str) -> WaitingGroup | None:
        """The oldest group of an environment that has too many rollouts waiting; None where it has not."""
        if self._counts.get(env_name, 0) <= self._capacity:
            return None
        queue = self._by_environment[env_name]
        while queue[0] not in self._groups:
            queue.popleft()
        return self._groups[queue[0]]

    def _judge(
        self, group: WaitingGroup, window: FreshnessWindow, current: int, now: float
    ) -> list[tuple[WaitingGroup, Experience, Verdict]]:
        verdicts = [(rollout, window.judge(_metadata(rollout), current, now)) for rollout in group.rollouts]
        stale = [(group, rollout, verdict) for rollout, verdict in verdicts if verdict is not None]
        if len(stale) < len(verdicts):  # it was filed by members that leave now
            self._file(group, [rollout for rollout, verdict in verdicts if verdict is None])
        return stale

    def _file(self, group: WaitingGroup, members: list[Experience] | None = None) -> None:
        window = self._rules.of(group.lesson_id)
        files = self._files.setdefault(window, _Files())
        stamps = [_metadata(rollout) for rollout in members or group.rollouts]
        step = min(stamp.weight_step for stamp in stamps)
        if step not in files.by_step:
            files.by_step[step] = []
            heapq.heappush(files.steps, step)
        files.by_step[step].append(group.group_id)
        if window.timestamp_delay_s is not None:
            heapq.heappush(files.by_time, (min(stamp.timestamp for stamp in stamps), group.group_id))

    def _count(self, env_name: str, change: int) -> None:
        self._counts[env_name] = self._counts.get(env_name, 0) + change
        self.rollouts += change

    def _sweep(self) -> None:
        """Forgets the entries of groups that have left, once these are more than those that wait."""
        if self._departed <= len(self._groups) + 64:
            return
        self._departed = 0
        self._files.clear()
        self._by_environment.clear()
        for group in self._groups.values():
            self._by_environment.setdefault(group.env_name, deque()).append(group.group_id)
            self._file(group)


def _older(files: _Files, oldest_step: int, oldest_timestamp: float) -> Iterator[str]:
    """Takes out what is filed under an older step or time."""
    while files.steps and files.steps[0] < oldest_step:
        yield from files.by_step.pop(heapq.heappop(files.steps))
    while files.by_time and files.by_time[0][0] <= oldest_timestamp:
        yield heapq.heappop(files.by_time)[1]


def _metadata(rollout: Experience) -> RolloutMetadata:
    assert rollout.metadata is not None  # ingest let nothing else in
    return rollout.metadata

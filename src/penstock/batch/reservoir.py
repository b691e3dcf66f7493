"""A batch maker that keeps a reservoir of rollouts with something to learn from, and mixes them.

Groups are merged into problems for the baseline only: fates, deadlines and storage go on by group. Costs O(1) per
rollout that comes or goes, and one pass over flags of all rollouts per batch.

A `Baseline` of a problem counts every rollout that was ever added under its key, those included that were filtered,
used or discarded since: they are answers of the same policy to the same problem, whatever became of them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
from typing_extensions import override

from penstock.batch.draws import RankSampler
from penstock.batch.examples import assemble_example, batch_metadata
from penstock.batch.group_pool import DeadlineQueue, DrawPool, GroupTable, PooledGroup, group_of
from penstock.batch.maker import BatchRandomness, Dropped, PacedBatchMaker, check_choice, uses_limit
from penstock.types import AnyRollout, Fate, RLExample, RolloutGroup, RolloutRecord

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
    groups: list[PooledGroup] = field(default_factory=list[PooledGroup])

    def add(self, group: PooledGroup) -> None:
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
class BaselineTable:
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

    def find(self, group: PooledGroup) -> Baseline:
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

    def enter(self, baseline: Baseline, group: PooledGroup) -> None:
        """A group's rewards enter the baseline of its problem."""
        self._idle.pop(baseline.key, None)
        baseline.add(group)

    def leave(self, group: PooledGroup) -> None:
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


def version_of(group: PooledGroup) -> int:
    """Weight step of the oldest weights behind a group, so that one that straddles a swap stays one."""
    stamps = [rollout.metadata for rollout in group.rollouts() if rollout.metadata is not None]
    return min(stamp.weight_step for stamp in stamps)


@final
class GrpoBatchMaker(PacedBatchMaker):
    """Draws single rollouts at random from those whose advantage is not zero.

    Rollouts share a baseline by (environment, example, policy version); the version of a rollout is the oldest behind
    any of its own group. The advantage is RLOO over every rollout of that key so far, at
    the time of the batch. At each `create_batch`, after everything new was merged, rollouts whose advantage is zero
    are given up as ``filtered``, also older ones that became so. That is final: a rollout that was given up does not
    come back when its key gets more members, but its reward counts for them.

    A batch has `batch_size` rollouts, or all unused ones of groups that are due where those are more. Due groups come
    first; the others are drawn without replacement.

    Args:
        environment_name: Take rollouts of this environment only; None means any.
        retention: ``newest``: when a newer version of a problem comes, the rollouts of the older one are given up as
            ``evicted``, and so are those that come later; ``all``: versions stay side by side.
        seed: Two makers with the same seed, steps and rollouts make the same batches; None means from the
            operating system.
        max_tokens: Longest trainable sequence, prompt and response together: the learner's row length.
        max_samples: Batches that a rollout may be in; −1 means any number.
        ordered: Take due groups by ticket, not by arrival.
        allow_truncated_sampling: Take rollouts of truncated sampling, such as top-k.

    Raises:
        ConfigError: `max_samples` is neither −1 nor at least 1.
    """

    def __init__(
        self,
        environment_name: str | None = None,
        retention: Retention = "newest",
        seed: int | None = None,
        max_tokens: int = 2048,
        max_samples: int = 1,
        ordered: bool = False,
        allow_truncated_sampling: bool = False,
    ) -> None:
        check_choice("retention", retention, Retention)
        self._uses = uses_limit(max_samples)
        self.environment_name = environment_name
        self._held = GroupTable(max_tokens, allow_truncated_sampling, environment_name, ordered)
        self._baselines = BaselineTable(retention)
        self._reservoir = DrawPool(by_member=True)
        self._draw = RankSampler(alpha=0.0)
        self._randomness = BatchRandomness(seed)
        self._step = 0
        self._deadlines = DeadlineQueue()
        self._dropped: list[Dropped] = []
        self._last: list[RolloutGroup] = []

    def __len__(self) -> int:
        """How many rollouts are in the reservoir or about to be judged."""
        return len(self._reservoir) + sum(len(group.members) for group in self._held.unplaced())

    @override
    def add_rollout(self, rollout: AnyRollout | RolloutRecord) -> None:
        """See `BatchMaker.add_rollout`; a stored record is taken for its rollout."""
        self._held.add(rollout.rollout if isinstance(rollout, RolloutRecord) else rollout)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """See `BatchMaker.create_batch`; `batch_size` counts rollouts."""
        self.judge_arrivals()
        if len(self._reservoir) < max(batch_size, 1):
            return None
        slots = self._choose(batch_size)
        chosen = [self._member(slot) for slot in slots]
        self._last = _by_group(rollout for _, rollout in chosen)
        batch = [assemble_example(rollout, _advantage(group, rollout)) for group, rollout in chosen]
        self._reservoir.set_drawable(slots, True)
        self._remove([slot for slot in slots if self._reservoir.count_use(slot) >= self._uses])
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """See `BatchMaker.get_batch_metadata`; what is in it says `penstock.batch.examples.batch_metadata`."""
        return batch_metadata(self._last, [False] * len(self._last), batch)

    @override
    def set_step(self, step: int) -> None:
        self._step = step

    def set_deadline(self, group_id: str, deadline_step: int) -> None:
        """See `PacedBatchMaker.set_deadline`; ignored for groups that are not here."""
        group = self._held.get(group_id)
        if group is not None:
            self._deadlines.set(group, deadline_step)

    @override
    def judge_arrivals(self) -> None:
        touched: dict[Baseline, None] = {}
        for group in self._held.arrived():
            baseline = self._baselines.find(group)
            version = version_of(group)
            if version < baseline.version:
                reason = f"{_problem(group)} has {_name(baseline.version)} already; this is {_name(version)}"
                self._drop(group.rollouts(), "evicted", reason)
                continue
            if version > baseline.version:
                reason = f"{_name(version)} of {_problem(group)} came; this is {_name(baseline.version)}"
                for older in list(baseline.groups):
                    self._drop(older.rollouts(), "evicted", reason)
                baseline = self._baselines.renew(baseline, version)
            self._baselines.enter(baseline, group)
            self._reservoir.place(group, drawable=True)
            touched[baseline] = None
        for baseline in touched:
            self._filter(baseline)

    def discard(self, rollout_ids: Iterable[str]) -> None:
        """See `PacedBatchMaker.discard`; baselines still count what is discarded."""
        for rollout_id in rollout_ids:
            gone = self._held.discard(rollout_id)
            if gone is not None:
                self._forget(gone)

    @override
    def dropped(self) -> list[Dropped]:
        dropped, self._dropped = self._dropped, []
        return dropped

    # --- what comes in ---------------------------------------------------------------------------------------------

    def _filter(self, baseline: Baseline) -> None:
        """Gives up what has nothing to learn from."""
        for group in list(baseline.groups):
            without = [r for r in group.rollouts() if baseline.advantage(r.episode_reward) == 0]
            if without:
                reason = f"its advantage is zero among {baseline.count} rollouts of {_problem(group)}"
                self._drop(without, "filtered", reason)

    def _drop(self, rollouts: Sequence[AnyRollout], fate: Fate, reason: str) -> None:
        ids = [rollout.rollout_id for rollout in rollouts]
        self._dropped += [Dropped(rollout_id, fate, reason) for rollout_id in ids]
        self.discard(ids)

    # --- what goes out ---------------------------------------------------------------------------------------------

    def _choose(self, batch_size: int) -> list[int]:
        """The slots of the next batch: what is due, then at random."""
        due = [slot for group in self._deadlines.pop_due(self._step) for slot in self._reservoir.slots(group)]
        first = [slot for slot in due if not self._reservoir.uses(slot)]
        self._reservoir.set_drawable(first, False)  # what is taken already is not drawn
        count = max(0, batch_size - len(first))
        ranks = self._draw.draw(len(self._reservoir), count, self._randomness.next(self._step))
        return first + self._reservoir.select(ranks)

    def _member(self, slot: int) -> tuple[PooledGroup, AnyRollout]:
        group = self._reservoir.owner(slot)
        rollout = group.members[slot - group.first_slot]
        assert rollout is not None  # a slot with an owner has a rollout
        return group, rollout

    def _remove(self, slots: Sequence[int]) -> None:
        for group in self._held.retire(self._reservoir, slots):
            self._forget(group)

    def _forget(self, group: PooledGroup) -> None:
        self._deadlines.clear(group)
        self._baselines.leave(group)


def _advantage(group: PooledGroup, rollout: AnyRollout) -> float:
    assert group.baseline is not None  # what is in the reservoir was judged
    return group.baseline.advantage(rollout.episode_reward)


def _by_group(rollouts: Iterable[AnyRollout]) -> list[RolloutGroup]:
    """The rollouts of a batch as groups, in the order of their first ones."""
    members: dict[str, list[AnyRollout]] = {}
    for rollout in rollouts:
        members.setdefault(rollout.group_id, []).append(rollout)
    return [group_of(of_one) for of_one in members.values()]


def _problem(group: PooledGroup) -> str:
    first = group.rollouts()[0]
    return f"problem {first.env_name}:{first.env_example_id}"


def _name(version: int) -> str:
    return f"weight step {version}"

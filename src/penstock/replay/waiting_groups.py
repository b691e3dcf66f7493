"""The groups that wait to be trained, and the batch makers that are given them.

Waiting groups are indexed so that dropping costs what is dropped and not what is kept: they are filed by their oldest
weight step and their oldest time, in queues whose entries outlive the groups and are swept when most of them are dead.
Rollouts leave one by one (freshness is decided rollout by rollout), groups with their last rollout. Rollouts are packed
(`PackedRollout`), and not looked into otherwise.

A maker that is bound to an environment gets that one's rollouts; one that is not bound gets the rest. Makers with the
two small contracts of `penstock.batch` look alike from here: what a plain `BatchMaker` is not told (deadlines, what is
gone), the pool makes up for when it looks at its batches.

In memory only, without locks: the pool holds its own.
"""

import heapq
import inspect
import logging
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from penstock.batch import BatchMaker, Dropped, PacedBatchMaker
from penstock.replay.freshness import FreshnessRules, FreshnessWindow, Verdict
from penstock.types import (
    ConfigError,
    Experience,
    Fate,
    FragmentExample,
    InvalidRolloutError,
    PackedRollout,
    RLExample,
    Rollout,
    RolloutGroup,
    RolloutMetadata,
    RunFailed,
    TrainingExample,
)
from penstock.types.errors import errors_of_user_code


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


AnyMaker = BatchMaker[Any, Any]
"""A maker of whatever the buffer holds."""


class BatchMakers:
    """Routes rollouts to makers by environment.

    Args:
        makers: At least one; no two for one environment.

    Raises:
        ConfigError: two makers would take the same rollouts, or there is none.
    """

    def __init__(self, makers: AnyMaker | Sequence[AnyMaker]) -> None:
        self._makers: dict[str | None, AnyMaker] = {}
        for maker in [makers] if isinstance(makers, BatchMaker) else makers:
            name = _environment_name(maker)
            if name in self._makers:
                bound = "any environment" if name is None else f"environment {name!r}"
                raise ConfigError(
                    f"two batch makers take rollouts of {bound}: give each an environment_name of its own"
                )
            self._makers[name] = maker
        if not self._makers:
            raise ConfigError("a replay buffer needs at least one batch maker")

    def __iter__(self) -> Iterator[AnyMaker]:
        """Every maker."""
        return iter(self._makers.values())

    def of(self, env_name: str) -> AnyMaker | None:
        """Who takes rollouts of an environment; None where nobody does."""
        return self._makers.get(env_name, self._makers.get(None))

    def shares_of(self, groups: Iterable[WaitingGroup]) -> Counter[AnyMaker]:
        """What each maker is to be asked for, in its units, so that its batches amount to these groups."""
        shares: Counter[AnyMaker] = Counter()
        for group in groups:
            maker = self.of(group.env_name)
            assert maker is not None  # it was offered
            shares[maker] += 1 if takes_whole_groups(maker) else len(group.rollouts)
        return shares

    def even_shares(self, batch_size: int, env_name: str | None = None) -> Counter[AnyMaker]:
        """`batch_size` shared evenly, the first makers taking what is left over; or all of it of one environment's."""
        makers = list(self) if env_name is None else [maker for maker in [self.of(env_name)] if maker is not None]
        each, over = divmod(batch_size, max(len(makers), 1))
        return Counter({m: each + (i < over) for i, m in enumerate(makers) if each or i < over})

    def add(self, group: WaitingGroup) -> list[Dropped]:
        """Adds a group, with its deadline where it has one; returns what the maker did not take, or gave up for it."""
        maker = self.of(group.env_name)
        if maker is None:
            return [
                _refused(rollout, f"no batch maker takes environment {group.env_name!r}") for rollout in group.rollouts
            ]
        refused: list[Dropped] = []
        for rollout in group.rollouts:
            try:
                _guarded(maker, "add_rollout", rollout)
            except InvalidRolloutError as error:
                refused.append(_refused(rollout, str(error)))
        if isinstance(maker, PacedBatchMaker):
            if group.deadline_step is not None and group.first_use is None and len(refused) < len(group.rollouts):
                maker.set_deadline(group.group_id, group.deadline_step)
            refused += maker.dropped()
        return refused

    def judge_arrivals(self) -> list[Dropped]:
        """Lets the makers decide about what arrived; returns what they gave up."""
        dropped: list[Dropped] = []
        for maker in self:
            if isinstance(maker, PacedBatchMaker):
                maker.judge_arrivals()
                dropped += maker.dropped()
        return dropped

    def add_restored(self, group: WaitingGroup, spent: Sequence[Experience]) -> list[Dropped]:
        """Adds a group of which some members are gone, so that the others keep the baseline that they had."""
        maker = self.of(group.env_name)
        if not spent or not isinstance(maker, PacedBatchMaker):
            return self.add(group)
        for rollout in spent:
            maker.add_rollout(rollout)
        dropped = self.add(group)
        maker.judge_arrivals()
        maker.discard([rollout.rollout_id for rollout in spent])
        return dropped + maker.dropped()

    def set_deadline(self, group: WaitingGroup, step: int) -> None:
        """Update `step` must take the group, although its own deadline is later."""
        maker = self.of(group.env_name)
        if isinstance(maker, PacedBatchMaker):
            maker.set_deadline(group.group_id, step)

    def remove(self, group: WaitingGroup, rollout: Experience) -> None:
        """A rollout is gone."""
        maker = self.of(group.env_name)
        if isinstance(maker, PacedBatchMaker):
            maker.discard([rollout.rollout_id])

    def draw(
        self, maker: AnyMaker, step: int, batch_size: int, at_least: int
    ) -> tuple[list[TrainingExample], list[Dropped]]:
        """A batch, empty where the maker has too little for one, and what it gave up while making it.

        Args:
            maker: Whom to ask.
            step: The update.
            batch_size: How much of it, in the maker's units.
            at_least: How little will do; a plain maker, which may have ignored some rollouts, is asked for less and
                less down to that.
        """
        if not isinstance(maker, PacedBatchMaker):
            while batch_size >= max(at_least, 1):
                if examples := _guarded(maker, "create_batch", batch_size):
                    return _checked(maker, examples), []
                batch_size //= 2
            return [], []
        maker.set_step(step)
        examples: Any = _guarded(maker, "create_batch", batch_size) or []
        return _checked(maker, examples), maker.dropped()


def is_paced(maker: AnyMaker) -> bool:
    """Whether it knows what the buffer knows."""
    return isinstance(maker, PacedBatchMaker)


def takes_whole_groups(maker: AnyMaker) -> bool:
    """Whether a group leaves the maker as a whole."""
    return isinstance(maker, PacedBatchMaker) and maker.unit == "group"


def batch_metrics(maker: AnyMaker, examples: Sequence[TrainingExample]) -> dict[str, float]:
    """The maker's own numbers about the batch that it made last."""
    facts = _guarded(maker, "get_batch_metadata", examples)
    try:
        return {str(name): float(value) for name, value in facts.get("metrics", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RunFailed(
            f"{type(maker).__name__}.get_batch_metadata returned {facts!r}: it must be a mapping, its numbers under "
            "'metrics'"
        ) from error


def _guarded(maker: AnyMaker, method: str, *arguments: Any) -> Any:
    """Calls a maker, which may be a user's; an error in it is told with its name."""
    with errors_of_user_code(RunFailed, f"the batch maker's {type(maker).__name__}.{method} raised"):
        return getattr(maker, method)(*arguments)


def _checked(maker: AnyMaker, made: Any) -> list[TrainingExample]:
    if not isinstance(made, list | tuple):
        if inspect.iscoroutine(made):
            made.close()
        raise RunFailed(
            f"{type(maker).__name__}.create_batch returned {made!r:.100}: it must be a list, or None while there is "
            "too little for a batch"
        )
    examples = cast(Sequence[Any], made)
    wrong = next((example for example in examples if not isinstance(example, RLExample | FragmentExample)), None)
    if wrong is not None:
        raise RunFailed(
            f"{type(maker).__name__}.create_batch returned {wrong!r}: a batch is a list of RLExample; "
            "penstock.batch.example_from_rollout makes one (of fragments, of penstock.types.FragmentExample)"
        )
    for example in examples:
        if isinstance(example, RLExample) and not np.isfinite(example.advantage).all():
            raise RunFailed(
                f"{type(maker).__name__}.create_batch gave rollout {', '.join(example.rollout_ids)} an advantage of "
                f"{example.advantage[~np.isfinite(example.advantage)][0]}: advantages are finite numbers"
            )
    return list(examples)


def _environment_name(maker: AnyMaker) -> str | None:
    return maker.environment_name if isinstance(maker, PacedBatchMaker) else getattr(maker, "environment_name", None)


def _refused(rollout: Experience, reason: str) -> Dropped:
    return Dropped(rollout.rollout_id, "invalid", reason)


_NUMBER = re.compile(r"-?\d[\d.]*(e[+-]?\d+)?")
_MOST_CAUSES = 64
_MOST_LOGGED = 5
LOG_EVERY_S = 30.0
"""Between two lines about what left untrained while no new version comes."""


class BatchMetrics:
    """What happened since the last batch: the numbers behind the ``replay/…`` metrics, and why rollouts left untrained.

    Causes are counted alike where their reasons differ in numbers only; the last reason stands for all of them.
    """

    def __init__(self) -> None:
        self.dropped: Counter[Fate] = Counter()
        self.dead_in_batch = 0
        self._causes: dict[tuple[str, str], tuple[int, str]] = {}
        self._unlogged: dict[tuple[str, str], tuple[int, str]] = {}
        self._logged_at = float("-inf")

    def note(self, fate: Fate | Literal["late"], rollouts: int, reason: str) -> None:
        """So many rollouts left without being trained; `late` are those of a ticket that is no longer outstanding."""
        if fate != "late":
            self.dropped[fate] += rollouts
        for causes in (self._causes, self._unlogged):
            key = (fate, _NUMBER.sub("#", reason))
            if key not in causes and len(causes) >= _MOST_CAUSES:
                key = (fate, "")
            causes[key] = (causes.get(key, (0, ""))[0] + rollouts, reason)

    def commonest(self) -> str:
        """In words, why most of those left that did so since the last batch; empty where none did."""
        if not self._causes:
            return ""
        total = sum(count for count, _ in self._causes.values())
        (fate, _), (count, reason) = max(self._causes.items(), key=lambda item: item[1][0])
        return f"left untrained since the last batch: {total} rollouts, {count} of them {fate}: {reason}"

    def take_line(self, now: float, at_once: bool) -> tuple[int, str] | None:
        """What left since the last line: level and text of the next one. None where there is nothing to say now.

        Args:
            now: In seconds.
            at_once: Without it a line follows another after `LOG_EVERY_S` at the earliest.
        """
        if not self._unlogged or not (at_once or now - self._logged_at >= LOG_EVERY_S):
            return None
        causes = sorted(self._unlogged.items(), key=lambda item: -item[1][0])
        self._unlogged, self._logged_at = {}, now
        named = [f"{count} {fate} ({reason})" for (fate, _), (count, reason) in causes[:_MOST_LOGGED]]
        named += [f"{len(causes) - _MOST_LOGGED} causes more"] if len(causes) > _MOST_LOGGED else []
        level = logging.INFO if all(fate == "filtered" for (fate, _), _ in causes) else logging.WARNING
        return level, f"{sum(count for _, (count, _) in causes)} rollouts left untrained: {'; '.join(named)}"

    def of_batch(self, step: int, rollouts: Sequence[Experience]) -> dict[str, float]:
        """Metrics of the batch of update `step`, which trains on these rollouts; starts counting anew."""
        ages = [step - rollout.metadata.weight_step for rollout in rollouts if rollout.metadata is not None]
        metrics = {
            "replay/staleness_mean": sum(ages) / len(ages) if ages else 0.0,
            "replay/staleness_max": float(max(ages, default=0)),
            "replay/filtered": float(self.dropped["filtered"]),
            "replay/aborted": float(self.dropped["aborted"]),
            "replay/stale": float(self.dropped["stale_step"] + self.dropped["stale_time"]),
            "replay/invalid": float(self.dropped["invalid"] + self.dropped["rolled_back"]),
            "replay/evicted": float(self.dropped["evicted"]),
            "replay/dead_in_batch": float(self.dead_in_batch),
        }
        self.dropped.clear()
        self._causes.clear()
        self.dead_in_batch = 0
        return metrics

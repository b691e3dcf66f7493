"""Freshness, decided rollout by rollout from its own metadata, and what of a delivered group may be trained.

With the learner at version `current`, a rollout is fresh while
``current − step_delay ≤ weight_step ≤ current`` and ``timestamp > now − timestamp_delay_s``. A newer stamp than
`current` is from the future (a generator that outlived the trainer it served) and makes the rollout invalid: the
buffer hears of a version before that is published, so no honest generator can be ahead of it.

A group keeps its remaining members when some are malformed, stale or from weights that the run has left behind. Pure;
nothing here raises.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.replay.config import ReplayBufferConfig
from penstock.types import Experience, Fate, RolloutGroup, RolloutMetadata, WeightVersion


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a rollout may not be trained.

    Attributes:
        fate: What it becomes.
        reason: In words, with the numbers.
    """

    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True)
class FreshnessWindow:
    """How old a rollout may be.

    Attributes:
        step_delay: In versions.
        timestamp_delay_s: In seconds; None without limit.
    """

    step_delay: int
    timestamp_delay_s: float | None

    def oldest_step(self, current: int) -> int:
        """The oldest weight step that is fresh at version `current`."""
        return current - self.step_delay

    def oldest_timestamp(self, now: float) -> float:
        """Timestamps up to and including this one are stale."""
        return float("-inf") if self.timestamp_delay_s is None else now - self.timestamp_delay_s

    def judge(self, metadata: RolloutMetadata, current: int, now: float) -> Verdict | None:
        """What is wrong with a rollout's age; None where it is fresh."""
        step = metadata.weight_step
        if step > current:
            return Verdict("invalid", f"weight_step {step} is from the future: the learner is at version {current}")
        if step < self.oldest_step(current):
            behind = f"more than {self.step_delay} updates before the learner's {current}"
            return Verdict("stale_step", f"sampled by version {step}, {behind}")
        if metadata.timestamp <= self.oldest_timestamp(now):
            age = now - metadata.timestamp
            return Verdict("stale_time", f"finished {age:.1f} s ago, the limit is {self.timestamp_delay_s} s")
        return None


class FreshnessRules:
    """The window of each lesson.

    Args:
        config: Limits of the buffer, and of single lessons.
    """

    def __init__(self, config: ReplayBufferConfig) -> None:
        self._config = config
        self._windows: dict[str, FreshnessWindow] = {}

    def of(self, lesson_id: str) -> FreshnessWindow:
        """How old rollouts of a lesson may be; lessons with equal limits share one window."""
        window = self._windows.get(lesson_id)
        if window is None:
            window = FreshnessWindow(self._config.step_delay(lesson_id), self._config.timestamp_delay_s(lesson_id))
            self._windows[lesson_id] = window
        return window


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """What becomes of one delivered group.

    Attributes:
        trainable: Members that may be trained.
        storable: Members with an identity and metadata, trainable or not.
        rejected: What became of the other rollouts that were started for the group, by id.
    """

    trainable: tuple[Experience, ...]
    storable: tuple[Experience, ...]
    rejected: dict[str, Verdict]


@dataclass(frozen=True, slots=True)
class IngestRules:
    """What a rollout must be to be trained now.

    Attributes:
        freshness: How old it may be.
        survives: Whether a version's weights are those that the present lineage had at that step.
        current: The learner's version.
        now: Unix seconds.
        faults: What is wrong with single rollouts beside that, by id.
    """

    freshness: FreshnessRules
    survives: Callable[[WeightVersion], bool]
    current: int
    now: float
    faults: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])

    def judge(self, rollout: Experience, lesson_id: str) -> Verdict | None:
        """Why a rollout of a lesson may not be trained; None where it may."""
        if rollout.metadata is None:
            return Verdict("invalid", "it has no metadata")
        if rollout.lesson_id != lesson_id:
            return Verdict("invalid", f"it is of lesson {rollout.lesson_id!r}, not {lesson_id!r}")
        if (defect := rollout.defect) is not None:
            return Verdict("invalid", defect)
        verdict = self.freshness.of(rollout.lesson_id).judge(rollout.metadata, self.current, self.now)
        if verdict is not None:
            return verdict
        newest = WeightVersion(rollout.metadata.lineage, rollout.newest_weight_step)
        if not self.survives(newest):
            return Verdict(
                "rolled_back", f"its weights (lineage {newest.lineage}, step {newest.step}) are of a dead lineage"
            )
        return self.faults.get(rollout.rollout_id)


def judge_group(
    group: RolloutGroup[Experience], lesson_id: str, expected: Sequence[str], rules: IngestRules
) -> JudgedGroup:
    """Judges a group as it arrives.

    Args:
        group: As delivered.
        lesson_id: The lesson that it was generated for.
        expected: Ids of the rollouts that were started for it.
        rules: What they must be.
    """
    rejected = dict.fromkeys(expected, Verdict("invalid", "not among the rollouts that were delivered"))
    storable: dict[str, Experience] = {}
    trainable: list[Experience] = []
    for rollout in group.rollouts:
        rollout_id = rollout.rollout_id
        if rollout_id not in rejected or rollout_id in storable:
            continue  # no rollout of this group, or a second one under the same id
        if rollout.metadata is not None:
            storable[rollout_id] = rollout
        verdict = rules.judge(rollout, lesson_id)
        if verdict is None:
            trainable.append(rollout)
        else:
            rejected[rollout_id] = verdict
    for rollout in trainable:
        del rejected[rollout.rollout_id]
    return JudgedGroup(tuple(trainable), tuple(storable.values()), rejected)

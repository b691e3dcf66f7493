"""What of a delivered group may be trained, and what becomes of the rest. Pure; nothing here raises.

Rollouts are judged one by one: a group keeps its remaining members when some are malformed, stale or from weights
that the run has left behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.replay.freshness import FreshnessRules, Verdict
from penstock.types import Experience, RolloutGroup, Ticket, WeightVersion


@dataclass(frozen=True, slots=True)
class Inspection:
    """The outcome for one group.

    Attributes:
        trainable: Members that may be trained.
        storable: Members with an identity and metadata, trainable or not.
        rejected: What became of the other rollouts that were started for the ticket, by id.
    """

    trainable: tuple[Experience, ...]
    storable: tuple[Experience, ...]
    rejected: dict[str, Verdict]


@dataclass(frozen=True, slots=True)
class Inspector:
    """Judges groups as they arrive.

    Attributes:
        rules: What is fresh.
        survives: Whether a version's weights are those that the present lineage had at that step.
    """

    rules: FreshnessRules
    survives: Callable[[WeightVersion], bool]

    def inspect(
        self, group: RolloutGroup[Experience], ticket: Ticket, expected: Sequence[str], current: int, now: float
    ) -> Inspection:
        """Judges a group.

        Args:
            group: As delivered.
            ticket: What it was generated for.
            expected: Ids of the rollouts that were started for the ticket.
            current: The learner's version.
            now: Unix seconds.
        """
        rejected = dict.fromkeys(expected, Verdict("invalid", "not among the rollouts that were delivered"))
        storable: dict[str, Experience] = {}
        trainable: list[Experience] = []
        for rollout in group.rollouts:
            rollout_id = rollout.rollout_id
            if rollout_id not in rejected or rollout_id in storable:
                continue  # no rollout of this ticket, or a second one under the same id
            if rollout.metadata is None:
                rejected[rollout_id] = Verdict("invalid", "it has no metadata")
                continue
            storable[rollout_id] = rollout
            verdict = self._judge(rollout, ticket, current, now)
            if verdict is None:
                trainable.append(rollout)
            else:
                rejected[rollout_id] = verdict
        for rollout in trainable:
            del rejected[rollout.rollout_id]
        return Inspection(tuple(trainable), tuple(storable.values()), rejected)

    def _judge(self, rollout: Experience, ticket: Ticket, current: int, now: float) -> Verdict | None:
        metadata = rollout.metadata
        assert metadata is not None
        if rollout.lesson_id != ticket.lesson_id:
            return Verdict("invalid", f"it is of lesson {rollout.lesson_id!r}, not {ticket.lesson_id!r}")
        if (defect := rollout.defect) is not None:
            return Verdict("invalid", defect)
        verdict = self.rules.of(rollout.lesson_id).judge(metadata, current, now)
        if verdict is not None:
            return verdict
        newest = WeightVersion(metadata.lineage, rollout.newest_weight_step)
        if not self.survives(newest):
            return Verdict(
                "rolled_back", f"its weights (lineage {newest.lineage}, step {newest.step}) are of a dead lineage"
            )
        return None

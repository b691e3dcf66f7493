"""What a run's files say about its rollouts: started, sealed, trained in which batches, ended how."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.types import WeightVersion


@dataclass(frozen=True, slots=True)
class SealedRollout:
    """One row of a rollout file.

    Attributes:
        rollout_id: The rollout.
        group_id: Its ticket.
        newest_version: The newest weights behind any of its tokens.
        complete: Whether the row has all that is needed to train on it again.
    """

    rollout_id: str
    group_id: str
    newest_version: WeightVersion
    complete: bool = True


@dataclass(frozen=True, slots=True)
class LoggedFate:
    """One line of the fate log.

    Attributes:
        fate: A fate, or `waiting` where a recovery took one back.
        version: The life of the run that decided it, and the update that was next; for `trained`, the update that
            used the rollout last.
    """

    fate: str
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One batch file: the intent of an update, which only a later checkpoint makes a fact.

    Attributes:
        batch_id: File name without its suffix.
        version: The lineage, and the update; it starts from these weights.
        rollout_ids: What it trains on.
    """

    batch_id: str
    version: WeightVersion
    rollout_ids: tuple[str, ...]

    @property
    def outcome(self) -> WeightVersion:
        """The version that the update makes."""
        return WeightVersion(self.version.lineage, self.version.step + 1)


@dataclass(frozen=True, slots=True)
class Damage:
    """Which rollouts were lost with files that could not be read.

    Attributes:
        ids: Those that are known.
        more: Whether a file did not even say which rollouts it held: any that nothing is known of may have been in it.
    """

    ids: frozenset[str] = frozenset()
    more: bool = False

    def may_hold(self, rollout_id: str) -> bool:
        """Whether a rollout that is in no file, and of no fate, was lost with one."""
        return self.more or rollout_id in self.ids


NO_DAMAGE = Damage()
"""All files could be read."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything the ledger is rebuilt from.

    Attributes:
        started: Rollouts per ticket that was handed out.
        sealed: Sealed rollouts by id.
        fates: The last line of the fate log by rollout id.
        batches: Every batch file.
        damage: What was lost with files that were put aside.
    """

    started: dict[str, int]
    sealed: dict[str, SealedRollout]
    fates: dict[str, LoggedFate]
    batches: list[StoredBatch]
    damage: Damage = NO_DAMAGE

    def uses(self, survives: Callable[[WeightVersion], bool], step: int) -> Counter[str]:
        """How often each rollout was used by updates that a life at version `step` has behind it."""
        return Counter(
            rollout_id
            for batch in self.batches
            if batch.outcome.step <= step and survives(batch.outcome)
            for rollout_id in batch.rollout_ids
        )

    def lost(self) -> dict[str, int]:
        """Groups that were started and of which nothing was stored or decided: their sizes."""
        stored = {sealed.group_id for sealed in self.sealed.values()}
        return {
            group_id: size
            for group_id, size in self.started.items()
            if group_id not in stored and not any(self._is_settled(f"{group_id}/{i}") for i in range(size))
        }

    def _is_settled(self, rollout_id: str) -> bool:
        return rollout_id in self.fates or self.damage.may_hold(rollout_id)

    def tickets(self) -> dict[str, list[str]]:
        """The rollout ids of every group that was started, or sealed where its start was lost with the machine."""
        groups = {ticket: [f"{ticket}/{i}" for i in range(size)] for ticket, size in self.started.items()}
        for sealed in self.sealed.values():
            if sealed.group_id not in self.started:
                groups.setdefault(sealed.group_id, []).append(sealed.rollout_id)
        return groups

"""What becomes of every rollout when a run resumes from a checkpoint: the plan, made from the files alone.

The checkpoint's rename is the only commit. Whatever happened after it is undone: batches of later updates count as
never trained, and fates decided since then are taken back. A group that is sealed comes back if all its tokens were
sampled under weights that the resumed run has too (step at or before the fork), and all of it was stored; otherwise it
is `rolled_back`. Three kinds of tickets follow from the checkpoint:

- *settled* before it: their fates stand;
- *outstanding* at it: a sealed group comes back under its own id; without one the ticket is issued again;
- *drawn after* it: the issuer will draw them again, and a sealed group is claimed when that happens. So at
  staleness zero the resumed run goes exactly the way that the dead one went.

What was in a file that could not be read any more is `rolled_back` too, if nothing else says how it ended.

This module decides and touches nothing; `ReplayBuffer.restore` carries the plan out. Killed in the middle of that,
a run resumes by the same rules.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from penstock.replay.admission import TicketKey
from penstock.replay.history import History, LoggedFate
from penstock.replay.ledger import FATES
from penstock.types import Fate, WeightVersion


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """What the plan needs of the checkpoint.

    Attributes:
        step: The version to resume from.
        outstanding: Its outstanding tickets' ids, by key.
        alive: Rollouts that waited and belong to no outstanding ticket, by group: those of an open buffer, and those
            that wait for a further use.
        key_of: Names a group across the lives of the run.
        was_drawn: Whether a group had been drawn, or had arrived.
        survives: Whether a version's weights are also the resumed run's.
    """

    step: int
    outstanding: Mapping[TicketKey, str]
    alive: Mapping[str, Collection[str]]
    key_of: Callable[[str], TicketKey]
    was_drawn: Callable[[TicketKey], bool]
    survives: Callable[[WeightVersion], bool]


@dataclass(slots=True)
class RecoveryPlan:
    """The outcome.

    Attributes:
        started: Rollouts that were ever started.
        fates: How many have which fate.
        decisions: (rollout id, fate or `waiting`, reason) wherever that differs from the fate log.
        waiting: Rollouts that come back, by group.
        claims: The group that comes back for a ticket, by key.
        uses: How often each rollout was trained on the surviving path.
    """

    started: int = 0
    fates: Counter[Fate] = field(default_factory=Counter[Fate])
    decisions: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    waiting: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    claims: dict[TicketKey, str] = field(default_factory=dict[TicketKey, str])
    uses: Counter[str] = field(default_factory=Counter[str])


def plan_recovery(history: History, checkpoint: CheckpointView) -> RecoveryPlan:
    """Decides about every rollout that was ever started."""
    return _Planner(history, checkpoint).plan()


class _Planner:
    def __init__(self, history: History, checkpoint: CheckpointView) -> None:
        self._history = history
        self._checkpoint = checkpoint
        self._plan = RecoveryPlan(uses=history.uses(checkpoint.survives, checkpoint.step))

    def plan(self) -> RecoveryPlan:
        tickets = self._history.tickets()
        candidates: dict[TicketKey, list[str]] = {}
        for ticket, ids in tickets.items():
            key = self._checkpoint.key_of(ticket)
            alive = self._checkpoint.alive.get(ticket)
            if alive is not None:
                self._bring_back(ticket, [rollout_id for rollout_id in ids if rollout_id in alive])
                self._confirm([rollout_id for rollout_id in ids if rollout_id not in alive])
            elif key not in self._checkpoint.outstanding and self._checkpoint.was_drawn(key):
                self._confirm(ids)
            elif any(self._is_valid(rollout_id) for rollout_id in ids):
                candidates.setdefault(key, []).append(ticket)
            else:
                self._abandon(ids)
        for key, groups in candidates.items():
            *others, best = sorted(groups, key=lambda group: group == self._checkpoint.outstanding.get(key))
            self._bring_back(best, tickets[best])
            self._plan.claims[key] = best
            for group in others:
                self._abandon(tickets[group])
        return self._plan

    def _is_valid(self, rollout_id: str) -> bool:
        sealed = self._history.sealed.get(rollout_id)
        return sealed is not None and sealed.complete and self._checkpoint.survives(sealed.newest_version)

    def _bring_back(self, group: str, ids: list[str]) -> None:
        valid = [rollout_id for rollout_id in ids if self._is_valid(rollout_id)]
        self._plan.waiting[group] = valid
        self._plan.started += len(valid)
        for rollout_id in valid:
            if self._logged_fate(rollout_id) is not None:
                self._plan.decisions.append((rollout_id, "waiting", "decided after the checkpoint: taken back"))
        self._abandon([rollout_id for rollout_id in ids if rollout_id not in valid])

    def _confirm(self, ids: list[str]) -> None:
        """Settled before the checkpoint: the logged fate stands, and what was trained is `trained`."""
        for rollout_id in ids:
            fate = self._logged_fate(rollout_id)
            if self._plan.uses[rollout_id] or (fate == "trained" and self._stands(self._history.fates[rollout_id])):
                self._end(rollout_id, "trained", "trained before the checkpoint")
            elif fate is not None and fate != "trained":
                self._end(rollout_id, fate, "")
            else:
                self._end_lost(rollout_id)

    def _abandon(self, ids: list[str]) -> None:
        """Neither settled before the checkpoint nor of any use after it."""
        for rollout_id in ids:
            fate = self._logged_fate(rollout_id)
            if rollout_id in self._history.sealed or fate in (None, "trained"):
                self._end_lost(rollout_id)
            else:
                self._end(rollout_id, fate, "")

    def _end_lost(self, rollout_id: str) -> None:
        sealed = self._history.sealed.get(rollout_id)
        if sealed is not None and not sealed.complete:
            reason = "its observations were not stored (replay.store.observations), so it could not be brought back"
            self._end(rollout_id, "rolled_back", reason)
        elif sealed is not None:
            self._end(rollout_id, "rolled_back", f"the run resumed from step {self._checkpoint.step}")
        elif self._history.damage.may_hold(rollout_id):
            self._end(rollout_id, "rolled_back", "the file that held it could not be read any more")
        else:
            self._end(rollout_id, "aborted", "it was in flight when the process ended")

    def _end(self, rollout_id: str, fate: Fate, reason: str) -> None:
        self._plan.started += 1
        self._plan.fates[fate] += 1
        if self._logged_fate(rollout_id) != fate:
            self._plan.decisions.append((rollout_id, fate, reason))

    def _logged_fate(self, rollout_id: str) -> Fate | None:
        logged = self._history.fates.get(rollout_id)
        return None if logged is None else next((fate for fate in FATES if fate == logged.fate), None)

    def _stands(self, logged: LoggedFate) -> bool:
        """Whether the update that used a rollout last lies before the checkpoint, in a life that goes on."""
        outcome = WeightVersion(logged.version.lineage, logged.version.step + 1)
        return outcome.step <= self._checkpoint.step and self._checkpoint.survives(outcome)

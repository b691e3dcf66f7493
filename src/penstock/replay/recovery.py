"""What becomes of every rollout when a run resumes from a checkpoint: the plan, and the pool brought there.

The checkpoint's rename is the only commit. Whatever happened after it is undone: batches of later updates count as
never trained, and fates decided since then are taken back. A group that is sealed comes back if all its tokens were
sampled under weights that the resumed run has too (step at or before the fork), and all of it was stored; otherwise it
is `rolled_back`. Three kinds of tickets follow from the checkpoint:

- *settled* before it: their fates stand;
- *outstanding* at it: a sealed group comes back under its own id; without one the ticket is issued again;
- *drawn after* it: the issuer will draw them again, and a sealed group is claimed when that happens. So at
  staleness zero the resumed run goes exactly the way that the dead one went.

What was in a file that could not be read any more is `rolled_back` too, if nothing else says how it ended.

`plan_recovery` decides and touches nothing; `restore_pool` carries the plan out, in a pool whose lock is held. Killed
in the middle of that, a run resumes by the same rules. Not covered: the boundary at which a state is taken, and whether
the books close afterwards; both are the buffer's.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.replay.history import History, LoggedFate
from penstock.replay.ledger import FATES, TicketKey
from penstock.replay.training_pool import TrainingPool
from penstock.replay.waiting_groups import WaitingGroup
from penstock.types import CheckpointError, Experience, Fate, RolloutGroup, RolloutRecord, WeightVersion

BEFORE_THE_FIRST = -1
"""The step of a fork that takes over no version of its parent."""


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
        has_tickets: Whether groups are generated for tickets. Then one that is not `alive` comes back when its ticket
            is drawn again, and those that are have been used; otherwise all come back at once.
    """

    step: int
    outstanding: Mapping[TicketKey, str]
    alive: Mapping[str, Collection[str]]
    key_of: Callable[[str], TicketKey]
    was_drawn: Callable[[TicketKey], bool]
    survives: Callable[[WeightVersion], bool]
    has_tickets: bool = True


ViewOf = Callable[[History, Mapping[str, set[str]]], CheckpointView]
"""The view of a checkpoint, given what the files say and what was alive at it."""


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


def restore_pool(
    pool: TrainingPool, state: Mapping[str, Any], view_of: ViewOf
) -> dict[TicketKey, RolloutGroup[Experience]]:
    """Begins the pool's lineage from a checkpoint: ledger and pool are rebuilt from the run's files.

    Args:
        pool: Empty, its lock held; its ledger's `update` is the checkpoint's.
        state: Of `TrainingPool.state`.
        view_of: Called again where a file turns out to be damaged.

    Returns:
        Groups that wait until their ticket is drawn again; none without tickets.

    Raises:
        CheckpointError: the state does not fit.
    """
    lineage, update = pool.ledger.lineage, pool.ledger.update
    try:
        recorded, alive = set(state["recorded"]), {str(k): set(v) for k, v in state["alive"].items()}
        pool.store.lineages.begin(lineage, int(state["lineage"]), update)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the replay buffer's state does not fit: {error!r}") from error
    pool.current = update
    pool.recorded = recorded - alive.keys()
    view, plan, records = _plan(pool, alive, view_of)
    pool.ledger.rebuild(plan.started, plan.fates, (i for ids in plan.waiting.values() for i in ids))
    pool.ledger.log_fates(plan.decisions, update)
    return _bring_back(pool, view.has_tickets, plan, records)


def abandon_earlier(pool: TrainingPool, key_of: Callable[[str], TicketKey]) -> None:
    """All that earlier lives started is settled, and this lineage takes over no version of theirs."""
    with pool.changed:
        lineage = pool.ledger.lineage
        pool.store.lineages.begin(lineage, lineage - 1, BEFORE_THE_FIRST)
        nothing = CheckpointView(0, {}, {}, key_of, lambda key: False, pool.survives)
        plan = plan_recovery(pool.store.history(), nothing)
        pool.ledger.rebuild(plan.started, plan.fates, ())
        pool.ledger.log_fates(plan.decisions, pool.ledger.update)


def _plan(
    pool: TrainingPool, alive: Mapping[str, set[str]], view_of: ViewOf
) -> tuple[CheckpointView, RecoveryPlan, list[RolloutRecord[Any]]]:
    """What is to be done, and the records that come back; a file that turns out to be damaged changes both."""
    history = pool.store.history()
    while True:
        view = view_of(history, alive)
        plan = plan_recovery(history, view)
        records = pool.store.read_records(plan.waiting)
        missing = {i for ids in plan.waiting.values() for i in ids}
        missing.difference_update(record.rollout.rollout_id for record in records)
        again = pool.store.history() if missing else history
        if again.damage == history.damage:
            return view, plan, records
        history = again


def _bring_back(
    pool: TrainingPool, has_tickets: bool, plan: RecoveryPlan, stored: Sequence[RolloutRecord[Any]]
) -> dict[TicketKey, RolloutGroup[Experience]]:
    """Claims wait for their tickets; the others go into the pool by arrival, spent members known to the baseline."""
    alive = {rollout_id for ids in plan.waiting.values() for rollout_id in ids}
    claimed = set(plan.claims.values()) if has_tickets else set[str]()
    members: dict[str, list[RolloutRecord[Any]]] = {}
    for record in stored:
        members.setdefault(record.group_id, []).append(record)
    groups: dict[str, RolloutGroup[Experience]] = {}
    for group_id in plan.waiting:
        records = members.get(group_id, [])
        rollouts = tuple(record.rollout for record in records if record.rollout.rollout_id in alive)
        if not rollouts:
            continue
        groups[group_id] = group = RolloutGroup(records[0].group_key, rollouts, group_id)
        if group_id not in claimed:
            waiting = WaitingGroup.of(RolloutGroup(group.key, pool.filters.members(rollouts), group_id))
            waiting.uses = {i: plan.uses[i] for r in rollouts if plan.uses[i := r.rollout_id]} or None
            spent = [record.rollout for record in records if record.rollout.rollout_id not in alive]
            if has_tickets or waiting.uses or spent:
                waiting.first_use = max(0, pool.current - 1)
            sound = [rollout for rollout in spent if rollout.defect is None]
            pool.add(waiting, durable=True, spent=pool.filters.members(sound))
    return {key: groups[group_id] for key, group_id in plan.claims.items() if group_id in claimed}


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

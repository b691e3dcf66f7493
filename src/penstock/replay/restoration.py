"""What of the replay buffer travels in a checkpoint, and how the buffer comes back from it and the run's files.

`penstock.replay.recovery` decides what becomes of every rollout; here ledger, stock and intake are brought there.
Everything happens with the buffer's lock held. Not covered: the boundary at which a state is taken, and whether the
books close afterwards; both are the buffer's.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.replay.admission import Admission, OpenAdmission
from penstock.replay.history import History
from penstock.replay.intake import Intake, waiting_group
from penstock.replay.recovery import CheckpointView, RecoveryPlan, plan_recovery
from penstock.replay.stock import Stock
from penstock.replay.store import ExperienceStore
from penstock.types import CheckpointError, Clock, Experience, RolloutGroup, RolloutRecord, WeightVersion

BEFORE_THE_FIRST = -1
"""The step of a fork that takes over no version of its parent."""


class Restoration:
    """Takes states of one buffer, and restores it.

    Args:
        store: Holds the groups.
        admission: Knows who may deliver.
        stock: Groups until their last use.
        intake: Groups on their way there.
        survives: Whether rollouts of a version may be trained in this life of the run.
        clock: Unix seconds.
        keep_checkpoints: How many checkpoints stay.
    """

    def __init__(
        self,
        store: ExperienceStore,
        admission: Admission,
        stock: Stock,
        intake: Intake,
        survives: Callable[[WeightVersion], bool],
        clock: Clock,
        keep_checkpoints: int,
    ) -> None:
        self._store = store
        self._admission = admission
        self._ledger = admission.ledger
        self._stock = stock
        self._intake = intake
        self._survives = survives
        self._clock = clock
        self._kept: deque[tuple[float, frozenset[str]]] = deque(maxlen=keep_checkpoints)
        self._expendable: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        """See `ReplayBuffer.state`; what was decided is flushed to the disk first."""
        self._ledger.sync()
        groups = self._stock.groups()
        self._expendable = self._find_expendable()
        state = {
            "lineage": self._admission.lineage,
            "recorded": sorted(self._intake.recorded.union(groups)),
            "alive": groups if not self._admission.paced else self._stock.used(),
        }
        if isinstance(self._admission, OpenAdmission):
            state["admission"] = self._admission.state()
        return state

    def checkpoint_saved(self) -> None:
        """See `ReplayBuffer.checkpoint_saved`."""
        expendable, self._expendable = self._expendable, ()
        self._store.expire(expendable)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `ReplayBuffer.restore`.

        Raises:
            CheckpointError: the state does not fit.
        """
        alive = self._begin(state)
        plan, records = self._plan(alive)
        self._ledger.rebuild(plan.started, plan.fates, (i for ids in plan.waiting.values() for i in ids))
        self._ledger.log_fates(plan.decisions, self._admission.update)
        self._bring_back(plan, records)
        self._admission.readmit()

    def begin_anew(self) -> None:
        """All that earlier lives started is settled, and this lineage takes over no version of theirs."""
        lineage = self._admission.lineage
        self._store.lineages.begin(lineage, lineage - 1, BEFORE_THE_FIRST)
        nothing = CheckpointView(0, {}, {}, self._admission.key_of, lambda key: False, self._survives)
        plan = plan_recovery(self._store.history(), nothing)
        self._ledger.rebuild(plan.started, plan.fates, ())
        self._ledger.log_fates(plan.decisions, self._admission.update)

    def _begin(self, state: Mapping[str, Any]) -> dict[str, set[str]]:
        """The next lineage begins; returns what was alive at the checkpoint."""
        try:
            recorded, alive = set(state["recorded"]), {str(k): set(v) for k, v in state["alive"].items()}
            if isinstance(self._admission, OpenAdmission):
                self._admission.restore(state["admission"])
            self._store.lineages.begin(self._admission.lineage, int(state["lineage"]), self._admission.update)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the replay buffer's state does not fit: {error!r}") from error
        self._stock.current = self._admission.update
        self._intake.recorded = recorded - alive.keys()
        return alive

    def _find_expendable(self) -> tuple[str, ...]:
        """Files that none of the kept checkpoints can need, this one included."""
        self._kept.append((self._clock(), frozenset(self._ledger.live_groups())))
        if len(self._kept) < (self._kept.maxlen or 1):
            return ()  # an older one may be of an earlier life, and nobody knows what it needs
        return self._store.expendable(frozenset[str]().union(*(live for _, live in self._kept)), self._kept[0][0])

    def _plan(self, alive: Mapping[str, set[str]]) -> tuple[RecoveryPlan, list[RolloutRecord[Any]]]:
        """What is to be done, and the records that come back; a file that turns out to be damaged changes both."""
        history = self._store.history()
        while True:
            plan = self._plan_by(history, alive)
            records = self._store.read_records(plan.waiting)
            missing = {i for ids in plan.waiting.values() for i in ids}
            missing.difference_update(record.rollout.rollout_id for record in records)
            again = self._store.history() if missing else history
            if again.damage == history.damage:
                return plan, records
            history = again

    def _plan_by(self, history: History, alive: Mapping[str, set[str]]) -> RecoveryPlan:
        admission = self._admission
        admission.recover(list(history.tickets()), history.lost())
        view = CheckpointView(
            admission.update,
            admission.restored_tickets(),
            alive,
            admission.key_of,
            admission.was_drawn,
            self._survives,
        )
        return plan_recovery(history, view)

    def _bring_back(self, plan: RecoveryPlan, stored: Sequence[RolloutRecord[Any]]) -> None:
        """Claims wait for their tickets; the others go into stock by arrival, spent members known to the baseline."""
        alive = {rollout_id for ids in plan.waiting.values() for rollout_id in ids}
        claimed = set(plan.claims.values()) if self._admission.paced else set[str]()
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
                spent = [record.rollout for record in records if record.rollout.rollout_id not in alive]
                self._restock(group, spent, plan)
        if self._admission.paced:
            self._intake.claims = {key: groups[group_id] for key, group_id in plan.claims.items()}

    def _restock(self, group: RolloutGroup[Experience], spent: Sequence[Experience], plan: RecoveryPlan) -> None:
        waiting = waiting_group(group, None)
        waiting.uses = {i: plan.uses[i] for r in group.rollouts if plan.uses[i := r.rollout_id]} or None
        if self._admission.paced or waiting.uses or spent:
            waiting.first_use = max(0, self._stock.current - 1)
        self._stock.add(waiting, durable=True, spent=[rollout for rollout in spent if rollout.defect is None])

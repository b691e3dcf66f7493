"""Groups between ingest and their last use; keeps batch maker, ledger and ticket places in step with them.

Everything here happens with the buffer's lock held, and nothing touches a file but the fate log.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.batch import BatchMaker
from penstock.replay.config import ReplayConfig
from penstock.replay.freshness import FreshnessWindow, Verdict
from penstock.replay.issuer import TicketIssuer
from penstock.replay.ledger import Ledger
from penstock.replay.tally import Tally
from penstock.replay.waiting import WaitingGroup, WaitingGroups
from penstock.types import Fate, InvalidRolloutError, RLExample, Rollout, RolloutGroup, RunFailed


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """What one update trains on.

    Attributes:
        examples: In batch order.
        group_ids: Their groups, in the same order.
        metrics: Of the batch, and of the wait for it.
    """

    examples: tuple[RLExample, ...]
    group_ids: tuple[str, ...]
    metrics: dict[str, float]


class Stock:
    """Waiting groups and those in training.

    Args:
        config: Pace and limits.
        window: What is fresh.
        issuer: Its places are freed as groups leave.
        ledger: Learns every fate.
        maker: Chooses batches.
        tally: Counts.
    """

    def __init__(
        self,
        config: ReplayConfig,
        window: FreshnessWindow,
        issuer: TicketIssuer,
        ledger: Ledger,
        maker: BatchMaker,
        tally: Tally,
    ) -> None:
        self.current = 0
        self.waiting = WaitingGroups(window, config.capacity)
        self._config = config
        self._issuer = issuer
        self._ledger = ledger
        self._maker = maker
        self._tally = tally
        self._reusable: dict[str, None] = {}
        self._in_training: dict[int, list[WaitingGroup]] = {}

    def add(self, group: RolloutGroup, deadline_step: int, uses: int = 0, durable: bool = False) -> None:
        """Takes an ingested group; one that is not durable yet is offered later."""
        entering = WaitingGroup.of(group, deadline_step, uses)
        self.waiting.add(entering)
        if uses:
            self._reusable[entering.group_id] = None
        elif durable:
            self.offer(entering.group_id)
        self._evict(entering.env_name)

    def offer(self, group_id: str) -> None:
        """Its file has its name: the batch maker may have it. A group that has left meanwhile is ignored."""
        if group_id not in self.waiting:
            return
        group = self.waiting.get(group_id)
        self._hand_to_maker(group, group.deadline_step if group.uses == 0 else None)
        entry = self._issuer.outstanding.get(group_id)
        if entry is not None and entry.phase == "waiting":
            self._issuer.outstanding.set_trainable(group_id)

    def settle(self, ids: Collection[str], fate: Fate, reason: str) -> None:
        """Rollouts meet their fate."""
        self._ledger.settle(ids, fate, self._issuer.update, reason)
        self._tally.dropped[fate] += len(ids)

    def drop_expired(self, now: float) -> None:
        """Drops what is no longer fresh."""
        for group_id, rollout, verdict in self.waiting.expired(self.current, now):
            self._drop(group_id, rollout, verdict)

    # --- batches -------------------------------------------------------------------------------------------------

    def form_batch(self, step: int) -> FormedBatch | None:
        """The batch of update `step`; None while a group that it owes is missing, or there are too few."""
        wanted = self._config.groups_per_batch
        short = max(0, wanted - self._issuer.outstanding.trainable)
        if self._issuer.outstanding.missing(step) or short > len(self._reusable):
            return None
        for group_id in list(islice(self._reusable, short)):
            if not self.waiting.get(group_id).offered:
                self.offer(group_id)
        for group_id in self._issuer.outstanding.must_take(step):
            self._make_due(group_id, step)
        self._maker.set_step(step)
        examples = self._maker.create_batch(wanted)
        return None if examples is None else self._take(step, examples)

    def finish(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used once more."""
        used_up: list[str] = []
        for group in self._in_training.pop(step):
            group.uses += 1
            if group.uses >= self._config.uses:
                used_up += [rollout.rollout_id for rollout in group.rollouts]
            else:
                group.offered = False
                self.waiting.add(group)
                self._reusable[group.group_id] = None
                self._evict(group.env_name)
        self._ledger.settle(used_up, "trained", step, f"trained by update {step}")

    def is_training(self, step: int) -> bool:
        """Whether update `step` has its batch and is not finished."""
        return step in self._in_training

    def groups(self) -> Iterator[WaitingGroup]:
        """Every group here, those in training first."""
        for groups in self._in_training.values():
            yield from groups
        for group_id in self.waiting.ids():
            yield self.waiting.get(group_id)

    def _take(self, step: int, examples: Sequence[RLExample]) -> FormedBatch:
        chosen = {rollout_id for example in examples for rollout_id in example.rollout_ids}
        ids = dict.fromkeys(i.rpartition("/")[0] for example in examples for i in example.rollout_ids)
        if any(group_id not in self.waiting for group_id in ids):
            raise RunFailed(f"the batch maker returned a group that does not wait, among {list(ids)}")
        groups = [self.waiting.remove(group_id) for group_id in ids]
        for group_id in ids:
            self._reusable.pop(group_id, None)
        for group in groups:
            left_out = [rollout.rollout_id for rollout in group.rollouts if rollout.rollout_id not in chosen]
            if left_out:
                self.settle(left_out, "filtered", f"left out of the batch of update {step} by the batch maker")
            group.rollouts = [rollout for rollout in group.rollouts if rollout.rollout_id in chosen]
        overtakes = self._issuer.take([group.group_id for group in groups if group.uses == 0])
        self._in_training[step] = groups
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        metrics = self._tally.batch_metrics(step, rollouts)
        metrics |= self._maker.get_batch_metadata(examples).get("metrics", {})
        metrics["replay/overtakes"] = float(overtakes)
        metrics["replay/reused"] = float(sum(group.uses > 0 for group in groups))
        return FormedBatch(tuple(examples), tuple(ids), metrics)

    def _make_due(self, group_id: str, step: int) -> None:
        """Any batch maker takes what is due; this is how it learns that a later deadline presses already."""
        group = self.waiting.get(group_id)
        if group.deadline_step > step:
            self._maker.discard([group_id])
            self._hand_to_maker(group, step)

    # --- leaving ---------------------------------------------------------------------------------------------------

    def _hand_to_maker(self, group: WaitingGroup, deadline_step: int | None) -> None:
        group.offered = True
        for rollout in list(group.rollouts):
            try:
                self._maker.add_rollout(rollout, deadline_step)
            except InvalidRolloutError as error:
                self._lose(group, rollout, Verdict("invalid", str(error)))

    def _drop(self, group_id: str, rollout: Rollout, verdict: Verdict) -> None:
        """One rollout leaves; the batch maker learns what is left of its group."""
        group = self.waiting.get(group_id)
        if group.offered:
            self._maker.discard([group_id])
        self._lose(group, rollout, verdict)
        if group.offered and group.rollouts:
            self._hand_to_maker(group, group.deadline_step if group.uses == 0 else None)

    def _lose(self, group: WaitingGroup, rollout: Rollout, verdict: Verdict) -> None:
        if group.uses:
            verdict = Verdict("trained", f"used {group.uses} times, then {verdict.fate}: {verdict.reason}")
        self.settle([rollout.rollout_id], verdict.fate, verdict.reason)
        self.waiting.drop(group.group_id, rollout)
        if not group.rollouts:
            self._free(group, rollout.lesson_id, verdict)

    def _free(self, group: WaitingGroup, lesson_id: str, verdict: Verdict) -> None:
        self._reusable.pop(group.group_id, None)
        if group.uses == 0:
            self._issuer.free(group.group_id, f"lesson {lesson_id}: {verdict.fate}, {verdict.reason}")

    def _evict(self, env_name: str) -> None:
        while (group_id := self.waiting.over_capacity(env_name)) is not None:
            reason = f"more than {self._config.capacity} rollouts of {env_name} wait (replay.capacity)"
            for rollout in list(self.waiting.get(group_id).rollouts):
                self._drop(group_id, rollout, Verdict("evicted", reason))

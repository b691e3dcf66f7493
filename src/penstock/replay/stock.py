"""Groups between ingest and their last use; keeps batch makers, ledger and ticket places in step with them.

A use is counted when a batch takes a rollout. One that has all its uses leaves at once, but meets its fate only when
the update of its last batch was applied; one with uses left stays, and may be in the next batch too. Everything here
happens with the buffer's lock held, and nothing touches a file but the fate log.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.batch import Dropped
from penstock.replay.admission import Admission
from penstock.replay.config import ReplayBufferConfig
from penstock.replay.feed import AnyMaker, MakerFeed, batch_metrics, is_paced, takes_whole_groups, unit_size
from penstock.replay.freshness import FreshnessRules, Verdict
from penstock.replay.tally import Tally
from penstock.replay.waiting import WaitingGroup, WaitingGroups
from penstock.types import Experience, Fate, TrainingExample


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """What one update trains on.

    Attributes:
        step: The update.
        examples: In batch order.
        group_ids: Their groups, in the same order.
        metrics: Of the batch, and of the wait for it.
    """

    step: int
    examples: tuple[TrainingExample, ...]
    group_ids: tuple[str, ...]
    metrics: dict[str, float]


class Stock:
    """Waiting groups and those in training.

    Args:
        config: Pace and limits.
        rules: What is fresh.
        admission: Its places are freed as groups leave.
        feed: The batch makers.
        tally: Counts.

    Attributes:
        current: The learner's version.
        waiting: The groups that wait.
        unused: How many rollouts among them were in no batch yet.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        rules: FreshnessRules,
        admission: Admission,
        feed: MakerFeed,
        tally: Tally,
    ) -> None:
        self.current = 0
        self.waiting = WaitingGroups(rules, config.capacity)
        self._config = config
        self._admission = admission
        self._ledger = admission.ledger
        self._feed = feed
        self._tally = tally
        self._fresh: dict[str, WaitingGroup] = {}
        self._reusable: dict[str, WaitingGroup] = {}
        self._in_training: dict[int, list[tuple[WaitingGroup, Experience]]] = {}
        self._pending: Counter[str] = Counter()
        self.unused = 0

    def add(self, group: WaitingGroup, durable: bool = False, spent: Sequence[Experience] = ()) -> None:
        """Takes an ingested group; one that is not durable yet is offered later.

        Args:
            group: With the members that may be trained.
            durable: Its file has its name.
            spent: Members of a restored group that may not be trained any more: its baseline knows them.
        """
        self.waiting.add(group)
        self.unused += sum(not group.uses_of(rollout.rollout_id) for rollout in group.rollouts)
        if durable:
            self._offer(group, self._feed.give_restored(group, spent))
        while (oldest := self.waiting.over_capacity(group.env_name)) is not None:
            reason = f"more than {self._config.capacity} rollouts of {group.env_name} wait (replay.capacity)"
            for rollout in list(oldest.rollouts):
                self._lose(oldest, rollout, Verdict("evicted", reason))

    def offer(self, group_id: str) -> None:
        """Its file has its name: a batch maker may have it. A group that has left meanwhile is ignored."""
        if group_id not in self.waiting:
            return
        group = self.waiting.get(group_id)
        self._offer(group, self._feed.give(group))

    def _offer(self, group: WaitingGroup, dropped: Sequence[Dropped]) -> None:
        group.offered = True
        if self._admission.paced:
            (self._fresh if group.first_use is None else self._reusable)[group.group_id] = group
        self._drop_all(dropped)
        entry = self._admission.outstanding.get(group.group_id)
        if entry is not None and entry.phase == "waiting":
            self._admission.outstanding.set_trainable(group.group_id)

    @property
    def has_reusable(self) -> bool:
        """Whether a group waits for a further use."""
        return bool(self._reusable)

    def settle(self, ids: Collection[str], fate: Fate, reason: str) -> None:
        """Rollouts meet their fate."""
        self._ledger.settle(ids, fate, self._admission.update, reason)
        self._tally.dropped[fate] += len(ids)

    def count_filtered(self, group_id: str, lesson_id: str, reward: float) -> None:
        """A group without signal is gone; where nothing else comes any more, the run ends."""
        self._admission.free(group_id)
        failure = self._tally.count_filtered(lesson_id, reward)
        if failure is not None and self._admission.paced:
            self._admission.end_with(failure)

    def drop_expired(self, now: float, step: int | None = None) -> None:
        """Drops what is no longer fresh, or will not be at update `step`."""
        for group, rollout, verdict in self.waiting.expired(max(self.current, step or 0), now):
            self._lose(group, rollout, verdict)

    # --- batches -------------------------------------------------------------------------------------------------

    def form_batch(self, step: int, hurry: bool, stuck: Callable[[], bool]) -> FormedBatch | None:
        """The batch of update `step` of a paced run; None while a group that it owes is missing, or too few wait.

        Args:
            step: The update.
            hurry: Whether the learner waits: only then are groups used again.
            stuck: Whether no more can come before this batch: then batch makers have to do with what is there.
        """
        self._drop_all(self._feed.judge())
        outstanding = self._admission.outstanding
        wanted = self._config.groups_per_batch
        short = max(0, wanted - outstanding.trainable)
        # At staleness zero nothing is used again: whether a batch would have to wait depends on timing.
        may_reuse = hurry and not self._config.synchronous
        if outstanding.missing(step) or short > (len(self._reusable) if may_reuse else 0):
            return None
        due = outstanding.must_take(step)
        for group_id in due:
            group = self._fresh[group_id]
            if group.deadline_step is None or group.deadline_step > step:
                self._feed.press(group, step)
        oldest = dict.fromkeys([*due, *self._fresh])
        chosen = [self._fresh[group_id] for group_id in islice(oldest, max(wanted, len(due)))]
        chosen += islice(self._reusable.values(), short)
        shares: Counter[AnyMaker] = Counter()
        for group in chosen:
            maker = self._feed.of(group.env_name)
            assert maker is not None  # it was offered
            shares[maker] += unit_size(maker, group)
        formed = self._draw(step, shares, stuck)
        if formed is None and stuck():
            for group in chosen:
                self._give_up(group)
        return formed

    def sample(self, step: int, batch_size: int, env_name: str | None = None) -> FormedBatch | None:
        """A batch for update `step` of an open buffer; None where there is too little for one.

        Args:
            step: The update.
            batch_size: In the makers' units; several makers share it evenly, the first taking what is left over.
            env_name: Ask only the maker of this environment.
        """
        self._drop_all(self._feed.judge())
        makers = list(self._feed) if env_name is None else [m for m in [self._feed.of(env_name)] if m is not None]
        each, over = divmod(batch_size, max(len(makers), 1))
        shares = Counter({m: each + (i < over) for i, m in enumerate(makers) if each or i < over})
        return self._draw(step, shares, lambda: False)

    def finish(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used once more."""
        used_up: list[str] = []
        for group, rollout in self._in_training.pop(step):
            self._pending[rollout.rollout_id] -= 1
            if self._pending[rollout.rollout_id]:
                continue
            del self._pending[rollout.rollout_id]
            if not self._waits(group, rollout):
                used_up.append(rollout.rollout_id)
        self._ledger.settle(used_up, "trained", step, f"trained by update {step}")

    def finish_before(self, step: int) -> None:
        """Updates before `step` were applied."""
        for update in [update for update in self._in_training if update < step]:
            self.finish(update)

    def is_training(self, step: int) -> bool:
        """Whether update `step` has its batch and is not finished."""
        return step in self._in_training

    def ids(self) -> Iterator[str]:
        """Every rollout here, those in training included; some twice."""
        for taken in self._in_training.values():
            yield from (rollout.rollout_id for _, rollout in taken)
        for group in self.waiting:
            yield from (rollout.rollout_id for rollout in group.rollouts)

    def groups(self) -> dict[str, list[str]]:
        """Rollout ids here by group, those in training included."""
        groups: dict[str, list[str]] = {}
        for rollout_id in dict.fromkeys(self.ids()):
            groups.setdefault(rollout_id.rpartition("/")[0], []).append(rollout_id)
        return groups

    def used(self) -> dict[str, list[str]]:
        """Of `groups`, those whose first use lies behind the run: its update was applied."""
        confirmed: set[str] = set()
        for group in [*self.waiting, *(group for taken in self._in_training.values() for group, _ in taken)]:
            if group.first_use is not None and group.first_use not in self._in_training:
                confirmed.add(group.group_id)
        return {group_id: ids for group_id, ids in self.groups().items() if group_id in confirmed}

    def _give_up(self, group: WaitingGroup) -> None:
        """Makes room for others where a batch maker will not have what waits."""
        reason = f"{_maker_name(self._feed, group)} makes no batch of what waits, and no more can come before it does"
        for rollout in list(group.rollouts):
            self.settle([rollout.rollout_id], "filtered", reason)
            self._retire(group, rollout)
        if group.first_use is None:
            self._admission.free(group.group_id, f"lesson {group.lesson_id}: {reason}")

    def _draw(self, step: int, shares: Counter[AnyMaker], stuck: Callable[[], bool]) -> FormedBatch | None:
        examples: list[TrainingExample] = []
        taken: list[tuple[WaitingGroup, Experience]] = []
        metrics: dict[str, float] = {}
        planned: Counter[str] = Counter()
        for maker in sorted(shares, key=is_paced):  # only a plain one may have too little, and then nothing is drawn
            at_least = 1 if stuck() else shares[maker]
            drawn, dropped = self._feed.draw(maker, step, shares[maker], at_least)
            if not drawn and not taken and not is_paced(maker) and not stuck():
                return None
            live = [(example, members) for example in drawn if (members := self._members(example, planned)) is not None]
            self._tally.dead_in_batch += len(drawn) - len(live)
            examples += [example for example, _ in live]
            mine = [member for _, members in live for member in members]
            taken += mine
            if drawn:
                metrics |= batch_metrics(maker, drawn)
            self._drop_all(dropped)
            if takes_whole_groups(maker):
                self._leave_out(step, mine)
        if not examples:
            return None
        return self._take(step, examples, taken, metrics)

    def _members(self, example: TrainingExample, planned: Counter[str]) -> list[tuple[WaitingGroup, Experience]] | None:
        """Whom an example is made of; None where one of them is not live any more, or has its uses in this batch."""
        members: list[tuple[WaitingGroup, Experience]] = []
        for rollout_id in example.rollout_ids:
            group_id = rollout_id.rpartition("/")[0]
            group = self.waiting.get(group_id) if group_id in self.waiting else None
            rollout = None if group is None else _member(group, rollout_id)
            if group is None or rollout is None:
                return None
            if group.uses_of(rollout_id) + planned[rollout_id] >= self._config.uses:
                return None
            members.append((group, rollout))
        planned.update(example.rollout_ids)
        return members

    def _leave_out(self, step: int, taken: Sequence[tuple[WaitingGroup, Experience]]) -> None:
        """A maker of whole groups that returned a part of one does not want the rest."""
        chosen = {rollout.rollout_id for _, rollout in taken}
        for group in {group.group_id: group for group, _ in taken}.values():
            for rollout in [r for r in group.rollouts if r.rollout_id not in chosen]:
                self._lose(group, rollout, Verdict("filtered", f"left out of the batch of update {step} by its maker"))

    def _take(
        self,
        step: int,
        examples: Sequence[TrainingExample],
        taken: Sequence[tuple[WaitingGroup, Experience]],
        metrics: dict[str, float],
    ) -> FormedBatch:
        groups = {group.group_id: group for group, _ in taken}
        first = [group_id for group_id, group in groups.items() if group.first_use is None]
        metrics |= self._tally.batch_metrics(step, [rollout for _, rollout in taken])
        metrics |= self._admission.take(step, first)
        metrics["replay/reused"] = float(len(groups) - len(first))
        for group_id in first:
            groups[group_id].first_use = step
            if self._fresh.pop(group_id, None) is not None:
                self._reusable[group_id] = groups[group_id]
        self._in_training.setdefault(step, []).extend(taken)
        for group, rollout in taken:
            self._pending[rollout.rollout_id] += 1
            uses = group.count_use(rollout.rollout_id)
            self.unused -= uses == 1
            if uses >= self._config.uses:
                self._retire(group, rollout)
        return FormedBatch(step, tuple(examples), tuple(groups), metrics)

    # --- leaving ---------------------------------------------------------------------------------------------------

    def _drop_all(self, dropped: Sequence[Dropped]) -> None:
        for rollout_id, fate, reason in dropped:
            group_id = rollout_id.rpartition("/")[0]
            group = self.waiting.get(group_id) if group_id in self.waiting else None
            rollout = None if group is None else _member(group, rollout_id)
            if group is not None and rollout is not None:
                self._lose(group, rollout, Verdict(fate, reason))

    def _lose(self, group: WaitingGroup, rollout: Experience, verdict: Verdict) -> None:
        """A rollout leaves, not because a batch took it."""
        uses = group.uses_of(rollout.rollout_id)
        if uses and not self._pending[rollout.rollout_id]:
            reason = f"used {'once' if uses == 1 else f'{uses} times'}, then {verdict.fate}: {verdict.reason}"
            self._ledger.settle([rollout.rollout_id], "trained", max(0, self.current - 1), reason)
        elif not uses:
            self.settle([rollout.rollout_id], verdict.fate, verdict.reason)
        self._retire(group, rollout)
        if group.rollouts or group.first_use is not None:
            return
        if verdict.fate == "filtered":
            self.count_filtered(group.group_id, group.lesson_id, rollout.episode_reward)
        else:
            self._admission.free(group.group_id, f"lesson {group.lesson_id}: {verdict.fate}, {verdict.reason}")

    def _retire(self, group: WaitingGroup, rollout: Experience) -> None:
        self.unused -= not group.uses_of(rollout.rollout_id)
        if group.offered:
            self._feed.forget(group, rollout)
        self.waiting.drop(group, rollout)
        if not group.rollouts:
            self._fresh.pop(group.group_id, None)
            self._reusable.pop(group.group_id, None)

    def _waits(self, group: WaitingGroup, rollout: Experience) -> bool:
        return any(member is rollout for member in group.rollouts)


def _maker_name(feed: MakerFeed, group: WaitingGroup) -> str:
    return f"the batch maker {type(feed.of(group.env_name)).__name__}"


def _member(group: WaitingGroup, rollout_id: str) -> Experience | None:
    return next((rollout for rollout in group.rollouts if rollout.rollout_id == rollout_id), None)

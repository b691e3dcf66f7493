"""The pool of a replay buffer: every group from its delivery to its last use, behind one lock.

The way of a group: ingested (judged, told to the curriculum, filtered) → sealed to a file → added to a batch maker →
drawn by an update, completed, and written to a batch file before the learner has it → trained. A use is counted when a
batch takes a rollout. One that has all its uses leaves at once, but meets its fate only when the update of its last
batch was applied; one with uses left stays, and may be in the next batch too.

Two fronts decide who may deliver and what an update draws: `penstock.replay.ReplayBuffer` takes what arrives,
`penstock.replay.PacedReplayBuffer` goes by tickets.

Invariants, tested with random schedules: no rollout is trained before its file has its name, or more often than
`max_samples`; every rollout that was started is in exactly one state; every wait is bounded. The lock is `changed`, and
re-entrant; no file of rollouts or of a batch is written while it is held. Lines of the logs are (`Ledger`), and the
curriculum is told of a group: what takes either of them far away must queue it.

Not covered: which of the fresh groups make a batch, and with what advantage (`penstock.batch.BatchMaker`); the way back
from a checkpoint (`recovery`).
"""

import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.batch import Dropped, GroupFilters
from penstock.replay.config import ReplayBufferConfig
from penstock.replay.freshness import FreshnessRules, IngestRules, Verdict, judge_group
from penstock.replay.ledger import RECHECK_S, Ledger
from penstock.replay.store import ExperienceStore, Sealer
from penstock.replay.waiting_groups import (
    AnyMaker,
    BatchMakers,
    BatchMetrics,
    WaitingGroup,
    WaitingGroups,
    batch_metrics,
    is_paced,
    takes_whole_groups,
)
from penstock.types import (
    Clock,
    Experience,
    Fate,
    RolloutGroup,
    RolloutRecord,
    RunFailed,
    TrainingBatch,
    TrainingExample,
    WeightVersion,
)

logger = logging.getLogger(__name__)
MOST_ARRIVED = 64
Complete = Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], dict[str, float]]]


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """What one update trains on.

    Attributes:
        step: The update.
        examples: In batch order.
        group_ids: Their groups, in the same order.
        first_uses: Those of the groups that no batch had before.
        metrics: Of the batch, and of the wait for it.
    """

    step: int
    examples: tuple[TrainingExample, ...]
    group_ids: tuple[str, ...]
    first_uses: tuple[str, ...]
    metrics: dict[str, float]


class TrainingPool:
    """Waiting groups and those in training. Thread-safe.

    Args:
        config: Limits.
        store: Where groups and batches are written.
        makers: Choose batches; several must be bound to different environments.
        ledger: Counts every rollout. Its `update` is kept by the front, its lock is the pool's.
        clock: Unix seconds.
        keep_checkpoints: How many checkpoints stay: what one of them may need is not deleted.

    Attributes:
        sealer: Writes what was ingested; a front's deliveries pass its `await_entry` and end with `note_delivery`.
        current: The learner's version.
        waiting: The groups that wait.
        unused: How many rollouts among them were in no batch yet.
        fresh: Groups that no batch had yet, in the order in which they became trainable.
        reusable: Groups that wait for a further use, by their first one.
        recorded: Groups of an earlier life that the curriculum knows.
        filters: What of a delivered group is left out, or earns less.
        drops: What left untrained since the last batch, and why.
        arrived: The last rollouts that may be trained, the newest at the end.
        logs_drops: Whether `logging` hears what left untrained; a run tells it by its own files and metrics.
        on_group: Called with the lock held, once per group with a trainable rollout, filtered ones included; at
            staleness zero in the order of tickets.
        on_gone: Called with the lock held: a group (id) left before its first use, with a fate and for a reason.
        on_filtered: Called with the lock held: a group (id, lesson, a member's reward) left, since it had no signal.
        on_trainable: Called with the lock held: a batch maker has a group (id) now.
        complete: Given what was drawn, examples and rollouts, before it is written; gives examples and metrics.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        store: ExperienceStore,
        makers: AnyMaker | Sequence[AnyMaker],
        ledger: Ledger,
        clock: Clock = time.time,
        keep_checkpoints: int = 1,
    ) -> None:
        self.store, self.ledger, self.changed = store, ledger, ledger.changed
        self.makers = BatchMakers(makers)
        self.current = 0
        self.waiting = WaitingGroups(rules := FreshnessRules(config), config.capacity)
        self.unused = 0
        self.fresh: dict[str, WaitingGroup] = {}
        self.reusable: dict[str, WaitingGroup] = {}
        self.recorded: set[str] = set()
        self.arrived: deque[Experience] = deque(maxlen=MOST_ARRIVED)
        self.logs_drops = True
        self.on_group: Callable[[RolloutGroup[Any]], None] = _ignore
        self.on_gone: Callable[[str, Fate, str], None] = _ignore
        self.on_filtered: Callable[[str, str, float], None] = _ignore
        self.on_trainable: Callable[[str], None] = _ignore
        self.complete: Complete = lambda examples, rollouts: (tuple(examples), {})
        self._rules, self._clock, self._uses, self._capacity = rules, clock, config.uses, config.capacity
        self.filters = GroupFilters(config.batch_maker)
        self.sealer = Sealer(store, ledger, config.store, config.groups_per_batch, clock, self._add_to_makers)
        self.drops = BatchMetrics()
        self._in_training: dict[int, list[tuple[WaitingGroup, Experience]]] = {}
        self._pending: Counter[str] = Counter()
        self._kept: deque[tuple[float, frozenset[str]]] = deque(maxlen=keep_checkpoints)
        self._expendable: tuple[str, ...] = ()

    # --- rollouts in ---------------------------------------------------------------------------------------------

    def ingest(
        self,
        group: RolloutGroup[Experience],
        expected_ids: Sequence[str],
        lesson_id: str,
        *,
        deadline_step: int | None = None,
        durable: bool = False,
        waiting: bool = False,
        faults: Mapping[str, Verdict] | None = None,
    ) -> str | None:
        """Judges a delivered group, tells the curriculum of it, and takes what may be trained.

        Args:
            group: As delivered.
            expected_ids: The rollouts that were started for it.
            lesson_id: The lesson that it was generated for.
            deadline_step: The last update that may train it for the first time; None without deadline.
            durable: It is in a file already, and counted as waiting.
            waiting: It is counted as waiting already.
            faults: By id, what is wrong with a rollout beside what is judged here.

        Returns:
            Why nothing of it may be trained; None where something may.
        """
        with self.changed:
            rules = IngestRules(self._rules, self.survives, self.current, self._clock(), faults or {})
            judged = judge_group(group, lesson_id, expected_ids, rules)
            if not (durable or waiting):
                self.ledger.deliver(group.group_id)
            if not durable:
                self.sealer.add(
                    group.group_id, [RolloutRecord(each, group.group_id, group.key) for each in judged.storable]
                )
            for rollout_id, verdict in judged.rejected.items():
                self.settle([rollout_id], verdict.fate, verdict.reason)
            if not judged.trainable:
                verdict = next(iter(judged.rejected.values()))
                return f"lesson {lesson_id}: {verdict.fate}, {verdict.reason}"
            trainable: RolloutGroup[Any] = replace(group, rollouts=judged.trainable)
            self.arrived.extend(judged.trainable)
            if group.group_id not in self.recorded:
                self.on_group(trainable)
            self.recorded.discard(group.group_id)
            kept, left = self.filters.judge(trainable)
            for reason, ids in left.items():
                self.settle(ids, "filtered", reason)
            if kept is None:
                self.on_filtered(group.group_id, lesson_id, trainable.rollouts[0].episode_reward)
            else:
                self.add(WaitingGroup.of(kept, deadline_step), durable)
            return None

    def arrived_under(self, step: int) -> list[Experience]:
        """The last arrivals of which version `step` sampled the first token, the newest first."""
        with self.changed:
            return [each for each in reversed(self.arrived) if each.oldest_weight_step == step]

    def add(self, group: WaitingGroup, durable: bool = False, spent: Sequence[Experience] = ()) -> None:
        """Takes a judged group; one that is not durable yet is trainable later.

        Args:
            group: With the members that may be trained.
            durable: Its file has its name.
            spent: Members of a restored group that may not be trained any more: its baseline knows them.
        """
        with self.changed:
            self.waiting.add(group)
            self.unused += sum(not group.uses_of(rollout.rollout_id) for rollout in group.rollouts)
            if durable:
                self._make_trainable(group, self.makers.add_restored(group, spent))
            while (oldest := self.waiting.over_capacity(group.env_name)) is not None:
                reason = f"more than {self._capacity} rollouts of {group.env_name} wait (replay.capacity)"
                for rollout in list(oldest.rollouts):
                    self._lose(oldest, rollout, Verdict("evicted", reason))

    def _add_to_makers(self, group_ids: list[str]) -> None:
        """Their file has its name. A group that has left meanwhile is passed over."""
        for group_id in group_ids:
            if group_id in self.waiting:
                group = self.waiting.get(group_id)
                self._make_trainable(group, self.makers.add(group))
        self.changed.notify_all()

    def _make_trainable(self, group: WaitingGroup, dropped: Sequence[Dropped]) -> None:
        group.offered = True
        (self.fresh if group.first_use is None else self.reusable)[group.group_id] = group
        self._drop_all(dropped)
        self.on_trainable(group.group_id)

    # --- batches out ---------------------------------------------------------------------------------------------

    def judge_arrivals(self) -> None:
        """Lets the batch makers decide about what they got since the last batch."""
        with self.changed:
            self._drop_all(self.makers.judge_arrivals())

    def draw(
        self, step: int, shares: Counter[AnyMaker], is_stuck: Callable[[], bool] = lambda: False
    ) -> FormedBatch | None:
        """The batch of update `step`, its uses counted; None where a batch maker has too little for one.

        Args:
            step: The update.
            shares: What each maker is asked for, in its units.
            is_stuck: Whether no more can come before this batch: then makers have to do with what is there.

        Raises:
            RunFailed: the ledger does not close.
        """
        examples: list[TrainingExample] = []
        taken: list[tuple[WaitingGroup, Experience]] = []
        metrics: dict[str, float] = {}
        planned: Counter[str] = Counter()
        with self.changed:
            for maker in sorted(shares, key=is_paced):  # only a plain one may have too little: then nothing is drawn
                at_least = 1 if is_stuck() else shares[maker]
                drawn, dropped = self.makers.draw(maker, step, shares[maker], at_least)
                if not drawn and not taken and not is_paced(maker) and not is_stuck():
                    return None
                live = [(e, members) for e in drawn if (members := self._members(e, planned)) is not None]
                self.drops.dead_in_batch += len(drawn) - len(live)
                examples += [example for example, _ in live]
                mine = [member for _, members in live for member in members]
                taken += mine
                if drawn:
                    metrics |= batch_metrics(maker, drawn)
                self._drop_all(dropped)
                if takes_whole_groups(maker):
                    self._leave_out(step, mine)
            return self._take(step, examples, taken, metrics) if examples else None

    def wait_for_batch(
        self,
        form: Callable[[bool], FormedBatch | None],
        suffices: Callable[[], bool],
        wanted: Callable[[], bool],
        timeout_s: float,
    ) -> TrainingBatch[Any] | None:
        """Tries until there is a batch, woken by news; its file is written then. None at the timeout.

        Args:
            form: Forms the batch, the lock held; takes whether the learner waits for it.
            suffices: Whether what is in no file yet would complete it.
            wanted: Whether the learner waits for it by now: only then is a file written before it is due.
            timeout_s: Longest wait.
        """
        started = time.monotonic()
        while True:
            self.changed.raise_if_over()
            hurry = wanted()
            if self.sealer.due or (hurry and self._can_seal(suffices)):
                self.sealer.seal()
            with self.changed:
                self.changed.raise_if_over()
                formed = form(hurry)
                remaining = started + timeout_s - time.monotonic()
                if formed is None and remaining <= 0:
                    return None
                if formed is None and wanted() == hurry and not (hurry and self._can_seal(suffices)):
                    self.changed.wait(min(remaining, RECHECK_S))
            if formed is not None:
                return self.write_intent(formed, time.monotonic() - started)

    def write_intent(self, formed: FormedBatch, wait_s: float) -> TrainingBatch[Any]:
        """Writes the batch's file; waits while the disk is full.

        Args:
            formed: The batch.
            wait_s: How long the learner waited for it.

        Raises:
            OSError: the disk refuses it for another reason.
            RunFailed: the disk has been full for too long.
        """
        rollouts = [rollout for _, rollout in self._in_training[formed.step]]
        examples, numbers = self.complete(formed.examples, rollouts)
        batch_id = f"batch_{uuid.uuid4().hex}_{int(self._clock() * 1000)}"
        space = self.sealer.space
        while True:
            try:
                self.store.write_batch(batch_id, examples, formed.step, self.ledger.lineage)
                break
            except OSError as error:
                space.note(error)
            self.changed.raise_if_over()
            time.sleep(min(space.retry_in_s, RECHECK_S))
        space.note_written()
        metrics = {**formed.metrics, **self.store.metrics(), **numbers, "replay/wait_s": wait_s}
        return TrainingBatch(batch_id, formed.step, examples, formed.group_ids, metrics)

    def finish(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used once more.

        Raises:
            RunFailed: it has no batch, or was finished before.
        """
        with self.changed:
            if step not in self._in_training:
                raise RunFailed(f"update {step} cannot be finished: it has no batch, or was finished before")
            used_up: list[str] = []
            for group, rollout in self._in_training.pop(step):
                self._pending[rollout.rollout_id] -= 1
                if self._pending[rollout.rollout_id]:
                    continue
                del self._pending[rollout.rollout_id]
                if all(member is not rollout for member in group.rollouts):
                    used_up.append(rollout.rollout_id)
            self.ledger.settle(used_up, "trained", step, f"trained by update {step}")
            self.changed.notify_all()

    def advance_to(self, step: int) -> None:
        """The learner holds version `step`. What is no longer fresh stays until `drop_expired`.

        Raises:
            RunFailed: the step lies behind the present one.
        """
        with self.changed:
            if step < self.current:
                raise RunFailed(f"current step {step} lies behind {self.current}: versions only grow")
            self.current = step
            self.changed.notify_all()

    def finish_before(self, step: int) -> None:
        """Updates before `step` were applied."""
        with self.changed:
            for update in [update for update in self._in_training if update < step]:
                self.finish(update)
            self.ledger.check()

    def _can_seal(self, suffices: Callable[[], bool]) -> bool:
        with self.changed:
            return suffices() and len(self.sealer) > 0 and not self.sealer.space.retry_in_s

    def _members(self, example: TrainingExample, planned: Counter[str]) -> list[tuple[WaitingGroup, Experience]] | None:
        """Whom an example is made of; None where one of them is not live any more, or has its uses in this batch."""
        members: list[tuple[WaitingGroup, Experience]] = []
        for rollout_id in example.rollout_ids:
            member = self.waiting.find(rollout_id)
            if member is None or member[0].uses_of(rollout_id) + planned[rollout_id] >= self._uses:
                return None
            members.append(member)
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
        metrics |= self.drops.of_batch(step, rollouts := [rollout for _, rollout in taken])
        metrics |= self.filters.take_metrics(rollouts)
        metrics["replay/reused"] = float(len(groups) - len(first))
        for group_id in first:
            groups[group_id].first_use = step
            if self.fresh.pop(group_id, None) is not None:
                self.reusable[group_id] = groups[group_id]
        self._in_training.setdefault(step, []).extend(taken)
        for group, rollout in taken:
            self._pending[rollout.rollout_id] += 1
            uses = group.count_use(rollout.rollout_id)
            self.unused -= uses == 1
            if uses >= self._uses:
                self._retire(group, rollout)
        self.ledger.check()
        return FormedBatch(step, tuple(examples), tuple(groups), tuple(first), metrics)

    # --- leaving -------------------------------------------------------------------------------------------------

    def settle(self, ids: Collection[str], fate: Fate, reason: str) -> None:
        """Rollouts meet their fate."""
        with self.changed:
            self.ledger.settle(ids, fate, self.ledger.update, reason)
            self.drops.note(fate, len(ids), reason)

    def log_drops(self, *, at_once: bool) -> None:
        """Tells `logging` what left untrained, a count for each cause; not too often, unless `at_once`."""
        if self.logs_drops:
            with self.changed:
                line = self.drops.take_line(self._clock(), at_once)
            if line is not None:  # a handler may be slow: the lock is not held
                logger.log(*line)

    def drop_expired(self, step: int = 0) -> None:
        """Drops what is no longer fresh, or will not be at update `step`."""
        with self.changed:
            for group, rollout, verdict in self.waiting.expired(max(self.current, step), self._clock()):
                self._lose(group, rollout, verdict)

    def staleness_of(self, rollout: Experience) -> Verdict | None:
        """Why a rollout is not fresh now; None where it is."""
        assert rollout.metadata is not None
        return self._rules.of(rollout.lesson_id).judge(rollout.metadata, self.current, self._clock())

    def survives(self, version: WeightVersion) -> bool:
        """Whether a version's weights are those that the present lineage had at that step."""
        return self.store.lineages.survives(version, self.ledger.lineage)

    def give_up(self, groups: Sequence[WaitingGroup]) -> None:
        """Makes room for others where the batch makers will not have what waits."""
        with self.changed:
            for group in groups:
                maker = type(self.makers.of(group.env_name)).__name__
                reason = f"the batch maker {maker} makes no batch of what waits, and no more can come before it does"
                for rollout in list(group.rollouts):
                    self.settle([rollout.rollout_id], "filtered", reason)
                    self._retire(group, rollout)
                if group.first_use is None:
                    self.on_gone(group.group_id, "filtered", f"lesson {group.lesson_id}: {reason}")

    def _drop_all(self, dropped: Iterable[Dropped]) -> None:
        for rollout_id, fate, reason in dropped:
            member = self.waiting.find(rollout_id)
            if member is not None:
                self._lose(*member, Verdict(fate, reason))

    def _lose(self, group: WaitingGroup, rollout: Experience, verdict: Verdict) -> None:
        """A rollout leaves, not because a batch took it."""
        uses = group.uses_of(rollout.rollout_id)
        if uses and not self._pending[rollout.rollout_id]:
            reason = f"used {'once' if uses == 1 else f'{uses} times'}, then {verdict.fate}: {verdict.reason}"
            self.ledger.settle([rollout.rollout_id], "trained", max(0, self.current - 1), reason)
        elif not uses:
            self.settle([rollout.rollout_id], verdict.fate, verdict.reason)
        self._retire(group, rollout)
        if group.rollouts or group.first_use is not None:
            return
        if verdict.fate == "filtered":
            self.on_filtered(group.group_id, group.lesson_id, rollout.episode_reward)
        else:
            reason = f"lesson {group.lesson_id}: {verdict.fate}, {verdict.reason}"
            self.on_gone(group.group_id, verdict.fate, reason)

    def _retire(self, group: WaitingGroup, rollout: Experience) -> None:
        self.unused -= not group.uses_of(rollout.rollout_id)
        if group.offered:
            self.makers.remove(group, rollout)
        self.waiting.drop(group, rollout)
        if not group.rollouts:
            self.fresh.pop(group.group_id, None)
            self.reusable.pop(group.group_id, None)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, list[str]]:
        """Rollout ids here by group, those in training included."""
        groups: dict[str, list[str]] = {}
        with self.changed:
            for rollout_id in dict.fromkeys(self._ids()):
                groups.setdefault(rollout_id.rpartition("/")[0], []).append(rollout_id)
        return groups

    def used(self) -> dict[str, list[str]]:
        """Of `groups`, those whose first use lies behind the run: its update was applied."""
        confirmed: set[str] = set()
        with self.changed:
            for group in [*self.waiting, *(group for taken in self._in_training.values() for group, _ in taken)]:
                if group.first_use is not None and group.first_use not in self._in_training:
                    confirmed.add(group.group_id)
            return {group_id: ids for group_id, ids in self.groups().items() if group_id in confirmed}

    def state(self, alive: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """What of the pool belongs into a checkpoint, inside `boundary`; what was decided is flushed to the disk first.

        Args:
            alive: Rollouts that a resume brings back without a ticket, by group.
        """
        with self.changed:
            self.ledger.sync()
            self._expendable = self._find_expendable()
            recorded = sorted(self.recorded.union(self.groups()))
            return {"lineage": self.ledger.lineage, "recorded": recorded, "alive": alive}

    def checkpoint_saved(self) -> None:
        """The checkpoint of the last `state` has its name: files that nobody can need any more are deleted."""
        expendable, self._expendable = self._expendable, ()
        self.store.expire(expendable)

    def check_ledger(self, more_ids: Iterable[str] = ()) -> None:
        """Compares the ledger with what is actually held, id by id.

        Args:
            more_ids: Live rollouts that are not here: in flight, or to be claimed.

        Raises:
            RunFailed: they differ; the message names rollouts.
        """
        with self.changed:
            self.ledger.check({*self._ids(), *more_ids})

    def close(self) -> None:
        """Wakes everybody with `Stopped`; what was delivered is still stored.

        A disk that refuses it now ends the run with that error instead; the groups' tickets are issued again.
        """
        self.changed.close()
        try:
            self.sealer.seal(blocking=False)  # it may run in a signal handler, and must not wait
        except Exception as error:  # whatever a disk or a remote store raises, the others must be stopped too
            self.changed.end_with(RunFailed(f"the last rollouts could not be stored: {error}"))
        finally:
            self.sealer.stop()

    def _find_expendable(self) -> tuple[str, ...]:
        """Files that none of the kept checkpoints can need, this one included."""
        self._kept.append((self._clock(), frozenset(self.ledger.live_groups())))
        if len(self._kept) < (self._kept.maxlen or 1):
            return ()  # an older one may be of an earlier life, and nobody knows what it needs
        return self.store.expendable(frozenset[str]().union(*(live for _, live in self._kept)), self._kept[0][0])

    def _ids(self) -> Iterator[str]:
        """Every rollout here, those in training included; some twice."""
        for taken in self._in_training.values():
            yield from (rollout.rollout_id for _, rollout in taken)
        for group in self.waiting:
            yield from (rollout.rollout_id for rollout in group.rollouts)

    # --- what others see -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of this moment; those of files are `ExperienceStore.metrics`."""
        with self.changed:
            counts = self.ledger.snapshot()
            return {
                "replay/size": float(self.waiting.rollouts),
                "replay/in_flight": float(counts["in_flight"]),
                "replay/overdue_groups": float(self.sealer.overdue),
                **{f"replay/ledger/{state}": float(count) for state, count in counts.items()},
            }

    def describe_disk(self) -> str:
        """In words, for how long there has been no room on the disk; empty where there is."""
        return self.sealer.space.describe() or self.ledger.space.describe()


def _ignore(*told: object) -> None:
    """Nobody listens."""

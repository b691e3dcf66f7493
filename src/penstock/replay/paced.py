"""The paced replay buffer: every update has its batch, of groups that tickets admitted before they were generated.

An update takes every group that is due, then the oldest finished ones; `penstock.replay.tickets` states the rule. At
staleness zero groups are ingested in ticket order, so that nothing downstream depends on which finished first; groups
that come early are held until their turn. What the run's last life had finished of a ticket that is drawn again is
claimed instead of being generated again. All of it happens under the issuer's lock, which is also the pool's.

A delivered group waits in front of ingestion until it is known that its engines served what the learner made
(`penstock.replay.digests`): counted as waiting, and in its turn at staleness zero. News of digests wakes it; after
`VERIFY_S`, and when its engine is dead, it is invalid.

Not covered: storage, freshness, uses and fates (`training_pool`); whoever takes what arrives without tickets
(`penstock.replay.ReplayBuffer`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from penstock.replay.config import ReplayBufferConfig
from penstock.replay.digests import WeightDigests
from penstock.replay.draws import Place, place_of
from penstock.replay.freshness import Verdict
from penstock.replay.history import History
from penstock.replay.ledger import TicketKey, rollout_ids
from penstock.replay.outstanding import Outstanding
from penstock.replay.recovery import CheckpointView, abandon_earlier, restore_pool
from penstock.replay.store import ExperienceStore
from penstock.replay.tickets import RestoredGroup, TicketIssuer
from penstock.replay.training_pool import FormedBatch, TrainingPool
from penstock.replay.waiting_groups import AnyMaker
from penstock.types import (
    Clock,
    ConfigError,
    Experience,
    Fate,
    NoProgressError,
    RolloutBatch,
    RolloutGroup,
    RunFailed,
    Ticket,
    TrainingBatch,
)

VERIFY_S = 60.0
"""So long a group waits for the digests of what its engines served."""


class PacedReplayBuffer:
    """Implements `penstock.types.RolloutSink`, `BatchSource` and `Checkpointable`. Thread-safe.

    Args:
        config: Pace and limits.
        store: Where groups and batches are written.
        makers: Choose batches; several must be bound to different environments.
        issuer: Admits what may be delivered; it serves one buffer.
        clock: Unix seconds.
        keep_checkpoints: How many checkpoints stay: what one of them may need is not deleted.

    Attributes:
        pool: The groups.
        digests: What the learner made, and engines serve.

    Raises:
        ConfigError: `config` limits how much may wait.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        store: ExperienceStore,
        makers: AnyMaker | Sequence[AnyMaker],
        issuer: TicketIssuer,
        clock: Clock = time.time,
        keep_checkpoints: int = 1,
    ) -> None:
        if config.max_waiting is not None:
            raise ConfigError(f"replay.max_waiting is {config.max_waiting}, but tickets limit what waits: leave it out")
        self._config = config
        self._issuer = issuer
        self._clock = clock
        self._changed = issuer.changed
        self.pool = TrainingPool(config.when_paced(), store, makers, issuer.ledger, clock, keep_checkpoints)
        self.pool.on_gone, self.pool.on_filtered = self._on_gone, self._on_filtered
        self.pool.on_trainable = issuer.set_trainable
        issuer.bind(self._claim, self._ingest_ready)
        self.digests = WeightDigests(self._changed, issuer.lineage)
        self.digests.on_news = self._on_digests
        self._unverified: dict[str, float] = {}
        self._held: dict[str, tuple[RolloutGroup[Experience], Outstanding]] = {}
        self._claims: dict[TicketKey, RolloutGroup[Experience]] = {}
        self._claimed: dict[str, RolloutGroup[Experience]] = {}
        self._places: Mapping[str, Place] = {}
        self._filtered: Counter[str] = Counter()
        self._filtered_rewards: dict[str, float] = {}
        self._waiting_since: float | None = None

    # --- rollouts in ---------------------------------------------------------------------------------------------

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """Takes groups one by one; those of unknown or aborted tickets are refused and counted.

        Raises:
            Stopped: the buffer was closed.
        """
        for group in [group for batch in batches for group in batch.groups]:
            with self._changed:
                self.pool.sealer.await_entry()
                self._deliver(group)
                self._changed.notify_all()
                cohort_is_in = self._config.synchronous and self._issuer.next_turn() is None
            self.pool.sealer.note_delivery(hurry=cohort_is_in)
            self.pool.log_drops(at_once=False)

    def is_stored(self, group_id: str) -> bool:
        """Whether a group that was delivered is in a file by now, or was refused."""
        with self._changed:
            return not (group_id in self._held or self.pool.sealer.holds(group_id))

    def flush(self) -> None:
        """Writes the file of what waits for one, which is kept for the next try where the disk refuses (OSError)."""
        self.pool.sealer.seal()

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`; called before that is published. Drops what is no longer fresh.

        Raises:
            RunFailed: the step lies behind the present one.
        """
        with self._changed:
            self.pool.advance_to(step)
            self.pool.drop_expired()
            self._expire_claims()
            self.digests.drop_before(step - self._config.longest_step_delay)
        self.pool.log_drops(at_once=True)
        if self.pool.sealer.due:
            self.pool.sealer.seal()

    def _deliver(self, group: RolloutGroup[Experience]) -> None:
        entry = self._issuer.accept(group.group_id)
        if entry is None:
            self._issuer.late_deliveries += 1
            reason = "their ticket is not outstanding: unknown, aborted, or delivered before"
            self.pool.drops.note("late", len(group.rollouts), reason)
            return
        entry.phase = "delivered"
        self._held[group.group_id] = (group, entry)
        if self._config.synchronous:  # though it may not be its turn; else the next line asks
            self._faults_of(group.group_id)  # from now on it waits for digests, where those are not in
        self._ingest_ready()

    def _ingest_ready(self) -> None:
        """Ingests what was delivered or claimed and is verified; at staleness zero, only whose turn it is."""
        for group_id in [group_id for group_id in self._claimed if group_id not in self._held]:
            entry = self._issuer.outstanding.get(group_id)
            if entry is not None:
                self._held[group_id] = (self._claimed[group_id], entry)
        if not self._config.synchronous:
            for group_id in list(self._held):
                self._ingest_if_verified(group_id)
            return
        while (turn := self._issuer.next_turn()) is not None and self._ingest_if_verified(turn):
            pass

    def _ingest_if_verified(self, group_id: str) -> bool:
        """Returns whether it was there and was ingested."""
        faults = self._faults_of(group_id) if group_id in self._held else None
        if faults is not None:
            self._ingest(group_id, faults)
        return faults is not None

    def _faults_of(self, group_id: str) -> dict[str, Verdict] | None:
        """By rollout, what is wrong with the weights behind it; None while that is waited for."""
        if group_id in self._claimed:
            return {}  # it was verified before it was stored
        faults: dict[str, Verdict] = {}
        now = self._clock()
        since = self._unverified.get(group_id, now)
        for rollout in self._held[group_id][0].rollouts:
            proof = self.digests.proof_of(rollout)
            if proof == "unknown" and now - since >= VERIFY_S:
                proof = Verdict("invalid", f"{self.digests.missing_of(rollout)} did not come within {VERIFY_S:g} s")
            if proof == "unknown":
                if group_id not in self._unverified:
                    self._unverified[group_id] = now
                    self.pool.ledger.deliver(group_id)
                return None
            if proof != "verified":
                faults[rollout.rollout_id] = proof
        return faults

    def _on_digests(self) -> None:
        """News of what engines serve: groups that waited for it may be ingested."""
        if self._unverified and not self._changed.is_over:
            self._ingest_ready()
            self._changed.notify_all()

    def _ingest(self, group_id: str, faults: Mapping[str, Verdict]) -> None:
        group, entry = self._held.pop(group_id)
        entry.phase = "waiting"
        durable = self._claimed.pop(group_id, None) is not None
        expected = [r.rollout_id for r in group.rollouts] if durable else rollout_ids(group_id, entry.size)
        failure = self.pool.ingest(
            group,
            expected,
            entry.ticket.lesson_id,
            deadline_step=entry.ticket.deadline_step,
            durable=durable,
            waiting=self._unverified.pop(group_id, None) is not None,
            faults=faults,
        )
        if failure is not None:
            self._issuer.free(group_id, failure)

    def _on_gone(self, group_id: str, fate: Fate, reason: str) -> None:
        self._issuer.free(group_id, reason, finished=fate == "filtered")

    def _on_filtered(self, group_id: str, lesson_id: str, reward: float) -> None:
        """A group without signal is gone; where nothing else comes any more, the run ends."""
        self._issuer.free(group_id)
        self._filtered[lesson_id] += 1
        self._filtered_rewards[lesson_id] = self._filtered_rewards.get(lesson_id, 0.0) + reward
        if self._filtered.total() >= self._config.filtered_limit:
            self._changed.end_with(RunFailed(self._describe_filtered()))

    # --- groups of an earlier life -------------------------------------------------------------------------------

    def _claim(self, ticket: Ticket) -> RestoredGroup | None:
        """A group that need not be generated again; one that could not be trained in time is given up as stale.

        Where tickets were drawn in another order than in the life that made it, it may answer another problem.
        """
        group = self._claims.pop((ticket.lesson_id, ticket.index), None)
        if group is None:
            return None
        ids = [rollout.rollout_id for rollout in group.rollouts]
        if self._places.get(group.group_id) != place_of(ticket):
            self.pool.settle(ids, "rolled_back", "the ticket of its index is for another problem since the resume")
            return None
        oldest_step = min(r.metadata.weight_step for r in group.rollouts if r.metadata is not None)
        due = min(ticket.deadline_step, oldest_step + self._config.step_delay(ticket.lesson_id))
        if not self._issuer.outstanding.fits(due, self._issuer.update):
            self.pool.settle(ids, "stale_step", f"due at update {due}: no place is left before it")
            return None
        self._claimed[group.group_id] = group
        return RestoredGroup(group.group_id, len(group.rollouts), due)

    def _expire_claims(self) -> None:
        """Gives up groups that nobody will claim while they are fresh."""
        for key, group in list(self._claims.items()):
            verdicts = [self.pool.staleness_of(rollout) for rollout in group.rollouts]
            if all(verdicts):
                del self._claims[key]
                for rollout, verdict in zip(group.rollouts, verdicts, strict=True):
                    assert verdict is not None
                    self.pool.settle([rollout.rollout_id], verdict.fate, verdict.reason)

    def _unpooled_ids(self) -> Iterator[str]:
        """Rollouts that are live although the pool does not hold them."""
        for entry in self._issuer.outstanding:
            name = entry.ticket.ticket_id
            if name in self._claimed:
                yield from (rollout.rollout_id for rollout in self._claimed[name].rollouts)
            elif entry.phase in ("running", "returned", "delivered"):
                yield from rollout_ids(name, entry.size)
        for group in self._claims.values():
            yield from (rollout.rollout_id for rollout in group.rollouts)

    # --- batches out ---------------------------------------------------------------------------------------------

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of update `step`; `finish_update` must follow once it was applied.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the buffer was closed.
            RunFailed: no batch can come: too many groups were filtered, or failed; or another update is next.
        """
        batch = self.await_batch(step, timeout_s, lambda: True)
        if batch is None:
            raise NoProgressError(f"no batch within {timeout_s:.1f} s: {self.waiting_for()}")
        return batch

    def await_batch(self, step: int, timeout_s: float, wanted: Callable[[], bool]) -> TrainingBatch[Any] | None:
        """`next_batch` for whoever works ahead of the learner; None at the timeout.

        Args:
            step: The update.
            timeout_s: Longest wait.
            wanted: Whether the learner waits for it by now. Only then is a file written before it is due, and are
                stragglers aborted. Call `wake` when it changes.
        """
        return self.pool.wait_for_batch(lambda hurry: self._form(step, hurry), self._suffices, wanted, timeout_s)

    def peek(self, step: int) -> None:
        """None: a batch is formed when it is asked for."""

    def try_next_batch(self, step: int) -> TrainingBatch[Any] | None:
        """`next_batch` without waiting; None where the batch cannot be formed yet."""
        return self.await_batch(step, 0.0, lambda: True)

    def wake(self) -> None:
        """Those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def finish_update(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used, and their fates follow.

        Raises:
            RunFailed: it has no batch, or was finished before.
        """
        with self._changed:
            self.pool.finish(step)
            self._issuer.finish(step)

    def _suffices(self) -> bool:
        """Whether a batch has enough groups with what is in no file yet, or everything is back and waits for that."""
        ingested, held = self._issuer.outstanding.ingested, len(self._issuer.outstanding)
        return ingested >= self._config.groups_per_batch or ingested == held or bool(self.pool.reusable)

    def _form(self, step: int, hurry: bool) -> FormedBatch | None:
        self.pool.drop_expired(step)
        if self._unverified:  # some may have waited for too long
            self._ingest_ready()
        if step != self._issuer.update:
            raise RunFailed(f"the batch of update {step} was asked for, but {self._issuer.update} is next")
        if hurry:  # a learner that waits does not wait for stragglers for ever
            self._waiting_since = self._clock() if self._waiting_since is None else self._waiting_since
            self._issuer.abort_stragglers(self._waiting_since)
        formed = self._draw(step, hurry)
        if formed is not None:
            self._waiting_since = None
            self._filtered.clear()
            self._filtered_rewards.clear()
            formed.metrics.update(self._issuer.take(step, formed.first_uses))
            formed.metrics.update(self._numbers())
        return formed

    def _draw(self, step: int, hurry: bool) -> FormedBatch | None:
        """The batch of an update; None while a group that it owes is missing, or too few wait."""
        pool, issuer, outstanding = self.pool, self._issuer, self._issuer.outstanding
        pool.judge_arrivals()
        wanted = self._config.groups_per_batch
        short = max(0, wanted - outstanding.trainable)
        # At staleness zero nothing is used again: whether a batch would have to wait depends on timing.
        may_reuse = hurry and not self._config.synchronous
        if outstanding.missing(step) or short > (len(pool.reusable) if may_reuse else 0):
            return None
        due = outstanding.must_take(step)
        for group in [pool.fresh[group_id] for group_id in due]:
            if group.deadline_step is None or group.deadline_step > step:
                pool.makers.set_deadline(group, step)
        oldest = dict.fromkeys([*due, *pool.fresh])
        chosen = [pool.fresh[group_id] for group_id in islice(oldest, max(wanted, len(due)))]
        chosen += islice(pool.reusable.values(), short)
        formed = pool.draw(step, pool.makers.shares_of(chosen), issuer.is_stuck)
        if formed is None and issuer.is_stuck():
            pool.give_up(chosen)
        return formed

    # --- what others see -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """``replay/…`` and ``data/…`` numbers of this moment."""
        return {**self._numbers(), **self.pool.store.metrics()}

    def _numbers(self) -> dict[str, float]:
        with self._changed:
            return {
                **self.pool.metrics(),
                **self._issuer.metrics(),
                "replay/outstanding_groups": float(len(self._issuer.outstanding)),
                "replay/unverified": float(sum(self._held[group_id][1].size for group_id in self._unverified)),
                "replay/late_deliveries": float(self._issuer.late_deliveries),
            }

    def waiting_for(self) -> str:
        """In words, what the next update waits for: the lessons whose groups run, the oldest, what must come first."""
        with self._changed:
            issuer, full = self._issuer, self.pool.describe_disk()
            phases = Counter(entry.phase for entry in issuer.outstanding)
            missing = [f"{count} due by update {due}" for due, count in issuer.outstanding.missing(issuer.update)]
            parts = [
                f"update {issuer.update} needs {self._config.groups_per_batch} groups, "
                f"{issuer.outstanding.trainable} are ready",
                f"running: {self._describe_running()}",
                f"not yet taken by a worker: {phases['pending'] + phases['returned']}",
                f"waiting for digests of their engines' weights: {len(self._unverified)}",
                f"being stored: {phases['waiting']}",
                f"must come first: {', '.join(missing) or 'nothing'}",
                f"outstanding {len(issuer.outstanding)} of at most {issuer.limit}",
                f"serving version {issuer.serving_step}",
            ]
            if issuer.last_failure:
                parts.append(f"failed since the last batch: {issuer.failed_since_batch}, last {issuer.last_failure}")
            return "; ".join([full, *parts] if full else parts)

    def _describe_running(self) -> str:
        running = [entry for entry in self._issuer.outstanding if entry.phase == "running"]
        if not running:
            return "nothing"
        counts = Counter(entry.ticket.lesson_id for entry in running)
        lessons = ", ".join(f"{lesson} {count}" for lesson, count in sorted(counts.items()))
        oldest, now = running[0], self._clock()
        age = now - (oldest.since if oldest.since is not None else now)
        return f"{lessons} (oldest {oldest.ticket.ticket_id}, for {age:.1f} s)"

    def _describe_filtered(self) -> str:
        """What was filtered while a batch waited, and what to do about it."""
        lessons = ", ".join(
            f"{lesson} ({count} groups, mean reward {self._filtered_rewards[lesson] / count:.3g})"
            for lesson, count in sorted(self._filtered.items())
        )
        cause, remedy = self.pool.filters.describe()
        return (
            f"{self._filtered.total()} groups were filtered while one batch waited "
            f"(replay.max_filtered_groups_per_batch): {cause}. Lessons: {lessons}. What helps: {remedy}"
        )

    def check_ledger(self) -> None:
        """Compares the ledger with what is actually held, id by id; done at every checkpoint.

        Raises:
            RunFailed: they differ; the message names rollouts.
        """
        with self._changed:
            self.pool.check_ledger(self._unpooled_ids())

    def close(self) -> None:
        """Wakes everybody with `Stopped`; what was delivered is still stored.

        A disk that refuses it now ends the run with that error instead; the groups' tickets are issued again.
        """
        self.pool.close()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def boundary(self) -> AbstractContextManager[None]:
        """Nothing is admitted, ingested or told to the curriculum inside: take checkpoint states in it.

        All that was delivered is stored; a full disk is waited for before.

        Raises:
            RunFailed: the disk has been full for too long.
        """
        return self.pool.sealer.boundary()

    def state(self) -> dict[str, Any]:
        """What belongs into a checkpoint beside the issuer's; what was decided is flushed to the disk first."""
        with self.boundary():
            self.check_ledger()
            return self.pool.state(self.pool.used())

    def checkpoint_saved(self) -> None:
        """The checkpoint of the last `state` has its name: files that nobody can need any more may go."""
        self.pool.checkpoint_saved()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Rebuilds ledger and pool from the run's files and a `state`.

        The issuer, with the new lineage, must have been restored before, and nothing may have been generated.

        Raises:
            CheckpointError: the state does not fit.
            RunFailed: what the files say and what was brought back differ.
        """
        issuer = self._issuer

        def view(history: History, alive: Mapping[str, set[str]]) -> CheckpointView:
            self._places = history.places
            return CheckpointView(
                issuer.update,
                issuer.restored_tickets(),
                alive,
                issuer.key_of,
                issuer.was_drawn,
                self.pool.survives,
            )

        with self._changed:
            self._claims = restore_pool(self.pool, state, view)
            claimed = {group.group_id for group in self._claims.values()}
            self._places = {name: place for name, place in self._places.items() if name in claimed}
            issuer.readmit()
            self.check_ledger()

    def begin_anew(self) -> None:
        """`restore` where the run ended before its first checkpoint: all that earlier lives started is settled."""
        abandon_earlier(self.pool, self._issuer.key_of)

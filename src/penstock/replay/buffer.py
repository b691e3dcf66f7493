"""The replay buffer: takes rollouts over, makes them durable, owns freshness, capacity, uses and fates.

The way of a group: delivered → ingested (`intake`) → sealed to a file (`sealing`) → offered to the batch maker, taken
by an update, trained (`stock`). This module holds the lock, the waits and the checkpoint.

Invariants, tested with random schedules: no rollout is trained before its file has its name, after its
deadline, or more often than `max_samples`; every rollout that was started is in exactly one state; every wait is
bounded and says what it waits for. State is guarded by the issuer's condition; files are written outside it.

Not covered: which of the fresh groups make a batch, and with what advantage (`penstock.batch.BatchMaker`).
"""

import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.batch import BatchMaker
from penstock.replay.config import ReplayConfig
from penstock.replay.freshness import FreshnessWindow
from penstock.replay.inspection import Inspector
from penstock.replay.intake import CurriculumHook, Intake
from penstock.replay.issuer import TicketIssuer
from penstock.replay.ledger import Ledger
from penstock.replay.recovery import CheckpointView, RecoveryPlan, plan_recovery
from penstock.replay.sealing import Sealer
from penstock.replay.stock import FormedBatch, Stock
from penstock.replay.store import ExperienceStore
from penstock.replay.tally import Tally
from penstock.replay.wait_report import describe_wait
from penstock.types import (
    CheckpointError,
    Clock,
    NoProgressError,
    RolloutBatch,
    RolloutGroup,
    RunFailed,
    TrainingBatch,
    WeightVersion,
)

_NAP_S = 1.0
"""Longest sleep of a waiting learner before it looks at clocks (stragglers, staleness) again; news wake it."""


class ReplayBuffer:
    """Implements `penstock.types.RolloutSink`, `BatchSource` and `Checkpointable`. Thread-safe.

    Args:
        config: Pace and limits.
        store: Where groups and batches are written.
        issuer: Admits groups; the buffer attaches itself to it.
        ledger: The issuer's.
        maker: Chooses batches.
        clock: Unix seconds.
        curriculum_hook: Called once per ingested group, in ticket order at staleness zero, the lock held.
    """

    def __init__(
        self,
        config: ReplayConfig,
        store: ExperienceStore,
        issuer: TicketIssuer,
        ledger: Ledger,
        maker: BatchMaker,
        clock: Clock = time.time,
        curriculum_hook: CurriculumHook | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._issuer = issuer
        self._ledger = ledger
        self._clock = clock
        self._changed = issuer.changed
        window = FreshnessWindow(config.step_delay, config.timestamp_delay_s)
        tally = Tally(config)
        self._stock = Stock(config, window, issuer, ledger, maker, tally)
        self._sealer = Sealer(store, self._changed, config.seal_rollouts, config.seal_s, clock)
        self._intake = Intake(
            config,
            issuer,
            ledger,
            self._stock,
            self._sealer,
            tally,
            Inspector(window, self._survives),
            clock,
            curriculum_hook,
        )
        self._waiting_since: float | None = None
        issuer.attach(self._intake)

    # --- rollouts in ---------------------------------------------------------------------------------------------

    def add_batches(self, batches: Sequence[RolloutBatch]) -> None:
        """See `RolloutSink.add_batches`. Groups of unknown or aborted tickets are refused and counted.

        Raises:
            Stopped: the buffer was closed.
        """
        for batch in batches:
            for group in batch.groups:
                with self._changed:
                    self._issuer.raise_if_over()
                    self._intake.deliver(group)
                    self._changed.notify_all()
                    complete = self._config.synchronous and self._issuer.next_turn() is None
                if complete or self._sealer.due:
                    self._seal()

    def set_current_step(self, step: int) -> None:
        """The learner holds version `step`; called before that is published. Drops what is no longer fresh.

        Raises:
            RunFailed: the step lies behind the present one.
        """
        with self._changed:
            if step < self._stock.current:
                raise RunFailed(f"current step {step} lies behind {self._stock.current}: versions only grow")
            self._stock.current = step
            self._stock.drop_expired(self._clock())
            self._intake.expire_claims(self._clock())
            self._changed.notify_all()
        if self._sealer.due:
            self._seal()

    # --- batches out ---------------------------------------------------------------------------------------------

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch:
        """See `BatchSource.next_batch`; `finish_update` must follow once the update was applied.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the buffer was closed.
            RunFailed: no batch can come: too many groups were filtered, or failed.
        """
        started = time.monotonic()
        while True:
            self._seal()
            with self._changed:
                formed = self._form(step)
                remaining = started + timeout_s - time.monotonic()
                if formed is None and remaining <= 0:
                    raise NoProgressError(f"no batch within {timeout_s:.1f} s: {self.waiting_for()}")
                if formed is None and not len(self._sealer):  # else a delivery wants its file first
                    self._changed.wait(min(remaining, _NAP_S))
            if formed is not None:
                return self._write_intent(step, formed, time.monotonic() - started)

    def try_next_batch(self, step: int) -> TrainingBatch | None:
        """`next_batch` without waiting; None where the batch cannot be formed yet."""
        self._seal()
        with self._changed:
            formed = self._form(step)
        return None if formed is None else self._write_intent(step, formed, 0.0)

    def _form(self, step: int) -> FormedBatch | None:
        self._issuer.raise_if_over()
        if step != self._issuer.update:
            raise RunFailed(f"the batch of update {step} was asked for, but {self._issuer.update} is next")
        now = self._clock()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        self._stock.drop_expired(now)
        self._issuer.abort_stragglers(self._waiting_since)
        formed = self._stock.form_batch(step)
        if formed is not None:
            self._waiting_since = None
            self._ledger.check()
            formed.metrics.update(self.metrics())
        return formed

    def _write_intent(self, step: int, formed: FormedBatch, wait_s: float) -> TrainingBatch:
        batch_id = f"batch_{uuid.uuid4().hex}_{int(self._clock() * 1000)}"
        self._store.write_batch(batch_id, formed.examples, step, self._issuer.lineage)
        metrics = {**formed.metrics, "replay/wait_s": wait_s}
        return TrainingBatch(batch_id, step, formed.examples, formed.group_ids, metrics)

    def finish_update(self, step: int) -> None:
        """Update `step` was applied: its rollouts were used, and their fates follow."""
        with self._changed:
            if not self._stock.is_training(step):
                raise RunFailed(f"update {step} cannot be finished: it has no batch, or was finished before")
            self._stock.finish(step)
            self._issuer.finish(step)
            self._changed.notify_all()

    def _seal(self) -> None:
        self._sealer.seal(self._offer)

    def _offer(self, group_ids: list[str]) -> None:
        for group_id in group_ids:
            self._stock.offer(group_id)
        self._changed.notify_all()

    # --- what others see ------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """``replay/…`` numbers of this moment."""
        with self._changed:
            counts = self._ledger.snapshot()
            return {
                "replay/size": float(self._stock.waiting.rollouts),
                "replay/in_flight": float(counts["in_flight"]),
                "replay/outstanding_groups": float(len(self._issuer.outstanding)),
                "replay/late_deliveries": float(self._issuer.late_deliveries),
                **{f"replay/ledger/{state}": float(count) for state, count in counts.items()},
            }

    def waiting_for(self) -> str:
        """In words, what the next update waits for."""
        with self._changed:
            return describe_wait(self._issuer, self._config.groups_per_batch, self._clock())

    def check_ledger(self) -> None:
        """Compares the ledger with what is actually held, id by id; done at every checkpoint.

        Raises:
            RunFailed: they differ; the message names rollouts.
        """
        with self._changed:
            held = {r.rollout_id for group in self._stock.groups() for r in group.rollouts}
            self._ledger.check(held.union(self._intake.unsettled_ids()))

    @contextmanager
    def boundary(self) -> Generator[None, None, None]:
        """Nothing is admitted, ingested or told to the curriculum inside: take checkpoint states in it."""
        with self._sealer.paused():
            yield

    def close(self) -> None:
        """Wakes everybody with `Stopped`; what was delivered is still stored."""
        self._issuer.close()
        self._sealer.seal(self._offer, blocking=False)  # it may run in a signal handler, and must not wait

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See `Checkpointable.state`. What was delivered and what was decided is flushed to the disk first."""
        with self._sealer.paused():
            self._seal()
            self.check_ledger()
            self._ledger.sync()
            groups = list(self._stock.groups())
            return {
                "lineage": self._issuer.lineage,
                "recorded": sorted(self._intake.recorded.union(group.group_id for group in groups)),
                "reusable": sorted(group.group_id for group in groups if group.uses),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Checkpointable.restore`: rebuilds ledger and stock from the run's files (`recovery`).

        The issuer, with the new lineage, must have been restored before, and nothing may have been generated.
        """
        with self._changed:
            step = self._issuer.update
            try:
                recorded, reusable = set(state["recorded"]), set(state["reusable"])
                self._store.lineages.begin(self._issuer.lineage, int(state["lineage"]), step)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"the replay buffer's state does not fit: {error!r}") from error
            self._stock.current = step
            self._intake.recorded = recorded
            outstanding = self._issuer.restored_tickets()
            view = CheckpointView(step, outstanding, reusable, self._issuer.was_drawn, self._survives)
            plan = plan_recovery(self._store.history(), view)
            self._ledger.rebuild(plan.started, plan.fates, (i for ids in plan.waiting.values() for i in ids))
            self._ledger.log_fates(plan.decisions, step)
            self._bring_back(plan)
            self._issuer.readmit()

    def _bring_back(self, plan: RecoveryPlan) -> None:
        alive = {rollout_id for ids in plan.waiting.values() for rollout_id in ids}
        groups: dict[str, RolloutGroup] = {}
        for record in self._store.read_records(plan.waiting):
            if record.rollout.rollout_id in alive:
                known = groups.get(record.group_id)
                members = (record.rollout,) if known is None else (*known.rollouts, record.rollout)
                groups[record.group_id] = RolloutGroup(record.group_key, members, record.group_id)
        self._intake.claims = {key: groups[group_id] for key, group_id in plan.claims.items()}
        claimed = set(plan.claims.values())
        for group_id, group in groups.items():
            if group_id in claimed:
                continue
            uses = max(plan.uses[rollout.rollout_id] for rollout in group.rollouts)
            self._stock.add(group, self._stock.current, uses=max(uses, 1), durable=True)

    def _survives(self, version: WeightVersion) -> bool:
        return self._store.lineages.survives(version, self._issuer.lineage)

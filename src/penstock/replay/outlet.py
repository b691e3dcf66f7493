"""How an update comes to its batch: asked for, formed of what is stored and fresh, written, handed out.

The batch file is the intent, written before the learner has the batch. State is guarded by the buffer's lock, which is
taken here; files are written outside it. Not covered: which groups make a batch (`stock`), and what becomes of them
when the update was applied.
"""

import time
import uuid
from collections.abc import Callable
from typing import Any

from penstock.replay.admission import Admission
from penstock.replay.config import ReplayBufferConfig
from penstock.replay.disk_space import DiskSpace
from penstock.replay.issuer import TicketIssuer
from penstock.replay.room import Room
from penstock.replay.sealing import Sealer
from penstock.replay.stock import FormedBatch, Stock
from penstock.replay.store import ExperienceStore
from penstock.types import Clock, RunFailed, TrainingBatch

NAP_S = 1.0
"""Longest sleep of a waiting learner before it looks at clocks (stragglers, staleness) again; news wake it."""


class Outlet:
    """The batches of one buffer.

    Args:
        config: Pace and limits.
        store: Where batches are written.
        admission: Knows which update is next.
        stock: Forms batches.
        sealer: Holds what is in no file yet.
        seal: Has it write its file.
        room: Told that there is more, where a batch was taken.
        space: Says how long a full disk is waited for.
        clock: Unix seconds.
        numbers: ``replay/…`` metrics of the moment, with the lock held.

    Attributes:
        awaited: With fewer rollouts in an open buffer no arrival need wake a learner.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        store: ExperienceStore,
        admission: Admission,
        stock: Stock,
        sealer: Sealer,
        seal: Callable[[], None],
        room: Room,
        space: DiskSpace,
        clock: Clock,
        numbers: Callable[[], dict[str, float]],
    ) -> None:
        self._config = config
        self._store = store
        self._admission = admission
        self._changed = admission.changed
        self._stock = stock
        self._sealer = sealer
        self._seal = seal
        self._room = room
        self._space = space
        self._clock = clock
        self._numbers = numbers
        self._waiting_since: float | None = None
        self.awaited = 0

    def sample(self, batch_size: int, environment_name: str | None, step: int | None) -> TrainingBatch[Any] | None:
        """See `ReplayBuffer.sample`."""
        self._admission.raise_if_over()
        self._seal()
        with self._changed:
            formed = self._form(self._stock.current if step is None else step, False, batch_size, environment_name)
        return None if formed is None else self._write_intent(formed, 0.0)

    def wait(
        self, step: int, timeout_s: float, wanted: Callable[[], bool], batch_size: int | None
    ) -> TrainingBatch[Any] | None:
        """See `ReplayBuffer.await_batch`."""
        started = time.monotonic()
        while True:
            self._admission.raise_if_over()
            hurry = wanted()
            if self._sealer.due or (hurry and self._completes_a_batch(batch_size)):
                self._seal()
            with self._changed:
                formed = self._form(step, hurry, batch_size)
                remaining = started + timeout_s - time.monotonic()
                if formed is None and remaining <= 0:
                    return None
                if formed is None and wanted() == hurry and not (hurry and self._completes_a_batch(batch_size)):
                    self.awaited = batch_size or self._config.groups_per_batch
                    self._changed.wait(min(remaining, NAP_S))
            if formed is not None:
                return self._write_intent(formed, time.monotonic() - started)

    def _completes_a_batch(self, batch_size: int | None = None) -> bool:
        """Whether a file now helps: it gives a batch enough groups, or everything is back and waits for it alone."""
        with self._changed:
            ingested, held = self._admission.outstanding.ingested, len(self._admission.outstanding)
            enough = ingested >= self._config.groups_per_batch or ingested == held or self._stock.has_reusable
            if not self._admission.paced:
                enough = self._stock.waiting.rollouts >= (batch_size or self._config.groups_per_batch)
            return enough and len(self._sealer) > 0 and not self._space.retry_in_s

    def _form(
        self, step: int, hurry: bool, batch_size: int | None = None, environment_name: str | None = None
    ) -> FormedBatch | None:
        admission = self._admission
        admission.raise_if_over()
        now = self._clock()
        self._stock.drop_expired(now, step)
        if not admission.paced:
            formed = self._stock.sample(step, batch_size or self._config.groups_per_batch, environment_name)
        else:
            self._make_way(admission, step, hurry, now)
            formed = self._stock.form_batch(step, hurry, admission.is_stuck)
        if formed is not None:
            self._waiting_since = None
            if self._room.most is not None:
                self._changed.notify_all()
            self._admission.ledger.check()
            formed.metrics.update(self._numbers())
        return formed

    def _make_way(self, admission: Admission, step: int, hurry: bool, now: float) -> None:
        """A learner that waits does not wait for stragglers for ever."""
        if step != admission.update:
            raise RunFailed(f"the batch of update {step} was asked for, but {admission.update} is next")
        if not hurry:
            return
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if isinstance(admission, TicketIssuer):
            admission.abort_stragglers(self._waiting_since)

    def _write_intent(self, formed: FormedBatch, wait_s: float) -> TrainingBatch[Any]:
        batch_id = f"batch_{uuid.uuid4().hex}_{int(self._clock() * 1000)}"
        while not self._try_to_write(batch_id, formed):
            self._admission.raise_if_over()
            time.sleep(min(self._space.retry_in_s, NAP_S))
        metrics = {**formed.metrics, **self._store.metrics(), "replay/wait_s": wait_s}
        return TrainingBatch(batch_id, formed.step, formed.examples, formed.group_ids, metrics)

    def _try_to_write(self, batch_id: str, formed: FormedBatch) -> bool:
        try:
            self._store.write_batch(batch_id, formed.examples, formed.step, self._admission.lineage)
        except OSError as error:
            self._space.note(error)
            return False
        self._space.note_written()
        return True

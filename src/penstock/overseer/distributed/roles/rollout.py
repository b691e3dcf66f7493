"""A rollout worker in a process of its own: tickets in, groups out; tokens come from the inference servers.

Nothing here imports JAX. Which environment fails, and how often, is the worker's own business; whatever else goes wrong
ends the component, and its tickets are handed to another.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.curriculum import Curriculum
from penstock.inference import RemoteContext
from penstock.overseer.config import RunConfig
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition, Identity, View
from penstock.overseer.distributed.roles.base import POLL_S, ThreadedComponent
from penstock.overseer.distributed.roles.contexts import TimedContext
from penstock.overseer.distributed.roles.run_clock import RunClock
from penstock.overseer.distributed.roles.servers import make_pool, servers_of
from penstock.overseer.distributed.roles.settings import Settings
from penstock.replay import RemoteSink, RemoteTickets
from penstock.rollout import RolloutManager, RolloutWorker
from penstock.tracking import conversation_of
from penstock.types import InferenceContext, RolloutBatch, Ticket, WeightVersion


class RolloutRole(ThreadedComponent):
    """Runs one `RolloutWorker`."""

    def __init__(self, around: Surroundings, settings: Settings, lessons: tuple[str, ...] | None) -> None:
        super().__init__(around, settings)
        config, identity = settings.config, around.identity
        tokenizer = settings.tokenizer()
        self.answers = 0
        self._pool = make_pool(settings)
        self._contexts = RemoteContext(self._pool, tokenizer)
        replay = around.caller("replay-0")
        self._clock = RunClock(replay)
        curriculum = Curriculum(config.curriculum)
        self._manager = RolloutManager(curriculum, self._contexts, config.seed, clock=self._clock.now)
        self._tickets = RemoteTickets(replay, identity.name, identity.incarnation, lessons=lessons)
        self._sink = RemoteSink(replay, identity.name, identity.incarnation)
        self._worker = RolloutWorker(
            identity.name,
            self._manager,
            self._tickets,
            self._sink,
            None,
            config.rollout,
            concurrency=config.concurrency,
            lockstep=False,
            log_samples=self._log_samples,
            on_failure=lambda ticket, reason: around.event("group_failed", ticket=ticket.ticket_id, reason=reason),
            context_of=self._context_of,
        )

    def start(self) -> None:
        """See `Component.start`."""
        self.look(self.around.view)
        self.crew.start(f"{self.name}.clock", self._follow_clock)
        self.crew.start(f"{self.name}.tickets", self._run)

    def _follow_clock(self) -> None:
        self._clock.follow(lambda: _replay_in(self.around.view), self.stopping)

    def _run(self) -> None:
        self.doing, self.state = "waiting for inference servers", "running"
        while not (self._pool.servers or self.stopping.is_set()):
            self.view_changed.wait(POLL_S)
            self.view_changed.clear()
        self.activity.begin()
        self.doing = "generating"
        self._worker.run_tickets()
        self.doing, self.state = "done", "drained"

    def look(self, view: View) -> None:
        """Follows servers and lineage; shares what may be outstanding with the other workers."""
        self._pool.set_servers(servers_of(view))
        self._manager.lineage = view.lineage
        self._tickets.lineage = self._sink.lineage = view.lineage
        if self.config.rollout.max_concurrent_groups is None:
            workers = max(1, len(view.of("rollout")))
            self._worker.concurrency = math.ceil(self.config.concurrency / workers)
        super().look(view)

    def drain(self) -> None:
        """Finishes its groups and takes no new tickets."""
        self._worker.drain()

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self._worker.stop()
        self._tickets.stop()
        self._sink.stop()
        super().stop(timeout_s)
        self._pool.close()
        self._manager.shutdown()

    @contextmanager
    def _context_of(self, ticket: Ticket) -> Iterator[InferenceContext]:
        with self.activity.busy():
            least = WeightVersion(self._tickets.lineage, ticket.admitted_step)  # all servers that are free have it
            context = self._contexts.for_session(ticket.ticket_id, least)
            yield TimedContext(context, self.activity, self._count_answer)

    def _count_answer(self) -> None:
        self.answers += 1

    def _log_samples(self, batch: RolloutBatch) -> None:
        chosen = list(batch.rollouts())[: self.config.tracking.samples_per_log]
        self.around.samples(0, [conversation_of(rollout) for rollout in chosen])

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        worker = self._worker
        counts = {"finished": worker.groups_finished, "failed": worker.groups_failed, "running": worker.running}
        return Condition(
            self.state,
            self.doing if worker.running else "waiting for tickets",
            float(worker.groups_finished + worker.groups_failed + self.answers) if self.activity.working else None,
            busy_s,
            idle_s,
            metrics={
                "rollout/groups_finished": float(worker.groups_finished),
                "rollout/groups_failed": float(worker.groups_failed),
                "rollout/groups_running": float(worker.running),
                **self._pool.metrics(),
            },
            facts=self._facts(groups=counts, last_failure=worker.last_failure),
        )


def _replay_in(view: View) -> Identity | None:
    peer = view.peer("replay-0")
    return None if peer is None else peer.identity


def make_rollout(around: Surroundings, settings: Mapping[str, Any]) -> RolloutRole:
    """Factory of a rollout worker; `settings` has its ``lessons``, or None for all, beside those of the run."""
    lessons = settings.get("lessons")
    return RolloutRole(around, Settings.of(settings, RunConfig), None if lessons is None else tuple(lessons))

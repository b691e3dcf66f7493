"""A rollout worker of a language run as a component: tickets in, groups out; tokens come from the inference servers.

Nothing here imports JAX. Which environment fails, and how often, is the worker's own business; whatever else goes wrong
ends the component, and its tickets are handed to another. The servers are seen as rollout workers, the evaluator and
the learner's probe see them, and waiting for their tokens does not count as work.
"""

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from typing_extensions import override

from penstock.curriculum import Curriculum
from penstock.inference import AgentEndpoint, RemoteContext, Server, ServerPool
from penstock.inference.config import InferenceConfig
from penstock.inference.external import dialect_of, key_of
from penstock.overseer.component import POLL_S, BusyTime, RunClock, Settings, ThreadedComponent
from penstock.overseer.config import RunConfig, rollout_workers
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus, Membership, Peer
from penstock.replay import RemoteSink, RemoteTickets
from penstock.rollout import RolloutManager, RolloutWorker
from penstock.tracking import conversation_of
from penstock.types import (
    Completion,
    Decoding,
    InferenceContext,
    PenstockError,
    RolloutBatch,
    TextCodec,
    Ticket,
    UnreachableError,
    WeightVersion,
)

CALL_S = 30.0
"""Longest wait for the replay service to take numbers."""


class TimedContext:
    """Tells an activity that it waits while tokens come. Implements `InferenceContext`.

    Args:
        context: Asks the servers.
        activity: Of the component.
        on_answer: Told of each answer.
    """

    def __init__(
        self, context: InferenceContext, activity: BusyTime, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        self._context = context
        self._activity = activity
        self._on_answer = on_answer

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's."""
        return self._context.tokenizer

    @property
    def ordered(self) -> bool:
        """The context's own."""
        return self._context.ordered

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, asked elsewhere; waiting for them is no work."""
        with self._activity.waiting():
            answers = self._context.generate(prompts, n, decoding, seeds)
        self._on_answer()
        return answers


class InterruptedEvaluation(PenstockError):
    """The evaluated version was not held to the end."""


class PinnedContext(TimedContext):
    """Refuses completions of any version but the one that is evaluated."""

    def pin(self, context: InferenceContext, version: WeightVersion) -> None:
        """From now on `context` is asked, and every token must be of that version."""
        self._context, self._version = context, version

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, all of the pinned version.

        Raises:
            InterruptedEvaluation: a token is of another version.
        """
        answers = super().generate(prompts, n, decoding, seeds)
        for completion in (completion for answer in answers for completion in answer):
            steps = {completion.oldest_weight_step, *completion.weight_steps.tolist()}
            if completion.lineage != self._version.lineage or steps != {self._version.step}:
                raise InterruptedEvaluation(f"steps {sorted(steps)} answered where {self._version} was evaluated")
        return answers


def located(name: str) -> str:
    """A worker's id as its rollouts carry it: its name in the run, its machine and its process."""
    return f"{name}@{socket.gethostname()}:{os.getpid()}"


def make_pool(settings: Settings) -> ServerPool:
    """A client of the run's inference servers; it knows none yet."""
    config = settings.config.inference
    authority = None if config.tls_ca is None else str(config.tls_ca)
    key = key_of(config.external, settings.token)
    pool = ServerPool(key, request_timeout_s=config.request_timeout_s, certificate_authority=authority)
    pool.dialect = dialect_of(config)
    if config.external is not None:
        pool.model_name = config.external.model
    return pool


def reproducible(config: RunConfig) -> bool:
    """Whether a run in many processes is to go the same way every time: at staleness zero, by one worker and server.

    Servers of another make do not sample the same again, whatever they are asked.
    """
    alone = config.inference.servers == rollout_workers(config) == 1
    return config.replay.synchronous and alone and config.inference.engine == "builtin"


def engine_config(config: RunConfig) -> InferenceConfig:
    """`inference` as a run's own engines have it: they forget where the run is to go the same way every time."""
    return config.inference.model_copy(update={"forgets": config.inference.forgets or reproducible(config)})


def reachable(url: str) -> str:
    """The URL by which other machines reach a server that listens on all of this machine's addresses."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    from penstock.weights.flight_messages import own_address  # its module loads Flight

    return f"{parts.scheme}://{own_address()}:{parts.port}"


def serving(view: Membership) -> list[Peer]:
    """Servers that take new requests, with weights of the run's present lineage."""
    return [peer for peer in _there(view) if not peer.address.get("draining")]


def servers_of(view: Membership) -> list[Server]:
    """All servers with weights of the run's present lineage, as clients know them.

    Nothing new goes to one that drains, nor to one that an evaluation holds back, at a version that others have left:
    what it generated would be staler than its ticket allows for.
    """
    newest = max((peer.address["step"] for peer in serving(view)), default=0)
    return [
        Server(
            peer.identity.name,
            peer.identity.incarnation,
            str(peer.address["url"]),
            _accepts(peer, newest),
            WeightVersion(view.lineage, int(peer.address["step"])),
        )
        for peer in _there(view)
    ]


def _there(view: Membership) -> list[Peer]:
    return [p for p in view.of("inference") if "url" in p.address and p.address.get("lineage") == view.lineage]


def _accepts(peer: Peer, newest: int) -> bool:
    address = peer.address
    return not (address.get("draining") or (address.get("held_back") and address["step"] < newest))


def tell_samples(ctx: ComponentContext, config: RunConfig, batch: RolloutBatch) -> None:
    """Some of a batch's conversations are for the trackers."""
    chosen = list(batch.rollouts())[: config.tracking.samples_per_log]
    ctx.samples(0, [conversation_of(rollout) for rollout in chosen])


class RolloutRole(ThreadedComponent):
    """Runs one `RolloutWorker`."""

    def __init__(self, ctx: ComponentContext, settings: Settings, lessons: tuple[str, ...] | None) -> None:
        super().__init__(ctx, settings)
        config, identity = settings.config, ctx.identity
        tokenizer = settings.tokenizer()
        self.answers = 0
        self._pool = make_pool(settings)
        self._contexts = RemoteContext(self._pool, tokenizer, ordered=reproducible(config))
        replay = ctx.caller("replay-0")
        self._clock = RunClock(ctx)
        curriculum = Curriculum(config.curriculum)
        agents = AgentEndpoint.of(config.inference, tokenizer)
        self._manager = RolloutManager(curriculum, self._contexts, config.seed, clock=self._clock.now, agents=agents)
        self._tickets = RemoteTickets(replay, identity.name, identity.incarnation, lessons=lessons)
        self._sink = RemoteSink(replay, identity.name, identity.incarnation)
        self._worker = RolloutWorker(
            located(identity.name),
            self._manager,
            self._tickets,
            self._sink,
            None,
            config.rollout,
            concurrency=config.concurrency,
            lockstep=reproducible(config),
            log_samples=partial(tell_samples, ctx, config),
            on_failure=lambda ticket, reason: ctx.event("group_failed", ticket=ticket.ticket_id, reason=reason),
            on_environment=self._tell_environment,
            context_of=self._context_of,
        )

    @override
    def start(self) -> None:
        self.look(self.ctx.view)
        self.crew.start(f"{self.name}.clock", partial(self._clock.follow, self.stopping))
        self.crew.start(f"{self.name}.tickets", self._run)

    def _run(self) -> None:
        self.doing, self.state = "waiting for inference servers", "running"
        while not (self._pool.servers or self.stopping.is_set()):
            self.view_changed.wait(POLL_S)
            self.view_changed.clear()
        self.activity.begin()
        self.doing = "generating"
        self._worker.run_tickets()
        self.doing, self.state = "done", "drained"

    def look(self, view: Membership) -> None:
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

    @override
    def stop(self, timeout_s: float) -> None:
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

    def _tell_environment(self, lesson_id: str, metrics: Mapping[str, float]) -> None:
        with suppress(UnreachableError):  # numbers only: the buffer is being replaced
            self.ctx.caller("replay-0").call("add_environment", lesson_id, dict(metrics), timeout_s=CALL_S)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        worker = self._worker
        counts = {"finished": worker.groups_finished, "failed": worker.groups_failed, "running": worker.running}
        return ComponentStatus(
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


def make_rollout(ctx: ComponentContext, settings: Mapping[str, Any]) -> RolloutRole:
    """Factory of a rollout worker; `settings` has its ``lessons``, or None for all, beside those of the run."""
    lessons = settings.get("lessons")
    return RolloutRole(ctx, Settings.of(settings, RunConfig), None if lessons is None else tuple(lessons))

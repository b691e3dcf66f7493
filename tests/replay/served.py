"""A replay service over a store without files, and the parts of it."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from penstock.batch import make_batch_maker
from penstock.replay import (
    MemoryRolloutStorage,
    PacedReplayBuffer,
    ReplayBufferConfig,
    ReplayService,
    RolloutReceiver,
    RolloutStorageConfig,
    TicketIssuer,
    TicketRules,
    TicketService,
)


class Record:
    """Records evaluations, and draws by the simulation's curriculum."""

    def __init__(self, curriculum: Any) -> None:
        self.curriculum = curriculum
        self.evaluations: list[Any] = []

    def update_evaluation(self, stats: Any, step: int) -> None:
        self.evaluations.append((stats, step))

    def metrics(self) -> dict[str, float]:
        return {"curriculum/told": float(len(self.curriculum.groups))}

    def describe(self) -> dict[str, str]:
        return {"easy": "active 50%"}

    def state(self) -> dict[str, Any]:
        return self.curriculum.state()


class Endpoint:
    """What a component offers its callers: the methods of both services."""

    def __init__(self, service: ReplayService, tickets: TicketService) -> None:
        self.service, self.tickets = service, tickets

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service if hasattr(self.service, name) else self.tickets, name)

    def start(self) -> None:
        self.tickets.start()
        self.service.start()

    def stop(self, timeout_s: float) -> bool:
        ended = self.tickets.stop(timeout_s)
        return self.service.stop(timeout_s) and ended

    @property
    def failure(self) -> Exception | None:
        return self.service.failure or self.tickets.failure

    def metrics(self) -> dict[str, float]:
        numbers = Counter(self.service.metrics())
        numbers.update(self.tickets.metrics())
        return dict(numbers)

    def status(self) -> dict[str, Any]:
        return {**self.tickets.status(), **self.service.status()}


@dataclass
class Served:
    service: Endpoint
    issuer: TicketIssuer
    buffer: PacedReplayBuffer
    record: Record
    store: Any
    refusals: list[tuple[str, str]]


def serve(
    sim,
    store=None,
    lineage=0,
    states=None,
    capacity_groups=64,
    start=True,
    needs_clearance=False,
    remote=None,
    **config,
):
    """A service, started; with a `RemoteCurriculum` in place of the simulation's."""
    settings = ReplayBufferConfig(**{"groups_per_batch": 2, "staleness_budget": 1, **config})
    store = sim.MemoryStore() if store is None else store
    curriculum = sim.Curriculum()
    ledger = store.open_ledger(lineage)
    chooser, may_draw = (curriculum, lambda: True) if remote is None else (remote, remote.may_draw)
    issuer = TicketIssuer(settings, TicketRules(7, chooser, sim.GROUP_SIZES.__getitem__, may_draw), lineage, ledger)
    maker = make_batch_maker(
        settings.batch_maker,
        advantage="rloo",
        max_tokens=16,
        max_samples=settings.max_samples,
        ordered=settings.synchronous,
        allow_truncated_sampling=False,
        seed=7,
    )
    buffer = PacedReplayBuffer(settings, store, maker, issuer)
    buffer.pool.on_group = curriculum.update if remote is None else remote.update_group
    if states is not None:
        curriculum.restore(states["curriculum"])
        issuer.restore(states["issuer"])
        buffer.restore(states["replay"])
    storage = MemoryRolloutStorage(RolloutStorageConfig(capacity_groups=capacity_groups))
    record, refusals = Record(curriculum), []
    tickets = TicketService(issuer, record if remote is None else remote, needs_clearance)
    replay = ReplayService(
        buffer,
        buffer,
        lineage=issuer.lineage,
        receiver=RolloutReceiver(storage, buffer),
        check_sender=tickets.check,
        states=tickets.states,
        on_refusal=lambda worker, reason: refusals.append((worker, reason)),
    )
    service = Endpoint(replay, tickets)
    if start:
        service.start()
    return Served(service, issuer, buffer, record, store, refusals)

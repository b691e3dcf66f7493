"""The replay buffer of a fleet run in a process of its own, and what its rollout workers tell of themselves.

It is made from the run's files: those of a new run, or those of the checkpoint that this lineage begins with. Workers
report here, because the statistics of their episodes belong into the same checkpoint; a worker that the view no longer
names is over, and what it had in flight is abandoned. What it delivered is counted here, whatever it reported.
"""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from penstock.batch import FragmentBatchMaker
from penstock.fleet import FleetReports, WorkerReport
from penstock.learner import read_states
from penstock.overseer.assembly import open_replay, restore_parts
from penstock.overseer.component import CallCounter, Settings, SteadyClock, ThreadedComponent
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Membership
from penstock.replay import FRAGMENTS, ReplayService

SERVED = ("checkpoint_saved", "checkpoint_states", "finish_update", "has_room", "set_current_step")
"""Methods of the service that others call as they are."""


class FleetReplayRole(ThreadedComponent[FleetRunConfig]):
    """Runs one `ReplayService` and one `FleetReports`."""

    def __init__(self, ctx: ComponentContext, settings: Settings[FleetRunConfig]) -> None:
        super().__init__(ctx, settings)
        config, replay = settings.config, settings.config.replay
        clock = SteadyClock()
        self.now = clock.now
        self._handling, self._receiving = CallCounter(self.activity), CallCounter(self.activity)
        opened = self.opened = open_replay(
            ctx,
            settings,
            replay.buffer_config(),
            FRAGMENTS,
            FragmentBatchMaker(replay.order, replay.max_samples),
            clock=clock.now,
            writing=self.activity.busy,
        )
        self.reports = FleetReports(config.fleet.stats_window)
        self._service = ReplayService(
            opened.buffer,
            opened.batches,
            FRAGMENTS,
            lineage=settings.lineage,
            states=self.states,
            on_refusal=lambda worker, reason: ctx.event("fragments_refused", worker=worker, reason=reason),
            on_delivery=self.reports.note_delivery,
        )
        parts = {"replay": opened.buffer, "statistics": self.reports.statistics}
        states = None if settings.checkpoint is None else read_states(settings.checkpoint)
        restore_parts(parts, opened.buffer, states, settings.lineage)
        self._workers: dict[str, Identity] = {}
        self._ended: set[str] = set()
        for method in SERVED:
            setattr(self, method, self._handling.of(getattr(self._service, method)))
        self.deliver = self._receiving.of(self._service.deliver)
        self.next_batch = self._service.next_batch  # its caller waits in it: no work

    def states(self) -> dict[str, Any]:
        """What belongs into a checkpoint beside the buffer's state."""
        return {"statistics": self.reports.statistics.state()}

    @override
    def start(self) -> None:
        super().start()
        self.look(self.ctx.view)

    def look(self, view: Membership) -> None:
        """Closes the accounts of those who died."""
        alive = {peer.identity.name: peer.identity for peer in view.of("rollout")}
        for name, identity in self._workers.items():
            if alive.get(name) != identity:
                self.reports.end(name, identity.incarnation)
                self._ended.add(name)
        self.reports.restarts += sum(
            name in self._ended for name, identity in alive.items() if self._workers.get(name) != identity
        )
        self._workers = alive
        super().look(view)

    def admit(self) -> None:
        """The learner trains; fragments are taken at any time."""
        self.activity.begin()
        self.doing = "serving"

    def take_report(self, worker: str, incarnation: int, report: WorkerReport) -> None:
        """A rollout worker tells how it is, and which episodes ended since its last report that was answered."""
        self.reports.take(worker, incarnation, report)

    def drain(self) -> None:
        """The overseer hears of the notice, has the newest version saved, and begins anew elsewhere."""

    @override
    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        self.opened.buffer.close()
        self.opened.store.close()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        statistics, tasks = self.reports.statistics, self.config.fleet.tasks
        owes = self._receiving.under_way > 0 or self.opened.buffer.metrics()["replay/overdue_groups"] > 0
        return ComponentStatus(
            self.state,
            self.doing,
            float(self._receiving.done) if owes else None,
            busy_s,
            idle_s,
            metrics=self.numbers(),
            facts=self._facts(
                lineage=self.settings.lineage,
                ledger=self.opened.ledger.snapshot(),
                account=self.reports.account().to_values(),
                lessons={name: f"{task.id}, {statistics.count(name):,} episodes" for name, task in tasks.items()},
                waiting_for=self._service.waiting_for(),
            ),
        )

    def numbers(self) -> dict[str, float]:
        """Of the buffer, of messages, and of all workers together."""
        return {**self._service.metrics(), **self.reports.metrics()}


def make_fleet_replay(ctx: ComponentContext, settings: Mapping[str, Any]) -> FleetReplayRole:
    """Factory of the replay buffer of a fleet run."""
    return FleetReplayRole(ctx, Settings.of(settings, FleetRunConfig))

"""What the rollout workers of a fleet have told of themselves, added up over all their lives.

The account of steps covers every life of every worker: what was in flight in one that ended is abandoned. Workers tell
every so often, but what the replay buffer has got of each life is counted as it comes (`note_delivery`): however a life
ends, the account has sent what the buffer has. Statistics of episodes are taken exactly once, by worker, incarnation,
slot and episode. Counters of a life that ended stay in the sums, so they never fall.

Not covered: who asks the workers (`RolloutManager`, or the workers tell by themselves from other processes), and lives
of the run: a resumed one counts anew, all but the statistics.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.fleet.accounting import StepAccount
from penstock.fleet.episode_statistics import EpisodeStatistics
from penstock.fleet.pipeline_monitor import pipeline_metrics
from penstock.fleet.wrapper import WorkerReport
from penstock.types import RolloutBatch, RolloutSink, SampleFragment

LEVELS = frozenset({"fleet/live", "fleet/quarantined", "fleet/queue_depth", "fleet/respawning"})
"""Gauges that say how a worker is now; all others are counters."""
STEPS_TOTAL = "fleet/steps_total"

_Life = tuple[str, int]


class FleetReports:
    """The newest report of each living worker, and the sum of those that ended. Thread-safe.

    Args:
        stats_window: Episodes per task over which statistics are averaged.

    Attributes:
        statistics: Of training episodes.
        restarts: Lives that followed another one of the same worker.
    """

    def __init__(self, stats_window: int) -> None:
        self.statistics = EpisodeStatistics(stats_window)
        self.restarts = 0
        self._lock = threading.Lock()
        self._living: dict[_Life, WorkerReport] = {}
        self._ended: dict[_Life, StepAccount] = {}  # as it was last told
        self._ended_counters: dict[str, float] = {}
        self._gone: set[_Life] = set()
        self._delivered: dict[_Life, tuple[int, int]] = {}  # trainable steps, and faults

    def take(self, name: str, incarnation: int, report: WorkerReport) -> None:
        """Takes a report of a worker's life in; one that comes after its `end` only adds its episodes."""
        self.statistics.add(name, incarnation, report.episodes)
        with self._lock:
            if (name, incarnation) not in self._gone:
                self._living[name, incarnation] = report

    def note_delivery(self, fragment: SampleFragment) -> None:
        """The replay buffer has got a fragment; once for each, whatever became of its worker."""
        assert fragment.metadata is not None  # the buffer refuses others
        incarnation = int(fragment.group_id.rsplit("-", 3)[1])  # worker-incarnation-slot-number
        life, steps = (fragment.metadata.worker_id, incarnation), fragment.trainable_steps
        with self._lock:
            sent, faults = self._delivered.get(life, (0, 0))
            self._delivered[life] = sent + steps, faults + fragment.length - steps

    def end(self, name: str, incarnation: int) -> None:
        """That life is over: what its last report had in flight is abandoned. A second call changes nothing."""
        with self._lock:
            self._gone.add((name, incarnation))
            report = self._living.pop((name, incarnation), None)
            if report is not None:
                self._ended[_sender(report)] = report.account
                _add(self._ended_counters, _counters(report))

    def latest(self) -> dict[str, WorkerReport]:
        """Of each living worker."""
        with self._lock:
            return {name: report for (name, _), report in self._living.items()}

    def account(self) -> StepAccount:
        """Where the steps of all lives of all workers are."""
        with self._lock:
            return self._account()

    def metrics(self) -> dict[str, float]:
        """``fleet/…`` numbers of all workers together."""
        with self._lock:
            reports, account = list(self._living.values()), self._account()
            sums = dict(self._ended_counters)
        for report in reports:
            _add(sums, report.gauges | _counters(report))
        sums |= {"fleet/workers": float(len(reports)), "fleet/worker_restarts": float(self.restarts)}
        steps = [report.condition.version.step for report in reports if report.condition.version is not None]
        if steps:
            sums |= {"fleet/weight_step_min": float(min(steps)), "fleet/weight_step_max": float(max(steps))}
        pipeline = pipeline_metrics([report.pipeline for report in reports])
        return pipeline | sums | account.metrics() | self.statistics.metrics()

    def _account(self) -> StepAccount:
        living = {_sender(report): report.account for report in self._living.values()}
        told = self._ended | living
        accounts = {
            life: told.get(life, StepAccount()).with_delivered(*self._delivered.get(life, (0, 0)))
            for life in {**told, **self._delivered}
        }
        return StepAccount.total(account if life in living else account.ended() for life, account in accounts.items())


class CountedSink:
    """Leads to a replay buffer of this process, and tells of every fragment that it took.

    Args:
        sink: The buffer.
        on_delivery: Told of each; `FleetReports.note_delivery`.
    """

    def __init__(self, sink: RolloutSink, on_delivery: Callable[[SampleFragment], None]) -> None:
        self._sink, self._on_delivery = sink, on_delivery

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """See `RolloutSink.add_batches`; one at a time, so that those before one that fails are counted."""
        for batch in batches:
            self._sink.add_batches([batch])
            for fragment in batch.rollouts():
                self._on_delivery(fragment)


def _sender(report: WorkerReport) -> _Life:
    """As fragments name it, which may be other than its supervisor does: the run's lineage is in it."""
    return report.condition.worker_id, report.condition.incarnation


def _counters(report: WorkerReport) -> dict[str, float]:
    """What only grows in its life."""
    counters = {name: value for name, value in report.gauges.items() if name not in LEVELS}
    return counters | {STEPS_TOTAL: float(report.pipeline.steps)}


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value

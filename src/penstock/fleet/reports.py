"""What the rollout workers of a fleet have told of themselves, added up over all their lives.

The account of steps covers every life of every worker: what was in flight in one that ended is abandoned. Statistics
of episodes are taken exactly once, by worker, incarnation, slot and episode. Not covered: who asks the workers
(`RolloutManager`, or the workers tell by themselves from other processes).
"""

import threading

from penstock.fleet.accounting import StepAccount
from penstock.fleet.episode_statistics import EpisodeStatistics
from penstock.fleet.pipeline_monitor import pipeline_metrics
from penstock.fleet.wrapper import WorkerReport

_Life = tuple[str, int]


class FleetReports:
    """The newest report of each living worker, and the sum of those that ended. Thread-safe.

    Args:
        stats_window: Episodes per task over which statistics are averaged.

    Attributes:
        statistics: Of episodes; tests may be added by whoever plays them.
        restarts: Lives that followed another one of the same worker.
    """

    def __init__(self, stats_window: int) -> None:
        self.statistics = EpisodeStatistics(stats_window)
        self.restarts = 0
        self._lock = threading.Lock()
        self._living: dict[_Life, WorkerReport] = {}
        self._ended = StepAccount()
        self._gone: set[_Life] = set()

    def take(self, name: str, incarnation: int, report: WorkerReport) -> None:
        """Takes a report of a worker's life in; one that comes after its `end` only adds its episodes."""
        self.statistics.add(name, incarnation, report.episodes)
        with self._lock:
            if (name, incarnation) not in self._gone:
                self._living[name, incarnation] = report

    def end(self, name: str, incarnation: int) -> None:
        """That life is over: what its last report had in flight is abandoned. A second call changes nothing."""
        with self._lock:
            self._gone.add((name, incarnation))
            report = self._living.pop((name, incarnation), None)
            if report is not None:
                self._ended = StepAccount.total([self._ended, report.account.ended()])

    def latest(self) -> dict[str, WorkerReport]:
        """Of each living worker."""
        with self._lock:
            return {name: report for (name, _), report in self._living.items()}

    def account(self) -> StepAccount:
        """Where the steps of all lives of all workers are."""
        with self._lock:
            return StepAccount.total([self._ended, *(report.account for report in self._living.values())])

    def metrics(self) -> dict[str, float]:
        """``fleet/…`` numbers of all workers together, and ``eval/…`` of tests."""
        with self._lock:
            reports = list(self._living.values())
            account = StepAccount.total([self._ended, *(report.account for report in reports)])
        gauges: dict[str, float] = {"fleet/workers": float(len(reports)), "fleet/worker_restarts": float(self.restarts)}
        for report in reports:
            for name, value in report.gauges.items():
                gauges[name] = gauges.get(name, 0.0) + value
        steps = [report.condition.version.step for report in reports if report.condition.version is not None]
        if steps:
            gauges |= {"fleet/weight_step_min": float(min(steps)), "fleet/weight_step_max": float(max(steps))}
        pipeline = pipeline_metrics([report.pipeline for report in reports])
        return pipeline | gauges | account.metrics() | self.statistics.metrics()

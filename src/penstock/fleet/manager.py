"""The fleet's centre: makes rollout workers, watches them, gives them weights, and adds up what they report.

Workers are made by a factory, so that they are threads here and may be actors elsewhere. A worker that failed is
stopped and made anew as its next incarnation; one that fails more often than `max_restarts` within `restart_window_s`
ends the fleet with its error, as it does where workers are processes of their own.

`supervise` does the watching: its caller calls it every so often, and `log_statistics` too. No thread of its own.

Two locks: whoever makes or ends workers holds the one, for as long as that takes; the other guards the list of them and
their reports, and is held for no longer than reports take. So numbers are there at once whatever a restart does.

`FleetReports` covers every incarnation of every worker: what was in flight in one that ended is abandoned. Workers
report every so often, but what the replay buffer has got of each is counted as it comes (`note_delivery`): however a
worker ends, the account has sent what the buffer has. Statistics of episodes are taken exactly once, by worker,
incarnation, slot and episode. Counters of an incarnation that ended stay in the sums, so they never fall.

Not covered: simulators (the workers' pools restart them), restarting the manager itself, and lineages of the run: a
resumed one counts anew, all but the statistics.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

from penstock.fleet.accounting import StepAccount
from penstock.fleet.config import FleetConfig
from penstock.fleet.episode_statistics import EpisodeStatistics
from penstock.fleet.pipeline_monitor import pipeline_metrics
from penstock.fleet.policy import OnEvent
from penstock.fleet.worker import WorkerReport
from penstock.types import ConfigError, RolloutBatch, RolloutSink, RunFailed, SampleFragment, WeightSink, WeightVersion

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


class CountingSink:
    """Leads to a replay buffer of this process, and tells of every fragment that it took.

    Args:
        sink: Takes the fragments: the replay buffer of this process.
        on_delivery: Called with each; `FleetReports.note_delivery`.
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


STOP_TIMEOUT_S = 30.0
"""How long a worker may take to end."""


class FleetWorker(Protocol):
    """What a manager needs of a worker; `RolloutWorkerWrapper` is one."""

    def start(self) -> None:
        """Begins its life and returns at once."""
        ...

    def stop(self, timeout_s: float) -> list[str]:
        """Ends it; says what did not end in time."""
        ...

    def report(self, since_episode: int = 0) -> WorkerReport:
        """How it is and what it did."""
        ...


WorkerFactory = Callable[[str, int], FleetWorker]
"""Makes a worker by its id and incarnation, with simulators, policy, sink and source of weights of its own."""


@dataclass(slots=True)
class _Member:
    worker: FleetWorker
    incarnation: int = 0
    next_episode: int = 0


class RolloutManager:
    """Creates and supervises rollout workers.

    Thread-safe: of `start`, `scale`, `supervise` and `stop` one call at a time, all else at any.

    Args:
        config: How many workers, and windows of statistics.
        make_worker: See `WorkerFactory`.
        broadcaster: Where `update_model` publishes, once for all workers; None: they have their own source.
        log: Takes what `log_statistics` gathered.
        on_event: Called with ``worker_restarted`` and ``fleet_scaled``.
        reports: Adds up what workers tell; None: one of its own.
        max_restarts: Of one worker after failures, within `restart_window_s`.
        restart_window_s: Failures that are older do not count any more.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: FleetConfig,
        make_worker: WorkerFactory,
        *,
        broadcaster: WeightSink | None = None,
        log: Callable[[Mapping[str, float]], None] = lambda metrics: None,
        on_event: OnEvent = lambda kind, values: None,
        reports: FleetReports | None = None,
        max_restarts: int = 10,
        restart_window_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._make_worker, self._broadcaster = config, make_worker, broadcaster
        self._log, self._on_event, self._clock = log, on_event, clock
        self._max_restarts, self._restart_window_s = max_restarts, restart_window_s
        self._changing = threading.Lock()  # taken before the other
        self._lock = threading.Lock()
        self._stopped = False
        self._members: dict[str, _Member] = {}
        self._lives: dict[str, int] = {}
        self._failed_s: dict[str, list[float]] = {}  # when, within the window
        self._reports = reports or FleetReports(config.stats_window)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Of the workers there are."""
        with self._lock:
            return tuple(self._members)

    @property
    def statistics(self) -> EpisodeStatistics:
        """Of training episodes."""
        return self._reports.statistics

    def start(self) -> None:
        """Makes and starts `config.workers` workers."""
        self.scale(self._config.workers)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends all workers, and begins none any more; their last statistics are taken in.

        Args:
            timeout_s: For all of them together, since they are asked at the same time. A change that is under way, as a
                restart, is waited for as long first.

        Raises:
            RunFailed: some did not end in time; says which of their threads.
        """
        self._stopped = True
        late = [] if (changing := self._changing.acquire(timeout=timeout_s)) else ["the one that restarts a worker"]
        try:
            late += self._stop_all(timeout_s)
        finally:
            if changing:
                self._changing.release()
        if late:
            raise RunFailed(f"the fleet's threads {late} did not end within {timeout_s:g} s")

    def scale(self, workers: int) -> None:
        """More workers, or fewer: those that came last go first.

        Raises:
            ConfigError: fewer than one.
            RunFailed: it was stopped.
        """
        if workers < 1:
            raise ConfigError(f"workers = {workers}: a fleet has at least one rollout worker")
        with self._changing:
            if self._stopped:
                raise RunFailed("this fleet was stopped: make another manager")
            before = self.worker_ids
            for name in before[workers:]:
                self._end(name)
            names = (f"fleet-{number}" for number in count())
            missing = (name for name in names if name not in before)
            for name in islice(missing, max(0, workers - len(before))):
                self._begin(name)
            if len(before) != workers:
                self._on_event("fleet_scaled", {"from": len(before), "to": workers})

    def update_model(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Publishes new weights, once; workers fetch them and never wait for it.

        Raises:
            ConfigError: the manager was given no broadcaster.
            WeightsError: see `penstock.types.WeightSink.publish`.
        """
        if self._broadcaster is None:
            raise ConfigError("this fleet's workers have their own source of weights: publish there")
        self._broadcaster.publish(version, arrays)

    def supervise(self) -> None:
        """Looks after every worker once: takes its report, and makes a failed one anew.

        Raises:
            RunFailed: one failed too often; from its last error's words.
        """
        with self._changing:
            for name in self.worker_ids:
                with self._lock:
                    report = self._read(name)
                if report is not None and report.condition.failure and not self._stopped:
                    self._restart(name, report.condition.failure)  # one that ended without a failure is left alone

    def account(self) -> StepAccount:
        """Where the steps of all lives of all workers are."""
        with self._lock:
            self._read_all()
            return self._reports.account()

    def reports(self) -> dict[str, WorkerReport]:
        """The latest of each worker, as `supervise` or `metrics` read it."""
        with self._lock:
            return self._reports.latest()

    def metrics(self) -> dict[str, float]:
        """``fleet/…`` numbers of all workers together."""
        with self._lock:
            self._read_all()
            return self._reports.metrics()

    def log_statistics(self) -> dict[str, float]:
        """Gathers `metrics`, hands them to `log`, and returns them."""
        metrics = self.metrics()
        self._log(metrics)
        return metrics

    def _begin(self, name: str) -> bool:
        """Makes a worker and starts it; false where the fleet was stopped meanwhile."""
        incarnation = self._lives.get(name, -1) + 1
        self._lives[name] = incarnation
        worker = self._make_worker(name, incarnation)
        with self._lock:
            if self._stopped:
                return False
            self._members[name] = _Member(worker, incarnation)
        worker.start()
        return True

    def _end(self, name: str) -> None:
        with self._lock:
            member = self._members.get(name)
        if member is not None:
            member.worker.stop(STOP_TIMEOUT_S)
            self._take_out(name)

    def _stop_all(self, timeout_s: float) -> list[str]:
        """Asks all workers at once; returns who is late."""
        late: list[str] = []
        with self._lock:
            workers = {name: member.worker for name, member in self._members.items()}
        threads = [
            threading.Thread(target=lambda w=worker: late.extend(w.stop(timeout_s)), name=f"stop.{name}")
            for name, worker in workers.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s + 1.0)
        for name in workers:
            self._take_out(name)
        return late + [thread.name for thread in threads if thread.is_alive()]

    def _take_out(self, name: str) -> None:
        """Takes a worker's last report; one that another thread took out already is gone."""
        with self._lock:
            if self._read(name) is not None:
                self._reports.end(name, self._members.pop(name).incarnation)

    def _restart(self, name: str, reason: str) -> None:
        self._end(name)
        now_s = self._clock()
        recent = [failed_s for failed_s in self._failed_s.get(name, ()) if now_s - failed_s <= self._restart_window_s]
        self._failed_s[name] = [*recent, now_s]
        if len(recent) >= self._max_restarts:
            raise RunFailed(
                f"rollout worker {name} failed {len(recent) + 1} times within overseer.restart_window_s = "
                f"{self._restart_window_s:g}, more than overseer.max_restarts = {self._max_restarts} allows; the last "
                f"time: {reason}"
            )
        if not self._begin(name):
            return
        self._reports.restarts += 1
        values = {"worker": name, "incarnation": self._lives[name], "reason": reason}
        self._on_event("worker_restarted", values)

    def _read_all(self) -> None:
        for name in self._members:
            self._read(name)

    def _read(self, name: str) -> WorkerReport | None:
        """Takes a worker's report in, under the lock; None where there is no such worker any more."""
        member = self._members.get(name)
        if member is None:
            return None
        report = member.worker.report(member.next_episode)
        self._reports.take(name, member.incarnation, report)
        member.next_episode = report.next_episode
        return report

"""A rollout worker as a component: threads that roll out, send and fetch weights, with one life and one report.

- *rollout*: starts the simulators, waits for the first weights, then runs the loop; each batch goes to the statistics
  and the cutter, and complete fragments into the queue. It alone touches the simulators.
- *sender*: hands fragments to the sink.
- *weights*: waits for newer versions, fetches them, gives them to the runner. Rolling out never waits for it again
  after the first version. Its loop remembers only what it has loaded, so a version that is published during a load is
  taken next, and one that was superseded is passed over for the newest.

The first error of any thread ends all three, is kept, and is told through `on_event` and `condition`; whoever
supervises makes the next incarnation from scratch. Arguments are plain objects and callables, so that the same class
lives in an actor.

Not covered: who restarts it (`RolloutManager`), and what the simulators run in.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.fleet.accounting import StepAccount, StepBooks
from penstock.fleet.config import FleetConfig
from penstock.fleet.episode_statistics import Episode, EpisodeTracker
from penstock.fleet.fragments import FragmentCutter
from penstock.fleet.pipeline_monitor import PipelineMonitor, PipelineReport, pipeline_metrics
from penstock.fleet.policy import OnEvent, PolicyRunner, Simulators
from penstock.fleet.rollout_loop import POLL_S, RolloutWorker
from penstock.fleet.sender import FragmentQueue, Sender
from penstock.fleet.steps import StepBatch
from penstock.types import (
    Clock,
    NoProgressError,
    RolloutSink,
    Stopped,
    SupersededVersionError,
    UnreachableError,
    WeightSource,
    WeightVersion,
)

WorkerState = Literal["new", "starting", "running", "stopping", "ended", "failed"]

_COUNTS_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """How a worker is.

    Attributes:
        worker_id: Unique in the run.
        incarnation: Which life of it.
        state: ``starting`` until its first batch; ``stopping`` from a request or a failure until its threads ended.
        version: Whose weights it decides with.
        steps: Decided in this life.
        silent_s: Seconds since its last batch, or since its start.
        failure: Why it failed, with the error's name; empty otherwise.
    """

    worker_id: str
    incarnation: int
    state: WorkerState
    version: WeightVersion | None
    steps: int
    silent_s: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker tells whoever supervises it; plain values.

    Attributes:
        condition: How it is.
        account: Where its steps are.
        pipeline: Its timings.
        gauges: Further ``fleet/…`` numbers, to be summed over workers.
        episodes: Those that ended since the number asked with.
        next_episode: The number to ask with next time.
    """

    condition: WorkerStatus
    account: StepAccount
    pipeline: PipelineReport
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    episodes: list[Episode] = field(default_factory=list[Episode])
    next_episode: int = 0


class RolloutWorkerWrapper:
    """One incarnation of one rollout worker.

    Args:
        worker_id: Unique in the run.
        incarnation: Grows with every restart; ids of fragments hold it, so that none is used twice.
        config: Lengths, limits and policies.
        pool: Its simulators, not started; closed at the end.
        runner: The policy that decides its actions.
        sink: Receives the finished fragments.
        weights: Newer versions come from here; None: the runner keeps its own.
        on_event: Called with ``worker_started``, ``weights_served``, ``worker_failed`` and ``worker_ended``.
        on_batch: Further progress handlers.
        first_weights_timeout_s: Longest wait for the first version.
        clock: Monotonic seconds.
        stamp: Unix seconds, which fragments are stamped with.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: int,
        config: FleetConfig,
        pool: Simulators,
        runner: PolicyRunner,
        sink: RolloutSink,
        weights: WeightSource | None,
        *,
        on_event: OnEvent = lambda kind, values: None,
        on_batch: Sequence[Callable[[StepBatch], None]] = (),
        first_weights_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        stamp: Clock = time.time,
    ) -> None:
        self.worker_id, self.incarnation = worker_id, incarnation
        self._config, self._pool, self._runner, self._weights = config, pool, runner, weights
        self._on_event, self._on_batch, self._clock = on_event, on_batch, clock
        self._first_weights_timeout_s, self._stamp = first_weights_timeout_s, stamp
        self._monitor = PipelineMonitor(config.most_in_batch)
        self._books = StepBooks()
        self._queue = FragmentQueue(config.queue_fragments, config.full_queue, config.send_timeout_s, self._books)
        self._sender = Sender(
            self._queue, sink, lambda: self._newest or runner.version, config.max_staleness, self._monitor.note_lag
        )
        self._cutter: FragmentCutter | None = None
        self._tracker: EpisodeTracker | None = None
        self._stopping = threading.Event()
        self._weights_changed = threading.Condition()
        self._loaded: WeightVersion | None = None
        self._newest: WeightVersion | None = None
        self._starting = threading.Lock()
        self._ending = threading.Lock()
        self._failure: BaseException | None = None
        self._abandoned = False
        self._threads: list[threading.Thread] = []
        self._counts: dict[str, int] = {}
        self._moved = clock()
        self._loads, self._swap_s = 0, 0.0

    def start(self) -> None:
        """Starts its threads and returns at once. Once in a life."""
        loops = {"rollout": self._roll_out, "sender": self._sender.run}
        if self._weights is not None:
            loops["weights"] = self._fetch_weights
        threads = [
            threading.Thread(target=self._guarded, args=(name, loop), name=f"{self.worker_id}.{name}", daemon=True)
            for name, loop in loops.items()
        ]
        with self._starting:
            for thread in threads:
                thread.start()
            self._threads = threads  # only now: threads that have not begun look like threads that have ended
        self._on_event("worker_started", {"worker": self.worker_id, "incarnation": self.incarnation})

    def stop(self, timeout_s: float) -> list[str]:
        """Ends it: no new action, what is in inference is finished, the queue is sent within the limit.

        Steps that are then still in flight are abandoned, and at once those of a fragment for which a full queue has no
        room: simulators that it blocked end without it. May be called again.

        Returns:
            The names of threads that did not end in time; empty in good order.
        """
        deadline = time.monotonic() + timeout_s
        self._ask_to_stop()
        with self._starting:
            threads = self._threads
        for thread in threads:  # the rollout thread comes first: it closes the queue, which ends the sender
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in threads if thread.is_alive()]
        self._queue.abandon()
        with self._ending:
            first, self._abandoned = not self._abandoned, True
        if first:
            values = {"worker": self.worker_id, "incarnation": self.incarnation, "late": late}
            self._on_event("worker_ended", values | self.account().to_values())
        return late

    @property
    def failure(self) -> BaseException | None:
        """The first error of any of its threads."""
        return self._failure

    def condition(self) -> WorkerStatus:
        """How it is now."""
        steps, failure = self._books.account().started, self._failure
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        return WorkerStatus(
            self.worker_id, self.incarnation, self._state(steps), self._runner.version, steps,
            self._clock() - self._moved, words,
        )  # fmt: skip

    def account(self) -> StepAccount:
        """Where its steps are; after `stop` nothing is in flight any more."""
        account = self._books.account()
        return account.ended() if self._abandoned else account

    def report(self, since_episode: int = 0) -> WorkerReport:
        """Everything that a supervisor asks for; it may be asked again with the same number."""
        tracker = self._tracker
        number, episodes = (since_episode, []) if tracker is None else tracker.since(since_episode)
        return WorkerReport(self.condition(), self.account(), self._monitor.report(), self._gauges(), episodes, number)

    def metrics(self) -> dict[str, float]:
        """``fleet/…`` numbers of this worker alone."""
        version = self._runner.version
        weights = {} if version is None else {"fleet/weight_step": float(version.step)}
        return pipeline_metrics([self._monitor.report()]) | self.account().metrics() | self._gauges() | weights

    @property
    def swap_s(self) -> float:
        """Seconds from the newest fetched arrays to a policy that decides with them; 0 before the first."""
        return self._swap_s

    def _state(self, steps: int) -> WorkerState:
        if any(thread.is_alive() for thread in self._threads):
            if self._stopping.is_set():
                return "stopping"
            return "running" if steps else "starting"
        if self._failure is not None:
            return "failed"
        return "ended" if self._threads else "new"

    def _gauges(self) -> dict[str, float]:
        counts = {f"fleet/{name}": float(count) for name, count in self._counts.items()}
        return counts | self._queue.metrics() | {"fleet/weight_loads": float(self._loads)}

    def _guarded(self, name: str, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Stopped:
            pass  # the sink or the weights were closed: an end in good order
        except BaseException as error:  # kept, and told to whoever supervises
            self._fail(error)
        finally:
            self._ask_to_stop()
            if name != "weights":  # nobody puts any more, or nobody takes
                self._queue.close()

    def _ask_to_stop(self) -> None:
        self._stopping.set()
        self._queue.stop_blocking()  # or a full queue would hold the simulators' thread

    def _fail(self, error: BaseException) -> None:
        with self._ending:
            if self._failure is not None:
                return
            self._failure = error
        reason = f"{type(error).__name__}: {error}"
        self._on_event("worker_failed", {"worker": self.worker_id, "incarnation": self.incarnation, "reason": reason})

    # --- rolling out ----------------------------------------------------------------------------------------------

    def _roll_out(self) -> None:
        try:
            limits = self._config.limits
            self._pool.start(limits.spawn_timeout_s + limits.reset_timeout_s)
            if self._wait_for_weights():
                self._run_loop(self._prepare())
        finally:
            self._pool.close()

    def _prepare(self) -> RolloutWorker:
        config, pool = self._config, self._pool
        self._tracker = EpisodeTracker(pool.tasks, config.discount)
        self._cutter = FragmentCutter(
            pool, config.fragment_length, self.worker_id, f"{self.worker_id}-{self.incarnation}",
            keep_states=config.max_staleness is not None, clock=self._stamp,
        )  # fmt: skip
        self._cutter.books = self._books
        return RolloutWorker(pool, self._runner, config, self._take_batch, self._monitor)

    def _run_loop(self, worker: RolloutWorker) -> None:
        counted = 0.0
        while not self._stopping.is_set():
            worker.run_once(POLL_S)
            now = self._clock()
            if now - counted >= _COUNTS_EVERY_S:
                self._counts, counted = self._pool.counts(), now
        worker.finish()

    def _take_batch(self, batch: StepBatch) -> None:
        assert self._cutter is not None and self._tracker is not None  # made before the first batch
        self._tracker.add(batch)
        for unsent in self._cutter.add(batch):
            self._queue.put(unsent)
        for handler in self._on_batch:
            handler(batch)
        self._moved = self._clock()

    # --- weights --------------------------------------------------------------------------------------------------

    def _wait_for_weights(self) -> bool:
        """Whether there are weights; false where it was stopped first."""
        if self._weights is None:
            return True
        deadline = self._clock() + self._first_weights_timeout_s
        with self._weights_changed:
            while self._loaded is None and not self._stopping.is_set():
                if self._clock() > deadline:
                    raise NoProgressError(
                        f"{self.worker_id} waited {self._first_weights_timeout_s:g} s for the first weights: none were "
                        "published; see that the learner runs"
                    )
                self._weights_changed.wait(POLL_S)
        return self._loaded is not None

    def _fetch_weights(self) -> None:
        weights = self._weights
        assert weights is not None  # this loop is started only with a source
        while not self._stopping.is_set():
            newer = weights.wait_for(self._loaded, POLL_S)
            if newer is not None:
                self._newest = newer
                self._load(weights, newer)

    def _load(self, weights: WeightSource, version: WeightVersion) -> None:
        try:
            arrays = weights.fetch(version)
        except SupersededVersionError:
            return  # the next turn asks for what replaced it
        except UnreachableError:
            self._stopping.wait(POLL_S)  # whoever serves the weights is being replaced: `wait_for` finds the next
            return
        began = self._clock()
        self._runner.set_weights(version, arrays)
        self._swap_s = self._clock() - began
        held = [version.lineage, version.step]
        self._on_event("weights_served", {
            "worker": self.worker_id, "incarnation": self.incarnation, "version": held, "time": self._stamp(),
        })  # fmt: skip
        with self._weights_changed:
            self._loaded, self._loads = version, self._loads + 1
            self._weights_changed.notify_all()

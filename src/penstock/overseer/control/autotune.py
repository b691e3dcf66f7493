"""Finds a good shape for a fleet by measuring: workers × simulators × simulators per process × batch × wait.

Every shape runs for a few seconds with the recipe's own simulators and network, without a learner, so that what is
measured is what the machine can roll out at most; steps are counted from when every simulator has stepped. One thing is
varied at a time, best first, until nothing is faster or the time is over. Not covered: how a learner shares the
machine, and several machines.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.fleet import RolloutWorker, SimulatorPool
from penstock.fleet.config import FleetConfig
from penstock.fleet.jax_policy import JaxPolicyRunner
from penstock.fleet.pipeline_monitor import PipelineMonitor
from penstock.fleet.steps import StepBatch
from penstock.model.control import ControlPolicy
from penstock.overseer.control.policies import make_policy
from penstock.overseer.control.simulators import probe_spaces, start_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.types import NoProgressError, PenstockError, RunFailed, fold

WARM_UP_S, MEASURE_S = 1.0, 2.0
"""After every simulator has stepped: not counted, and counted."""
SHORT_WAIT_MS, MOST_WAIT_MS = 2.0, 50.0
MOST_PARTS = 2
"""Unless the recipe has more."""
LEAST_GAIN = 1.05
"""A shape must be faster by this to be preferred; less is noise."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """What is varied.

    Attributes:
        workers: Rollout workers.
        envs_per_worker: Simulators of each.
        envs_per_process: Simulators in a process.
        batch_size: Most simulators in one inference.
        max_wait_ms: How long an inference waits for that many.
        parts_per_process: Parts in which a process's simulators act.
    """

    workers: int
    envs_per_worker: int
    envs_per_process: int
    batch_size: int
    max_wait_ms: float
    parts_per_process: int = 1

    @property
    def envs_per_part(self) -> int:
        """Simulators that act together."""
        return self.envs_per_process // self.parts_per_process

    @classmethod
    def of(cls, fleet: FleetConfig) -> "Shape":
        """The recipe's."""
        return cls(
            fleet.workers, fleet.envs_per_worker, fleet.envs_per_process, fleet.most_in_batch, fleet.max_wait_ms,
            fleet.parts_per_process,
        )  # fmt: skip

    def words(self) -> str:
        """As overrides of a recipe."""
        return " ".join(f"fleet.{name}={value:g}" for name, value in asdict(self).items())


@dataclass(frozen=True, slots=True)
class Measurement:
    """One shape, measured.

    Attributes:
        shape: Which.
        steps_per_s: Of all simulators together.
        batch_slots: Mean slots in an inference.
        inference_ms: Median time of one.
        failure: Why it could not be measured; empty otherwise.
    """

    shape: Shape
    steps_per_s: float = 0.0
    batch_slots: float = 0.0
    inference_ms: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class AutotuneReport:
    """All measurements, in their order.

    Attributes:
        recipe: The shape that the recipe has.
        measurements: At least one, of the recipe's shape.
        seconds: That all took; starts of simulators, too.
    """

    recipe: Shape
    measurements: tuple[Measurement, ...]
    seconds: float

    @property
    def best(self) -> Measurement:
        """The recipe's shape, unless another is faster by `LEAST_GAIN`."""
        first, *others = self.measurements
        fastest = max(self.measurements, key=lambda measured: measured.steps_per_s)
        return fastest if fastest.steps_per_s > LEAST_GAIN * first.steps_per_s else first

    @property
    def proposal(self) -> str | None:
        """The best shape as overrides of a recipe; None where no shape could be measured."""
        return None if self.best.failure else self.best.shape.words()

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "best": asdict(self.best),
            "proposal": self.proposal,
            "measurements": [asdict(measured) for measured in self.measurements],
            "seconds": self.seconds,
        }

    def print(self, console: Console) -> None:
        """Prints a table and the proposal as overrides."""
        table = Table()
        for column in (
            "workers",
            "simulators",
            "per process",
            "parts",
            "batch",
            "wait ms",
            "steps/s",
            "mean batch",
            "inference ms",
        ):
            table.add_column(column, justify="right")
        for measured in self.measurements:
            shape = measured.shape
            numbers = ("failed", "", "")
            if not measured.failure:
                numbers = (
                    f"{measured.steps_per_s:,.0f}",
                    f"{measured.batch_slots:.1f}",
                    f"{measured.inference_ms:.2f}",
                )
            table.add_row(
                str(shape.workers), str(shape.envs_per_worker), str(shape.envs_per_process),
                str(shape.parts_per_process), str(shape.batch_size), f"{shape.max_wait_ms:g}", *numbers,
                style="bold green" if measured is self.best else None,
            )  # fmt: skip
        console.print(table)
        if self.proposal is None:
            console.print(f"no shape could be measured: {self.best.failure}", soft_wrap=True, highlight=False)
            return
        for measured in self.measurements:
            if measured.failure:
                line = f"failed: {measured.shape.words()}: {measured.failure}"
                console.print(line, soft_wrap=True, highlight=False)
        console.print(f"measured for {self.seconds:.0f} s, without a learner; try:", highlight=False)
        console.print(f"  {self.proposal}", soft_wrap=True, highlight=False, style="cyan")


def autotune(
    config: FleetRunConfig, seconds: float = 60.0, tell: Callable[[str], object] | None = None
) -> AutotuneReport:
    """Measures shapes until nothing is faster, or the time is over.

    Args:
        config: The recipe; its shape is measured first.
        seconds: For everything; a measurement that has begun is finished.
        tell: Told of each measurement in words.

    Raises:
        ConfigError: a simulator cannot be made.
    """
    started = time.monotonic()
    policy = make_policy(config, probe_spaces(config))
    first = Shape.of(config.fleet)
    measured: dict[Shape, Measurement] = {}

    def try_shape(shape: Shape) -> Measurement:
        if shape not in measured:
            measured[shape] = result = measure(config, policy, shape)
            if tell is not None:
                tell(f"{shape.words()}: {result.failure or f'{result.steps_per_s:,.0f} steps/s'}")
        return measured[shape]

    best = try_shape(first)
    improved = True
    while improved:
        improved = False
        for shape in neighbours(best.shape, len(config.fleet.tasks), config.fleet.acts_as_wholes is None):
            if time.monotonic() - started > seconds:
                improved = False
                break
            if shape not in measured and try_shape(shape).steps_per_s > LEAST_GAIN * best.steps_per_s:
                best, improved = measured[shape], True
                break
    return AutotuneReport(first, tuple(measured.values()), time.monotonic() - started)


def neighbours(shape: Shape, tasks: int, parts: bool = True) -> Iterator[Shape]:
    """Shapes that differ in one thing, and are valid; the most promising first. Waits by a factor of five, else two.

    Args:
        shape: Of which.
        tasks: How many there are; each needs a process.
        parts: Processes may act in parts.
    """
    each, envs, batch, wait_ms = shape.envs_per_process, shape.envs_per_worker, shape.batch_size, shape.max_wait_ms
    grown = replace(shape, envs_per_worker=2 * envs, batch_size=2 * batch)
    candidates = [
        replace(shape, envs_per_process=2 * each),
        replace(shape, envs_per_process=each // 2),
        replace(shape, envs_per_process=2 * each, parts_per_process=2 * shape.parts_per_process),
        replace(shape, parts_per_process=1 if shape.parts_per_process > 1 else 2),
        grown,
        replace(shape, batch_size=2 * batch),
        replace(shape, batch_size=batch // 2),
        replace(shape, max_wait_ms=5 * wait_ms if wait_ms else SHORT_WAIT_MS),
        replace(shape, max_wait_ms=wait_ms / 5 if wait_ms > SHORT_WAIT_MS else 0.0),
        replace(grown, envs_per_process=2 * each),
        replace(shape, envs_per_worker=envs // 2, batch_size=min(batch, envs // 2)),
        replace(shape, workers=2 * shape.workers, envs_per_worker=envs // 2, batch_size=min(batch, envs // 2)),
    ]
    for candidate in candidates:
        envs, each = candidate.envs_per_worker, candidate.envs_per_process
        if each < 1 or envs < each or envs % each or each % candidate.parts_per_process:
            continue
        if not candidate.envs_per_part <= candidate.batch_size <= envs:
            continue
        if candidate.parts_per_process > (max(MOST_PARTS, shape.parts_per_process) if parts else 1):
            continue
        if candidate == shape or candidate.max_wait_ms > max(MOST_WAIT_MS, wait_ms):
            continue
        if candidate.workers * envs // each >= tasks:
            yield candidate


def measure(config: FleetRunConfig, policy: ControlPolicy, shape: Shape) -> Measurement:
    """Runs one shape; what goes wrong is its finding."""
    fleet = config.fleet.model_copy(update=asdict(shape))
    stopping, counting = threading.Event(), threading.Event()
    workers = [_MeasuredWorker(config.seed, fleet, policy, index) for index in range(shape.workers)]
    try:
        for worker in workers:
            worker.start(stopping, counting)
        for worker in workers:
            worker.wait_for_everyone()
        time.sleep(WARM_UP_S)
        counting.set()
        began = time.perf_counter()
        time.sleep(MEASURE_S)
        counting.clear()
        elapsed_s = time.perf_counter() - began
    except PenstockError as error:
        return Measurement(shape, failure=_line(error))
    finally:
        stopping.set()
        for worker in workers:
            worker.close()
    steps = sum(worker.steps for worker in workers)
    failure = next((worker.failure for worker in workers if worker.failure), "")
    if not steps and not failure:
        failure = f"no simulator stepped within the {elapsed_s:.1f} s that were measured"
    metrics = workers[0].monitor.metrics()
    return Measurement(
        shape,
        0.0 if failure else steps / elapsed_s,
        metrics.get("fleet/batch_slots_mean", 0.0),
        1000 * metrics.get("fleet/inference_p50_s", 0.0),
        failure,
    )


class _MeasuredWorker:
    """Simulators, a policy and a thread that only counts."""

    def __init__(self, seed: int, fleet: FleetConfig, policy: ControlPolicy, index: int) -> None:
        self._fleet = fleet
        self._name = f"autotune-{index}"
        self._pool = SimulatorPool(fleet, self._name, fold(seed, "autotune", index), worker_index=index)
        self._runner = JaxPolicyRunner(
            policy, fleet.envs_per_worker, fleet.most_in_batch, fold(seed, "autotune", index)
        )
        self._thread: threading.Thread | None = None
        self._counting = threading.Event()
        self._stepped = np.zeros(fleet.envs_per_worker, np.bool_)
        self._everyone = threading.Event()  # has stepped, or the thread has ended
        self.monitor = PipelineMonitor(fleet.most_in_batch)
        self.steps = 0
        self.failure = ""

    def start(self, stopping: threading.Event, counting: threading.Event) -> None:
        """Returns when one simulator of each task is made and the policy is compiled."""
        self._counting = counting
        start_pool(self._pool, self._fleet)
        self._runner.compile()
        worker = RolloutWorker(self._pool, self._runner, self._fleet, self._count, self.monitor)

        def run() -> None:
            try:
                worker.run(stopping)
            except PenstockError as error:
                self.failure = _line(error)
            finally:
                self._everyone.set()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait_for_everyone(self) -> None:
        """Returns when every simulator has stepped once, or the thread has failed.

        Raises:
            RunFailed: a simulator was given up.
            NoProgressError: they did not within the time for making and resetting one.
        """
        limits = self._fleet.limits
        limit_s = limits.spawn_timeout_s + limits.reset_timeout_s
        deadline = time.monotonic() + limit_s
        while not self._everyone.wait(POLL_S):
            for slot, reason in self._pool.given_up().items():
                raise RunFailed(f"simulator {slot} was given up: {reason}")
            if time.monotonic() > deadline:
                waiting = np.flatnonzero(~self._stepped)
                raise NoProgressError(
                    f"{len(waiting)} simulators took no step without a fault within {limit_s:g} s: {waiting[:8]}"
                )

    def _count(self, batch: StepBatch) -> None:
        taken = batch.acted & ~batch.faults  # what a simulator failed at is no step: one that always fails makes none
        if not self._everyone.is_set():
            self._stepped[batch.slots[taken]] = True
            if self._stepped.all():
                self._everyone.set()
        if self._counting.is_set():
            self.steps += int(np.count_nonzero(taken))

    def close(self) -> None:
        """After it was asked to stop."""
        if self._thread is not None:
            self._thread.join(self._fleet.limits.step_timeout_s)
        self._pool.close()


def _line(error: PenstockError) -> str:
    return " ".join(str(error).split())

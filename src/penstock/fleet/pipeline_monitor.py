"""Where a worker's time goes: seconds per stage, how full batches are, how far behind the weights are.

Cheap enough to be always on: a stage is one write into a ring of the latest samples; percentiles are computed when
somebody asks. One thread writes each ring; readers may see a sample more or less, never a torn one.

Stages, all in seconds: `wait` from a batch's first slot until inference begins; `receive` copying what one poll gave;
`inference` from its begin until its result is read; `send` sending one batch's actions; `report` the progress handler;
`step` what a process spent on its simulators, as it says itself.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

STAGES = ("wait", "receive", "inference", "send", "report", "step")
"""Names of the stages."""

SAMPLES = 2048
"""Latest samples of each stage."""

MOST_REPORTED = 256
"""Samples of each stage that a report carries."""


class RingBuffer:
    """The latest samples of something.

    Args:
        size: Number of samples kept; a newer one overwrites the oldest.
    """

    def __init__(self, size: int = SAMPLES) -> None:
        self._samples = np.zeros(size)
        self._size = size
        self._written = 0

    def add(self, sample: float) -> None:
        """Takes one."""
        self._samples[self._written % self._size] = sample
        self._written += 1

    def extend(self, samples: Sequence[float] | np.ndarray) -> None:
        """Takes several."""
        latest = np.asarray(samples[-self._size :], np.float64)
        at = self._written % self._size
        fitting = min(len(latest), self._size - at)
        self._samples[at : at + fitting] = latest[:fitting]
        self._samples[: len(latest) - fitting] = latest[fitting:]
        self._written += len(latest)

    def latest(self, most: int) -> list[float]:
        """At most so many of the latest, in any order."""
        written = self._written
        count = min(written, self._size, most)
        return np.take(self._samples, np.arange(written - count, written), mode="wrap").tolist()


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """What one worker's monitor says; plain values, so that it travels.

    Attributes:
        samples: Seconds by stage, the latest.
        lag: Versions behind the newest, of steps that were sent lately.
        batches: How often an inference had so many slots, by number.
        most_in_batch: Slots of a full batch.
        steps: Decided so far.
    """

    samples: Mapping[str, list[float]] = field(default_factory=dict[str, list[float]])
    lag: list[float] = field(default_factory=list[float])
    batches: Mapping[int, int] = field(default_factory=dict[int, int])
    most_in_batch: int = 1
    steps: int = 0


class PipelineMonitor:
    """Notes of one worker.

    Args:
        most_in_batch: Slots of a full batch.
    """

    def __init__(self, most_in_batch: int) -> None:
        self._most = most_in_batch
        self._rings = {stage: RingBuffer() for stage in STAGES}
        self._lag = RingBuffer()
        self._batches: dict[int, int] = {}
        self._steps = 0
        self._lock = threading.Lock()

    def note_batch(self, slots: int, wait_s: float, inference_s: float, send_s: float, report_s: float) -> None:
        """One inference batch, from its first arrival until its report."""
        rings = self._rings
        rings["wait"].add(wait_s)
        rings["inference"].add(inference_s)
        rings["send"].add(send_s)
        rings["report"].add(report_s)
        with self._lock:
            self._batches[slots] = self._batches.get(slots, 0) + 1
            self._steps += slots

    def note_steps(self, seconds: Sequence[float]) -> None:
        """How long each process of a batch took."""
        self._rings["step"].extend(seconds)

    def note_receive(self, seconds: float) -> None:
        """How long it took to copy what one poll gave."""
        self._rings["receive"].add(seconds)

    def note_lag(self, versions: np.ndarray) -> None:
        """How far the steps of a fragment lie back as it is sent."""
        self._lag.extend(versions)

    def report(self) -> PipelineReport:
        """Everything, small enough to send."""
        with self._lock:
            batches, steps = dict(self._batches), self._steps
        samples = {stage: ring.latest(MOST_REPORTED) for stage, ring in self._rings.items()}
        return PipelineReport(samples, self._lag.latest(SAMPLES), batches, self._most, steps)

    def metrics(self) -> dict[str, float]:
        """``fleet/…`` numbers of this worker alone."""
        return pipeline_metrics([self.report()])


def pipeline_metrics(reports: Iterable[PipelineReport]) -> dict[str, float]:
    """``fleet/…`` numbers of several workers' reports, merged by sample; what nobody measured is left out."""
    given = list(reports)
    metrics: dict[str, float] = {"fleet/steps_total": float(sum(report.steps for report in given))}
    for stage in STAGES:
        samples = [sample for report in given for sample in report.samples.get(stage, ())]
        if samples:
            p50, p99 = np.percentile(samples, [50, 99])
            metrics |= {f"fleet/{stage}_p50_s": float(p50), f"fleet/{stage}_p99_s": float(p99)}
    lag = [sample for report in given for sample in report.lag]
    if lag:
        metrics |= {"fleet/lag_min": min(lag), "fleet/lag_mean": float(np.mean(lag)), "fleet/lag_max": max(lag)}
    return metrics | _fill_metrics(given)


def _fill_metrics(reports: Sequence[PipelineReport]) -> dict[str, float]:
    """Mean slots in a batch, and the histogram: the share of batches at most a quarter full, a half, and so on."""
    batches = [(slots, report.most_in_batch, times) for report in reports for slots, times in report.batches.items()]
    total = sum(times for _, _, times in batches)
    if not total:
        return {}
    metrics = {"fleet/batch_slots_mean": sum(slots * times for slots, _, times in batches) / total}
    quarters = [0] * 4
    for slots, most, times in batches:
        quarters[min(3, (4 * slots - 1) // most)] += times
    for quarter, times in zip((25, 50, 75, 100), quarters, strict=True):
        metrics[f"fleet/batch_fill_to_{quarter}"] = times / total
    return metrics

"""What is counted in a process: steps and resets by slot, when they came, and processor seconds."""

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.fleet.steps import StepBatch
from penstock.types import RolloutBatch

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tally:
    """Told of every batch of a worker; others read it.

    Args:
        slots: Of the worker.
        watched: A slot of which each batch's time is kept, with the steps of all others until then; None: none.
        settled_steps: So many of every slot, and all is as it will stay.

    Attributes:
        everyone: Set when every slot has made `settled_steps`.
        batches: So far.
        moments: (seconds, others' steps so far) at each of the watched slot's batches.
    """

    def __init__(self, slots: int, watched: int | None = None, settled_steps: int = 1) -> None:
        self.everyone = threading.Event()
        self.batches = 0
        self.moments: list[tuple[float, int]] = []
        self._watched = watched
        self._settled_steps = settled_steps
        self._steps = np.zeros(slots, np.int64)
        self._resets = np.zeros(slots, np.int64)

    def __call__(self, batch: StepBatch) -> None:
        """Takes a batch in."""
        self.batches += 1
        self._steps[batch.slots] += batch.acted
        self._resets[batch.slots] += batch.acted & batch.first
        if self._watched is not None and self._watched in batch.slots:
            self.moments.append((time.perf_counter(), self.steps - int(self._steps[self._watched])))
        if not self.everyone.is_set() and self._steps.min() >= self._settled_steps:
            self.everyone.set()

    @property
    def steps(self) -> int:
        """Whose results are known."""
        return int(self._steps.sum())

    @property
    def resets(self) -> int:
        """Within a step: the first ones are left out."""
        return int(self._resets.sum())


class ThrowingAway:
    """Takes fragments as a replay buffer does, counts their steps, keeps nothing.

    Attributes:
        trainable: Steps.
        faults: Steps that must not be trained on.
        begun: Set when the first came.
    """

    def __init__(self) -> None:
        self.trainable, self.faults = 0, 0
        self.begun = threading.Event()

    def add_batches(self, batches: Iterable[RolloutBatch[Any]]) -> None:
        """See `RolloutSink`."""
        for batch in batches:
            for group in batch.groups:
                for fragment in group.rollouts:
                    self.trainable += fragment.trainable_steps
                    self.faults += fragment.length - fragment.trainable_steps
        self.begun.set()


def processor_s(pids: Iterable[int | None]) -> float:
    """Processor seconds of other processes so far; those that are gone count nothing."""
    ticks = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(words[11]) + int(words[12])
    return ticks / _TICKS_PER_S


def rates(counts: dict[str, float]) -> dict[str, float]:
    """By how much counts grew, per second and per batch."""
    seconds, batches = counts["at_s"], counts["batches"]
    return {
        "steps_per_s": counts["steps"] / seconds,
        "resets_per_s": counts["resets"] / seconds,
        "main_cpu": counts["main_s"] / seconds,
        "simulators_cpu": counts["simulators_s"] / seconds,
        "batch_slots_mean": counts["steps"] / batches if batches else 0.0,
    }


def rates_during_gaps(moments: list[tuple[float, int]], gap_s: float) -> tuple[float, float]:
    """Others' steps per second while the watched slot was silent for longer than `gap_s`, and otherwise.

    Raises:
        ValueError: it was never silent, or always.
    """
    silent, lively = [0.0, 0], [0.0, 0]
    for (begin_s, before), (end_s, after) in zip(moments, moments[1:], strict=False):
        place = silent if end_s - begin_s > gap_s else lively
        place[0] += end_s - begin_s
        place[1] += after - before
    if not silent[0] or not lively[0]:
        raise ValueError(f"{len(moments)} moments, {silent[0]:.1f} s silent: measure longer")
    return silent[1] / silent[0], lively[1] / lively[0]

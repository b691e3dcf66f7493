"""The curves of a run: ``metrics.jsonl`` read on from where the last look ended, one series per metric.

A resume goes back to a checkpoint and writes its updates anew: of one metric a later row supersedes all earlier ones of
its own step and beyond. A curve is handed out as minimum, mean and maximum over blocks of 2^k steps, so that no picture
has more than a few thousand points, and no peak is lost. Rows are read by blocks of bytes: memory follows the numbers,
not the file.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.rundir.views import read_metric_block

BLOCK_BYTES = 8 << 20
"""So much of the file is read at once; a longer line is read whole."""
_FIRST = 64


@dataclass(slots=True)
class Curve:
    """One metric: steps that increase, and a number for each; 12 bytes a row, with room for a quarter more.

    Attributes:
        start: Unix seconds from which `times` count.
        steps: int32, with room behind `count`.
        values: float32, whose seven digits are what is shown.
        times: Seconds after `start`, float32.
        count: How many there are.
    """

    start: float
    steps: np.ndarray = field(default_factory=lambda: np.empty(_FIRST, np.int32))
    values: np.ndarray = field(default_factory=lambda: np.empty(_FIRST, np.float32))
    times: np.ndarray = field(default_factory=lambda: np.empty(_FIRST, np.float32))
    count: int = 0

    def extend(self, steps: np.ndarray, values: np.ndarray, times: np.ndarray) -> None:
        """Adds rows in the order of the file; what they supersede goes."""
        later = np.minimum.accumulate(steps[::-1])[::-1]
        kept = np.append(steps[:-1] < later[1:], True)
        steps, values, times = steps[kept], values[kept], times[kept] - self.start
        self.count = int(np.searchsorted(self.steps[: self.count], steps[0]))
        stop = self.count + len(steps)
        if stop > len(self.steps):
            for name in ("steps", "values", "times"):
                setattr(self, name, np.resize(getattr(self, name), max(stop, 5 * self.count // 4)))
        for array, new in ((self.steps, steps), (self.values, values), (self.times, times)):
            array[self.count : stop] = new
        self.count = stop

    def between(self, first: int | None, last: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps, values and times from one step to another, both included."""
        steps = self.steps[: self.count]
        start = 0 if first is None else int(np.searchsorted(steps, first))
        stop = self.count if last is None else int(np.searchsorted(steps, last, "right"))
        return (
            steps[start:stop].astype(np.int64),
            self.values[start:stop].astype(np.float64),
            self.times[start:stop].astype(np.float64) + self.start,
        )


class Curves:
    """All metrics of a run. Thread-safe.

    Args:
        path: ``metrics.jsonl``; it may be missing yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._series: dict[str, Curve] = {}
        self._offset = 0

    def read_on(self) -> bool:
        """Reads the next block of finished lines; returns whether there was one.

        A file that has become shorter (a torn line was cut off, or it is another) is read from its beginning.

        Raises:
            RunDirectoryError: a finished line is no row of metrics.
        """
        size = self._path.stat().st_size if self._path.is_file() else 0
        if size < self._offset:
            with self._lock:
                self._series, self._offset = {}, 0
        table, offset = read_metric_block(self._path, self._offset, BLOCK_BYTES)
        if offset == self._offset:
            return False
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        steps, times = columns.pop("step"), columns.pop("time")
        with self._lock:
            for name, values in columns.items():
                self._extend(name, steps, values, times)
            self._offset = offset
        return True

    @property
    def names(self) -> list[str]:
        """Of the metrics, in alphabetical order."""
        with self._lock:
            return sorted(self._series)

    def last(self, name: str) -> float | None:
        """The newest number of a metric; None where there is none."""
        with self._lock:
            series = self._series.get(name)
            return float(series.values[series.count - 1]) if series and series.count else None

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps, values and times of a metric; empty where there is none."""
        with self._lock:
            return self._series.get(name, Curve(0.0)).between(None, None)

    def picture(self, name: str, points: int, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """A metric from one step to another in at most so many blocks.

        Returns:
            ``step`` and ``time`` of each block's last row, its ``mean``, and ``low`` and ``high`` where a block has
            several rows; ``block`` is the number of steps in one.
        """
        with self._lock:
            steps, values, times = self._series.get(name, Curve(0.0)).between(first, last)
            return _blocks(steps, values, times, points)

    def _extend(self, name: str, steps: np.ndarray, values: np.ndarray, times: np.ndarray) -> None:
        if values.dtype == object or not np.issubdtype(values.dtype, np.number):
            return  # a text or a mixture: no curve
        known = np.isfinite(values) & ~np.isnan(np.asarray(steps, np.float64))
        if known.any():
            series = self._series.setdefault(name, Curve(float(times[known][0])))
            series.extend(steps[known].astype(np.int64), values[known].astype(np.float32), times[known])


def _blocks(steps: np.ndarray, values: np.ndarray, times: np.ndarray, points: int) -> dict[str, Any]:
    if not len(steps):
        return {"block": 1, "step": [], "time": [], "mean": []}
    block, numbers = 1, steps - steps[0]
    while len(np.unique(numbers // block) if block > 1 else numbers) > points:
        block *= 2
    if block == 1:
        return {"block": 1, "step": steps.tolist(), "time": _short(times, 3), "mean": _rounded(values)}
    starts = np.flatnonzero(np.diff(steps // block, prepend=-1))
    stops = np.append(starts[1:], len(steps))
    return {
        "block": block,
        "step": steps[stops - 1].tolist(),
        "time": _short(times[stops - 1], 3),
        "mean": _rounded(np.add.reduceat(values, starts) / (stops - starts)),
        "low": _rounded(np.minimum.reduceat(values, starts)),
        "high": _rounded(np.maximum.reduceat(values, starts)),
    }


def _short(values: np.ndarray, digits: int) -> list[float]:
    return np.round(values, digits).tolist()


def _rounded(values: np.ndarray) -> list[float]:
    """To seven significant digits, which is what a float32 has."""
    return [float(f"{value:.7g}") for value in values.tolist()]

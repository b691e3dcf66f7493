"""The curves of a run: ``metrics.jsonl`` read on from where the last look ended, one series per metric.

A resume goes back to a checkpoint and writes its updates anew: of one metric a later row supersedes all earlier ones of
its own step and beyond. A curve is handed out as minimum, mean and maximum over blocks of 2^k steps, so that no picture
has more than a few thousand points, and no peak is lost. Rows are read by blocks of bytes and kept as they stand in
the file, four bytes a number; what superseded what is looked at when a curve is asked for.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.rundir.views import read_metric_block

BLOCK_BYTES = 2 << 20
"""So much of the file is read at once; a longer line is read whole."""
_ROWS = 1024
"""Rows that were read by looks of fewer are joined until they are so many."""


@dataclass(slots=True)
class _Rows:
    """Some rows of the file in their order: one number of each metric for each of them.

    Attributes:
        steps: int32.
        times: Unix seconds, float64.
        values: float32 by metric, whose seven digits are what is shown; NaN where a row does not have it.
    """

    steps: np.ndarray
    times: np.ndarray
    values: dict[str, np.ndarray]

    def joined(self, later: "_Rows") -> "_Rows":
        """These rows and later ones."""
        none = [np.full(len(rows.steps), np.nan, np.float32) for rows in (self, later)]
        values = {
            name: np.concatenate([self.values.get(name, none[0]), later.values.get(name, none[1])])
            for name in self.values | later.values
        }
        return _Rows(np.concatenate([self.steps, later.steps]), np.concatenate([self.times, later.times]), values)


class Curves:
    """All metrics of a run. Thread-safe.

    Args:
        path: ``metrics.jsonl``; it may be missing yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: list[_Rows] = []
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
                self._rows, self._offset = [], 0
        table, offset = read_metric_block(self._path, self._offset, BLOCK_BYTES)
        if offset == self._offset:
            return False
        rows = _rows(table)
        with self._lock:
            if self._rows and len(self._rows[-1].steps) < _ROWS:
                rows = self._rows.pop().joined(rows)
            self._rows.append(rows)
            self._offset = offset
        return True

    @property
    def names(self) -> list[str]:
        """Of the metrics, in alphabetical order."""
        with self._lock:
            return sorted({name for rows in self._rows for name in rows.values})

    def last(self, name: str) -> float | None:
        """The newest number of a metric; None where there is none."""
        with self._lock:
            values = next((rows.values[name] for rows in reversed(self._rows) if name in rows.values), None)
        return None if values is None else float(values[np.isfinite(values)][-1])

    def counted(self, name: str, begins: Sequence[float]) -> float | None:
        """How far a counter came in all lives of a run, each of which counts from zero; None where there is none.

        Args:
            name: Of the metric.
            begins: Unix seconds at which the lives began, in order.
        """
        with self._lock:
            parts = [(rows.times, rows.values[name]) for rows in self._rows if name in rows.values]
        if not parts:
            return None
        times, values = map(np.concatenate, zip(*parts, strict=True))
        times, values = times[np.isfinite(values)], values[np.isfinite(values)]
        lives = np.searchsorted(begins, times, "right")  # of each row
        last = np.append(lives[1:] != lives[:-1], True)
        return float(values[last].sum(dtype=np.float64))

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps, values and times of a metric; empty where there is none."""
        with self._lock:
            parts = [(rows.steps, rows.values[name], rows.times) for rows in self._rows if name in rows.values]
        if not parts:
            return np.empty(0, np.int64), np.empty(0), np.empty(0)
        steps, values, times = map(np.concatenate, zip(*parts, strict=True))
        known = np.isfinite(values)
        if not known.all():
            steps, values, times = steps[known], values[known], times[known]
        kept = np.append(steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:], True)
        if not kept.all():
            steps, values, times = steps[kept], values[kept], times[kept]
        return steps.astype(np.int64), values.astype(np.float64), times

    def picture(self, name: str, points: int, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """A metric from one step to another in at most so many blocks.

        Returns:
            ``step`` and ``time`` of each block's last row, its ``mean``, and ``low`` and ``high`` where a block has
            several rows; ``block`` is the number of steps in one.
        """
        steps, values, times = self.series(name)
        start = 0 if first is None else int(np.searchsorted(steps, first))
        stop = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
        return _blocks(steps[start:stop], values[start:stop], times[start:stop], points)


def _rows(table: pa.Table) -> _Rows:
    """A metric that is a text, or a mixture, makes no curve."""
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    steps, times = columns.pop("step").astype(np.float64), columns.pop("time").astype(np.float64)
    known = ~np.isnan(steps)
    values: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if np.issubdtype(column.dtype, np.number):
            with np.errstate(over="ignore"):
                numbers = column[known].astype(np.float32)
            if np.isfinite(numbers).any():
                values[name] = numbers
    return _Rows(steps[known].astype(np.int32), times[known], values)


def _blocks(steps: np.ndarray, values: np.ndarray, times: np.ndarray, points: int) -> dict[str, Any]:
    if not len(steps):
        return {"block": 1, "step": [], "time": [], "mean": []}
    block, numbers = 1, steps - steps[0]
    while np.count_nonzero(np.diff(numbers // block)) >= points:
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

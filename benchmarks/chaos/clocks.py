"""Clocks that can be set: `time.time` of a component's process, moved by an offset that stands in a file.

To be imported in a component's process before any part of Penstock that keeps `time.time` as a default; importing this
module is what replaces it. `components` makes the factories that do so. Nothing here imports Penstock at the top.
"""

import importlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos import memory

LOOK_S = 0.05
"""A new offset is noticed so soon."""

FACTORIES = {
    "learner": "penstock.overseer.language.kind:make_learner",
    "replay": "penstock.overseer.language.replay:make_replay",
    "curriculum": "penstock.overseer.language.replay:make_curriculum",
    "inference": "penstock.overseer.language.kind:make_inference",
    "rollout": "penstock.overseer.language.rollout:make_rollout",
    "evaluator": "penstock.overseer.language.evaluator:make_evaluator",
}
"""Each imported in its own process, after the clock is replaced."""

_true_time, _true_time_ns = time.time, time.time_ns


class _Offset:
    """Seconds by which this process's clock is wrong."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._seconds = 0.0
        self._due = 0.0

    def seconds(self) -> float:
        """What the file says, looked at now and then; 0 where there is none."""
        if self.path is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_S
            self._seconds = read_offset(self.path)
        return self._seconds


_offset = _Offset()


def _moved_time() -> float:
    return _true_time() + _offset.seconds()


def _moved_time_ns() -> int:
    return _true_time_ns() + int(_offset.seconds() * 1e9)


def read_offset(path: Path) -> float:
    """Seconds; 0 where nothing was set."""
    try:
        return float(path.read_text())
    except FileNotFoundError:
        return 0.0


def set_offset(folder: Path, component: str, seconds: float) -> None:
    """Sets the clock of a component, of this incarnation and all later ones."""
    new = folder / f"{component}.new"
    new.write_text(repr(seconds))
    new.rename(folder / component)


def follow(path: Path) -> None:
    """This process's clock is moved by what the file says, from now on."""
    time.time, time.time_ns = _moved_time, _moved_time_ns
    _offset.path = path


def components(folder: Path) -> dict[str, Any]:
    """A factory for each role, whose components have clocks that `set_offset` sets, and take memory when told to.

    Args:
        folder: Where the offsets stand; not in the run directory, whose disk may be full.
    """
    return {role: partial(make, role, str(folder)) for role in FACTORIES}


def make(role: str, folder: str, ctx: Any, settings: Mapping[str, Any]) -> Any:
    """A component like any other of its role, with a clock of its own, which takes memory where it is told to."""
    follow(Path(folder) / ctx.identity.name)
    memory.follow(Path(folder) / f"{ctx.identity.name}.memory")
    module, _, name = FACTORIES[role].partition(":")
    return getattr(importlib.import_module(module), name)(ctx, settings)

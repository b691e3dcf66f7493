"""The tracker protocol, what a service's settings must be able to do, and several trackers as one that cannot fail.

A service that is down must neither end a run nor vanish without a word: `MultiTracker` counts every failure, reports
each tracker's first one, and goes on with the others. Calls may come from several threads; each tracker sees them one
at a time.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict


class Tracker(Protocol):
    """Where metrics and sample conversations go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes metrics named ``<group>/<name>`` of one weight step. Steps need not grow from call to call."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Takes conversations in the form of `conversation_of`."""
        ...

    def close(self) -> None:
        """Writes out what is pending. Nothing is logged afterwards."""
        ...


class ServiceConfig(BaseModel):
    """Settings of one service, which make its tracker. A key of `TrackingConfig` is all that a new one needs besides.

    Attributes:
        label: The service's name for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: ClassVar[str]

    @abstractmethod
    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> Tracker:
        """The tracker.

        Args:
            run_dir: The run directory; it exists.
            run_config: The resolved configuration, for services that show it.

        Raises:
            ConfigError: the service's package is not installed, or the service cannot be reached.
        """


OnFailure = Callable[[str, Exception], None]
"""Called with a tracker's class name and its error."""


class MultiTracker:
    """Hands everything to each of several trackers; an error of one is counted and reported once.

    Args:
        trackers: Any number.
        on_failure: Called with the first error of each tracker, for the run's event log.
    """

    def __init__(self, trackers: Sequence[Tracker], on_failure: OnFailure) -> None:
        self._trackers = [(tracker, threading.Lock()) for tracker in trackers]
        self._on_failure = on_failure
        self._failures: dict[str, int] = {}
        self._counting = threading.Lock()

    @property
    def failures(self) -> dict[str, int]:
        """Tracker class name → how many calls failed so far."""
        with self._counting:
            return dict(self._failures)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics everywhere."""
        self._each(lambda tracker: tracker.log(metrics, step))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs conversations everywhere."""
        self._each(lambda tracker: tracker.log_samples(step, samples))

    def close(self) -> None:
        """Closes every tracker."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker, lock in self._trackers:
            try:
                with lock:
                    call(tracker)
            except Exception as error:  # whatever a service's client raises: the run does not depend on it
                self._count(type(tracker).__name__, error)

    def _count(self, name: str, error: Exception) -> None:
        with self._counting:
            self._failures[name] = self._failures.get(name, 0) + 1
            first = self._failures[name] == 1
        if first:
            self._on_failure(name, error)

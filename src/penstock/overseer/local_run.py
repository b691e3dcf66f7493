"""What conductors of runs in one process have in common: how they stop, their phases, their checkpoints.

Not covered: what is trained; a subclass knows its components and the phases around them.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from penstock.overseer.assembly import save_when_there_is_room
from penstock.overseer.kind import RunStart
from penstock.overseer.results import Results, read_results, write_results
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.training_loop import TrainingLoop
from penstock.replay import PacedReplayBuffer, ReplayBuffer, RolloutStore
from penstock.rundir import RunDirectory
from penstock.types import Checkpointable, Stopped


class LocalParts(Protocol):
    """What every run in one process consists of, beside what is of its kind."""

    learner: Any
    evaluator: Any
    store: RolloutStore
    loop: TrainingLoop

    @property
    def buffer(self) -> ReplayBuffer | PacedReplayBuffer:
        """Holds what waits for the learner."""
        ...

    @property
    def checkpointables(self) -> dict[str, Checkpointable]:
        """What travels in a checkpoint beside the learner."""
        ...


PartsT = TypeVar("PartsT", bound=LocalParts)


class LocalRun(ABC, Generic[PartsT]):
    """One run in this process, whatever it trains (most of `penstock.overseer.overseer.OverseenRun`).

    Args:
        config: What to run.
        directory: Where it is written.
        crew: Starts the components' threads.
        log: The run's single writer.
        start: The policy, or the checkpoint to resume from.
    """

    def __init__(self, config: Any, directory: RunDirectory, crew: ThreadGroup, log: RunLog, start: RunStart) -> None:
        self.results: dict[str, Results] = {}
        self.training_s = 0.0
        self.start = start
        self._config = config
        self._directory = directory
        self._crew = crew
        self._log = log
        self._stopping = threading.Event()
        self._parts: PartsT | None = None
        self._phases = 0
        self._no_room = ""  # for a checkpoint

    def run(self) -> None:
        """Takes the run through its phases; returns at the last step or after `stop`."""
        try:
            self._phase("loading")
            self._parts = parts = self._wired()
            if self.start.checkpoint is not None:
                self.results = read_results(self.start.checkpoint.states["run"]["results"])
            self._go_through(parts)
        except Stopped:
            if not self._stopping.is_set():
                raise
        finally:
            if self._parts is not None:
                self._shut_down(self._parts)

    @abstractmethod
    def _wired(self) -> PartsT:
        """Makes the components, and connects them."""

    @abstractmethod
    def _go_through(self, parts: PartsT) -> None:
        """All phases after the loading."""

    def _shut_down(self, parts: PartsT) -> None:
        """However the run ended."""
        parts.store.close()

    def stop(self) -> None:
        """Asks the run to end at the next update boundary, with a checkpoint."""
        self._stopping.set()
        if self._parts is not None:
            self._parts.loop.stop()
            self._parts.evaluator.stop()
            self._parts.buffer.close()

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping.is_set()

    @property
    def stop_limit_s(self) -> float:
        """How long the end of a run may take."""
        return self._config.overseer.stop_timeout_s

    @property
    def lineage(self) -> int:
        """Which life of the run this is."""
        return self.start.lineage

    @property
    def step(self) -> int:
        """The learner's version."""
        return self._parts.learner.step if self._parts is not None else self._log.step

    @property
    def complete(self) -> bool:
        """Whether the run reached its goal and was evaluated there."""
        return "after" in self.results

    def _phase(self, words: str) -> None:
        if self._stopping.is_set():
            raise Stopped(words)
        self._phases += 1
        self._log.phase(words)

    def _save_with(
        self, parts: PartsT, step: int, write: Callable[[Mapping[str, Any], int], Path], **more: Any
    ) -> None:
        """Writes a checkpoint as soon as there is room.

        Args:
            parts: What travels in it.
            step: The learner's.
            write: Takes all states, and how many checkpoints stay.
            more: Further states.
        """

        def states() -> dict[str, Any]:
            with parts.buffer.boundary():
                gathered: dict[str, Any] = {name: part.state() for name, part in parts.checkpointables.items()}
            return gathered | more | {"run": {"lineage": self.start.lineage, "results": write_results(self.results)}}

        path = save_when_there_is_room(
            self._directory,
            states,
            lambda gathered: write(gathered, self._config.overseer.keep_checkpoints),
            self._config.replay.store.full_disk_s,
            self._wait_for_room,
        )
        self._no_room = ""
        parts.buffer.checkpoint_saved()
        self._log.event("checkpoint", step, path=str(path))

    def _wait_for_room(self, seconds: float, why: str) -> None:
        self._no_room = why
        self._log.progress.note(why)
        time.sleep(seconds)  # also while the run ends: its last checkpoint is worth the wait

    def _status(self, bottleneck: str) -> dict[str, Any]:
        """What status.json says of every run."""
        waiting = [self._no_room or self._log.no_room]
        if self._parts is not None:
            waiting.append(self._parts.buffer.waiting_for())
        return {
            "phase": self._log.progress.phase,
            "step": self.step,
            "steps": self._config.steps,
            "lineage": self.start.lineage,
            "bottleneck": bottleneck,
            "waiting_for": "; ".join(filter(None, waiting)),
        }

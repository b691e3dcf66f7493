"""The run that faults are done to: the recipe `cats` in many processes, wired as `penstock.train` wires it.

It is made in this process, so that its conductor and supervisor are at hand. The overseer takes the main thread.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos import clocks
from penstock.overseer import RunConfig, load_config
from penstock.overseer.component import Settings
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.run import Run as TrainingRun
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import Overseer, ThreadGroup
from penstock.overseer.supervisor.supervisor import Supervisor
from penstock.overseer.tasks import SupervisedTasks
from penstock.overseer.terminal import Progress, TerminalView
from penstock.rundir import RunDirectory, read_metrics

ROLLOUT_WORKERS, INFERENCE_SERVERS = 3, 2
HEARTBEAT_TIMEOUT_S = 8.0
"""A stopped process is noticed after so long; on a busy machine a living one may need seconds to answer."""

OVERRIDES = (
    "runtime=ray",
    "steps=1000000",
    f"rollout.workers={ROLLOUT_WORKERS}",
    f"inference.servers={INFERENCE_SERVERS}",
    "overseer.heartbeat_s=0.3",
    f"overseer.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S:g}",
    "overseer.checkpoint_every=10",
    "overseer.keep_checkpoints=3",
    "overseer.max_restarts=1000",
    "overseer.backoff_s=0.2",
    "overseer.max_backoff_s=1",
    "replay.store.compact_after_s=20",
    "replay.max_filtered_groups_per_batch=1000000",
)


def configuration(learning_rate: float, groups: int, weights_port: int, advertised_port: int) -> RunConfig:
    """Of the run.

    Args:
        learning_rate: The recipe's own reaches the bar in minutes; a lower one keeps a long run learning.
        groups: In a batch; each holds 8 rollouts.
        weights_port: Where the learner's weight server listens.
        advertised_port: Where its clients are told to find it.
    """
    more = (
        f"learner.optimizer.learning_rate={learning_rate}",
        f"replay.groups_per_batch={groups}",
        f"weights.port={weights_port}",
        f"weights.advertise=127.0.0.1:{advertised_port}",
    )
    return load_config("cats", [*OVERRIDES, *more])


@dataclass(frozen=True)
class Run:
    """A run that is wired, and what can be seen of it.

    Attributes:
        directory: Its files.
        config: Its own.
        conductor: Takes it through its phases.
        supervisor: Knows who lives.
        progress: What the terminal would show.
        oversee: Runs it to its end; in the main thread.
        ended: Set when that returned, or raised.
    """

    directory: RunDirectory
    config: RunConfig
    conductor: TrainingRun
    supervisor: Supervisor
    progress: Progress
    oversee: Callable[[], None]
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def over(self) -> bool:
        """Whether it came to its end, whatever that was."""
        return self.ended.is_set()

    @property
    def updates(self) -> int:
        """So many were made, those that were undone by a rewind counted too."""
        return len(self._rewards())

    def reward(self, updates: int) -> float:
        """Mean over the last so many; 0 where there were fewer."""
        last = self._rewards()[-updates:]
        return sum(last) / updates if len(last) == updates else 0.0

    def _rewards(self) -> list[float]:
        rows = read_metrics(self.directory.metrics_path) if self.directory.metrics_path.exists() else []
        return [row["train/reward_mean"] for row in rows if "train/reward_mean" in row]


@contextmanager
def wired(config: RunConfig, path: Path, clock_folder: Path) -> Iterator[Run]:
    """Makes the run's directory and its parts; nothing is started yet."""
    from penstock.overseer.ray import RayLauncher  # an extra, which the other parts of the benchmark do without

    directory = RunDirectory.create(path, config.dump())
    with directory.locked():
        progress = Progress("penstock · chaos", config.steps, config.replay.staleness_budget)
        log, crew = RunLog(directory, config, progress), ThreadGroup()
        settings = Settings(config, directory, secrets.token_hex(32))
        factories: Mapping[str, Any] = clocks.components(clock_folder)
        launcher = RayLauncher(config.ray, directory.path.resolve().name, directory.path)
        kind = LanguageKind.of(config, factories=factories)
        tasks = SupervisedTasks(kind, settings, None, launcher, log)
        conductor = TrainingRun(kind, tasks, log)
        view = TerminalView(progress, quiet=True)
        overseer = Overseer(conductor, crew, view)
        try:
            yield Run(directory, config, conductor, tasks.supervisor, progress, overseer.run)
        finally:
            log.close()

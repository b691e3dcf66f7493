"""`penstock.updates`: a run as a loop over its updates, in a script or a notebook.

The run is overseen in a thread of its own. After each update its learner waits until the loop asks for the next, while
everything else goes on; so what a loop's body takes is no silence of the run. However a loop is left (``break``, an
exception, Ctrl-C, the end of the interpreter), the run ends at that update with a checkpoint. Not covered: runs in many
processes, SIGTERM.
"""

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from penstock.overseer.training import RunRequest, request_run
from penstock.rundir import RunDirectory
from penstock.types import ConfigError, FragmentExample, RolloutBatch, RolloutGroup, TrainingBatch

if TYPE_CHECKING:
    from penstock.overseer.config import RunConfig
    from penstock.overseer.control_config import FleetRunConfig
    from penstock.overseer.language.given import GivenEnvironment, GivenReward
    from penstock.overseer.run import Run
    from penstock.overseer.terminal import RunSummary

logger = logging.getLogger(__name__)

_READS = 5
"""Of files that are merged meanwhile."""


def updates(
    config: "RunConfig | FleetRunConfig | str | Path | None" = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    recipe: str | None = None,
    quiet: bool = False,
    *,
    environment: "GivenEnvironment | Mapping[str, GivenEnvironment] | None" = None,
    reward: "GivenReward | Mapping[str, GivenReward] | None" = None,
    **overrides: Any,
) -> "UpdateLoop":
    """Trains like `penstock.train`, one update at a time: ``for update in penstock.updates("cats", steps=40):``.

    The run begins with the first update that is asked for. The learner waits while an `Update` is looked at. Leaving
    the loop ends the run at that update with a checkpoint, whatever left it; a loop that goes to its end is evaluated
    like any run.

    Args:
        config: As of `penstock.train`, like all that follows.
        run_dir: The path of the run directory, by default ``runs/<recipe>-<time>``.
        resume: Whether to go on in `run_dir`.
        recipe: A name for messages, by default that of `config`.
        quiet: Whether to print nothing, which leaves the output to the loop's body.
        environment: Objects in place of the lessons' environments.
        reward: Objects in place of their reward functions.
        overrides: Changes to the configuration, such as ``steps=40``.

    Raises:
        ConfigError: bad input, ``runtime: ray`` among it. What else `penstock.train` raises comes from the loop.
    """
    request = request_run(config, run_dir, resume, recipe, quiet, environment, reward, overrides)
    if request.config.runtime != "local":
        raise ConfigError(
            f"runtime is {request.config.runtime}, and penstock.updates goes through the updates of a run in this "
            'process: set runtime="local", or use penstock.train'
        )
    return UpdateLoop(request)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Update:
    """One update that was made.

    Attributes:
        step: The version of the policy that it led to, from 1.
        metrics: Its line of metrics.jsonl, such as ``train/loss`` and ``train/reward_mean``.
        batch: What it trained on.
        run_dir: The run directory.
    """

    step: int
    metrics: Mapping[str, float]
    batch: TrainingBatch[Any]
    run_dir: Path

    @property
    def rollouts(self) -> RolloutBatch[Any]:
        """The groups behind the batch: conversations with rewards, read from the run directory; or fragments.

        Raises:
            RunDirectoryError: the files cannot be read.
        """
        fragments = [each.fragment for each in self.batch.examples if isinstance(each, FragmentExample)]
        if fragments:
            return RolloutBatch.of(tuple(RolloutGroup(f.group_id, (f,), f.group_id) for f in fragments))
        return RolloutBatch.of(tuple(_read_groups(self.run_dir, self.batch)))

    def __repr__(self) -> str:
        shown = [f"{name.rpartition('/')[2]} {self.metrics[name]:.3g}" for name in _SHOWN if name in self.metrics]
        return f"Update({', '.join([f'step {self.step}', *shown, f'{len(self.batch.examples)} examples'])})"


_SHOWN = ("train/reward_mean", "train/loss")


def _read_groups(run_dir: Path, batch: TrainingBatch[Any]) -> Iterator[RolloutGroup[Any]]:
    from penstock.rundir.live_files import FilesVanished, RunFiles

    wanted = [rollout_id for example in batch.examples for rollout_id in example.rollout_ids]
    for attempt in range(1, _READS + 1):
        with suppress(*[FilesVanished] if attempt < _READS else []):
            records = RunFiles.list_now(RunDirectory(run_dir)).read_rollouts(wanted)
            break
    members: dict[str, list[Any]] = {group_id: [] for group_id in batch.group_ids}
    keys: dict[str, str] = {}
    for record in sorted(records.values(), key=lambda record: wanted.index(record.rollout.rollout_id)):
        members.setdefault(record.group_id, []).append(record.rollout)
        keys[record.group_id] = record.group_key
    for group_id, rollouts in members.items():
        if rollouts:
            yield RolloutGroup(keys[group_id], tuple(rollouts), group_id)


@final
class UpdateLoop(Iterator[Update]):
    """What `penstock.updates` returns: the updates of one run, each once.

    Whoever keeps it beyond its loop goes on with ``next``, or ends the run with `close`; as a context manager it does
    so by itself. Without a name it ends with its loop.
    """

    def __init__(self, request: RunRequest) -> None:
        self._feed = UpdateFeed(request)
        self._left = weakref.finalize(self, self._feed.leave)  # when it is dropped, or the interpreter ends

    def __next__(self) -> Update:
        update = self._feed.take() if self._left.alive else None
        if update is None:
            self.close()
            raise StopIteration
        return update

    def close(self) -> None:
        """Ends the run at its present update with a checkpoint, unless it has ended; returns when it has.

        Raises:
            PenstockError: what the run failed with.
        """
        if self._left.detach() is not None:
            self._feed.end()
            if self._feed.failure is not None:
                raise self._feed.failure

    @property
    def summary(self) -> "RunSummary | None":
        """What `penstock.train` would have returned; None until the run has ended."""
        return self._feed.summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *left: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"UpdateLoop({self._feed.summary or self._feed})"


@final
class UpdateFeed:
    """The run behind a loop, and the one update that is looked at; of two threads, the learner's and the loop's.

    Args:
        request: What to run, in a thread of its own, when the first update is asked for.

    Attributes:
        summary: Of the run that has ended.
        failure: What it failed with.
    """

    def __init__(self, request: RunRequest) -> None:
        self.summary: RunSummary | None = None
        self.failure: BaseException | None = None
        self._request = request
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._looping: threading.Thread | None = None
        self._run: Run | None = None
        self._update: Update | None = None
        self._holds = True
        self._stopping = False
        self._ended = False
        self._abandoned = False

    # --- of the run ------------------------------------------------------------------------------------------------

    def opened(self, run: "Run") -> None:
        """The run exists, and can be stopped."""
        with self._changed:
            self._run = run
        if self._stopping:
            run.stop()

    def give(self, step: int, metrics: Mapping[str, float], batch: TrainingBatch[Any], directory: RunDirectory) -> None:
        """Offers an update; returns when the loop asks for the next one, or the run is to end."""
        with self._changed:
            if self._holds:
                self._update = Update(step, metrics, batch, directory.path)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._update is None or not self._holds)

    def release(self) -> None:
        """The run is to end: no update is held any more."""
        with self._changed:
            self._holds = False
            self._changed.notify_all()

    def counters(self) -> dict[str, float]:
        """What changes while the loop has an update: its body may take any time."""
        return {} if self._update is None else {"loop": time.monotonic()}

    # --- of the loop -----------------------------------------------------------------------------------------------

    def take(self) -> Update | None:
        """The next update; None where the run has ended.

        Raises:
            KeyboardInterrupt: a second one, or one before the run could be stopped.
        """
        self._looping = threading.current_thread()
        if self._thread is None:
            self._thread = threading.Thread(target=self._oversee, name="overseer", daemon=True)
            self._thread.start()
        try:
            return self._next()
        except KeyboardInterrupt:
            run = self._run
            if run is None or run.stopping:
                self._abandoned = True
                self._stop()
                raise
            run.log.progress.note("stopping at the next update with a checkpoint; once more ends at once")
            return self._last()

    def _next(self) -> Update | None:
        with self._changed:
            self._update = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._update is not None or self._ended)
            return self._update

    def _last(self) -> None:
        try:
            self.end()
        except KeyboardInterrupt:
            self._abandoned = True
            raise

    def end(self) -> None:
        """Has the run end with a checkpoint, and waits for that: its overseer has limits."""
        self._stop()
        if self._thread is not None and not self._abandoned:
            self._thread.join()
        self._update = None

    def leave(self) -> None:
        """Nobody will ask for an update any more. Garbage may be collected in any thread: the run's own do not wait."""
        self._stop()
        if threading.current_thread() in (self._looping, threading.main_thread()):
            self.end()
        if self.failure is not None:
            logger.error("the run ended with %s: %s", type(self.failure).__name__, self.failure)

    def _stop(self) -> None:
        self._stopping = True
        if self._run is not None:
            self._run.stop()

    def _oversee(self) -> None:
        try:
            self.summary = self._request.run(self)
        except BaseException as error:  # raised where the loop is
            self.failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def __repr__(self) -> str:
        if self._thread is None:
            return f"{self._request.recipe}, not begun"
        return f"{self._request.recipe}, at step {0 if self._run is None else self._run.step}"

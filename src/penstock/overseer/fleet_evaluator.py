"""Evaluation during a fleet run: in simulators of its own, beside training and never in its way.

An evaluation is due when a multiple of `evaluation.every` has been passed. The versions that become due while one runs
are not queued: the newest of them is evaluated next. Its pool lives only as long as one evaluation. Every evaluation
resets its simulators with the same seeds.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.curriculum import evaluation_due
from penstock.model.control import ControlPolicy, with_named_arrays
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_episodes import play_episodes
from penstock.overseer.fleet_policies import make_evaluation_runner
from penstock.overseer.fleet_simulators import OnEvent, evaluation_fleet, open_evaluation_pool
from penstock.overseer.result_rows import Results
from penstock.types import PenstockError, RolloutBatchStats, Stopped, WeightVersion

VERSION_POLL_S = 0.2


class FleetEvaluator:
    """Evaluates versions that are due, in a thread (`run`), or one at once (`evaluate`).

    Args:
        config: The run's.
        policy: Its form; weights come with each version.
        log: Takes metrics by step.
        on_event: Told of simulators' deaths, and of an evaluation that failed; the run goes on without its numbers.

    Attributes:
        steps: Simulator steps of all evaluations so far.
    """

    def __init__(
        self,
        config: FleetRunConfig,
        policy: ControlPolicy,
        log: Callable[[int, Mapping[str, float]], None],
        on_event: OnEvent,
    ) -> None:
        self._config = config
        self._policy = policy
        self._log = log
        self._on_event = on_event
        self._evaluated_step = 0
        self._taken_step = 0  # further than the other while an evaluation runs
        self._changed = threading.Condition()
        self._due: tuple[WeightVersion, Mapping[str, Any]] | None = None
        self._finishing = False
        self._stopping = threading.Event()
        self.steps = 0
        self.doing = ""

    def is_due(self, version: WeightVersion) -> bool:
        """Whether an evaluation is due at a version, or was and was not made."""
        return evaluation_due(self._config.evaluation.every, self._evaluated_step, version.step)

    def offer(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Hands the version to the thread where an evaluation is due; returns at once."""
        with self._changed:
            if evaluation_due(self._config.evaluation.every, self._taken_step, version.step):
                self._due = version, arrays
                self._changed.notify_all()

    def run(self) -> None:
        """Evaluates what is due until `finish` or `stop`; one that runs at `finish` is completed."""
        while (due := self._next()) is not None:
            try:
                self.attempt(*due)
            except Stopped:
                return

    def attempt(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Evaluates a version that is due, and logs the numbers; what fails is told, and does not come again.

        Raises:
            Stopped: `stop` was called.
        """
        try:
            self._log(version.step, metrics_of(self.evaluate(version, arrays)))
        except Stopped:
            raise
        except PenstockError as error:
            self._on_event("evaluation_failed", {"step": version.step, "error": str(error)})
        self._evaluated_step = version.step

    def _next(self) -> tuple[WeightVersion, Mapping[str, Any]] | None:
        with self._changed:
            while self._due is None and not self._finishing and not self._stopping.is_set():
                self._changed.wait(VERSION_POLL_S)
            due, self._due = self._due, None
            if due is None or self._finishing or self._stopping.is_set():
                return None
            self._taken_step = due[0].step
            return due

    def evaluate(self, version: WeightVersion, arrays: Mapping[str, Any]) -> Results:
        """Plays `evaluation.episodes` of each task with these weights.

        Raises:
            Stopped: `stop` was called.
            ConfigError: a simulator cannot be made.
        """

        def count(steps: int) -> None:
            self.steps += steps

        self.doing = f"evaluating version {version.step}"
        pool = open_evaluation_pool(self._config, self._on_event)
        try:
            runner = make_evaluation_runner(with_named_arrays(self._policy, arrays), self._config, version)
            fleet, episodes = evaluation_fleet(self._config), self._config.evaluation.episodes
            return play_episodes(pool, runner, fleet, episodes, self._stopping, count)
        finally:
            pool.close()
            self.doing = ""

    def finish(self) -> None:
        """No further evaluation is begun in the thread."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the evaluation that runs, too."""
        self._stopping.set()
        self.finish()

    def state(self) -> dict[str, Any]:
        """The step last evaluated."""
        return {"evaluated_step": self._evaluated_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes `state` back."""
        self._evaluated_step = self._taken_step = int(state["evaluated_step"])


def metrics_of(results: Mapping[str, RolloutBatchStats]) -> dict[str, float]:
    """Flattens results of one evaluation to ``eval/<task>/<name>`` metrics; a task that failed has none."""
    return {
        f"eval/{task}/{name}": value
        for task, stats in results.items()
        if not stats.failure
        for name, value in {
            "return_mean": stats.reward_mean,
            "return_min": min(stats.rewards, default=0.0),
            "return_max": max(stats.rewards, default=0.0),
            "length_mean": stats.response_tokens,
            "episodes": float(stats.groups),
            **stats.metrics,
        }.items()
    }

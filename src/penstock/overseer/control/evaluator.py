"""Evaluation during the training of a control policy, in simulators of its own; and as a component.

An evaluation is due when a multiple of `evaluation.every` has been passed. The versions that become due while one runs
are not queued: the newest of them is evaluated next. Its pool lives only as long as one evaluation, and every
evaluation resets its simulators with the same seeds. `penstock.fleet.evaluate_policy` does the playing, without bias to
short episodes.

The component fetches a version's weights before it plays, so that training goes on meanwhile. A version that is gone
before it could be fetched is passed over for the newest.
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from penstock.curriculum import evaluation_due
from penstock.fleet import PolicyEvaluation, evaluate_policy
from penstock.fleet.config import FleetConfig
from penstock.fleet.policy import PolicyRunner, Simulators
from penstock.fleet.steps import StepBatch
from penstock.model.control import ControlPolicy, named_arrays, with_named_arrays
from penstock.overseer.component import POLL_S, Settings, ThreadedComponent
from penstock.overseer.control.policies import make_evaluation_runner, make_policy
from penstock.overseer.control.rollout import FollowedWeights
from penstock.overseer.control.simulators import evaluation_fleet, open_evaluation_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.results import EvaluationLog, Results, write_stats
from penstock.overseer.run_log import simulators_told
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.types import (
    NoProgressError,
    PenstockError,
    RolloutBatchStats,
    Spaces,
    Stopped,
    UnreachableError,
    WeightsError,
    WeightVersion,
)


def play_episodes(
    pool: Simulators,
    runner: PolicyRunner,
    config: FleetConfig,
    episodes: int,
    stopping: threading.Event,
    on_steps: Callable[[int], None] | None = None,
    on_slow: Callable[[str], None] = lambda words: None,
) -> Results:
    """Plays on a started pool.

    Args:
        pool: Started; its simulators begin their first episodes.
        runner: The policy, with weights.
        config: Of the pool.
        episodes: Number per task.
        stopping: Ends it early.
        on_steps: Told of the steps of each batch.
        on_slow: Told how far it is, where that takes long.

    Returns:
        Statistics by task.

    Raises:
        Stopped: `stopping` was set.
        NoProgressError: the episodes were not over in time.
        RunFailed: every simulator of a task was given up.
    """
    watch = [] if on_steps is None else [partial(_count, on_steps)]
    check = partial(_check, stopping)
    played = evaluate_policy(pool, runner, episodes, config, on_batch=watch, on_slow=on_slow, check=check)
    return {task: _stats(task, played) for task in config.tasks}


def _check(stopping: threading.Event) -> None:
    if stopping.is_set():
        raise Stopped("the evaluation was cut short")


def _count(on_steps: Callable[[int], None], batch: StepBatch) -> None:
    on_steps(int(np.count_nonzero(batch.acted)))


def _stats(task: str, played: PolicyEvaluation) -> RolloutBatchStats:
    """Of one task: an episode is a problem of its own, its steps stand for tokens, and nothing is a success."""
    chosen = np.array([name == task for name in played.tasks], np.bool_)
    returns, lengths = played.returns[chosen], played.lengths[chosen]
    count = len(returns)
    metrics: dict[str, float] = {}
    if count:
        metrics["discounted_return_mean"] = float(played.discounted_returns[chosen].mean())
        metrics["episodes_per_s"] = count / max(played.seconds, 1e-9)
    return RolloutBatchStats(
        lesson_id=task,
        groups=count,
        rollouts=count,
        reward_mean=float(returns.mean()) if count else 0.0,
        success_rate=0.0,
        pass_at_k=0.0,
        response_tokens=float(lengths.mean()) if count else 0.0,
        truncated_fraction=0.0,
        rewards=tuple(returns.tolist()),
        prompts=tuple(str(index) for index in range(count)),
        metrics=metrics,
    )


VERSION_POLL_S = 0.2


class FleetEvaluator:
    """Evaluates versions that are due, in a thread (`run`), or one at once (`evaluate`).

    Simulators' deaths, and an evaluation that failed, are told by events; the run goes on without its numbers.

    Args:
        ctx: Of the component that evaluates.
        config: The run's.
        policy: Its form; weights come with each version.

    Attributes:
        steps: Simulator steps of all evaluations so far.
    """

    def __init__(self, ctx: ComponentContext, config: FleetRunConfig, policy: ControlPolicy) -> None:
        self._config = config
        self._policy = policy
        self._log = EvaluationLog(ctx, config.overseer.keep_best)
        self._on_event = simulators_told(ctx)
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
        self._log.begin(version.step)
        try:
            results = self.evaluate(version, arrays)
        except Stopped:
            raise
        except PenstockError as error:
            self._on_event("evaluation_failed", {"step": version.step, "error": str(error)})
        else:
            self._log.metrics(version.step, metrics_of(results))
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

        def tell(words: str) -> None:
            self._on_event("evaluation_slow", {"step": version.step, "words": words})

        self.doing = f"evaluating version {version.step}"
        pool = open_evaluation_pool(self._config, self._on_event)
        try:
            runner = make_evaluation_runner(with_named_arrays(self._policy, arrays), self._config, version)
            fleet, episodes = evaluation_fleet(self._config), self._config.evaluation.episodes
            return play_episodes(pool, runner, fleet, episodes, self._stopping, count, tell)
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


WAITING = "waiting for a version that is due"


class FleetEvaluatorRole(ThreadedComponent[FleetRunConfig]):
    """Runs one `FleetEvaluator`: when a version is due, and when the overseer asks.

    Args:
        ctx: What its host gives it.
        settings: The run, with its config, directory and lineage.
        spaces: What the policy sees and does.
        state: Checkpointed; None for a run that begins.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings[FleetRunConfig],
        spaces: Spaces,
        state: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(ctx, settings)
        policy = make_policy(settings.config, spaces)
        self._feed = FollowedWeights(ctx, settings, named_arrays(policy))
        self._evaluator = FleetEvaluator(ctx, settings.config, policy)
        if state:
            self._evaluator.restore(state)
        self._one_at_a_time = threading.Lock()

    @override
    def start(self) -> None:
        self.activity.begin()
        self.state, self.doing = "running", WAITING
        if self.config.evaluation.every:
            self.crew.start(f"{self.name}.versions", self._run)

    def _run(self) -> None:
        seen: WeightVersion | None = None
        while not (self.stopping.is_set() or self.draining):
            try:
                version = self._feed.wait_for(seen, POLL_S) if self._feed.training else None
                if version is None:
                    self.stopping.wait(0.0 if self._feed.training else POLL_S)
                    continue
                if self._evaluator.is_due(version):
                    arrays = self._feed.fetch(version)
                    with self._one_at_a_time, self.activity.busy():
                        self._evaluator.attempt(version, arrays)
                seen = version
            except (UnreachableError, WeightsError):
                self.stopping.wait(POLL_S)  # a restart, or a newer version meanwhile
            except Stopped:
                return

    # --- what the overseer calls ---------------------------------------------------------------------------------

    def evaluate(self, step: int, when: str | None = None) -> dict[str, Any]:
        """A full evaluation of every task with weights of that step, whose episodes are not kept; a task.

        Raises:
            NoProgressError: the weights could not be fetched within ``overseer.no_progress_s``.
        """
        version, arrays = self._fetched(step)
        with self._one_at_a_time, self.activity.busy():
            return write_stats(self._evaluator.evaluate(version, arrays))

    def _fetched(self, step: int) -> tuple[WeightVersion, Mapping[str, Any]]:
        reason: Exception | None = None
        limit = time.monotonic() + self.config.overseer.no_progress_s
        while time.monotonic() < limit and not self.stopping.is_set():
            version = WeightVersion(self.ctx.view.lineage, step)
            try:
                return version, self._feed.fetch(version)
            except (UnreachableError, WeightsError) as failure:
                reason = failure
            self.stopping.wait(POLL_S / 2)
        raise NoProgressError(f"version {step} could not be fetched within overseer.no_progress_s: {reason}")

    def evaluation_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._evaluator.state()

    @override
    def stop(self, timeout_s: float) -> None:
        self._evaluator.stop()
        self._feed.close()
        super().stop(timeout_s)

    def _has_work(self) -> bool:
        return self._one_at_a_time.locked()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        doing = self._evaluator.doing
        facts = self._facts(state=self._evaluator.state())
        progress = float(self._evaluator.steps) if doing else None
        return ComponentStatus(self.state, doing or self.doing, progress, busy_s, idle_s, facts=facts)


def make_fleet_evaluator(ctx: ComponentContext, settings: Mapping[str, Any]) -> FleetEvaluatorRole:
    """Factory of a fleet's evaluator; `settings` has the ``spaces`` and its checkpointed ``state``, or None."""
    spaces = Spaces.from_values(settings["spaces"])
    return FleetEvaluatorRole(ctx, Settings.of(settings, FleetRunConfig), spaces, settings.get("state"))

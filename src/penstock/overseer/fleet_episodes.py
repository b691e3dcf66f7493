"""Plays whole episodes with one version of a policy, and sums up their returns by task.

`penstock.fleet.evaluate_policy` does the playing, without bias to short episodes. Not covered: where simulators come
from.
"""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.fleet import PolicyEvaluation, evaluate_policy
from penstock.fleet.config import FleetConfig
from penstock.fleet.policy import PolicyRunner, Simulators
from penstock.fleet.steps import StepBatch
from penstock.overseer.result_rows import Results
from penstock.types import RolloutBatchStats, Stopped


def play_episodes(
    pool: Simulators,
    runner: PolicyRunner,
    config: FleetConfig,
    episodes: int,
    stopping: threading.Event,
    on_steps: Callable[[int], None] | None = None,
) -> Results:
    """Plays on a started pool.

    Args:
        pool: Started; its simulators begin their first episodes.
        runner: The policy, with weights.
        config: Of the pool.
        episodes: Number per task.
        stopping: Ends it early.
        on_steps: Told of the steps of each batch.

    Returns:
        Statistics by task.

    Raises:
        Stopped: `stopping` was set.
        NoProgressError: the episodes were not over in time.
        RunFailed: every simulator of a task was given up.
    """
    watch = partial(_watch, stopping, on_steps)
    played = evaluate_policy(pool, runner, episodes, config, on_batch=[watch])
    return {task: _stats(task, played) for task in config.tasks}


def _watch(stopping: threading.Event, on_steps: Callable[[int], None] | None, batch: StepBatch) -> None:
    if stopping.is_set():
        raise Stopped("the evaluation was cut short")
    if on_steps is not None:
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

"""Evaluation during training: which versions, with what outcome, told to the curriculum and the log.

An evaluation is due when a multiple of its frequency has been *passed*, so none is skipped when versions jump.
It runs between two weight swaps, so all its rollouts come from one version. It counts as done only at its end: a run
that is checkpointed or stopped in the middle of it owes it still, and so does its resume.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.curriculum import evaluation_due
from penstock.rollout import RolloutManager
from penstock.rollout.manager import EvalType
from penstock.types import (
    EnvironmentFailure,
    InvalidRolloutError,
    RolloutBatchStats,
    Stopped,
    WeightVersion,
)

Log = Callable[[int, Mapping[str, float]], None]
OnFailure = Callable[[str, EnvironmentFailure | InvalidRolloutError], None]


class Evaluator:
    """Evaluates versions as they start to serve.

    Args:
        manager: Generates, and tells the curriculum of full evaluations.
        log: Takes metrics by step.
        on_failure: Told of a lesson whose environment failed altogether; the run goes on without its numbers.
    """

    def __init__(self, manager: RolloutManager, log: Log, on_failure: OnFailure) -> None:
        self._manager = manager
        self._log = log
        self._on_failure = on_failure
        self._evaluated_step = 0
        self._glanced_step = 0
        self._stopping = threading.Event()

    def __call__(self, version: WeightVersion) -> None:
        """Runs the evaluation that is due at this version, if any."""
        config, step = self._manager.curriculum.config, version.step
        if evaluation_due(config.eval_frequency, self._evaluated_step, step):
            self._log(step, metrics_of(self._attempt("eval", step), "eval"))
            self._evaluated_step = self._glanced_step = step
        elif evaluation_due(config.micro_eval_frequency, self._glanced_step, step):
            self._log(step, metrics_of(self._attempt("micro_eval", step), "micro_eval"))
            self._glanced_step = step

    def is_due(self, step: int) -> bool:
        """Whether a call with a version of that step would evaluate anything."""
        config = self._manager.curriculum.config
        return evaluation_due(config.eval_frequency, self._evaluated_step, step) or evaluation_due(
            config.micro_eval_frequency, self._glanced_step, step
        )

    def _attempt(self, eval_type: EvalType, step: int) -> dict[str, RolloutBatchStats]:
        results: dict[str, RolloutBatchStats] = {}
        for lesson_id in self._manager.curriculum.config.lessons:
            try:
                results[lesson_id] = self._one(lesson_id, eval_type, step)
            except (EnvironmentFailure, InvalidRolloutError) as failure:
                if self._stopping.is_set():
                    raise Stopped("the evaluation was cut short") from failure
                self._on_failure(lesson_id, failure)
                results[lesson_id] = RolloutBatchStats.failed(lesson_id, str(failure))
        return results

    def evaluate(self, step: int) -> dict[str, RolloutBatchStats]:
        """A full evaluation of every lesson; one whose environment failed altogether has a `failure`.

        Raises:
            Stopped: `stop` was called.
        """
        return self._attempt("eval", step)

    def stop(self) -> None:
        """No lesson is begun any more."""
        self._stopping.set()

    def _one(self, lesson_id: str, eval_type: EvalType, step: int) -> RolloutBatchStats:
        if self._stopping.is_set():
            raise Stopped("the evaluation was cut short")
        return self._manager.evaluate_lesson(lesson_id, None, eval_type, step)[0]

    def state(self) -> dict[str, Any]:
        """The steps last evaluated."""
        return {"evaluated_step": self._evaluated_step, "glanced_step": self._glanced_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes `state` back."""
        self._evaluated_step = int(state["evaluated_step"])
        self._glanced_step = int(state["glanced_step"])


def metrics_of(results: Mapping[str, RolloutBatchStats], group: str) -> dict[str, float]:
    """Flattens evaluation results to ``<group>/<lesson>/<name>`` metrics; a lesson that failed has none."""
    return {
        f"{group}/{lesson_id}/{name}": value
        for lesson_id, stats in results.items()
        if not stats.failure
        for name, value in {
            "reward_mean": stats.reward_mean,
            "success_rate": stats.success_rate,
            "pass_at_k": stats.pass_at_k,
            "response_tokens": stats.response_tokens,
            "truncated_fraction": stats.truncated_fraction,
            "rollouts": float(stats.rollouts),
            **stats.metrics,
        }.items()
    }

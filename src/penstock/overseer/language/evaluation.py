"""`penstock.evaluate`: offline evaluation of a checkpoint by the very code that generates during training.

A `RolloutManager` with an engine of its own: no worker, no learner. The held-out prompts and seeds are those of the
run's own evaluations. Rollouts go to Parquet where a directory is given.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.inference.http_server import model_directory
from penstock.model.language import PolicyConfig, load_policy
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.evaluation_report import EvaluationReport, LessonReport
from penstock.overseer.language.given import GivenEnvironment, GivenReward, take_objects
from penstock.rollout import RolloutManager
from penstock.rundir import table_from_evaluation, write_parquet
from penstock.rundir.storage import check_place
from penstock.text import Tokenizer
from penstock.types import (
    ConfigError,
    EnvironmentFailure,
    RolloutBatch,
    RolloutBatchStats,
)

LABEL = "offline"
"""Among the labels of evaluations in rollouts that are kept."""


def evaluate(
    checkpoint: Path | str,
    config: RunConfig | str | Path,
    lessons: Sequence[str] | None = None,
    n: int | None = None,
    generations: int = 1,
    rollouts_path: Path | None = None,
    *,
    environment: GivenEnvironment | Mapping[str, GivenEnvironment] | None = None,
    reward: GivenReward | Mapping[str, GivenReward] | None = None,
) -> EvaluationReport:
    """Evaluates a checkpoint on the held-out examples of a recipe's lessons.

    Args:
        checkpoint: A run's ``checkpoints/step-<n>`` or any Hugging Face model directory.
        config: The recipe, its name or its path; its model section gives way to the checkpoint.
        lessons: Which lessons; all by default.
        n: Held-out prompts per lesson; by default as the recipe says.
        generations: Responses per prompt; k of pass@k goes up to it.
        rollouts_path: Write the rollouts to this Parquet file.
        environment: As of `penstock.train`: objects in place of the lessons' environments.
        reward: As of `penstock.train`: objects in place of their reward functions.

    Raises:
        ConfigError: an unknown lesson, a checkpoint that is none, a path that cannot be written, or a recipe of a
            control policy.
        EnvironmentFailure: every group of a lesson failed.
    """
    known = config if isinstance(config, RunConfig) else load_config(config)
    if not isinstance(known, RunConfig):
        raise ConfigError(f"config {config} trains a control policy: evaluate it by penstock.overseer.evaluate_fleet")
    given = take_objects(known, environment, reward)
    config = given.config
    chosen = _chosen_lessons(config, lessons)
    model_dir = model_directory(str(checkpoint))
    tokenizer = Tokenizer.load(model_dir, config.model.chat_template_kwargs)
    decoder = load_policy(PolicyConfig(path=str(model_dir), dtype=config.model.dtype), config.seed, tokenizer)
    if rollouts_path is not None:
        check_place(rollouts_path, "--rollouts")
    limits = config.overseer
    started = time.perf_counter()
    with RolloutManager.from_configs(
        given.environments,
        config.curriculum,
        config.inference,
        tokenizer,
        decoder,
        config.seed,
        start_timeout_s=limits.no_progress_s,
        stop_timeout_s=limits.stop_timeout_s,
    ) as manager:
        results = {lesson_id: _evaluated(manager, lesson_id, n, generations) for lesson_id in chosen}
    seconds = time.perf_counter() - started
    if rollouts_path is not None:
        _write_rollouts(rollouts_path, [batch for _, batch in results.values()])
    reports = {
        lesson_id: LessonReport.of(lesson_id, batch, config.curriculum.lessons[lesson_id].success_threshold)
        for lesson_id, (_, batch) in results.items()
    }
    return EvaluationReport(model_dir, reports, seconds, rollouts_path)


def _evaluated(
    manager: RolloutManager, lesson_id: str, n: int | None, generations: int
) -> tuple[RolloutBatchStats, RolloutBatch]:
    try:
        return manager.evaluate_lesson(lesson_id, n, "eval", n_generations=generations, label=LABEL)
    except EnvironmentFailure as failure:
        raise EnvironmentFailure(f"lesson {lesson_id!r} cannot be evaluated: {failure}") from failure


def _chosen_lessons(config: RunConfig, lessons: Sequence[str] | None) -> list[str]:
    known = list(config.curriculum.lessons)
    unknown = [lesson_id for lesson_id in lessons or [] if lesson_id not in known]
    if unknown:
        raise ConfigError(f"lesson {unknown[0]!r} is not in the recipe: its lessons are {', '.join(known)}")
    return list(lessons or known)


def _write_rollouts(path: Path, batches: Sequence[RolloutBatch]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(path, table_from_evaluation(batches, LABEL))

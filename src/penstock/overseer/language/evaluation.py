"""`penstock.evaluate`: offline evaluation of a checkpoint by the very code that generates during training.

A `RolloutManager` with an engine of its own: no worker, no learner. The held-out prompts and seeds are those of the
run's own reports, before and after its training, which no decision of the curriculum looked at. A baseline answers the
same prompts with the same seeds after it. Rollouts go to Parquet where a path is given.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa

from penstock.environments import Environment, load_environment
from penstock.inference.serving import model_directory
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.evaluation_report import EvaluationReport, LessonReport, chosen_of
from penstock.overseer.language.generation import check_count, manager_of, version_of
from penstock.overseer.language.given import GivenEnvironment, GivenObjects, GivenReward, take_objects
from penstock.rollout import RolloutManager
from penstock.rundir import table_from_evaluation, write_parquet
from penstock.rundir.storage import check_place
from penstock.types import ConfigError, EnvironmentFailure, RolloutBatch
from penstock.types.addresses import is_url

LABEL, BASELINE = "offline", "baseline"
"""Among the labels of evaluations in rollouts that are kept."""

Answers = dict[str, RolloutBatch]
"""By lesson."""


def evaluate(
    checkpoint: Path | str,
    config: RunConfig | str | Path,
    lessons: Sequence[str] | None = None,
    n: int | None = None,
    generations: int = 1,
    rollouts_path: Path | str | None = None,
    baseline: Path | str | None = None,
    ks: Sequence[int] | None = None,
    *,
    environment: GivenEnvironment | Mapping[str, GivenEnvironment] | None = None,
    reward: GivenReward | Mapping[str, GivenReward] | None = None,
    token: str | None = None,
) -> EvaluationReport:
    """Evaluates a checkpoint on the held-out examples of a recipe's lessons.

    Args:
        checkpoint: A run's ``checkpoints/step-<n>``, any Hugging Face model directory, or, as of `penstock generate`,
            the URL of a server.
        config: The recipe, its name or its path; its model section gives way to the checkpoint.
        lessons: Which lessons; all by default.
        n: Held-out prompts per lesson; by default as the recipe says.
        generations: Responses per prompt; k of pass@k goes up to it.
        rollouts_path: Write the rollouts to this Parquet file.
        baseline: A checkpoint, or a server, to compare with, which answers the same prompts with the same seeds.
        ks: Of pass@k; by default 1, 2, 4, … and `generations`.
        environment: As of `penstock.train`: objects in place of the lessons' environments. They are closed at the end.
        reward: As of `penstock.train`: objects in place of their reward functions.
        token: What a server asks for.

    Raises:
        ConfigError: an unknown lesson, no prompts, a checkpoint that is none, a path that cannot be written, a recipe
            of a control policy, or a k above `generations`.
        EnvironmentFailure: every group of a lesson failed: it has no result.
        UnreachableError: nothing answers at the URL.
    """
    given = take_objects(_recipe(config), environment, reward)
    curriculum = given.config.curriculum
    chosen = chosen_of(lessons, curriculum.lessons, "lesson")
    check_count(n)
    _check_ks(ks or (), generations)
    sources = [one for one in (checkpoint, baseline) if one is not None]
    answering = [str(one) if is_url(one) else model_directory(str(one)) for one in sources]
    path = None if rollouts_path is None else Path(rollouts_path)
    if path is not None:
        _check_rollouts_path(path)
    found: list[Answers] = []
    seconds: list[float] = []
    with _environments(given, chosen) as environments:  # they serve checkpoint and baseline
        for one, label in zip(sources, (LABEL, BASELINE), strict=False):
            began = time.perf_counter()
            found.append(_answers(one, given.config, token, environments, chosen, n, generations, label))
            seconds.append(time.perf_counter() - began)
    if path is not None:
        _write_rollouts(path, found)
    asked = curriculum.eval_n_examples if n is None else n

    def report(which: int, path: Path | None = None, other: EvaluationReport | None = None) -> EvaluationReport:
        lesson_reports = {
            lesson_id: LessonReport.of(
                lesson_id,
                batch,
                curriculum.lessons[lesson_id].success_threshold,
                ks or (),
                asked - len(batch.groups),
                None if other is None else found[1][lesson_id],
            )
            for lesson_id, batch in found[which].items()
        }
        return EvaluationReport(answering[which], lesson_reports, seconds[which], path, other)

    return report(0, path, None if baseline is None else report(1))


def _recipe(config: RunConfig | str | Path) -> RunConfig:
    known = config if isinstance(config, RunConfig) else load_config(config)
    if not isinstance(known, RunConfig):
        raise ConfigError(f"config {config} trains a control policy: evaluate it by penstock.overseer.evaluate_fleet")
    return known


def _check_ks(ks: Sequence[int], generations: int) -> None:
    for k in ks:
        if not 1 <= k <= generations:
            raise ConfigError(
                f"k of pass@k is {k}, and generations is {generations}: of n responses to a prompt k can be 1 to n; "
                "ask for more responses, or for a smaller k"
            )


def _check_rollouts_path(path: Path) -> None:
    check_place(path, "--rollouts")
    if path.suffix != ".parquet":
        raise ConfigError(f"--rollouts {path} is written as Parquet: let its name end in .parquet")


@contextmanager
def _environments(given: GivenObjects, lessons: Sequence[str]) -> Iterator[dict[str, Environment]]:
    """Those of the lessons, as given or else loaded; they are closed at the end."""
    with ExitStack() as at_the_end:
        environments = dict(given.environments)
        for environment in environments.values():
            at_the_end.callback(environment.close)
        for lesson_id in lessons:
            if lesson_id not in environments:
                spec = given.config.curriculum.lessons[lesson_id].environment.spec
                environments[lesson_id] = load_environment(spec)
                at_the_end.callback(environments[lesson_id].close)
        yield environments


def _answers(
    source: Path | str,
    config: RunConfig,
    token: str | None,
    environments: Mapping[str, Environment],
    lessons: Sequence[str],
    n: int | None,
    generations: int,
    label: str,
) -> Answers:
    step = version_of(source)
    with manager_of(source, config, token, environments) as manager:
        return {lesson_id: _evaluated(manager, lesson_id, n, generations, label, step) for lesson_id in lessons}


def _evaluated(
    manager: RolloutManager, lesson_id: str, n: int | None, generations: int, label: str, step: int
) -> RolloutBatch:
    try:
        _, batch = manager.evaluate_lesson(lesson_id, n, "report", step, n_generations=generations, label=label)
        return batch
    except EnvironmentFailure as failure:
        raise EnvironmentFailure(f"lesson {lesson_id!r} has no result: {failure}") from failure


def _write_rollouts(path: Path, found: Sequence[Answers]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [
        table_from_evaluation(list(of_one.values()), label)
        for of_one, label in zip(found, (LABEL, BASELINE), strict=False)
    ]
    write_parquet(path, pa.concat_tables(tables))

"""Supervised steps on the environments' reference solutions, before reinforcement learning begins.

A random model cannot reach sparse rewards by trying. The warm start's optimiser state is its own and is
discarded; version 0 of the run is what comes out.
"""

from collections.abc import Callable, Mapping

from penstock.batch import example_from_pair
from penstock.learner import Learner
from penstock.learner.config import WarmStartConfig
from penstock.rollout import RolloutManager
from penstock.types import fold, generator

OnStep = Callable[[int, int, Mapping[str, float]], None]


def warm_start(learner: Learner, manager: RolloutManager, config: WarmStartConfig, seed: int, on_step: OnStep) -> None:
    """Runs the configured supervised steps.

    Args:
        learner: Whose parameters change.
        manager: Knows the lessons' environments.
        config: Steps, batch size and lessons.
        seed: The run's seed.
        on_step: Called after each step with its number, the number of all steps, and metrics.

    Raises:
        ConfigError: an environment has no reference solutions.
    """
    lessons = config.lessons or [
        lesson_id for lesson_id, lesson in manager.curriculum.config.lessons.items() if not lesson.dependencies
    ]
    rng = generator(fold(seed, "warm_start"))
    for step in range(config.steps):
        lesson_id = lessons[int(rng.integers(len(lessons)))]
        references = manager.environment(lesson_id).reference_examples(
            config.batch_size, fold(seed, "warm_start", step)
        )
        examples = [example_from_pair(*reference.token_pair(manager.context.tokenizer)) for reference in references]
        on_step(step + 1, config.steps, learner.supervised_update(examples))

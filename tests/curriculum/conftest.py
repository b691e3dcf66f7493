"""Small curricula and results for them."""

import pytest

from penstock.curriculum import Curriculum, CurriculumConfig
from penstock.types import RolloutBatchStats


def lesson(depends_on=(), **fields):
    """One lesson as a config file writes it; `depends_on` are ids, or (id, threshold) pairs."""
    dependencies = [
        {"dependency_id": d} if isinstance(d, str) else {"dependency_id": d[0], "reward_threshold": d[1]}
        for d in depends_on
    ]
    return {
        "environment": {"env_class": "penstock.environments.CatsEnvironment"},
        "dependencies": dependencies,
        "plateau_window": 5,
        "plateau_threshold": 0.1,
        **fields,
    }


def curriculum(lessons, **fields):
    return Curriculum(CurriculumConfig.model_validate({"lessons": lessons, **fields}))


def results(lesson_id, rewards, groups=1):
    """What `RolloutBatchStats.of` says of such rewards with the default success threshold."""
    n = len(rewards)
    return RolloutBatchStats(
        lesson_id=lesson_id,
        groups=groups,
        rollouts=n,
        reward_mean=sum(rewards) / n if n else 0.0,
        success_rate=sum(r >= 0.5 for r in rewards) / n if n else 0.0,
        pass_at_k=0.0,
        response_tokens=0.0,
        truncated_fraction=0.0,
        rewards=tuple(rewards),
    )


@pytest.fixture
def train():
    """Feeds the same training group several times; returns the kinds and lessons of all events."""

    def feed(target, lesson_id, rewards, times=1):
        events = [e for _ in range(times) for e in target.update_training(results(lesson_id, rewards))]
        return [(event.kind, event.lesson_id) for event in events]

    return feed


@pytest.fixture
def evaluate():
    """Feeds one full evaluation."""

    def feed(target, lesson_id, rewards, step=0):
        return [(e.kind, e.lesson_id) for e in target.update_evaluation(results(lesson_id, rewards), step)]

    return feed


def two_lessons():
    """`b` comes after `a`; both graduate at the top."""
    return CurriculumConfig.model_validate({"lessons": {"a": lesson(), "b": lesson([("a", 0.8)])}})


def a_way_through():
    """Updates that unlock `b`, graduate `a`, bring it back, and move both on: events at 5, 6 and 8."""
    from penstock.curriculum import CurriculumUpdate

    won = [CurriculumUpdate(results("a", [1.0, 1.0])) for _ in range(5)]
    looks = [CurriculumUpdate(results("a", rewards), step) for rewards, step in (([1.0, 1.0], 10), ([1.0, 0.0], 20))]
    moves = [CurriculumUpdate(results(i, [1.0, 0.0])) for i in "abababab"]
    return [*won, looks[0], moves[1], looks[1], *moves]

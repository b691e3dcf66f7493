"""A curriculum that is tried without a model: the real one decides, and only answers are drawn."""

import io
import math

import pytest
from rich.console import Console

from penstock.curriculum import CurriculumConfig, LearningCurve, simulate_curriculum
from penstock.types import ConfigError


def lessons(**changes):
    environment = {"env_class": "nowhere:Nothing"}
    return CurriculumConfig.model_validate(
        {
            "lessons": {
                "easy": {"environment": environment, "stop_threshold": 0.9, "plateau_window": 10},
                "hard": {
                    "environment": environment,
                    "stop_threshold": 0.9,
                    "plateau_window": 10,
                    "dependencies": [{"dependency_id": "easy", "reward_threshold": 0.8}],
                },
            },
            "eval_frequency": 10,
            "eval_n_examples": 64,
            **changes,
        }
    )


def test_a_curve_goes_63_percent_of_its_way_in_its_rollouts():
    curve = LearningCurve(0.1, 0.9, 2000)
    assert curve.success(0) == pytest.approx(0.1)
    assert curve.success(2000) == pytest.approx(0.9 - 0.8 / math.e)
    assert LearningCurve.parse("0.3") == LearningCurve(0.3, 0.3) and LearningCurve.parse("0.3").success(9) == 0.3
    assert LearningCurve.parse("0.1..0.9") == LearningCurve(0.1, 0.9, 2000)
    assert LearningCurve.parse("1e-1..0.9/5e3") == LearningCurve(0.1, 0.9, 5000)


@pytest.mark.parametrize("text", ["", "a", "0.1..", "0.1..0.9/", "0.1/20", "0.1-0.9", "--1"])
def test_what_is_no_curve_is_refused(text):
    with pytest.raises(ConfigError, match="is no learning curve: write 0.3, 0.1..0.9 or 0.1..0.9/2000"):
        LearningCurve.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5", "start is 1.5"),
        ("0.1..-1", "end is -1.0"),
        ("0.1..0.2/0", "rollouts are 0.0"),
        ("nan", "is no learning"),
    ],
)
def test_probabilities_are_between_zero_and_one(text, message):
    with pytest.raises(ConfigError, match=message):
        LearningCurve.parse(text)


def test_lessons_that_are_always_solved_unlock_and_graduate_as_the_curriculum_says():
    """Easy is level after 10 groups and hard unlocks with that; both graduate once evaluated and level."""
    sure = LearningCurve(1.0, 1.0)
    found = simulate_curriculum(lessons(), {"easy": sure, "hard": sure}, 40, 2, every=5)
    kinds = [(step, event.lesson_id, event.kind) for step, event in found.events]
    assert kinds == [
        (4, "hard", "unlocked"),  # by the tenth group of easy
        (10, "easy", "graduated"),  # the first evaluation: what is reported before training decides nothing
        (12, "hard", "graduated"),  # its own tenth group, by the evaluation of step 10
        (12, "hard", "completed"),
    ]
    assert found.complete_at == 12 and list(found.steps) == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    start, between = found.steps[0], found.steps[10]
    assert (start["easy"].probability, start["hard"].status, start["easy"].success) == (1.0, "locked", None)
    assert between["easy"].status == "graduated" and between["easy"].probability == pytest.approx(0.02)
    assert between["hard"].probability == pytest.approx(0.98) and between["easy"].rollouts == 60
    assert sum(lesson.rollouts for lesson in found.steps[40].values()) == 40 * 2 * 4


def test_a_lesson_that_is_never_solved_keeps_the_others_locked():
    found = simulate_curriculum(lessons(), {"easy": LearningCurve(0.0, 0.0)}, 30, 4, every=30)
    assert found.events == [] and found.complete_at is None
    assert found.steps[30]["hard"].status == "locked" and found.steps[30]["easy"].success == 0.0


def test_the_same_seed_gives_the_same_and_another_does_not():
    runs = [simulate_curriculum(lessons(), {}, 60, 8, seed).to_json() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_complete_curriculum_stops_where_the_run_would():
    sure = {name: LearningCurve(1.0, 1.0) for name in ("easy", "hard")}
    found = simulate_curriculum(lessons(when_complete="stop"), sure, 40, 2, every=100)
    assert list(found.steps) == [0, 13] and found.complete_at == 12


def test_without_evaluations_nothing_graduates():
    sure = LearningCurve(1.0, 1.0)
    found = simulate_curriculum(lessons(eval_frequency=0), {"easy": sure, "hard": sure}, 40, 2, every=40)
    assert [event.kind for _, event in found.events] == ["unlocked"]


def test_unknown_lessons_and_empty_updates_are_refused():
    with pytest.raises(ConfigError, match="'esay' is not in the recipe: its lessons are easy, hard"):
        simulate_curriculum(lessons(), {"esay": LearningCurve()}, 1, 1)
    with pytest.raises(ConfigError, match="groups_per_step is 0: it must be at least 1"):
        simulate_curriculum(lessons(), {}, 1, 0)


def test_the_table_has_a_line_per_step_and_the_events():
    out = io.StringIO()
    sure = LearningCurve(1.0, 1.0)
    simulate_curriculum(lessons(), {"easy": sure, "hard": sure}, 15, 2, every=5).print(Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert [line.split("│")[2].split() for line in lines if line.startswith("│ 10")] == [["2%", "1.00", "graduated"]]
    assert "step 4: hard unlocked, easy at 1" in lines and lines[-1] == "every lesson has graduated: at step 12"

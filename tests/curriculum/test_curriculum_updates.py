"""The curriculum's log: the same log makes the same state, wherever its base lies."""

import pytest

from penstock.curriculum import Curriculum, CurriculumLog
from penstock.curriculum.curriculum import make_curriculum

from .conftest import a_way_through, two_lessons


def test_the_way_through_is_worth_following():
    curriculum = Curriculum(two_lessons())
    events = [
        (number, event.kind, event.lesson_id)
        for number, update in enumerate(a_way_through(), start=1)
        for event in update.apply(curriculum)
    ]
    assert events == [(5, "unlocked", "b"), (6, "graduated", "a"), (8, "regressed", "a")]


@pytest.mark.parametrize("folds", [{}, {5: 5}, {7: 3, 8: 8, 16: 8}, {16: 16}, {9: 0}])
def test_the_state_does_not_depend_on_where_the_base_lies(folds):
    expected, log = Curriculum(two_lessons()), CurriculumLog(two_lessons())
    for number, update in enumerate(a_way_through(), start=1):
        update.apply(expected)
        assert log.append(update) == number
        if number in folds:
            assert log.fold(folds[number]) == expected.state()
    assert log.fold(log.number) == expected.state()
    assert log.base.number == 16 and log.since(16) == ()


def test_a_fold_keeps_what_is_still_needed_one_by_one():
    log = CurriculumLog(two_lessons())
    for update in a_way_through():
        log.append(update)
    whole = log.fold(4)
    assert (log.base.number, log.number, len(log.since(4)), len(log.since(7))) == (4, 16, 12, 9)
    again = make_curriculum(two_lessons(), log.base)
    for update in log.since(4):
        update.apply(again)
    assert again.state() == whole


def test_what_the_curriculum_does_not_look_at_is_not_kept():
    log = CurriculumLog(two_lessons())
    update = a_way_through()[0]
    log.append(
        type(update)(type(update.stats)(**{**_fields(update.stats), "prompts": ("p", "q"), "metrics": {"m": 1}}))
    )
    assert log.since(0) == (update,)


def _fields(stats):
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}

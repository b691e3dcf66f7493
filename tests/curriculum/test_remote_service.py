"""The curriculum as a service: repeats, gaps, rebuilding, and what it answers."""

import pytest

from penstock.curriculum import Curriculum, CurriculumBase, CurriculumService
from penstock.types import SupersededError

from .conftest import a_way_through, two_lessons

NEW = CurriculumBase(0, None)


def told(count):
    curriculum = Curriculum(two_lessons())
    for update in a_way_through()[:count]:
        update.apply(curriculum)
    return curriculum


def kinds(answer):
    return [(number, event.kind) for number, event in answer.events]


def test_it_asks_for_a_base_first():
    service = CurriculumService(two_lessons())
    assert service.apply(0, 1, a_way_through()[:2]).applied is None
    assert service.metrics() == {} and service.status() == {"lineage": -1, "applied": 0, "lessons": {}}


def test_it_answers_as_a_curriculum_that_was_told_the_same():
    service, updates = CurriculumService(two_lessons()), a_way_through()
    answer = service.apply(0, 1, updates[:6], NEW)
    expected = told(6)
    assert (answer.applied, answer.complete) == (6, False)
    assert list(answer.probabilities.items()) == list(expected.probabilities().items())
    assert (answer.metrics, answer.lessons) == (expected.metrics(), expected.describe())
    assert kinds(answer) == [(5, "unlocked"), (6, "graduated")]
    assert service.apply(0, 7, updates[6:]).metrics == told(16).metrics() == service.metrics()
    assert service.progress == 16.0
    assert service.status() == {"lineage": 0, "applied": 16, "lessons": told(16).describe()}


def test_updates_that_come_again_change_nothing_and_their_events_are_told_again():
    service, updates = CurriculumService(two_lessons()), a_way_through()
    service.apply(0, 1, updates[:4], NEW)
    first = service.apply(0, 5, updates[4:6])
    assert service.apply(0, 5, updates[4:6]) == first
    longer = service.apply(0, 5, updates[4:8])  # the answer was lost, and more came meanwhile
    assert kinds(longer) == [(5, "unlocked"), (6, "graduated"), (8, "regressed")]
    assert longer.metrics == told(8).metrics()
    assert kinds(service.apply(0, 9, updates[8:])) == []


def test_a_gap_needs_a_base():
    service, updates = CurriculumService(two_lessons()), a_way_through()
    service.apply(0, 1, updates[:4], NEW)
    assert service.apply(0, 6, updates[5:]).applied is None
    answer = service.apply(0, 6, updates[5:], CurriculumBase(5, told(5).state()))
    assert answer.metrics == told(16).metrics()


def test_a_newer_lineage_begins_anew_and_an_older_one_is_refused():
    service, updates = CurriculumService(two_lessons()), a_way_through()
    service.apply(0, 1, updates, NEW)
    assert service.apply(1, 1, updates[6:7]).applied is None
    answer = service.apply(1, 1, updates[6:7], CurriculumBase(0, told(6).state()))
    assert answer.metrics == told(7).metrics() and answer.applied == 1
    assert kinds(answer) == [], "none of the lineage before, whose numbers were the same"
    with pytest.raises(SupersededError, match="the log is of lineage 0, and the run's is 1"):
        service.apply(0, 17, [])

"""Unlocking, graduation, regression, sampling and state."""

import json
import logging
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.curriculum as package
from penstock.curriculum import Curriculum, CurriculumConfig, evaluation_due
from penstock.types import CheckpointError, PenstockError

from .conftest import curriculum, lesson, results

WON, LOST = [1.0, 1.0], [0.0, 0.0]


def test_success_is_smoothed_per_group_and_undefined_before_the_first(train):
    one = curriculum({"a": lesson()})
    assert one.progress("a").success is None
    train(one, "a", [1.0, 0.0])
    assert one.progress("a").success == 0.5  # the first group sets it
    train(one, "a", WON)
    assert one.progress("a").success == pytest.approx(0.9 * 0.5 + 0.1)
    train(one, "a", [0.49, 0.5])
    assert one.progress("a").success == pytest.approx(0.9 * 0.55 + 0.1 * 0.5)
    assert (one.progress("a").groups, one.progress("a").rollouts) == (3, 6)


def test_a_lesson_of_its_own_success_threshold(train):
    one = curriculum({"a": lesson(success_threshold=0.9)})
    train(one, "a", [0.8, 0.9])
    assert one.progress("a").success == 0.5


def test_groups_and_evaluations_without_rollouts_change_nothing(train, evaluate):
    one = curriculum({"a": lesson()})
    before = one.state()
    assert train(one, "a", []) == evaluate(one, "a", []) == []
    assert one.state() == before


def test_unlocking_needs_measure_threshold_and_plateau(train):
    two = curriculum({"a": lesson(), "b": lesson([("a", 0.8)])})
    assert (two.active, two.locked) == (("a",), ("b",))
    assert train(two, "a", WON, 4) == []  # high enough, but four results are no plateau of five
    assert train(two, "a", WON) == [("unlocked", "b")]
    assert two.active == ("a", "b")


def test_a_dependency_below_its_threshold_unlocks_nothing(train):
    two = curriculum({"a": lesson(), "b": lesson([("a", 0.8)])})
    train(two, "a", [1.0, 0.0], 40)
    assert two.progress("a").success == pytest.approx(0.5) and two.locked == ("b",)


def test_an_all_zero_lesson_is_level_but_unlocks_nothing(train):
    two = curriculum({"a": lesson(), "b": lesson(["a"])})  # threshold 0
    assert train(two, "a", LOST, 50) == []
    assert two.locked == ("b",)
    assert ("unlocked", "b") in train(two, "a", WON) + train(two, "a", LOST, 6)


def test_without_require_plateau_the_threshold_is_enough(train):
    two = curriculum({"a": lesson(require_plateau=False), "b": lesson([("a", 1.0)])})
    assert train(two, "a", WON) == [("unlocked", "b")]


def test_every_dependency_counts(train):
    three = curriculum({"a": lesson(), "b": lesson(), "c": lesson(["a", "b"])})
    assert train(three, "a", WON, 5) == []
    assert train(three, "b", WON, 5) == [("unlocked", "c")]


def test_start_threshold_waits_for_an_evaluation_of_the_lesson_itself(train, evaluate):
    two = curriculum({"a": lesson(), "b": lesson(["a"], start_threshold=0.25)})
    train(two, "a", WON, 5)
    assert evaluate(two, "b", [1.0, 0.0, 0.0, 0.0, 0.0]) == []
    assert evaluate(two, "b", [1.0, 0.0, 0.0, 0.0]) == [("unlocked", "b")]


def test_graduation_needs_an_evaluation_and_a_plateau(train, evaluate):
    two = curriculum({"a": lesson(stop_threshold=0.9), "b": lesson()})
    assert train(two, "a", WON, 10) == []  # never evaluated
    assert evaluate(two, "a", [1.0, 0.0]) == []  # evaluated too low
    assert evaluate(two, "b", WON) == []  # evaluated well, but no plateau
    assert evaluate(two, "a", WON) == [("graduated", "a")]
    assert (two.graduated, two.active, two.complete) == (("a",), ("b",), False)
    assert train(two, "b", WON, 5) == [("graduated", "b"), ("completed", "b")]  # the plateau came last
    assert two.complete


def test_training_success_alone_never_graduates_and_evaluation_never_moves_it(train, evaluate):
    one = curriculum({"a": lesson()})
    train(one, "a", LOST, 5)
    evaluate(one, "a", WON)
    assert one.progress("a").success == 0.0 and one.progress("a").evaluation == 1.0


def test_regression_and_the_way_back(train, evaluate):
    one = curriculum({"a": lesson(stop_threshold=0.5)})
    train(one, "a", WON, 5)
    evaluate(one, "a", WON, step=10)
    assert one.graduated == ("a",) and one.progress("a").graduation_level == 1.0
    assert evaluate(one, "a", [1.0] * 17 + [0.0] * 3, step=20) == []  # 0.85 is not under 0.85
    assert evaluate(one, "a", [1.0] * 16 + [0.0] * 4, step=30) == [("regressed", "a")]
    assert one.active == ("a",) and not one.complete
    assert one.progress("a").results == []
    assert train(one, "a", WON, 10) == []  # that evaluation, although above 0.5, does not graduate it again
    assert len(one.progress("a").results) == 5  # the plateau's window
    assert evaluate(one, "a", [1.0] * 16 + [0.0] * 4, step=40) == [("graduated", "a"), ("completed", "a")]


def test_a_lesson_regresses_by_a_share_of_the_level_that_it_graduated_at(train, evaluate):
    one = curriculum({"a": lesson(stop_threshold=0.5, regression_ratio=0.5)})
    train(one, "a", WON, 5)
    assert evaluate(one, "a", [1.0, 0.0]) == [("graduated", "a"), ("completed", "a")]
    assert evaluate(one, "a", [1.0, 0.0, 0.0, 0.0]) == []
    assert evaluate(one, "a", [1.0, 0.0, 0.0, 0.0, 0.0]) == [("regressed", "a")]


def test_an_evaluation_before_a_lesson_is_practised_does_not_graduate_it(train, evaluate):
    two = curriculum({"a": lesson(), "b": lesson(["a"])})
    evaluate(two, "b", WON)
    train(two, "a", WON, 5)
    assert train(two, "b", WON, 5) == []
    assert evaluate(two, "b", WON) == [("graduated", "b")]


def test_all_graduated_is_no_exception_and_no_starvation(train, evaluate):
    two = curriculum({"a": lesson(), "b": lesson()})
    for lesson_id in ("a", "b"):
        train(two, lesson_id, WON, 5)
        evaluate(two, lesson_id, WON)
    assert two.complete and two.active == ()
    assert two.probabilities() == {"a": 0.5, "b": 0.5}
    assert {two.sample_lesson(seed) for seed in range(20)} == {"a", "b"}


def test_probabilities_of_active_and_graduated_lessons(train, evaluate):
    three = curriculum({"a": lesson(), "b": lesson(), "c": lesson(["b"])})
    train(three, "a", WON, 5)
    evaluate(three, "a", WON)
    assert three.probabilities() == {"a": 0.02, "b": 0.98}
    assert three.describe() == {"a": "graduated 2%", "b": "active 98%", "c": "locked"}


def test_a_won_lesson_without_graduation_keeps_its_floor(train):
    two = curriculum({"a": lesson(), "b": lesson()})
    train(two, "a", WON, 5)
    assert two.probabilities() == pytest.approx({"a": 0.1, "b": 0.9})


def test_sampling_depends_on_the_seed_alone():
    two = curriculum({"a": lesson(), "b": lesson()})
    drawn = [two.sample_lesson(seed) for seed in range(200)]
    assert drawn == [two.sample_lesson(seed) for seed in range(200)]
    assert 60 < drawn.count("a") < 140


def test_metrics(train):
    two = curriculum({"a": lesson(), "b": lesson(["a"])})
    train(two, "a", [1.0, 0.0])
    assert two.metrics() == {
        "curriculum/active": 1.0,
        "curriculum/graduated": 0.0,
        "curriculum/locked": 1.0,
        "curriculum/a/probability": 1.0,
        "curriculum/a/rollouts": 2.0,
        "curriculum/a/success": 0.5,
        "curriculum/b/probability": 0.0,
        "curriculum/b/rollouts": 0.0,
    }


def test_an_unknown_lesson_is_named():
    one = curriculum({"a": lesson()})
    for update in (lambda: one.update_training(results("z", WON)), lambda: one.update_evaluation(results("z", WON), 1)):
        with pytest.raises(PenstockError, match="lesson 'z' is unknown: there are a"):
            update()


def test_events_say_why(evaluate):
    two = curriculum({"a": lesson(stop_threshold=0.5), "b": lesson([("a", 0.5)])})
    events = [e for _ in range(5) for e in two.update_training(results("a", WON))]
    assert [e.reason for e in events] == ["a at 1"]
    (event,) = two.update_evaluation(results("a", [1.0, 1.0, 0.0]), 10)
    assert event.reason == "evaluation success 0.667, plateaued"
    (event,) = two.update_evaluation(results("a", LOST), 20)
    assert event.reason == "evaluation success 0 under 0.85 of 0.667"


def test_state_survives_json_and_continues_alike(train, evaluate):
    lessons = {"a": lesson(stop_threshold=0.5), "b": lesson([("a", 0.8)]), "c": lesson(["b"])}
    first, second = curriculum(lessons), curriculum(lessons)
    train(first, "a", WON, 5)
    evaluate(first, "a", WON, step=7)
    train(first, "b", [1.0, 0.0], 3)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() and second.restored_events == ()
    assert second.probabilities() == first.probabilities()
    assert train(first, "b", [1.0, 0.0], 4) == train(second, "b", [1.0, 0.0], 4) == [("unlocked", "c")]
    assert second.state() == first.state()


def test_lessons_added_and_removed_since_are_merged_and_said(train, caplog):
    before = curriculum({"a": lesson(), "old": lesson()})
    train(before, "a", WON, 5)
    after = curriculum({"a": lesson(), "new": lesson(), "next": lesson(["a"])})
    with caplog.at_level(logging.WARNING):
        after.restore(before.state())
    said = [(e.kind, e.lesson_id) for e in after.restored_events]
    assert said == [("added", "new"), ("added", "next"), ("removed", "old"), ("unlocked", "new"), ("unlocked", "next")]
    assert "lesson 'new' was added" in caplog.text and "lesson 'old' was removed" in caplog.text
    assert after.progress("a").groups == 5 and after.active == ("a", "new", "next")


def test_a_damaged_state_is_refused():
    one = curriculum({"a": lesson()})
    with pytest.raises(CheckpointError, match="has no 'lessons'"):
        one.restore({})
    state = one.state()
    state["lessons"]["a"]["colour"] = "red"
    with pytest.raises(CheckpointError, match="lesson 'a': unexpected or missing fields: colour"):
        one.restore(state)


@pytest.mark.parametrize(
    ("frequency", "last", "step", "due"),
    [
        (10, 0, 9, False),
        (10, 0, 10, True),
        (10, 0, 13, True),  # passed, not hit
        (10, 13, 19, False),
        (10, 13, 20, True),
        (10, 9, 31, True),
        (10, 20, 20, False),
        (1, 4, 5, True),
        (0, 0, 1000, False),
    ],
)
def test_an_evaluation_is_due_when_a_multiple_was_passed(frequency, last, step, due):
    assert evaluation_due(frequency, last, step) is due


def test_many_threads_lose_nothing():
    two = curriculum({"a": lesson(), "b": lesson()})
    failures = []

    def work(lesson_id):
        try:
            for _ in range(200):
                two.update_training(results(lesson_id, [1.0, 0.0]))
                assert sum(two.probabilities().values()) == pytest.approx(1.0)
                two.metrics()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(lesson_id,)) for lesson_id in ("a", "b", "a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert two.progress("a").groups == two.progress("b").groups == 400


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["train", "eval"]),
        st.lists(st.sampled_from([0.0, 0.6, 1.0]), max_size=4),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, floor=st.floats(0, 0.25), rehearsal=st.floats(0, 0.25))
def test_whatever_happens_some_lesson_can_be_sampled(actions, floor, rehearsal):
    lessons = {
        "a": lesson(plateau_window=3, plateau_threshold=5.0),
        "b": lesson(["a"], plateau_window=3, stop_threshold=0.5),
        "c": lesson(["a", ("b", 0.4)], plateau_window=3, require_plateau=False),
        "d": lesson(["c"], start_threshold=0.2),
    }
    config = {"lessons": lessons, "minimum_sample_probability": floor, "rehearsal_probability": rehearsal}
    target = Curriculum(CurriculumConfig.model_validate(config))
    for lesson_id, kind, rewards in actions:
        stats = results(lesson_id, rewards)
        events = target.update_training(stats) if kind == "train" else target.update_evaluation(stats, 1)
        for event in events:
            status = {"unlocked": target.active, "graduated": target.graduated, "regressed": target.active}
            assert event.lesson_id in status.get(event.kind, target.graduated)
        probabilities = target.probabilities()
        assert sum(probabilities.values()) == pytest.approx(1.0)
        assert set(probabilities) == {*target.active, *target.graduated}
        assert all(probabilities[i] >= floor - 1e-9 for i in target.active)
        assert sorted((*target.active, *target.graduated, *target.locked)) == list("abcd")
        assert target.complete == (len(target.graduated) == 4)
        assert target.sample_lesson(3) in probabilities


def test_exported_names():
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert dir(package) == package.__all__ == sorted(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lesson'"):
        _ = package.Lesson

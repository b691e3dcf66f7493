"""What the next ticket is for: lesson, index, and the place of its problem in an epoch."""

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay.draws import (
    Draw,
    LessonEpochs,
    ProblemRules,
    TicketSampler,
    parse_ticket_id,
    permuted,
    place_of,
    ticket_id,
)
from penstock.types import CheckpointError, fold


class Recorder:
    def __init__(self, lessons):
        self.seeds = []
        self._lessons = iter(lessons)

    def sample_lesson(self, seed):
        self.seeds.append(seed)
        return next(self._lessons)


@pytest.mark.parametrize("lesson", ["cats", "easy-adding", "a-1-2", "grüße/0"])
def test_ids_hold_any_lesson_name(lesson):
    assert parse_ticket_id(ticket_id(lesson, 3, 17)) == (lesson, 3, 17)


@pytest.mark.parametrize("name", ["", "cats", "cats-1", "cats-x-1", "cats-1--1"])
def test_what_is_no_ticket_id_is_refused(name):
    with pytest.raises(CheckpointError, match="not a ticket id"):
        parse_ticket_id(name)


def test_lessons_are_drawn_by_counter_and_indices_count_per_lesson():
    chooser = Recorder(["a", "b", "a"])
    draws = TicketSampler(11, 0, chooser)
    assert [draws.draw() for _ in range(3)] == [Draw("a", 0), Draw("b", 0), Draw("a", 1)]
    assert chooser.seeds == [fold(11, "lesson", number) for number in range(3)]
    assert draws.last_lesson == "a"
    assert draws.was_drawn("a", 1) and not draws.was_drawn("a", 2) and not draws.was_drawn("c", 0)


def test_a_tickets_seed_depends_on_lesson_and_index_alone():
    first, second = TicketSampler(11, 0, Recorder([])), TicketSampler(11, 4, Recorder([]))
    one, other = first.ticket(Draw("a", 5), 1, 2), second.ticket(Draw("a", 5), 7, 8)
    assert one.seed == other.seed == fold(11, "a", 5)
    assert (one.ticket_id, other.ticket_id) == ("a-0-5", "a-4-5")
    assert (other.admitted_step, other.deadline_step) == (7, 8)
    seeds = {first.ticket(Draw(lesson, index), 0, 0).seed for lesson in "ab" for index in range(50)}
    assert len(seeds) == 100


def test_the_counters_continue_where_the_checkpoint_left_them():
    draws = TicketSampler(11, 0, Recorder(["a", "b"]))
    draws.draw(), draws.draw()
    chooser = Recorder(["a"])
    resumed = TicketSampler(11, 1, chooser)
    resumed.restore(draws.state())
    assert resumed.draw() == Draw("a", 1) and chooser.seeds == [fold(11, "lesson", 2)]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_a_permutation_has_every_number_once(size, seed):
    assert sorted(permuted(position, size, seed) for position in range(size)) == list(range(size))


def test_the_permutation_never_changes_since_runs_resume_in_the_middle_of_it():
    assert [permuted(position, 10, 7) for position in range(10)] == [4, 6, 1, 3, 2, 8, 5, 0, 9, 7]
    assert [permuted(position, 10**12, fold(7, "a")) for position in range(3)] == [
        876608158087,
        954110899987,
        47228157969,
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_over_many_epochs_every_problem_stands_everywhere_equally_often(size):
    counts = Counter((p, permuted(p, size, fold(1, epoch))) for epoch in range(2000) for p in range(size))
    expected = 2000 / size
    chi_squared = sum((counts[p, n] - expected) ** 2 / expected for p in range(size) for n in range(size))
    assert chi_squared < 45  # (size − 1)² degrees of freedom: 16 at most, of which 39 is passed once in a thousand


def rules(size=5, **changes):
    return ProblemRules(size, **{"digest": "d", **changes})


def numbers(epochs, n):
    return [epochs.problem(epochs.draw()) for _ in range(n)]


def test_each_epoch_has_every_problem_once_in_an_order_of_its_own():
    epochs = LessonEpochs(rules(50), 7, "easy")
    first, second = numbers(epochs, 50), numbers(epochs, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != list(range(50))
    assert (epochs.epoch, epochs.position) == (1, 50)
    other_lesson, other_seed = LessonEpochs(rules(50), 7, "hard"), LessonEpochs(rules(50), 8, "easy")
    assert first not in (numbers(other_lesson, 50), numbers(other_seed, 50))
    assert numbers(LessonEpochs(rules(50), 7, "easy"), 50) == first


def test_sequential_problems_come_as_they_are_numbered():
    assert numbers(LessonEpochs(rules(3, order="sequential"), 7, "easy"), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_what_failed_is_drawn_again_in_its_epoch_before_anything_new_whatever_failed_first():
    epochs = LessonEpochs(rules(3), 7, "easy")
    places = [epochs.draw() for _ in range(4)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0)]
    for place in (places[3], places[1]):
        assert epochs.fail(place)
    epochs.finish((0, 0))
    assert [epochs.draw() for _ in range(3)] == [(0, 1), (1, 0), (1, 1)]


def test_after_the_last_retry_a_problem_stays_untrained_in_that_epoch_alone():
    epochs = LessonEpochs(rules(1, retries=2), 7, "easy")
    assert [epochs.fail(epochs.draw()) for _ in range(3)] == [True, True, False]
    assert epochs.untrained == 1
    assert epochs.draw() == (1, 0) and epochs.fail((1, 0))  # its failures were forgotten
    assert epochs.draw() == (1, 0)
    epochs.finish((1, 0))
    assert LessonEpochs(rules(1, retries=0), 7, "easy").fail((0, 0)) is False


def test_a_state_holds_digest_size_epoch_position_and_what_is_to_be_drawn_again():
    epochs = LessonEpochs(rules(3, digest="abc"), 7, "easy")
    for _ in range(5):
        epochs.draw()
    epochs.fail((0, 2)), epochs.fail((1, 0)), epochs.draw()
    state = epochs.state()
    assert state == {
        "digest": "abc", "size": 3, "order": "shuffle", "epoch": 1, "position": 2, "untrained": 0,
        "failures": [[0, 2, 1], [1, 0, 1]], "again": [[1, 0]],
    }  # fmt: skip
    resumed = LessonEpochs(rules(3, digest="abc", retries=1), 7, "easy")
    assert resumed.restore(state) is None and resumed.state() == state
    assert [resumed.draw() for _ in range(2)] == [(1, 0), (1, 2)]
    assert resumed.fail((0, 2)) is False  # the second failure of a place that was open


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (rules(4), "5 problems are now 4"),
        (rules(5, digest="e"), "the 5 problems are others than before"),
        (rules(5, order="sequential"), "order 'shuffle' is now 'sequential'"),
    ],
)
def test_changed_problems_begin_the_next_epoch_and_it_is_said(changed, told):
    epochs = LessonEpochs(rules(5), 7, "easy")
    epochs.fail(epochs.draw())
    resumed = LessonEpochs(changed, 7, "easy")
    assert resumed.restore(epochs.state()) == told
    assert [resumed.draw() for _ in range(2)] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("damage", [{"epoch": None}, {"failures": [[1]]}, {"again": 3}])
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(CheckpointError, match="the epochs of lesson 'easy' do not fit"):
        LessonEpochs(rules(), 7, "easy").restore({**LessonEpochs(rules(), 7, "easy").state(), **damage})


def test_tickets_carry_epoch_position_and_number_of_their_problem_and_others_none():
    draws = TicketSampler(11, 2, Recorder(["a", "b", "a"]), {"a": rules(1)})
    first, other, second = (draws.ticket(draws.draw(), 0, 1) for _ in range(3))
    assert [(t.ticket_id, t.epoch, t.position, t.problem) for t in (first, other, second)] == [
        ("a-2-0", 0, 0, 0), ("b-2-0", None, None, None), ("a-2-1", 1, 0, 0),
    ]  # fmt: skip
    assert place_of(second) == (1, 0) and place_of(other) is None


def test_a_sampler_counts_epochs_over_all_problems_and_by_lesson():
    assert TicketSampler(1, 0, Recorder([])).metrics() == {}
    draws = TicketSampler(1, 0, Recorder("aab"), {"a": rules(4), "b": rules(2, retries=0)})
    tickets = [draws.ticket(draws.draw(), 0, 0) for _ in range(3)]
    draws.fail(tickets[2], "the environment raised")
    assert draws.metrics() == {
        "data/a/epoch": 0.5, "data/b/epoch": 0.5, "data/epoch": 0.5, "data/untrained": 1.0,
    }  # fmt: skip
    assert TicketSampler(1, 0, Recorder([]), {"a": rules(4)}).metrics() == {"data/epoch": 0.0, "data/untrained": 0.0}


def test_a_state_of_before_epochs_goes_on_without_them_for_ever(caplog):
    older = TicketSampler(1, 0, Recorder("a"))
    older.draw()
    state = {key: value for key, value in older.state().items() if key != "problems"}
    resumed = TicketSampler(1, 1, Recorder("a"), {"a": rules(4)})
    with caplog.at_level(logging.WARNING):
        resumed.restore(state)
    assert "older than epochs" in caplog.text
    assert resumed.draw() == Draw("a", 1) and resumed.metrics() == {}
    assert "problems" not in resumed.state()


def test_a_lesson_that_is_new_or_was_iid_begins_its_first_epoch():
    before = TicketSampler(1, 0, Recorder("a"))
    before.draw()
    resumed = TicketSampler(1, 1, Recorder("a"), {"a": rules(4)})
    resumed.restore(before.state())
    assert resumed.data_changes == {} and resumed.redraw("a", 0) == Draw("a", 0)
    assert resumed.draw() == Draw("a", 1, (0, 0))


def test_a_draw_of_the_checkpoint_keeps_its_place_unless_the_data_were_changed(caplog):
    before = TicketSampler(1, 0, Recorder("ab"), {"a": rules(4), "b": rules(4)})
    for _ in range(2):
        before.draw()
    resumed = TicketSampler(1, 1, Recorder(""), {"a": rules(4), "b": rules(9)})
    with caplog.at_level(logging.WARNING):
        resumed.restore(before.state())
    assert resumed.data_changes == {"b": "4 problems are now 9: epoch 1 begins"} and "epoch 1 begins" in caplog.text
    assert resumed.redraw("a", 0, 0, 0) == Draw("a", 0, (0, 0))
    assert resumed.redraw("b", 0, 0, 0) == Draw("b", 0, (1, 0))
    without = TicketSampler(1, 1, Recorder(""), {"a": rules(4)})
    without.restore(before.state())
    assert without.redraw("b", 0, 0, 0) == Draw("b", 0)  # its order is iid now

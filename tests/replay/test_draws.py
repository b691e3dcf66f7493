import pytest

from penstock.replay.tickets import TicketSampler, parse_ticket_id, ticket_id
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
    assert [draws.draw() for _ in range(3)] == [("a", 0), ("b", 0), ("a", 1)]
    assert chooser.seeds == [fold(11, "lesson", number) for number in range(3)]
    assert draws.was_drawn("a", 1) and not draws.was_drawn("a", 2) and not draws.was_drawn("c", 0)


def test_a_tickets_seed_depends_on_lesson_and_index_alone():
    first, second = TicketSampler(11, 0, Recorder([])), TicketSampler(11, 4, Recorder([]))
    one, other = first.ticket("a", 5, 1, 2), second.ticket("a", 5, 7, 8)
    assert one.seed == other.seed == fold(11, "a", 5)
    assert (one.ticket_id, other.ticket_id) == ("a-0-5", "a-4-5")
    assert (other.admitted_step, other.deadline_step) == (7, 8)
    seeds = {first.ticket(lesson, index, 0, 0).seed for lesson in "ab" for index in range(50)}
    assert len(seeds) == 100


def test_the_counters_continue_where_the_checkpoint_left_them():
    draws = TicketSampler(11, 0, Recorder(["a", "b"]))
    draws.draw(), draws.draw()
    chooser = Recorder(["a"])
    resumed = TicketSampler(11, 1, chooser)
    resumed.restore(draws.state())
    assert resumed.draw() == ("a", 1) and chooser.seeds == [fold(11, "lesson", 2)]

"""Which group comes next, and how evenly lessons are served."""

import pytest

from penstock.replay.outstanding import Outstanding
from penstock.replay.tickets import PaceMetrics, TicketSampler, parse_ticket_id, ticket_id
from penstock.types import CheckpointError, Ticket, fold


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
    assert draws.last_lesson == "a"
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


def groups(*lessons):
    return [Outstanding(Ticket(f"{x}-0-{i}", x, i, 0, 9, 0), 2, number=i) for i, x in enumerate(lessons)]


def test_overtaking_is_counted_for_who_was_passed():
    pace = PaceMetrics()
    slow, fast, later = groups("slow", "fast", "fast")
    metrics = pace.record(0, [fast], [slow, later])
    assert metrics["replay/overtakes"] == 1
    assert (metrics["replay/slow/overtaken"], metrics["replay/fast/overtaken"]) == (1, 0)
    metrics = pace.record(1, [later], [slow])
    assert metrics["replay/slow/overtaken"] == 2 and metrics["replay/overtakes"] == 1
    metrics = pace.record(2, [slow], [])
    assert metrics["replay/slow/overtaken"] == 2 and metrics["replay/overtakes"] == 0
    assert metrics["replay/slow/groups"] == 1 and "replay/fast/groups" not in metrics


def test_a_lesson_starves_while_it_has_groups_and_is_not_trained():
    pace = PaceMetrics()
    slow, *fast = groups("slow", "fast", "fast", "fast")
    starved = []
    for step in range(3):
        metrics = pace.record(step, [fast[step]], [slow])
        starved.append((metrics["replay/slow/starved_updates"], metrics["replay/fast/starved_updates"]))
    assert starved == [(1, 0), (2, 0), (3, 0)]
    assert pace.record(3, [slow], [])["replay/slow/starved_updates"] == 0
    again = groups("slow", "fast")
    assert pace.record(9, [again[1]], [again[0]])["replay/slow/starved_updates"] == 1  # it had none in between

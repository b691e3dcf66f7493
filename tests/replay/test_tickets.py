"""Which group comes next, and how evenly lessons are served."""

from penstock.replay.outstanding import Outstanding
from penstock.replay.tickets import PaceMetrics
from penstock.types import Ticket


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

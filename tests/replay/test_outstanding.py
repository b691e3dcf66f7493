"""The deadline arithmetic, by numbers and by its invariant."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.replay.outstanding import Outstanding, OutstandingTickets
from penstock.types import Ticket


def admit(book, number, deadline):
    ticket = Ticket(f"a-0-{number}", "a", number, 0, deadline, 0)
    book.add(Outstanding(ticket, 1, number))
    return ticket.ticket_id


def test_what_an_update_owes_by_each_deadline():
    book = OutstandingTickets(groups_per_batch=2)
    for number, deadline in enumerate([4, 4, 4, 5, 5, 6]):
        admit(book, number, deadline)
    assert book.missing(3) == [(4, 1), (5, 1)]  # 3 − 2, 5 − 4; 6 − 6 owes nothing
    assert book.missing(4) == [(4, 2), (5, 2), (6, 2)]  # never more than a batch
    assert book.missing(1) == []
    book.set_trainable("a-0-1")
    assert book.missing(3) == [] and book.must_take(3) == ["a-0-1"]
    assert book.missing(4) == [(4, 1), (5, 1), (6, 1)]


def test_must_take_is_the_earliest_deadlines_and_empty_without_pressure():
    book = OutstandingTickets(groups_per_batch=2)
    names = [admit(book, number, deadline) for number, deadline in enumerate([5, 3, 4, 4])]
    for name in names:
        book.set_trainable(name)
    assert book.must_take(0) == []
    assert book.must_take(3) == ["a-0-1"]
    assert book.must_take(4) == ["a-0-1", "a-0-2"]


def test_removal_forgets_a_ticket_in_any_phase():
    book = OutstandingTickets(groups_per_batch=1)
    first, second = admit(book, 0, 2), admit(book, 1, 2)
    book.set_trainable(first)
    assert (len(book), book.trainable) == (2, 1)
    assert book.remove(first).ticket.ticket_id == first and book.remove(second).phase == "pending"
    assert (len(book), book.trainable, book.missing(2), book.get(first)) == (0, 0, [], None)


def test_a_group_fits_only_where_all_deadlines_can_still_be_met():
    book = OutstandingTickets(groups_per_batch=1)
    for number, deadline in enumerate([3, 5]):
        admit(book, number, deadline)
    assert not book.fits(2, update=3)  # past
    assert not book.fits(3, update=3)  # update 3 has its group
    assert book.fits(4, update=3)
    admit(book, 2, 4)
    assert not book.fits(4, update=3) and not book.fits(5, update=3) and book.fits(6, update=3)


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 100_000))
def test_taking_what_is_owed_keeps_every_deadline_within_reach(b, s, seed):
    """N(≤ d) ≤ (d − u + 1)·B after every admission and every update, whatever finishes when."""
    rng = random.Random(seed)
    book, update, serving, admitted = OutstandingTickets(b), 0, 0, 0
    for _ in range(60):
        while len(book) < (s + 1 - (update - serving)) * b and rng.random() < 0.8:
            admit(book, admitted, serving + s)
            admitted += 1
        unfinished = [e.ticket.ticket_id for e in book if e.phase == "pending"]
        for name in rng.sample(unfinished, rng.randint(0, len(unfinished))):
            book.set_trainable(name)
        if book.trainable >= b and not book.missing(update):
            chosen = book.must_take(update)
            others = [e.ticket for e in book if e.phase == "trainable" and e.ticket.ticket_id not in chosen]
            rng.shuffle(others)
            due = [t.ticket_id for t in others if t.deadline_step <= update]
            rest = [t.ticket_id for t in others if t.deadline_step > update]
            for name in (chosen + due + rest)[:b]:
                book.remove(name)
            update += 1
        if serving < update and rng.random() < 0.5:
            serving += 1
        deadlines = [entry.ticket.deadline_step for entry in book]
        assert min(deadlines, default=update) >= update
        for deadline in set(deadlines):
            assert sum(d <= deadline for d in deadlines) <= (deadline - update + 1) * b

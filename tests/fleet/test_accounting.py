"""Where steps are: what a worker told, and what the replay buffer has of it."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.accounting import StepAccount, StepBooks

COUNTS = st.integers(0, 50)


@st.composite
def accounts(draw) -> StepAccount:
    places = {name: draw(COUNTS) for name in StepAccount().to_values() if name != "started"}
    return StepAccount(started=sum(places.values()), **places)


def test_what_was_delivered_after_the_last_report_was_in_flight():
    told = StepAccount(started=100, acting=4, buffered=20, waiting=16, sent=50, sent_faults=2, stale=8)
    found = told.with_delivered(64, 4)  # one fragment of 16 waited
    assert found == StepAccount(started=100, acting=4, buffered=20, waiting=0, sent=64, sent_faults=4, stale=8)
    assert found.ended().abandoned == 24


def test_what_the_worker_gave_up_may_have_arrived_and_what_it_never_told_of_was_started():
    ended = StepAccount(started=100, waiting=8, buffered=4, sent=88).ended()
    assert ended.with_delivered(96, 0) == StepAccount(started=100, sent=96, abandoned=4)
    assert ended.with_delivered(120, 0) == StepAccount(started=120, sent=120)
    assert StepAccount().with_delivered(7, 1) == StepAccount(started=8, sent=7, sent_faults=1)


def test_deliveries_beyond_what_was_told_take_nothing_from_the_steps_that_act():
    told = StepAccount(started=100, acting=16, buffered=20, sent=64)
    found = told.with_delivered(160, 0)
    assert found == StepAccount(started=176, acting=16, sent=160)
    assert found.ended() == StepAccount(started=176, sent=160, abandoned=16)


@given(accounts(), COUNTS, COUNTS)
def test_an_account_closes_whatever_was_delivered_and_nothing_that_was_sent_is_taken_back(told, sent, faults):
    for found in (told.with_delivered(sent, faults), told.ended().with_delivered(sent, faults)):
        assert found.closes and found.started >= told.started
        assert found.sent == max(told.sent, sent) and found.sent_faults == max(told.sent_faults, faults)
        assert found.with_delivered(sent, faults) == found


def test_books_settle_what_waits_and_no_more():
    books = StepBooks()
    books.add(started=12, acting=2, buffered=10)
    books.add(buffered=-8, waiting=8)
    books.settle(3, "sent")
    assert books.account() == StepAccount(started=12, acting=2, buffered=2, waiting=5, sent=3)
    books.abandon()
    books.settle(4, "sent")  # which came too late
    assert books.account() == StepAccount(started=12, acting=2, buffered=2, sent=3, abandoned=5)

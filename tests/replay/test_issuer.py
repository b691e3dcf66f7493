"""Admission: how many tickets, when, for what, and with which deadline."""

import threading
import time

import pytest

from penstock.replay import Ledger, ReplayBufferConfig, TicketIssuer, TicketRules
from penstock.types import RunFailed, Stopped, fold


class OneLesson:
    def sample_lesson(self, seed):
        return "cats"


class Lessons:
    """Draws these in turn."""

    def __init__(self, *lessons):
        self.left = list(lessons)

    def sample_lesson(self, seed):
        return self.left.pop(0)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def issuer_of(b=2, s=1, lineage=0, ledger=None, clock=None, chooser=None, **config):
    config = ReplayBufferConfig(groups_per_batch=b, staleness_budget=s, **config)
    rules = TicketRules(7, chooser or OneLesson(), lambda lesson: 3)
    return TicketIssuer(config, rules, lineage, ledger or Ledger(), clock or Clock())


def finish(issuer, *tickets):
    """What the buffer does for groups that became trainable."""
    for ticket in tickets:
        issuer.outstanding.get(ticket.ticket_id).phase = "waiting"
        issuer.outstanding.set_trainable(ticket.ticket_id)


def take(issuer, *tickets):
    with issuer.changed:
        return issuer.take(issuer.update, [ticket.ticket_id for ticket in tickets])


def test_nothing_is_admitted_before_an_engine_serves():
    issuer = issuer_of()
    assert issuer.acquire(4, 0.0) == [] and issuer.limit == 0
    issuer.set_serving_step(0)
    assert len(issuer.acquire(4, 0.0)) == 4


def test_the_bound_is_the_designs():
    """(S + 1 − (u − v))·B with B = 2, S = 1."""
    issuer = issuer_of()
    issuer.set_serving_step(0)
    assert issuer.limit == 4
    tickets = issuer.acquire(99, 0.0)
    assert [(t.ticket_id, t.admitted_step, t.deadline_step) for t in tickets] == [
        (f"cats-0-{i}", 0, 1) for i in range(4)
    ]
    assert [t.seed for t in tickets] == [fold(7, "cats", i) for i in range(4)]
    finish(issuer, *tickets[:2])
    take(issuer, *tickets[:2])
    assert (issuer.update, issuer.limit) == (1, 2)  # u = 1, v = 0
    assert issuer.acquire(99, 0.0) == []
    issuer.set_serving_step(1)
    assert issuer.limit == 4 and [t.deadline_step for t in issuer.acquire(1, 0.0)] == [2]
    assert len(issuer.acquire(99, 0.0)) == 1


def test_a_version_that_cannot_serve_is_refused():
    issuer = issuer_of()
    with pytest.raises(RunFailed, match="version 1 cannot serve.*learner is at 0"):
        issuer.set_serving_step(1)
    issuer.ledger.update = 3
    issuer.set_serving_step(2)
    with pytest.raises(RunFailed, match="version 1 cannot serve: version 2 did"):
        issuer.set_serving_step(1)


def test_at_staleness_zero_a_cohort_is_whole_and_waits_for_the_newest_version():
    issuer = issuer_of(b=3, s=0)
    issuer.set_serving_step(0)
    first = issuer.acquire(2, 0.0)
    rest = issuer.acquire(9, 0.0)
    assert [t.ticket_id for t in first + rest] == ["cats-0-0", "cats-0-1", "cats-0-2"]
    finish(issuer, *first, *rest)
    take(issuer, *first, *rest)
    assert issuer.limit == 0 and issuer.acquire(9, 0.0) == []  # update 0 is being computed
    issuer.set_serving_step(1)
    assert [t.deadline_step for t in issuer.acquire(9, 0.0)] == [1, 1, 1]


def test_at_staleness_zero_a_failed_group_is_replaced_when_nothing_of_the_cohort_runs():
    issuer = issuer_of(b=3, s=0)
    issuer.set_serving_step(0)
    tickets = issuer.acquire(9, 0.0)
    issuer.fail(tickets[1], "invalid", "it raised")
    assert issuer.acquire(9, 0.0) == []
    finish(issuer, tickets[0])
    assert issuer.acquire(9, 0.0) == []
    finish(issuer, tickets[2])
    assert [t.ticket_id for t in issuer.acquire(9, 0.0)] == ["cats-0-3"]


def test_a_failed_ticket_frees_its_place_and_is_told_to_the_ledger():
    ledger = Ledger()
    issuer = issuer_of(ledger=ledger)
    issuer.set_serving_step(0)
    tickets = issuer.acquire(4, 0.0)
    issuer.fail(tickets[0], "invalid", "the environment raised")
    assert [t.index for t in issuer.acquire(4, 0.0)] == [4]
    assert ledger.snapshot()["invalid"] == 3 and ledger.snapshot()["in_flight"] == 12
    issuer.fail(tickets[0], "invalid", "again")
    assert issuer.late_deliveries == 1 and ledger.snapshot()["invalid"] == 3
    ledger.check()


def test_a_straggler_is_aborted_when_the_update_that_owes_it_waited_long_enough():
    clock = Clock()
    ledger = Ledger()
    issuer = issuer_of(b=1, s=1, clock=clock, ledger=ledger, straggler_timeout_s=10.0)
    issuer.set_serving_step(0)
    slow, slower = issuer.acquire(2, 0.0)  # both due at update 1: update 0 owes one of them
    waited_since = clock.now
    clock.now += 9.9
    issuer.abort_stragglers(waited_since)
    assert len(issuer.outstanding) == 2
    clock.now += 0.1
    issuer.abort_stragglers(waited_since)
    assert [e.ticket.ticket_id for e in issuer.outstanding] == [slower.ticket_id]
    assert ledger.snapshot()["aborted"] == 3
    fresh = issuer.acquire(2, 0.0)
    clock.now += 9.0
    issuer.abort_stragglers(waited_since)  # the other one goes too; the fresh one has not had its time yet
    assert [e.ticket for e in issuer.outstanding] == fresh


def test_no_more_groups_are_aborted_than_the_update_needs_gone():
    clock = Clock()
    issuer = issuer_of(b=2, s=1, clock=clock, straggler_timeout_s=10.0)
    issuer.set_serving_step(0)
    tickets = issuer.acquire(4, 0.0)
    finish(issuer, tickets[3])
    clock.now += 60
    issuer.abort_stragglers(clock.now - 30)  # it owes two of the four, and one is there
    assert [e.ticket.ticket_id for e in issuer.outstanding] == [t.ticket_id for t in tickets[1:]]


def test_acquire_waits_no_longer_than_it_may():
    issuer = issuer_of()
    started = time.monotonic()
    assert issuer.acquire(1, 0.05) == []
    assert 0.04 < time.monotonic() - started < 5


def test_a_freed_place_wakes_a_waiting_worker():
    issuer = issuer_of()
    issuer.set_serving_step(0)
    tickets = issuer.acquire(4, 0.0)
    got = []
    waiter = threading.Thread(target=lambda: got.extend(issuer.acquire(1, 30.0)), daemon=True)
    waiter.start()
    issuer.fail(tickets[0], "invalid", "")
    waiter.join(10)
    assert [t.index for t in got] == [4]


def test_close_ends_every_wait_now_and_later():
    issuer = issuer_of()
    errors = []

    def wait():
        try:
            issuer.acquire(1, 30.0)
        except Stopped as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    issuer.changed.close()
    for waiter in waiters:
        waiter.join(10)
    assert len(errors) == 3
    with pytest.raises(Stopped):
        issuer.acquire(1, 0.0)


def test_a_resumed_issuer_reissues_what_was_outstanding_under_its_own_lineage():
    issuer = issuer_of()
    issuer.set_serving_step(0)
    tickets = issuer.acquire(3, 0.0)
    state = issuer.state()
    assert state["outstanding"] == [[t.ticket_id, "cats", t.index, 0, 1] for t in tickets]

    resumed = issuer_of(lineage=1)
    resumed.restore(state)
    resumed.set_serving_step(0)
    again = resumed.acquire(9, 0.0)
    assert [t.ticket_id for t in again] == ["cats-1-0", "cats-1-1", "cats-1-2"]
    assert [(t.index, t.seed, t.deadline_step) for t in again] == [(t.index, t.seed, 1) for t in tickets]
    assert [t.ticket_id for t in resumed.acquire(9, 0.0)] == ["cats-1-3"]


def test_groups_in_training_count_as_outstanding_in_a_checkpoint():
    issuer = issuer_of()
    issuer.set_serving_step(0)
    tickets = issuer.acquire(4, 0.0)
    finish(issuer, *tickets)
    take(issuer, tickets[2], tickets[0])
    state = issuer.state()
    assert state["update"] == 0 and [row[2] for row in state["outstanding"]] == [2, 0, 1, 3]
    issuer.finish(0)
    assert issuer.state()["update"] == 1 and [row[2] for row in issuer.state()["outstanding"]] == [1, 3]


def test_the_number_of_overtakes_counts_groups_ahead_of_an_older_one():
    issuer = issuer_of(b=2, s=2)
    issuer.set_serving_step(0)
    tickets = issuer.acquire(6, 0.0)
    assert take(issuer, tickets[0], tickets[3])["replay/overtakes"] == 1
    assert take(issuer, tickets[1], tickets[2])["replay/overtakes"] == 0


def test_a_lesson_of_less_tolerance_is_due_earlier_and_waits_for_its_version():
    config = ReplayBufferConfig(
        groups_per_batch=1, staleness_budget=2, tolerances={"strict": {"max_rollout_step_delay": 0}}
    )
    issuer = TicketIssuer(
        config, TicketRules(1, Lessons("lax", "strict", "strict", "lax"), lambda lesson: 2), 0, Ledger()
    )
    issuer.set_serving_step(0)
    lax, strict = issuer.acquire(2, 0.0)
    assert [lax.deadline_step, strict.deadline_step] == [2, 0]
    finish(issuer, lax, strict)
    assert issuer.outstanding.must_take(0) == [strict.ticket_id]
    take(issuer, strict)
    assert issuer.acquire(9, 0.0) == []  # update 1 is next: version 0 is too old for this lesson
    issuer.finish(0)
    state = issuer.state()
    assert state["unplaced"] == [["strict", 1]] and not issuer.was_drawn(("strict", 1))

    resumed = TicketIssuer(config, TicketRules(1, Lessons("lax"), lambda lesson: 2), 1, Ledger())
    resumed.restore(state)
    for each, name in ((issuer, "strict-0-1"), (resumed, "strict-1-1")):
        each.set_serving_step(1)
        tickets = each.acquire(9, 0.0) + each.acquire(9, 0.0)
        assert {ticket.ticket_id: ticket.deadline_step for ticket in tickets}[name] == 1


# --- holders, and lessons that only some generate -------------------------------------------------------------------


def test_the_tickets_of_a_dead_holder_are_handed_out_first_and_counted_once():
    ledger = Ledger()
    issuer = issuer_of(ledger=ledger)
    issuer.set_serving_step(0)
    first = issuer.offer(2, holder="a#1")
    other = issuer.offer(1, holder="b#1")
    assert issuer.held_by("a#1") == ["cats-0-0", "cats-0-1"]
    assert issuer.reissue("a#1") == ["cats-0-0", "cats-0-1"] and issuer.held_by("a#1") == []
    assert issuer.reissue("a#1") == []
    again = issuer.offer(9, holder="b#1")
    assert again == first
    again += issuer.offer(9, holder="b#1")
    assert [t.ticket_id for t in again] == ["cats-0-0", "cats-0-1", "cats-0-3"]
    assert ledger.snapshot()["started"] == ledger.snapshot()["in_flight"] == 3 * (len(again) + len(other))
    ledger.check()


def test_a_returned_ticket_cannot_fail_before_it_is_handed_out_again():
    ledger = Ledger()
    issuer = issuer_of(ledger=ledger)
    issuer.set_serving_step(0)
    (ticket,) = issuer.offer(1, holder="a#1")
    issuer.reissue("a#1")
    issuer.fail(ticket, "invalid", "a late word of the dead")
    assert issuer.late_deliveries == 1 and issuer.offer(1, holder="b#1") == [ticket]
    issuer.fail(ticket, "invalid", "it failed indeed")
    assert ledger.snapshot()["invalid"] == 3


def test_a_worker_of_one_lesson_neither_takes_nor_blocks_anothers_tickets():
    issuer = issuer_of(chooser=Lessons("dogs", "cats", "dogs", "cats"))
    issuer.set_serving_step(0)
    cats = issuer.offer(4, lessons=("cats",))
    assert [t.ticket_id for t in cats] == ["cats-0-0", "cats-0-1"]
    assert issuer.offer(4, lessons=("cats",)) == []
    assert [t.ticket_id for t in issuer.offer(4, lessons=("dogs",))] == ["dogs-0-0", "dogs-0-1"]


def test_nothing_is_drawn_while_the_chooser_may_not():
    known = []
    rules = TicketRules(7, OneLesson(), lambda lesson: 3, may_draw=lambda: known)
    issuer = TicketIssuer(ReplayBufferConfig(groups_per_batch=2), rules, 0, Ledger())
    issuer.set_serving_step(0)
    assert issuer.acquire(4, 0.0) == []
    known.append("the probabilities")
    assert len(issuer.acquire(4, 0.0)) == 4

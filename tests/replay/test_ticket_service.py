"""Tickets for other processes: who gets what, what becomes of a dead worker's, and which version serves."""

import pytest

from penstock.replay import Ledger, ReplayBufferConfig, TicketIssuer, TicketRules, TicketService
from penstock.replay.ticket_service import ServingVersions
from penstock.types import RunFailed, Stopped, SupersededError

LIMIT_S = 280.0


class InTurn:
    def __init__(self, *lessons):
        self.lessons, self.drawn = lessons, 0

    def sample_lesson(self, seed):
        self.drawn += 1
        return self.lessons[(self.drawn - 1) % len(self.lessons)]


@pytest.fixture
def desk_of():
    desks = []

    def make(b=2, s=1, lessons=("cats",), serving=True):
        config = ReplayBufferConfig(groups_per_batch=b, staleness_budget=s)
        issuer = TicketIssuer(config, TicketRules(7, InTurn(*lessons), lambda lesson: 3), 0, Ledger())
        if serving:
            issuer.set_serving_step(0)
        desks.append(TicketService(issuer, None))
        desks[-1].start()
        return desks[-1], issuer

    yield make
    for desk in desks:
        assert desk.stop(LIMIT_S)


def names(future):
    return [ticket.ticket_id for ticket in future.result(LIMIT_S)]


def test_who_waits_is_served_when_a_version_serves(desk_of):
    desk, issuer = desk_of(serving=False)
    asked = desk.ask("a", 1, 1, 3, None)
    assert not asked.done() and desk.waiting == 1
    issuer.set_serving_step(0)
    assert names(asked) == ["cats-0-0", "cats-0-1", "cats-0-2"]
    assert desk.waiting == 0


def test_those_in_line_share_what_is_free(desk_of):
    desk, issuer = desk_of(b=3, serving=False)  # six places
    asked = [desk.ask(worker, 1, 1, 9, None) for worker in "abc"]
    issuer.set_serving_step(0)
    assert [len(names(future)) for future in asked] == [2, 2, 2]


def test_a_repeat_of_the_last_request_gets_the_same_tickets_and_an_older_one_nothing(desk_of):
    desk, issuer = desk_of()
    first = names(desk.ask("a", 1, 1, 2, None))
    assert names(desk.ask("a", 1, 1, 2, None)) == first == ["cats-0-0", "cats-0-1"]
    assert names(desk.ask("a", 1, 2, 1, None)) == ["cats-0-2"]
    assert names(desk.ask("a", 1, 1, 2, None)) == []
    assert len(issuer.outstanding) == 3


def test_a_repeat_takes_the_place_of_the_one_in_line(desk_of):
    desk, issuer = desk_of(serving=False)
    lost, repeated = desk.ask("a", 1, 1, 2, None), desk.ask("a", 1, 1, 2, None)
    assert names(lost) == [] and desk.waiting == 1
    issuer.set_serving_step(0)
    assert names(repeated) == ["cats-0-0", "cats-0-1"] == issuer.held_by("a#1")


def test_who_withdraws_leaves_the_line_with_what_came_in_the_last_moment(desk_of):
    desk, issuer = desk_of(serving=False)
    desk.ask("a", 1, 1, 2, None)
    assert desk.withdraw("a", 1) == [] and desk.waiting == 0
    asked = desk.ask("b", 1, 1, 2, None)
    issuer.set_serving_step(0)
    assert names(asked) == [ticket.ticket_id for ticket in desk.withdraw("b", 1)]
    assert issuer.held_by("a#1") == []


def test_workers_of_a_lesson_wait_for_that_lesson(desk_of):
    desk, issuer = desk_of(b=2, lessons=("dogs", "cats", "dogs", "dogs"), serving=False)
    cats, birds = desk.ask("a", 1, 1, 4, ["cats"]), desk.ask("b", 1, 1, 4, ["birds"])
    dogs = desk.ask("c", 1, 1, 4, ["dogs"])
    issuer.set_serving_step(0)
    assert names(cats) == ["cats-0-0"]
    assert names(dogs)[0] == "dogs-0-0"
    assert not birds.done() and desk.waiting == 1


def test_what_a_released_worker_held_goes_to_the_next_and_its_messages_are_refused(desk_of):
    desk, issuer = desk_of()
    held = names(desk.ask("a", 1, 1, 2, None))
    desk.release("a", 1)
    assert desk.reissued == 2
    with pytest.raises(SupersededError, match="a#1 was replaced: messages are taken from #2 on"):
        desk.ask("a", 1, 2, 1, None)
    assert names(desk.ask("b", 1, 1, 2, None)) == held
    desk.release("a", 1)
    assert desk.reissued == 2 and issuer.held_by("b#1") == held


def test_a_newer_incarnation_releases_the_older_one(desk_of):
    desk, issuer = desk_of()
    held = names(desk.ask("a", 1, 1, 4, None))
    assert names(desk.ask("a", 3, 1, 4, None)) == held == issuer.held_by("a#3")
    with pytest.raises(SupersededError):
        desk.check("a", 2)


def test_a_failure_of_the_run_reaches_those_in_line_and_those_who_come_later(desk_of):
    desk, issuer = desk_of(serving=False)
    asked = desk.ask("a", 1, 1, 2, None)
    with issuer.changed:
        issuer.changed.end_with(RunFailed("nothing can come"))
    with pytest.raises(RunFailed, match="nothing can come"):
        asked.result(LIMIT_S)
    with pytest.raises(RunFailed, match="nothing can come"):
        desk.ask("b", 1, 1, 2, None)
    assert isinstance(desk.failure, RunFailed)


def test_after_stop_everybody_gets_stopped(desk_of):
    desk, _ = desk_of(serving=False)
    asked = desk.ask("a", 1, 1, 2, None)
    assert desk.stop(LIMIT_S)
    with pytest.raises(Stopped):
        asked.result(LIMIT_S)
    with pytest.raises(Stopped):
        desk.ask("b", 1, 1, 2, None)
    assert desk.failure is None


class OneLesson:
    def sample_lesson(self, seed):
        return "cats"


def issuer_at(update, lineage=0):
    issuer = TicketIssuer(ReplayBufferConfig(), TicketRules(7, OneLesson(), lambda lesson: 3), lineage, Ledger())
    issuer.ledger.update = update
    return issuer


def test_the_oldest_version_that_any_server_holds_serves():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=False)
    assert issuer.serving_step is None
    serving.hold("inference-0", 1, 0, 3)
    assert issuer.serving_step == 3
    serving.hold("inference-1", 1, 0, 3)
    serving.hold("inference-0", 1, 0, 5)
    assert issuer.serving_step == 3 and serving.describe() == {"inference-0": 5, "inference-1": 3}
    serving.hold("inference-1", 1, 0, 4)
    assert issuer.serving_step == 4


def test_nobody_waits_for_a_dead_server_and_a_late_word_of_its_death_spares_the_next():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=False)
    serving.hold("inference-0", 1, 0, 3)
    serving.hold("inference-1", 1, 0, 5)
    serving.hold("inference-0", 2, 0, 4)
    serving.forget("inference-0", 1)
    assert issuer.serving_step == 4
    serving.forget("inference-0", 2)
    assert issuer.serving_step == 5
    with pytest.raises(SupersededError, match="inference-1#0 was replaced by #1"):
        serving.hold("inference-1", 0, 0, 5)


def test_what_a_dead_server_still_says_holds_nothing_up():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=False)
    serving.hold("inference-0", 1, 0, 3)
    serving.forget("inference-1", 4)
    with pytest.raises(SupersededError, match="inference-1#4 is dead"):
        serving.hold("inference-1", 4, 0, 2)
    serving.hold("inference-0", 1, 0, 5)
    assert issuer.serving_step == 5
    assert serving.hold("inference-1", 5, 0, 5)


def test_nobody_waits_for_a_server_that_is_held_back_while_another_serves():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=False)
    serving.hold("inference-0", 1, 0, 2)
    serving.hold("inference-1", 1, 0, 2)
    serving.hold("inference-0", 1, 0, 2, held_back=True)
    serving.hold("inference-1", 1, 0, 4)
    assert issuer.serving_step == 4
    serving.hold("inference-0", 1, 0, 2, held_back=False)  # it catches up; nothing is taken back
    serving.hold("inference-1", 1, 0, 5)
    assert issuer.serving_step == 4
    serving.hold("inference-0", 1, 0, 5)
    assert issuer.serving_step == 5


def test_a_server_that_is_held_back_and_serves_alone_sets_the_pace():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=False)
    serving.hold("inference-0", 1, 0, 2, held_back=True)
    assert issuer.serving_step == 2
    serving.hold("inference-1", 1, 0, 4)
    assert issuer.serving_step == 4


def test_a_server_that_joins_late_takes_nothing_back():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=False)
    serving.hold("inference-0", 1, 0, 5)
    serving.hold("inference-1", 1, 0, 2)
    assert issuer.serving_step == 5


def test_another_lineages_version_does_not_count():
    issuer = issuer_at(5, lineage=2)
    serving = ServingVersions(issuer, needs_clearance=True)
    assert not serving.hold("inference-0", 1, 1, 5) and not serving.clear(1, 5)
    assert issuer.serving_step is None


def test_where_evaluations_come_first_a_version_serves_when_it_is_cleared():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=True)
    serving.hold("inference-0", 1, 0, 5)
    assert issuer.serving_step is None
    assert serving.clear(0, 4)
    assert issuer.serving_step == 4
    serving.clear(0, 5)
    assert issuer.serving_step == 5
    serving.clear(0, 4)  # repeated late
    assert issuer.serving_step == 5


def test_where_evaluations_come_first_all_servers_count():
    issuer = issuer_at(5)
    serving = ServingVersions(issuer, needs_clearance=True)
    serving.hold("inference-0", 1, 0, 3, held_back=True)
    serving.hold("inference-1", 1, 0, 5)
    serving.clear(0, 5)
    assert issuer.serving_step == 3

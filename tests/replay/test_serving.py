"""The version that serves: the oldest of all servers, of this lineage, cleared where that is asked for."""

import pytest

from penstock.replay import Ledger, ReplayBufferConfig, TicketIssuer
from penstock.replay.ticket_service import ServingVersions
from penstock.types import SupersededError


class OneLesson:
    def sample_lesson(self, seed):
        return "cats"


def issuer_at(update, lineage=0):
    issuer = TicketIssuer(ReplayBufferConfig(), 7, lineage, OneLesson(), Ledger(), lambda lesson: 3)
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

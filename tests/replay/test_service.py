"""The replay service: what each call does, that a repeat does nothing, and that strangers are refused."""

import asyncio
import threading
import time

import numpy as np
import pytest
from tests.waiting import wait_until

from penstock.curriculum import Curriculum, CurriculumConfig, CurriculumService, RemoteCurriculum
from penstock.replay import batch_to_buffer
from penstock.types import (
    NoProgressError,
    RolloutBatch,
    RolloutBatchStats,
    RunFailed,
    Stopped,
    SupersededError,
    TransferError,
)


def message_of(sim, *tickets, rewards=(0.0, 1.0, 0.5), **fields):
    """A message with the groups of tickets."""
    fields.setdefault("timestamp", time.time())
    groups = [sim.make_group(t, rewards[: sim.GROUP_SIZES[t.lesson_id]], **fields) for t in tickets]
    return bytes(memoryview(batch_to_buffer(RolloutBatch.of(tuple(groups)))))


def acquire(loop, service, number=1, most=1, worker="a", incarnation=1, lineage=0, timeout_s=5.0, lessons=None):
    return loop.run(service.acquire(worker, incarnation, lineage, number, most, timeout_s, lessons))


def settle(served, states, limit_s=10.0):
    """Waits until the ledger says so."""
    limit = time.monotonic() + limit_s
    while True:
        found = served.issuer.ledger.snapshot()
        if all(found[state] == count for state, count in states.items()):
            return
        assert time.monotonic() < limit, found
        time.sleep(0.002)


def stats_of(reward, lesson_id="easy"):
    return RolloutBatchStats(lesson_id, 1, 2, reward, reward, reward, 3.0, 0.0, (reward, reward))


def test_one_update_from_the_first_ticket_to_the_checkpoint(sim, serve, loop):
    s = serve()
    assert acquire(loop, s.service, timeout_s=0.01) == []  # no server holds a version
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = acquire(loop, s.service, 1, most=2)
    assert len(tickets) == 2
    assert s.service.deliver("a", 1, 0, 1, message_of(sim, *tickets)) == "taken"
    batch = s.service.next_batch(0, 0, 10.0)
    assert (batch.step, set(batch.group_ids)) == (0, {ticket.ticket_id for ticket in tickets})
    s.service.finish_update(0, 0)
    s.service.set_current_step(0, 1)
    states = s.service.checkpoint_states(0, 1)
    assert set(states) == {"curriculum", "issuer", "replay"} and states["issuer"]["update"] == 1
    s.service.checkpoint_saved(0, 1)
    s.buffer.check_ledger()
    wait_until(lambda: s.service.progress == 3.0)  # two groups, counted once they are in the buffer, and one update
    assert s.service.failure is None


def test_a_delivery_counts_once_however_often_it_is_repeated(sim, serve, loop):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = acquire(loop, s.service, 1, most=2)
    first = message_of(sim, tickets[0])
    assert [s.service.deliver("a", 1, 0, 1, first) for _ in range(3)] == ["taken"] * 3
    assert s.service.deliver("a", 1, 0, 2, message_of(sim, tickets[1])) == "taken"
    settle(s, {"in_flight": 0})
    assert s.service.metrics()["replay/late_deliveries"] == 0
    assert s.service.metrics()["replay/repeated_messages"] == 2
    assert s.service.metrics()["rollout_storage/received_bytes"] == len(first) + len(message_of(sim, tickets[1]))


def test_a_writer_whose_share_is_full_is_told_so(sim, serve, loop):
    s = serve(capacity_groups=1, start=False)
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = s.issuer.acquire(2, 0.0)
    assert s.service.deliver("a", 1, 0, 1, message_of(sim, tickets[0])) == "taken"
    second = message_of(sim, tickets[1])
    assert s.service.deliver("a", 1, 0, 2, second) == "full"
    s.service.start()  # the receiver takes the first one out
    limit = time.monotonic() + 10
    while (answer := s.service.deliver("a", 1, 0, 2, second)) == "full":
        assert time.monotonic() < limit
        time.sleep(0.002)
    assert answer == "taken"
    settle(s, {"in_flight": 0})


@pytest.mark.attack
def test_a_damaged_message_is_refused_told_and_may_be_sent_again(sim, serve, loop):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    (ticket,) = acquire(loop, s.service)
    message = message_of(sim, ticket)
    with pytest.raises(TransferError):
        s.service.deliver("a", 1, 0, 1, message[:100] + bytes([message[100] ^ 1]) + message[101:])
    assert s.refusals[0][0] == "a" and "checksum" in s.refusals[0][1]
    assert s.service.deliver("a", 1, 0, 1, message) == "taken"


@pytest.mark.attack
def test_another_lineages_worker_gets_no_tickets_and_its_groups_are_not_taken(sim, serve, loop):
    s = serve(lineage=2, store=None)
    s.service.server_holds("inference-0", 1, 2, 0)
    assert acquire(loop, s.service, lineage=1, timeout_s=0.01) == []
    (ticket,) = acquire(loop, s.service, lineage=2)
    assert s.service.deliver("a", 1, 1, 1, message_of(sim, ticket)) == "refused"
    s.service.fail("a", 1, 1, ticket, "invalid", "of another life")
    assert s.issuer.held_by("a#1") == [ticket.ticket_id]
    assert s.service.metrics()["replay/refused_messages"] == 3


def test_a_learner_of_another_lineage_must_end(serve):
    s = serve(lineage=2)
    calls = (
        ("next_batch", 0, 0.1), ("finish_update", 0), ("set_current_step", 1), ("checkpoint_states", 0),
        ("checkpoint_saved", 0),
    )  # fmt: skip
    for method, *args in calls:
        with pytest.raises(SupersededError, match="the learner is of lineage 1, and the run's is 2"):
            getattr(s.service, method)(1, *args)


def test_the_dead_are_not_heard_and_what_they_held_goes_on(sim, serve, loop):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = acquire(loop, s.service, most=2)
    s.service.release("a", 1)
    for call in (
        lambda: s.service.deliver("a", 1, 0, 1, message_of(sim, *tickets)),
        lambda: s.service.fail("a", 1, 0, tickets[0], "invalid", "late"),
        lambda: acquire(loop, s.service, 2),
    ):
        with pytest.raises(SupersededError, match="a#1 was replaced"):
            call()
    again = acquire(loop, s.service, most=2, worker="b")
    assert again == tickets
    assert s.service.deliver("b", 1, 0, 1, message_of(sim, *again)) == "taken"
    s.service.next_batch(0, 0, 10.0)
    assert s.issuer.ledger.snapshot()["started"] == sum(sim.GROUP_SIZES[t.lesson_id] for t in tickets)
    s.buffer.check_ledger()


def test_a_group_that_came_before_its_worker_died_is_taken(sim, serve, loop):
    s = serve(start=False)
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = s.issuer.offer(2, holder="a#1")
    assert s.service.deliver("a", 1, 0, 1, message_of(sim, *tickets)) == "taken"
    s.service.release("a", 1)
    assert [entry.phase for entry in s.issuer.outstanding] == ["returned", "returned"]
    s.service.start()
    settle(s, {"in_flight": 0})
    assert s.service.metrics()["replay/late_deliveries"] == 0
    assert s.issuer.offer(1, holder="b#1")[0].ticket_id not in {t.ticket_id for t in tickets}
    s.buffer.check_ledger()


@pytest.mark.attack
def test_only_its_holder_fails_a_ticket_and_only_once(sim, serve, loop):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    (ticket,) = acquire(loop, s.service)
    s.service.fail("b", 1, 0, ticket, "invalid", "not mine")
    assert s.issuer.held_by("a#1") == [ticket.ticket_id]
    for _ in range(2):
        s.service.fail("a", 1, 0, ticket, "invalid", "the environment raised")
    assert s.issuer.ledger.snapshot()["invalid"] == sim.GROUP_SIZES[ticket.lesson_id]
    assert s.service.metrics()["replay/late_deliveries"] == 0


def test_the_learners_calls_may_be_repeated(sim, serve, loop):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    s.service.deliver("a", 1, 0, 1, message_of(sim, *acquire(loop, s.service, most=4)))
    first = s.service.next_batch(0, 0, 10.0)
    assert s.service.next_batch(0, 0, 10.0) is first
    for _ in range(2):
        s.service.finish_update(0, 0)
        s.service.set_current_step(0, 1)
    assert s.service.next_batch(0, 1, 10.0).step == 1
    s.service.finish_update(0, 0)  # a late repeat: the batch of update 1 stays
    assert s.service.next_batch(0, 1, 10.0).step == 1
    assert s.service.checkpoint_states(0, 1) is s.service.checkpoint_states(0, 1)
    with pytest.raises(RunFailed, match="update 2 cannot be finished"):
        s.service.finish_update(0, 2)


def test_a_batch_that_does_not_come_says_what_is_waited_for(serve):
    s = serve()
    with pytest.raises(NoProgressError, match="update 0 needs 2 groups, 0 are ready"):
        s.service.next_batch(0, 0, 0.05)
    assert "update 0 needs 2 groups" in s.service.waiting_for()
    assert s.service.status()["waiting_for"] == s.service.waiting_for()


def test_an_evaluation_counts_once(serve):
    s = serve()
    for stats, step in ((stats_of(0.25), 3), (stats_of(0.25), 3), (stats_of(0.5), 3), (stats_of(0.5, "hard"), 3)):
        s.service.update_evaluation(stats, step)
    assert [(each.lesson_id, each.reward_mean) for each, _ in s.record.evaluations] == [
        ("easy", 0.25), ("easy", 0.5), ("hard", 0.5),
    ]  # fmt: skip


def test_where_evaluations_come_first_nothing_is_admitted_before(serve, loop):
    s = serve(needs_clearance=True, staleness_budget=0)
    s.service.server_holds("inference-0", 1, 0, 0)
    assert acquire(loop, s.service, timeout_s=0.01) == []
    s.service.cleared(0, 0)
    assert len(acquire(loop, s.service, most=9)) == 2


def test_thousand_workers_wait_without_a_thread_each(serve, loop):
    s = serve(groups_per_batch=500)

    before = threading.active_count()

    async def ask_all():
        asked = [asyncio.ensure_future(s.service.acquire(f"worker-{i}", 1, 0, 1, 1, 280.0)) for i in range(1000)]
        await asyncio.sleep(0)
        while s.service.status()["waiting_workers"] < 1000:
            await asyncio.sleep(0.001)
        threads = threading.active_count() - before
        s.service.server_holds("inference-0", 1, 0, 0)
        return threads, await asyncio.gather(*asked)

    threads, answers = loop.run(ask_all())
    assert threads < 50
    tickets = [ticket.ticket_id for answer in answers for ticket in answer]
    assert len(tickets) == len(set(tickets)) == 1000


def test_after_stop_every_wait_ends(serve, loop):
    s = serve()
    assert s.service.stop(10)
    with pytest.raises(Stopped):
        acquire(loop, s.service)
    with pytest.raises(Stopped):
        s.service.next_batch(0, 0, 5.0)
    assert s.service.failure is None


def test_status_says_who_serves_and_what_is_where(sim, serve, loop):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    acquire(loop, s.service, most=2)
    status = s.service.status()
    assert status["servers"] == {"inference-0": 0} and status["serving_step"] == 0 and status["lineage"] == 0
    assert status["ledger"]["in_flight"] == status["ledger"]["started"] > 0
    assert status["lessons"] == {"easy": "active 50%"}
    metrics = s.service.metrics()
    assert {"replay/size", "rollout_storage/depth", "curriculum/told", "replay/waiting_workers"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())


def test_at_staleness_zero_lessons_are_those_of_a_curriculum_in_this_process(sim, wire, serve, loop):
    """However slow the other process is."""
    lesson = {"environment": {"env_class": "penstock.environments.CatsEnvironment"}, "plateau_window": 3}
    config = CurriculumConfig.model_validate({"lessons": dict.fromkeys(sim.GROUP_SIZES, lesson)})
    drawn = []
    for curriculum in (CurriculumService(config), None):
        remote = RemoteCurriculum(config, wire.Wire(curriculum, loop, lambda _: time.sleep(0.05)), 0, strict=True)
        if curriculum is None:  # as in one process
            remote = Local(config)
        s = serve(remote=remote, staleness_budget=0)
        remote.start(s.buffer.wake)
        lessons = []
        for step in range(6):
            s.service.server_holds("inference-0", 1, 0, step)
            for number in (1, 2):
                (ticket,) = acquire(loop, s.service, 2 * step + number)
                lessons.append(ticket.ticket_id)
                rewards = [1.0, 0.9] if ticket.lesson_id == "easy" else [0.0, 0.0, 1.0]  # easy is soon rare
                answer = s.service.deliver("a", 1, 0, 2 * step + number, message_of(sim, ticket, rewards=rewards))
                assert answer == "taken"
            assert s.service.next_batch(0, step, 10.0).step == step
            s.service.finish_update(0, step)
            s.service.set_current_step(0, step + 1)
        drawn.append((lessons, s.service.checkpoint_states(0, 6)["curriculum"]))
        assert remote.stop(10)
    assert drawn[0] == drawn[1]
    assert {name.partition("-")[0] for name in drawn[0][0]} == set(sim.GROUP_SIZES)


class Local(Curriculum):
    """A curriculum in this process, with what the wiring of a remote one calls."""

    def may_draw(self):
        return True

    def start(self, on_news):
        pass

    def stop(self, timeout_s):
        return True

    def update_group(self, group):
        lesson_id = group.rollouts[0].lesson_id
        self.update_training(RolloutBatchStats.of(lesson_id, RolloutBatch.of((group,))))

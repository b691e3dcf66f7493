"""Workers and a learner over calls of which some are lost: nothing is skipped, nothing counts twice."""

import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from penstock.replay import RemoteBatches, RemoteSink, RemoteTickets
from penstock.types import (
    BatchSource,
    NoProgressError,
    RolloutBatch,
    RolloutSink,
    Stopped,
    SupersededError,
    TicketSource,
    TrainingBatch,
    TransferError,
    UnreachableError,
)


def in_turn(*faults):
    """These faults, then none."""
    left = list(faults)
    return lambda method: left.pop(0) if left else None


def group_of(sim, ticket):
    rewards = [0.0, 1.0, 0.5][: sim.GROUP_SIZES[ticket.lesson_id]]
    return RolloutBatch.of((sim.make_group(ticket, rewards, timestamp=time.time()),))


def test_they_are_what_workers_and_learners_ask_for(wire, loop):
    caller = wire.Wire(None, loop)
    assert isinstance(RemoteTickets(caller, "a", 1), TicketSource)
    assert isinstance(RemoteSink(caller, "a", 1), RolloutSink)
    assert isinstance(RemoteBatches(caller, 0), BatchSource)


@pytest.mark.parametrize("fault", ["request", "answer"])
def test_tickets_whose_answer_was_lost_are_not_lost(wire, serve, loop, fault):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = RemoteTickets(wire.Wire(s.service, loop, in_turn(fault, fault)), "a", 1)
    found = []
    while not found:
        found = tickets.acquire(2, 0.05)
    assert [ticket.ticket_id for ticket in found] == s.issuer.held_by("a#1") and len(found) == 2
    found += tickets.acquire(2, 0.05)
    assert len({ticket.ticket_id for ticket in found}) == len(s.issuer.held_by("a#1")) == 4


def test_only_tickets_of_its_lessons(sim, wire, serve, loop):
    s = serve(groups_per_batch=6)
    s.service.server_holds("inference-0", 1, 0, 0)
    tickets = RemoteTickets(wire.Wire(s.service, loop), "a", 1, lessons=["hard"])
    found = [ticket for _ in range(12) for ticket in tickets.acquire(2, 0.01)]
    assert found and {ticket.lesson_id for ticket in found} == {"hard"}


def test_a_sink_delivers_once_waits_for_room_and_counts_what_is_of_no_use(sim, wire, serve, loop):
    s = serve(capacity_groups=1)
    s.service.server_holds("inference-0", 1, 0, 0)
    caller = wire.Wire(s.service, loop, in_turn("answer", "request", None, "answer"))
    sink = RemoteSink(caller, "a", 1)
    held = s.issuer.offer(4, holder="a#1")
    sink.add_batches([group_of(sim, ticket) for ticket in held])
    limit = time.monotonic() + 10
    while s.issuer.ledger.snapshot()["in_flight"]:
        assert time.monotonic() < limit
        time.sleep(0.002)
    assert s.issuer.late_deliveries == 0 and sink.refused == 0
    sink.lineage = 5
    sink.add_batches([group_of(sim, held[0]), RolloutBatch(())])
    assert sink.refused == 1 and s.issuer.late_deliveries == 0


def test_a_full_service_has_a_limit(sim, wire, serve, loop):
    s = serve(capacity_groups=1, start=False)
    s.service.server_holds("inference-0", 1, 0, 0)
    sink = RemoteSink(wire.Wire(s.service, loop), "a", 1, limit_s=0.05)
    first, second = s.issuer.offer(2, holder="a#1")
    sink.add_batches([group_of(sim, first)])
    with pytest.raises(NoProgressError, match="a waited .* s to hand rollouts over: replay-0 is full"):
        sink.add_batches([group_of(sim, second)])


def test_a_message_that_is_always_damaged_is_an_error(sim, loop, serve):
    s = serve()
    s.service.server_holds("inference-0", 1, 0, 0)
    (ticket,) = s.issuer.offer(1, holder="a#1")

    class Noisy:
        calls = 0

        def call(self, method, *args, timeout_s):
            self.calls += 1
            return s.service.deliver(*args[:-1], args[-1][:-1])

    noisy = Noisy()
    with pytest.raises(TransferError):
        RemoteSink(noisy, "a", 1).add_batches([group_of(sim, ticket)])
    assert noisy.calls == 3


def test_a_dead_service_has_a_limit_and_a_stop_ends_the_wait(wire, loop):
    dead = wire.Wire(None, loop)
    with pytest.raises(NoProgressError, match="replay-0 has not answered"):
        RemoteBatches(dead, 0, limit_s=0.0).finish_update(3)
    tickets = RemoteTickets(dead, "a", 1, limit_s=0.0)
    with pytest.raises(NoProgressError, match="replay-0 has not answered"):
        tickets.acquire(1, 0.01)
    patient = RemoteTickets(dead, "a", 1)
    assert patient.acquire(1, 0.01) == []
    stopped = threading.Event()

    def wait():
        with pytest.raises(Stopped):
            patient.acquire(1, 60.0)
        stopped.set()

    thread = threading.Thread(target=wait)
    thread.start()
    patient.stop()
    thread.join(10)
    assert stopped.is_set()


def test_a_replaced_worker_hears_of_it(wire, serve, loop):
    s = serve()
    caller = wire.Wire(s.service, loop)
    s.service.release("a", 1)
    with pytest.raises(SupersededError):
        RemoteTickets(caller, "a", 1).acquire(1, 0.01)


def test_a_learner_waits_in_slices_up_to_its_own_limit(wire, serve, loop, monkeypatch):
    monkeypatch.setattr("penstock.replay.remote._SLICE_S", 0.01)
    s, heard = serve(), []
    caller = wire.Wire(s.service, loop, in_turn("request"))
    with pytest.raises(NoProgressError, match="update 0 needs 2 groups"):
        RemoteBatches(caller, 0, on_wait=heard.append).next_batch(0, 0.5)
    assert caller.calls.count("next_batch") > 3 and "update 0 needs 2 groups" in heard[0]


class FormsAhead:
    """Batches of which the next is always there."""

    def __init__(self) -> None:
        self.metrics = {"replay/wait_s": 0.0}

    def peek(self, step):
        return TrainingBatch(f"batch-{step}", step, ("examples of", step), (), {})

    def next_batch(self, step, timeout_s):
        return replace(self.peek(step), metrics=self.metrics)


@pytest.mark.parametrize("fault", [None, "request", "answer"])
def test_a_batch_that_a_learner_looked_at_travels_once(wire, serve, loop, fault):
    s = serve()
    s.service.service._batches = FormsAhead()
    answers = []
    caller = wire.Wire(s.service, loop, lambda method: fault if method == "formed_batch" else None)
    call = caller.call
    caller.call = lambda *asked, timeout_s: answers.append(call(*asked, timeout_s=timeout_s)) or answers[-1]
    learner = RemoteBatches(caller, 0)
    assert learner.next_batch(0, 1.0).examples == ("examples of", 0)
    looked_at = learner.peek(1)
    assert (looked_at is None) == (fault is not None), "who looks ahead does not insist"
    assert learner.peek(1) is looked_at
    batch = learner.next_batch(1, 1.0)
    assert (batch.batch_id, batch.examples, batch.metrics) == ("batch-1", ("examples of", 1), {"replay/wait_s": 0.0})
    assert (answers[-1].examples == ()) == (fault is None)
    assert learner.next_batch(2, 1.0).examples == ("examples of", 2)


class Crowd:
    """Workers in threads, some of which die with what they hold; a supervisor releases and replaces them."""

    def __init__(self, sim, wire, loop, service, seed):
        self.sim, self.wire, self.loop, self.seed = sim, wire, loop, seed
        self.service = service
        self.stopping = threading.Event()
        self.handed: Counter[str] = Counter()
        self.deaths = 0
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._keep, args=(i,), daemon=True) for i in range(3)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not self.errors, self.errors

    def _keep(self, index):
        rng = random.Random(f"{self.seed} {index}")
        incarnation = 0
        try:
            while not self.stopping.is_set():
                incarnation += 1
                self._live(f"worker-{index}", incarnation, rng)
                self.deaths += not self.stopping.is_set()
                if rng.random() < 0.5:  # else its successor's first word tells
                    self.service.release(f"worker-{index}", incarnation)
        except BaseException as error:
            self.errors.append(error)

    def _live(self, name, incarnation, rng):
        fault = faults(rng, self._lock)
        caller = self.wire.Wire(self.service, self.loop, fault)
        tickets, sink = RemoteTickets(caller, name, incarnation), RemoteSink(caller, name, incarnation)
        for _ in range(rng.randint(2, 12)):
            held = tickets.acquire(rng.randint(1, 3), 0.05)
            for ticket in held:
                with self._lock:
                    self.handed[ticket.ticket_id] += 1
                if self.stopping.is_set():
                    return
                kind = rng.random()
                if kind < 0.1:
                    tickets.fail(ticket, "invalid", "the environment raised")
                elif kind < 0.25:
                    return  # dead, with what it holds
                else:
                    sink.add_batches([group_of(self.sim, ticket)])


def faults(rng, lock):
    """One call in ten is lost, one in ten answered in vain."""

    def fault(method):
        with lock:
            return {0: "request", 1: "answer"}.get(rng.randrange(10))

    return fault


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_skipped_or_counted_twice_whatever_is_lost_and_whoever_dies(sim, wire, serve, loop, seed):
    s = serve(groups_per_batch=4, staleness_budget=1)
    s.service.server_holds("inference-0", 1, 0, 0)
    learner = RemoteBatches(wire.Wire(s.service, loop, faults(random.Random(seed), threading.Lock())), 0)
    trained: Counter[str] = Counter()
    with Crowd(sim, wire, loop, s.service, seed) as crowd:
        for step in range(12):
            batch = learner.next_batch(step, 30.0)
            assert batch.step == step and len(batch.group_ids) == 4
            trained.update(batch.group_ids)
            learner.finish_update(step)
            learner.set_current_step(step + 1)
            learner.checkpoint_states(step + 1)
            learner.checkpoint_saved(step + 1)
            s.service.server_holds("inference-0", 1, 0, step + 1)
            s.buffer.check_ledger()
    assert crowd.deaths > 0 and max(crowd.handed.values()) > 1  # or nothing was reissued, and this shows nothing
    assert set(trained.values()) == {1} and trained.total() == 48
    left = {entry.ticket.ticket_id for entry in s.issuer.outstanding}
    for lesson_id, drawn in s.issuer.state()["next_index"].items():
        for index in range(drawn):
            ticket_id = f"{lesson_id}-0-{index}"
            assert ticket_id in crowd.handed or ticket_id in left, f"{ticket_id} was skipped"
    assert s.service.failure is None
    s.buffer.check_ledger()


def test_unreachable_is_what_the_wire_says(wire, loop):
    with pytest.raises(UnreachableError):
        wire.Wire(None, loop).call("anything", timeout_s=1.0)

"""The worker's loops against a fake manager: what is delivered, counted, evaluated and aborted, and in what order."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.rollout import RolloutConfig, RolloutWorker
from penstock.types import (
    EnvironmentFailure,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RunFailed,
    Stopped,
    Ticket,
    WeightsError,
    WeightVersion,
)
from penstock.weights import InProcessBroadcaster

WAIT_S = 280.0


def ticket(index: int) -> Ticket:
    return Ticket(f"easy-0-{index}", "easy", index, seed=100 + index, deadline_step=1, admitted_step=0)


def batch_of(ticket_id: str) -> RolloutBatch:
    one = Rollout(
        "cats",
        "7",
        np.array([1], np.int32),
        np.array([2], np.int32),
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
        1.0,
        rollout_id=f"{ticket_id}/0",
        lesson_id="easy",
    )
    return RolloutBatch((RolloutGroup("cats:7", (one,), ticket_id),))


class FakeTickets:
    """Hands out `count` tickets; Stopped once all of them were delivered to the sink or failed."""

    def __init__(self, count: int) -> None:
        self.left = [ticket(index) for index in range(count)]
        self.open = count
        self.failed: list[tuple[str, str, str]] = []
        self.serving: list[int] = []

    def acquire(self, most: int, timeout_s: float) -> list[Ticket]:
        if not self.open:
            raise Stopped("no more tickets")
        taken, self.left = self.left[:most], self.left[most:]
        return taken

    def set_serving_step(self, step: int) -> None:
        self.serving.append(step)

    def fail(self, ticket: Ticket, fate: str, reason: str) -> None:
        self.failed.append((ticket.ticket_id, fate, reason))
        self.open -= 1


class FakeManager:
    """Generates by calling `behave(ticket_id)`, which may raise or wait."""

    def __init__(self, behave=lambda ticket_id: None, size: int = 1, metrics=None) -> None:
        self.behave = behave
        self.size = size
        self.metrics = metrics or {}
        self.context = SimpleNamespace(tokenizer=None)
        self.models: list[WeightVersion] = []
        self.seeds: list[int] = []
        self.problems: list[list[int] | None] = []

    def group_size(self, lesson_id: str) -> int:
        return self.size

    def sample_batch(self, lesson_id, n_examples, n, mode, seed, step, worker_id, *, group_ids, context, problems):
        self.seeds.append(seed)
        self.problems.append(problems)
        result = self.behave(group_ids[0])
        return (batch_of(group_ids[0]) if result is None else result), self.metrics

    def update_model(self, version: WeightVersion, arrays) -> None:
        self.models.append(version)


class Sink:
    def __init__(self) -> None:
        self.groups: list[str] = []
        self.tickets: FakeTickets | None = None

    def add_batches(self, batches) -> None:
        self.groups += [group.group_id for batch in batches for group in batch.groups]
        self.tickets.open -= 1


def worker(manager, tickets, sink=None, weights=None, evaluate=lambda version: None, **changes) -> RolloutWorker:
    sink = sink or Sink()
    sink.tickets = tickets
    settings = {"concurrency": 4, "lockstep": False, **changes}
    config = settings.pop("config", RolloutConfig())
    return RolloutWorker(
        "w0",
        manager,
        tickets,
        sink,
        weights or InProcessBroadcaster(),
        config,
        evaluate=evaluate,
        log_samples=settings.pop("log_samples", lambda batch: None),
        **settings,
    )


def test_every_ticket_becomes_a_delivered_group():
    sink, manager = Sink(), FakeManager()
    worker(manager, FakeTickets(9), sink).run_tickets()
    assert sorted(sink.groups) == [f"easy-0-{index}" for index in range(9)]
    assert sorted(manager.seeds) == [100 + index for index in range(9)]


def test_a_slow_group_does_not_hold_back_the_others():
    sink, others_done = Sink(), threading.Event()

    def behave(ticket_id: str) -> None:
        if ticket_id == "easy-0-0":
            assert others_done.wait(WAIT_S)

    class Watching(Sink):
        def add_batches(self, batches) -> None:
            super().add_batches(batches)
            if len(self.groups) == 5:
                others_done.set()

    sink = Watching()
    worker(FakeManager(behave), FakeTickets(6), sink).run_tickets()
    assert sink.groups[-1] == "easy-0-0"


def test_in_lockstep_groups_are_delivered_in_ticket_order_not_as_they_finish():
    last_done = threading.Event()

    def behave(ticket_id: str) -> None:
        last_done.set() if ticket_id == "easy-0-3" else last_done.wait(WAIT_S)

    sink = Sink()
    worker(FakeManager(behave), FakeTickets(4), sink, lockstep=True).run_tickets()
    assert sink.groups == [f"easy-0-{index}" for index in range(4)]


def test_a_failed_group_is_counted_and_the_others_go_on():
    def behave(ticket_id: str) -> None:
        if ticket_id == "easy-0-1":
            raise EnvironmentFailure("reward is NaN")

    tickets, sink = FakeTickets(4), Sink()
    running = worker(FakeManager(behave), tickets, sink)
    running.run_tickets()
    assert tickets.failed == [("easy-0-1", "invalid", "reward is NaN")]
    assert (running.groups_finished, running.groups_failed, running.last_failure) == (3, 1, "reward is NaN")


def test_an_environment_that_returns_no_group_is_no_crash():
    tickets = FakeTickets(1)
    worker(FakeManager(lambda ticket_id: RolloutBatch(())), tickets).run_tickets()
    assert tickets.failed == [("easy-0-0", "invalid", "the environment returned no group")]


def test_failures_in_a_row_end_the_run_with_the_last_one():
    def behave(ticket_id: str) -> None:
        raise EnvironmentFailure("the verifier is broken")

    failing = worker(FakeManager(behave), FakeTickets(9), config=RolloutConfig(max_consecutive_failures=3))
    with pytest.raises(RunFailed, match=r"\d groups in a row failed.*'easy'.*the verifier is broken"):
        failing.run_tickets()


def test_an_unexpected_error_surfaces_unchanged():
    def behave(ticket_id: str) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        worker(FakeManager(behave), FakeTickets(1)).run_tickets()


def test_groups_cut_short_by_the_stop_keep_their_tickets_for_the_resume():
    tickets, sink = FakeTickets(1), Sink()

    def behave(ticket_id: str) -> None:
        running.stop()
        raise Stopped("the engine is stopping")

    running = worker(FakeManager(behave), tickets, sink)
    running.run_tickets()
    assert (sink.groups, tickets.failed) == ([], [])


@pytest.mark.parametrize(("lockstep", "order"), [(True, ["evaluate", "serve"]), (False, ["serve", "evaluate"])])
def test_at_staleness_zero_evaluation_is_a_barrier_before_serving(lockstep: bool, order: list[str]):
    manager, weights, seen = FakeManager(), InProcessBroadcaster(), []
    tickets = FakeTickets(0)
    tickets.set_serving_step = lambda step: seen.append("serve")
    running = worker(manager, tickets, weights=weights, evaluate=lambda v: seen.append("evaluate"), lockstep=lockstep)
    weights.publish(WeightVersion(0, 3), {"a": np.zeros(1, np.float32)})
    thread = threading.Thread(target=running.run_weights)
    thread.start()
    try:
        deadline = threading.Event()
        while len(seen) < 2 and not deadline.wait(0.01):
            assert thread.is_alive()
    finally:
        running.stop()
        thread.join(WAIT_S)
    assert seen == order
    assert manager.models == [WeightVersion(0, 3)]


class Superseding(InProcessBroadcaster):
    """The learner publishes version 1 after the worker was told of version 0, before it fetched that."""

    def fetch(self, version: WeightVersion):
        if version == WeightVersion(0, 0):
            self.publish(WeightVersion(0, 1), {"a": np.zeros(1, np.float32)})
        return super().fetch(version)


def test_a_version_superseded_before_it_was_fetched_is_skipped():
    manager, weights = FakeManager(), Superseding()
    weights.publish(WeightVersion(0, 0), {"a": np.zeros(1, np.float32)})
    running = worker(manager, FakeTickets(0), weights=weights, evaluate=lambda version: running.stop())
    running.run_weights()
    assert manager.models == [WeightVersion(0, 1)]


def test_sample_conversations_are_logged_every_log_freq_groups():
    logged = []
    config = RolloutConfig(log_freq=4)
    worker(FakeManager(), FakeTickets(9), config=config, log_samples=lambda batch: logged.append(batch)).run_tickets()
    assert len(logged) == 3
    config = RolloutConfig(log_freq=0)
    worker(FakeManager(), FakeTickets(9), config=config, log_samples=lambda batch: logged.append(batch)).run_tickets()
    assert len(logged) == 3


def test_a_worker_begins_no_group_once_so_many_rollouts_were_begun():
    sink, tickets = Sink(), FakeTickets(9)
    config = RolloutConfig(max_rollouts=9)
    worker(FakeManager(size=4), tickets, sink, config=config, concurrency=2).run_tickets()
    assert len(sink.groups) in (3, 4) and len(tickets.left) == 9 - len(sink.groups)  # two may begin at a time


@pytest.mark.parametrize("lockstep", [False, True])
def test_what_an_environment_says_of_its_groups_is_told_also_of_those_that_failed(lockstep: bool):
    def behave(ticket_id: str):
        if ticket_id == "easy-0-1":
            raise EnvironmentFailure("the tool is broken")
        return RolloutBatch(()) if ticket_id == "easy-0-2" else None

    told: list[tuple[str, dict[str, float]]] = []
    manager = FakeManager(behave, size=8, metrics={"tool_calls": 0.5})
    running = worker(
        manager, FakeTickets(3), lockstep=lockstep, on_environment=lambda lesson, said: told.append((lesson, said))
    )
    running.run_tickets()
    assert sorted(told, key=lambda pair: (pair[1]["failed_groups"], len(pair[1]))) == [
        ("easy", {"tool_calls": 0.5, "failed_groups": 0.0, "failed_rollouts": 0.0}),
        ("easy", {"failed_groups": 1.0, "failed_rollouts": 8.0}),
        ("easy", {"tool_calls": 0.5, "failed_groups": 1.0, "failed_rollouts": 8.0}),
    ]


def following(manager, tickets, **changes) -> tuple[RolloutWorker, InProcessBroadcaster]:
    weights = InProcessBroadcaster()
    weights.publish(WeightVersion(0, 3), {"a": np.zeros(1, np.float32)})
    return worker(manager, tickets, weights=weights, **changes), weights


@pytest.mark.parametrize("lockstep", [False, True])
def test_run_is_both_loops(lockstep: bool):
    served = threading.Event()
    manager, tickets, evaluated = (
        FakeManager(lambda ticket_id: None if served.wait(WAIT_S) else ...),
        FakeTickets(5),
        [],
    )
    running, _ = following(
        manager, tickets, lockstep=lockstep, evaluate=lambda version: (evaluated.append(version.step), served.set())
    )
    running.run()
    assert (running.groups_finished, tickets.serving, evaluated) == (5, [3], [3])
    assert manager.models == [WeightVersion(0, 3)]


def test_run_raises_what_either_loop_raises_and_ends_the_other():
    def broken(version: WeightVersion) -> None:
        raise WeightsError("the new version is damaged")

    tickets = FakeTickets(1)
    tickets.acquire = lambda most, timeout_s: []  # tickets that never come
    running, _ = following(FakeManager(), tickets, evaluate=broken)
    with pytest.raises(WeightsError, match="damaged"):
        running.run()
    running, _ = following(FakeManager(lambda ticket_id: 1 / 0), FakeTickets(1))
    with pytest.raises(ZeroDivisionError):
        running.run()


def test_run_without_weights_is_the_tickets_loop():
    sink = Sink()
    sink.tickets = tickets = FakeTickets(3)
    RolloutWorker(
        "w0", FakeManager(), tickets, sink, None, RolloutConfig(), concurrency=2, lockstep=False,
        log_samples=lambda batch: None,
    ).run()  # fmt: skip
    assert len(sink.groups) == 3


def test_the_tickets_problem_is_generated_and_without_one_the_seeds():
    class Two(FakeTickets):
        def acquire(self, most, timeout_s):
            given = super().acquire(most, timeout_s)
            return [replace(t, problem=41) if t.index == 1 else t for t in given]

    manager = FakeManager()
    worker(manager, Two(2), Sink(), concurrency=1).run_tickets()
    assert manager.problems == [None, [41]]

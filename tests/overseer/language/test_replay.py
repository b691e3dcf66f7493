"""The replay buffer owes progress while something waits for it alone, and counts its work."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.overseer.component import Settings
from penstock.overseer.language.replay import ReplayRole, arrived_examples, owes_progress
from penstock.replay import RolloutStore, batch_to_buffer
from penstock.rundir import RunDirectory
from penstock.types import RolloutBatch, RolloutGroup, Ticket
from tests.overseer.conftest import tiny
from tests.overseer.lonely import Lonely
from tests.replay.simulation import make_rollout
from tests.waiting import wait_until

LIMIT_S = 280.0


@pytest.mark.parametrize(
    ("waiting", "in_hand", "owes"), [((0, 0), 0, False), ((0, 0), 1, True), ((2, 0), 0, True), ((0, 2), 0, True)]
)
def test_it_owes_progress_for_deliveries_and_for_files_that_are_due(waiting: Any, in_hand: int, owes: bool):
    names = ("rollout_storage/depth", "replay/overdue_groups")
    assert owes_progress(dict(zip(names, map(float, waiting), strict=True)), in_hand) is owes


@pytest.mark.parametrize(("most", "taken"), [(1, 4), (2, 4), (5, 5)])
def test_of_each_engine_as_many_arrivals_are_taken_as_asked_and_as_have_eight_tokens(most: int, taken: int):
    """Each has two."""
    arrived = [make_rollout(f"words-0-1/{i}", weight_step=3) for i in range(6)]
    other = replace(arrived[0], metadata=replace(arrived[0].metadata, engines=("inference-1#0",)))
    pool = SimpleNamespace(arrived_under=lambda step: [*arrived, other] if step == 3 else [])
    found = arrived_examples(SimpleNamespace(pool=pool), 3, most)  # type: ignore[arg-type]
    assert [engines for _, engines in found] == [("inference-0#0",)] * taken + [("inference-1#0",)]
    assert arrived_examples(SimpleNamespace(pool=pool), 2, most) == []  # type: ignore[arg-type]


@pytest.fixture
def role(run_dir: Path):
    config = tiny({"runtime": "ray", "replay": {"store": {"buffer_size": 1}}})
    role: Any = ReplayRole(Lonely("replay"), Settings(config, RunDirectory.create(run_dir, config.dump()), "0" * 64))  # type: ignore[arg-type]
    role.start()
    role.admit()
    role.server_holds("inference-0", 0, 0, 0)
    yield role
    role.stop(LIMIT_S)


def take(role: Any, number: int) -> Ticket:
    (ticket,) = asyncio.run(role.acquire("rollout-0", 0, 0, number, 1, LIMIT_S))
    return ticket


def deliver(role: Any, number: int, ticket: Ticket) -> None:
    name = ticket.ticket_id
    rollouts = tuple(make_rollout(f"{name}/{i}", reward=float(i), timestamp=time.time()) for i in range(3))
    batch = RolloutBatch.of((RolloutGroup("words:1", rollouts, name),))
    assert role.deliver("rollout-0", 0, 0, number, bytes(memoryview(batch_to_buffer(batch)))) == "taken"


def progress(role: Any) -> float | None:
    return role.condition().progress


def test_a_buffer_that_cannot_write_owes_progress_although_it_answers(role, monkeypatch: pytest.MonkeyPatch):
    assert progress(role) is None
    may_write, write = threading.Event(), RolloutStore.seal

    def hang(store: RolloutStore, records: Any) -> None:
        assert may_write.wait(LIMIT_S)
        write(store, records)

    monkeypatch.setattr(RolloutStore, "seal", hang)
    first, second = take(role, 1), take(role, 2)
    deliver(role, 1, first)
    wait_until(lambda: progress(role) is not None, "debt", LIMIT_S)
    stuck_at = progress(role)
    deliver(role, 2, second)  # more of the same, and whatever else it answers, is no progress
    role.server_holds("inference-1", 0, 0, 0)
    assert progress(role) == stuck_at
    may_write.set()
    wait_until(lambda: progress(role) is None, "groups in a file", LIMIT_S)
    assert role._service.progress == 2


def test_a_learner_that_is_paused_and_groups_that_are_generated_are_not_its_debt(role):
    ticket = take(role, 1)
    assert progress(role) is None
    deliver(role, 1, ticket)
    wait_until(lambda: role._service.progress == 1 and progress(role) is None, "a group that nobody takes", LIMIT_S)


def test_handling_is_work_and_waiting_in_it_is_not(role):
    asyncio.run(role.acquire("rollout-0", 0, 0, 1, 64, LIMIT_S))  # all that there are
    before = role.condition()
    assert asyncio.run(role.acquire("rollout-1", 0, 0, 1, 1, 0.4)) == []
    waited = role.condition()
    assert waited.idle_s - before.idle_s >= 0.2 > waited.busy_s - before.busy_s
    handled = role._handling.done
    role.set_current_step(0, 0)
    assert role._handling.done == handled + 1
    assert role.condition().busy_s > waited.busy_s

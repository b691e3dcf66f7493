"""The scale benchmark: its arithmetic, its simulated worker against a replay service, and a tiny run of it."""

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.scale import reporting
from benchmarks.scale.counting import Books, Limits, Window, broken, cpu_seconds, descendants, marginal, saturated
from benchmarks.scale.latencies import QUANTILES_S, Latencies, quantiles
from benchmarks.scale.making import GROUP_SIZE, GroupMaker
from benchmarks.scale.worker import SimulatedWorker

from penstock.overseer.supervisor.messages import Identity, Membership
from penstock.replay.messages import batch_from_buffer
from penstock.types import SupersededError, Ticket, UnreachableError

TICKET = Ticket("cats-0-3", "cats", 3, 17, 5, 2)
LEDGER = {"started": 32, "in_flight": 0, "waiting": 8, "trained": 24, "aborted": 0}


def window(**changes: Any) -> Window:
    quiet = Window(
        workers=100,
        seconds=10.0,
        latencies_s={"deliver": [0.01] * 100, "acquire": [0.02] * 100, "heartbeat": [0.1] * 1000},
        cpu_s={"overseer": 2.0, "replay": 4.0, "farms": 6.0},
        machine_share=0.5,
        groups=100,
        beats_due=1000.0,
    )
    return replace(quiet, **changes)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_latencies_follow_their_quantiles():
    latencies = Latencies((1.0, 2.0, 6.0))
    assert [latencies.at(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0, 4.0, 6.0]
    assert latencies.mean_s == (1.5 + 4.0) / 2
    assert Latencies((1.0, 2.0, 6.0), speed=4.0).at(1.0) == 1.5


def test_the_mean_is_that_of_the_draws():
    latencies, rng = Latencies(), random.Random(0)
    drawn = [latencies.at(rng.random()) for _ in range(5000)]
    assert sum(drawn) / len(drawn) == pytest.approx(latencies.mean_s, rel=0.03)


def test_the_recorded_latencies_are_quantiles():
    assert len(QUANTILES_S) == 11 and sorted(QUANTILES_S) == list(QUANTILES_S)
    assert quantiles([3.0, 1.0, 2.0])[0] == 1.0 and quantiles([3.0, 1.0, 2.0])[-1] == 3.0


def test_cost_is_processor_time_per_worker_and_second():
    assert window().cost(("overseer", "replay", "learner")) == 6.0 / (100 * 10.0)
    assert window().cores("replay") == 0.4
    assert window().messages_per_s == 120.0
    assert window().rate("deliver") == 10.0


def test_one_more_worker_shows_what_the_mean_hides():
    """Fixed costs of 1 core and a square term: the cost per worker falls while that of one more grows."""
    cost = {n: (1.0 + 1e-6 * n * n) / n for n in (10, 100, 1000)}
    assert cost[1000] < cost[10]
    assert marginal((10, cost[10]), (100, cost[100])) == pytest.approx(1.1e-4)
    assert marginal((100, cost[100]), (1000, cost[1000])) == pytest.approx(1.1e-3)
    assert reporting.margins(cost) == pytest.approx([1.1e-4, 1.1e-3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        (
            {"latencies_s": {"deliver": [0.01] * 97 + [1.5] * 3, "heartbeat": [0.1] * 1000}},
            ["p99 of deliver is 1.50 s"],
        ),
        ({"latencies_s": {"heartbeat": [0.1] * 700}}, ["70% of the heartbeats"]),
        ({"deaths": 2.0}, ["2 components were given up"]),
        ({"groups": 55}, ["55% of the groups"]),
        ({"depth": 101.0}, ["101 groups wait for the buffer"]),
    ],
)
def test_every_limit_can_be_crossed(changes, words):
    found = broken(window(**changes), expected_groups_per_s=10.0, limits=Limits())
    assert len(found) == len(words) and all(word in said for word, said in zip(words, found, strict=True))


def test_few_groups_in_a_short_window_are_chance():
    assert broken(window(groups=5, seconds=1.0, beats_due=900.0), 10.0) == []


def test_what_is_saturated_is_named():
    assert saturated(window(), 2) == "nothing is fully busy: the limit is in waiting"
    full = window(cpu_s={"replay": 9.5, "overseer": 1.0}, machine_share=0.95)
    assert saturated(full, 2) == "replay (0.95 cores), the machine (95% of 2 cores)"


def test_processor_time_of_processes():
    before, until = cpu_seconds(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert cpu_seconds(os.getpid()) - before >= 0.05
    assert os.getpid() in descendants(os.getppid())
    assert os.getppid() not in descendants(os.getpid())


# --- books -----------------------------------------------------------------------------------------------------------


def books(**changes: Any) -> Books:
    delivered = {f"cats-0-{number}" for number in range(4)}
    trained = {f"cats-0-{number}/{member}": 1 for number in range(3) for member in range(GROUP_SIZE)}
    return replace(Books(delivered, trained, LEDGER, GROUP_SIZE), **changes)


def test_books_that_close():
    assert books().check() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ledger": {**LEDGER, "started": 40}}, "the ledger does not close"),
        ({"trained": {**books().trained, "cats-0-1/0": 2}}, "1 rollouts were trained twice, such as cats-0-1/0"),
        ({"delivered": {f"cats-0-{number}" for number in (0, 1, 3, 4)}}, "1 groups were trained that nobody delivered"),
        ({"delivered": {f"cats-0-{number}" for number in range(5)}}, "8 delivered rollouts are neither trained nor"),
        ({"ledger": {**LEDGER, "trained": 16, "waiting": 16}}, "trained on 24 rollouts, the ledger has 16"),
    ],
)
def test_books_that_do_not(changes, words):
    assert any(words in fault for fault in books(**changes).check())


# --- the simulated worker --------------------------------------------------------------------------------------------


class Around:
    """What a host gives a component, as far as the worker uses it."""

    identity = Identity("rollout", 7, 2)
    view = Membership(1, 4)


class Replay:
    """Answers as the service does, by a script; keeps what it was told."""

    def __init__(self, **scripts: list[Any]) -> None:
        self.scripts = {"now": [1000.0] * 100, **scripts}
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    async def __call__(self, method: str, *args: Any) -> Any:
        self.told.append((method, args))
        script = self.scripts.get(method, [])
        if not script:
            await asyncio.Event().wait()
        answer = script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def of(self, method: str) -> list[tuple[Any, ...]]:
        return [args for name, args in self.told if name == method]


def live(replay: Replay, until: Callable[[SimulatedWorker, list[str]], bool], monkeypatch) -> SimulatedWorker:
    """Runs a worker with engines that take no time, until something holds."""
    monkeypatch.setattr("benchmarks.scale.worker.PAUSE_S", 0.0)
    taken: list[str] = []

    async def run() -> SimulatedWorker:
        loop, ctx = asyncio.get_running_loop(), Around()
        worker = SimulatedWorker(ctx, replay, loop, lambda: Latencies((0.0, 0.0)), asyncio.Event(), taken.append)  # pyright: ignore[reportArgumentType]
        worker.start()
        async with asyncio.timeout(10):
            while not until(worker, taken):
                await asyncio.sleep(0)
        return worker

    return asyncio.run(run())


def test_a_worker_speaks_the_protocol_and_numbers_its_requests(monkeypatch):
    second = replace(TICKET, ticket_id="cats-0-4", index=4)
    replay = Replay(acquire=[[TICKET], [], [second]], deliver=["taken", "taken"])
    live(replay, lambda worker, taken: taken == ["cats-0-3", "cats-0-4"], monkeypatch)
    assert [args[:4] for args in replay.of("acquire")[:3]] == [("rollout-7", 2, 4, number) for number in (1, 2, 3)]
    assert [args[:4] for args in replay.of("deliver")] == [("rollout-7", 2, 4, number) for number in (1, 2)]
    batch = batch_from_buffer(replay.of("deliver")[0][4])
    assert [group.group_id for group in batch.groups] == ["cats-0-3"] and len(list(batch.rollouts())) == GROUP_SIZE


def test_a_delivery_is_repeated_under_its_number_until_it_is_taken(monkeypatch):
    replay = Replay(acquire=[[TICKET]], deliver=["full", UnreachableError("silent"), "taken"])
    live(replay, lambda worker, taken: taken == ["cats-0-3"], monkeypatch)
    assert [args[3] for args in replay.of("deliver")] == [1, 1, 1]


def test_an_unanswered_request_for_tickets_is_repeated_under_its_number(monkeypatch):
    replay = Replay(acquire=[UnreachableError("silent"), [TICKET]], deliver=["taken"])
    live(replay, lambda worker, taken: taken == ["cats-0-3"], monkeypatch)
    assert [args[3] for args in replay.of("acquire")[:2]] == [1, 1]


def test_a_refused_delivery_is_not_counted(monkeypatch):
    replay = Replay(acquire=[[TICKET]], deliver=["refused"])
    worker = live(replay, lambda worker, taken: len(replay.of("acquire")) == 2, monkeypatch)
    assert worker.condition().facts["groups"]["finished"] == 0


def test_a_replaced_worker_fails(monkeypatch):
    replay = Replay(acquire=[SupersededError("replaced")])
    worker = live(replay, lambda worker, taken: worker.condition().state == "failed", monkeypatch)
    assert worker.condition().error == "SupersededError: replaced"


def test_groups_are_those_of_their_tickets():
    batch = GroupMaker("rollout-7")(TICKET, 4, 1000.0)
    first = next(iter(batch.rollouts()))
    assert first.rollout_id == "cats-0-3/0" and first.metadata is not None
    assert (first.metadata.worker_id, first.metadata.weight_step, first.metadata.lineage) == ("rollout-7", 2, 4)
    assert sum(rollout.episode_reward for rollout in batch.rollouts()) == GROUP_SIZE / 2


# --- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_run(monkeypatch, capsys):
    pytest.importorskip("ray", reason="the extra ray")
    from benchmarks.scale import __main__ as benchmark

    monkeypatch.setattr(benchmark, "FLAT", 1e9)
    options = ["--workers", "2,6", "--seconds", "4", "--settle", "2", "--repeats", "1", "--no-limit"]
    benchmark.main(options)
    printed = capsys.readouterr().out
    marks = dict(
        re.findall(r"^  (.*?) +-?[\d.]+  at (?:most|least) [\d.e+]+ +(reached|MISSED)$", printed, re.MULTILINE)
    )
    assert marks["faults in the books"] == "reached", printed
    assert marks["cost per worker at 6 / at 2"] == "reached"
    assert re.search(r"^ +6 +[\d.]+ +[\d.]+", printed, re.MULTILINE)

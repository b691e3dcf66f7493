"""Which versions are evaluated, against an evaluation that plays nothing."""

import threading
from dataclasses import replace

import pytest

from penstock.overseer.control import evaluator as fleet_evaluator
from penstock.overseer.control.evaluator import FleetEvaluator, metrics_of
from penstock.types import RolloutBatchStats, RunFailed, WeightVersion
from tests.overseer.lonely import Lonely
from tests.overseer.test_control_config import build
from tests.waiting import wait_until

STATS = RolloutBatchStats("pole", 2, 2, 15.0, 0.0, 0.0, 12.5, 0.0, (10.0, 20.0), ("0", "1"))


class Rehearsal(Lonely):
    """A pool, a runner, the playing and a component's surroundings, all in one; `gate` holds an evaluation back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("evaluator")
        self.played: list[int] = []
        self.logged: list[int] = []
        self.events: list[tuple[str, dict]] = []
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.failure: Exception | None = None
        monkeypatch.setattr(fleet_evaluator, "open_evaluation_pool", lambda config, on_event: self)
        monkeypatch.setattr(fleet_evaluator, "with_named_arrays", lambda policy, arrays: policy)
        monkeypatch.setattr(fleet_evaluator, "make_evaluation_runner", lambda policy, config, version: version)
        monkeypatch.setattr(fleet_evaluator, "play_episodes", self.play)

    def play(self, pool, runner, config, episodes, stopping, on_steps, on_slow):
        self.began.set()
        assert self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self.played.append(runner.step)
        on_steps(7)
        on_slow("2 of 3 episodes")
        return {"pole": STATS}

    def close(self) -> None:
        self.closed += 1

    def evaluator(self, every: int) -> FleetEvaluator:
        return FleetEvaluator(self, build({"evaluation": {"every": every}}), None)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.logged.append(step)

    def event(self, kind: str, step: int = 0, **fields) -> None:
        self.events.append((kind, {"step": step, **fields} if step else fields))


@pytest.fixture
def rehearsal(monkeypatch) -> Rehearsal:
    return Rehearsal(monkeypatch)


def offer(evaluator: FleetEvaluator, *steps: int) -> None:
    for step in steps:
        evaluator.offer(WeightVersion(0, step), {})


def started(evaluator: FleetEvaluator) -> threading.Thread:
    thread = threading.Thread(target=evaluator.run)
    thread.start()
    return thread


def test_multiples_that_were_passed_are_due_and_the_newest_of_them_is_played(rehearsal):
    evaluator = rehearsal.evaluator(every=10)
    rehearsal.gate.clear()
    thread = started(evaluator)
    offer(evaluator, 3, 9, 12)
    assert rehearsal.began.wait(5)
    offer(evaluator, 21, 35)  # while version 12 is played
    rehearsal.gate.set()
    wait_until(lambda: rehearsal.played == [12, 35])
    offer(evaluator, 38)
    evaluator.finish()
    thread.join(5)
    assert not thread.is_alive() and rehearsal.played == rehearsal.logged == [12, 35]
    assert rehearsal.closed == 2 and evaluator.steps == 14
    slow = {"words": "2 of 3 episodes"}
    assert rehearsal.events == [("evaluation_slow", {"step": step} | slow) for step in (12, 35)]
    assert evaluator.state() == {"evaluated_step": 35}


def test_a_multiple_is_played_once_whatever_comes_while_it_is_played(rehearsal):
    evaluator = rehearsal.evaluator(every=10)
    rehearsal.gate.clear()
    thread = started(evaluator)
    offer(evaluator, 10)
    assert rehearsal.began.wait(5)
    offer(evaluator, 11, 19)
    assert evaluator.state() == {"evaluated_step": 0}  # a life that ends now plays it again
    rehearsal.gate.set()
    wait_until(lambda: evaluator.state() == {"evaluated_step": 10})
    offer(evaluator, 20)
    wait_until(lambda: rehearsal.played[-1] == 20)
    evaluator.stop()
    thread.join(5)
    assert rehearsal.played == [10, 20]


def test_a_restored_evaluator_goes_on_where_it_was(rehearsal):
    evaluator = rehearsal.evaluator(every=10)
    evaluator.restore({"evaluated_step": 20})
    thread = started(evaluator)
    offer(evaluator, 25)
    offer(evaluator, 31)
    wait_until(lambda: rehearsal.played == [31])
    evaluator.stop()
    thread.join(5)
    assert rehearsal.played == [31]


def test_without_a_frequency_nothing_is_played(rehearsal):
    evaluator = rehearsal.evaluator(every=0)
    offer(evaluator, 10, 20)
    thread = started(evaluator)
    evaluator.finish()
    thread.join(5)
    assert rehearsal.played == []


def test_an_evaluation_that_fails_is_told_and_the_next_one_is_played(rehearsal):
    evaluator = rehearsal.evaluator(every=1)
    rehearsal.failure = RunFailed("all simulators were given up")
    thread = started(evaluator)
    offer(evaluator, 1)
    wait_until(lambda: rehearsal.events)
    rehearsal.failure = None
    offer(evaluator, 2)
    wait_until(lambda: rehearsal.played)
    evaluator.stop()
    thread.join(5)
    failed = {"step": 1, "error": "all simulators were given up"}
    assert [fields for kind, fields in rehearsal.events if kind == "evaluation_failed"] == [failed]
    assert rehearsal.played == [2] and rehearsal.closed == 2


def test_results_as_metrics():
    stats = replace(STATS, metrics={"discounted_return_mean": 9.0, "episodes_per_s": 0.5})
    assert metrics_of({"pole": stats}) == {
        "eval/pole/return_mean": 15.0,
        "eval/pole/return_min": 10.0,
        "eval/pole/return_max": 20.0,
        "eval/pole/length_mean": 12.5,
        "eval/pole/episodes": 2.0,
        "eval/pole/discounted_return_mean": 9.0,
        "eval/pole/episodes_per_s": 0.5,
    }

"""Evaluations of several tasks: each plays its own number of episodes, in the simulators that the run gives it."""

import threading

import pytest

from penstock.fleet import config as assignment
from penstock.overseer.control.evaluator import play_episodes
from penstock.overseer.control.simulators import evaluation_fleet
from penstock.overseer.control_config import FleetRunConfig
from penstock.types import Stopped
from tests.fleet.fake_pool import FakePool, FakeRunner

TASKS = {name: {"id": "Fake-v0", "share": share} for name, share in (("a", 1), ("b", 5), ("c", 1))}


@pytest.mark.parametrize(("episodes", "simulators", "per_process"), [(3, 8, 1), (7, 4, 2), (1, 4, 1), (5, 7, 2)])
def test_each_task_plays_its_number_of_episodes_whatever_the_simulators(episodes, simulators, per_process):
    config = FleetRunConfig.model_validate(
        {
            "steps": 1,
            "fleet": {"tasks": TASKS, "envs_per_worker": 8, "envs_per_process": per_process},
            "evaluation": {"episodes": episodes, "simulators": simulators},
        }
    )
    fleet = evaluation_fleet(config)
    rows = fleet.envs_per_process
    tasks = tuple(task for task in assignment.assign_tasks(fleet) for _ in range(rows))
    pool, steps = FakePool(len(tasks) // rows, rows, tasks=tasks), []
    pool.start(1)
    results = play_episodes(pool, FakeRunner(len(tasks)), fleet, episodes, threading.Event(), steps.append)
    assert {task: stats.groups for task, stats in results.items()} == dict.fromkeys("abc", episodes)
    assert {stats.response_tokens for stats in results.values()} == {10.0}
    for stats in results.values():
        assert 0 < stats.metrics["discounted_return_mean"] < stats.reward_mean
        assert stats.metrics["episodes_per_s"] > 0
    assert pool.steps_taken - len(tasks) <= sum(steps) <= pool.steps_taken


def test_it_ends_when_it_is_stopped():
    stopping = threading.Event()
    stopping.set()
    config = FleetRunConfig.model_validate({"steps": 1, "fleet": {"tasks": {"a": TASKS["a"]}, "envs_per_worker": 2}})
    pool = FakePool(2, tasks=("a", "a"))
    pool.start(1)
    with pytest.raises(Stopped, match="cut short"):
        play_episodes(pool, FakeRunner(2), evaluation_fleet(config), 4, stopping)
    assert not pool.steps_taken, "also where no simulator answers"

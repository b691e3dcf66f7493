"""Evaluation: whole episodes, a fixed number of each slot, whatever their lengths."""

import numpy as np
import pytest
from tests.fleet.fake_pool import FakePool, FakeRunner, Script

from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.fleet.evaluation import evaluate_policy
from penstock.types import ConfigError, NoProgressError

CONFIG = FleetConfig(tasks={"fake": SimulatorConfig(id="Fake-v0")}, envs_per_worker=4, max_wait_ms=1)


def evaluate(script, episodes, **more):
    pool = FakePool(4, script=script)
    pool.start(1)
    return pool, evaluate_policy(pool, FakeRunner(4), episodes, CONFIG, **more)


def length_of(slot, episode):
    return (2, 3, 5, 40)[slot] + episode


def test_long_episodes_count_as_often_as_short_ones():
    pool, played = evaluate(
        Script(ends=lambda slot, episode, step: "terminated" if step + 1 == length_of(slot, episode) else None), 10
    )
    assert played.slots.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert played.lengths.tolist() == [2, 3, 4, 3, 4, 5, 5, 6, 40, 41]
    expected = [pool.returns[slot][i] for slot, n in enumerate((3, 3, 2, 2)) for i in range(n)]
    assert played.returns.tolist() == expected and played.tasks == ("fake",) * 10
    assert len(pool.returns[0]) > 3, "short ones are played on and left out"
    assert not pool.closed and played.faulty_episodes == 0 and len(played.episodes) == 10


def test_fewer_episodes_than_slots_are_those_of_the_first_slots():
    _, played = evaluate(Script(), 2)
    assert played.slots.tolist() == [0, 1] and played.lengths.dtype == np.int64


def test_an_episode_that_a_fault_cut_is_played_again():
    faults = lambda slot, episode, step: (slot, episode, step) == (1, 0, 9)  # noqa: E731
    pool, played = evaluate(Script(faults=faults), 8)
    assert played.faulty_episodes == 1 and played.slots.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert played.returns[2:4].tolist() == pool.returns[1][:2] and played.episodes[2].number == 1


def test_handlers_see_every_batch():
    seen = []
    pool, _ = evaluate(Script(), 4, on_batch=[lambda batch: seen.append(len(batch.slots))])
    assert sum(seen) == pool.steps_taken


def test_episodes_that_do_not_end_are_named():
    script = Script(ends=lambda slot, episode, step: None if slot == 2 else "terminated")
    with pytest.raises(NoProgressError, match=r"3 of 4 episodes were over after 0.1 s; slots that owe some: \[2\]"):
        evaluate(script, 4, timeout_s=0.1)


def test_no_episodes_are_refused():
    with pytest.raises(ConfigError, match="episodes = 0"):
        evaluate(Script(), 0)

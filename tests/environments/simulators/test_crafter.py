"""Crafter: the same seed gives the same world and the same creatures; death terminates, the limit truncates."""

import numpy as np
import pytest

from penstock.environments.simulators import make_simulator
from penstock.types import ConfigError

pytest.importorskip("crafter")

SMALL = {"area": (24, 24)}


def rewards_and_frames(steps, *ballast):
    simulator = make_simulator("crafter", SMALL)
    simulator.action_space.seed(1)
    simulator.reset(seed=5)
    return [simulator.step(simulator.action_space.sample())[:2] for _ in range(steps)], ballast


@pytest.mark.slow
def test_a_trajectory_does_not_depend_on_where_creatures_lie_in_memory():
    one, _ = rewards_and_frames(400)
    other, _ = rewards_and_frames(400, [object() for _ in range(5000)])
    assert [reward for _, reward in one] == [reward for _, reward in other]
    assert all(np.array_equal(frame, twin) for (frame, _), (twin, _) in zip(one, other, strict=True))


def test_creatures_of_a_chunk_are_kept_in_the_order_of_their_making():
    simulator = make_simulator("crafter", SMALL)
    for seed in range(3):
        simulator.reset(seed=seed)
        world = simulator._world._world
        order = {id(creature): index for index, creature in enumerate(world.objects)}
        chunks = [[order[id(creature)] for creature in chunk] for chunk in world.chunks.values()]
        assert chunks == [sorted(chunk) for chunk in chunks]
        assert sum(map(len, chunks)) == len(world.objects) > 5


def test_starving_terminates():
    simulator = make_simulator("crafter", SMALL)
    simulator.reset(seed=0)
    steps, terminated = 0, False
    while not terminated:
        _, reward, terminated, truncated, said = simulator.step(0)
        steps += 1
        assert not truncated and (terminated or said == {})
    assert steps == 168
    assert reward == pytest.approx(-0.2)
    assert len(said["achievements"]) == 22 and said["unlocked"] == 0


def test_the_limit_truncates_and_tells_what_was_achieved():
    simulator = make_simulator("crafter", {**SMALL, "length": 100})
    simulator.action_space.seed(0)
    simulator.reset(seed=2)
    steps = [simulator.step(simulator.action_space.sample()) for _ in range(100)]
    assert [step[2:4] for step in steps] == [(False, False)] * 99 + [(False, True)]
    said = steps[-1][4]
    assert said["unlocked"] == sum(count > 0 for count in said["achievements"].values()) > 0
    total = sum(step[1] for step in steps)
    assert total == pytest.approx(said["unlocked"], abs=0.95)


def test_reward_may_be_left_out_and_pictures_be_larger():
    simulator = make_simulator("crafter", {**SMALL, "reward": False, "size": [80, 96]})
    simulator.reset(seed=0)
    steps = [simulator.step(5) for _ in range(60)]
    assert {step[1] for step in steps} == {0.0}
    assert steps[0][0].shape == (80, 96, 3) == simulator.observation_space.shape
    assert simulator.render().shape == (256, 256, 3)


def test_a_length_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="length is 0"):
        make_simulator("crafter", {"length": 0})

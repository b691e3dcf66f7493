"""One simulator's row of a block, stepped in this process: what is a fault, and what counts in an episode's return."""

import os

import gymnasium
import numpy as np
import pytest

from penstock.fleet.block import Block, block_bytes, create_memory
from penstock.fleet.messages import EnvWorkerSpec
from penstock.fleet.simulator_row import SimulatorRow
from penstock.fleet.spaces import spaces_of


class Told(gymnasium.Env):
    """Says (reward, info) as it was told; the episode ends with the last of them."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, told):
        self._told = told

    def reset(self, *, seed=None, options=None):
        self._left = list(self._told)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward, said = self._left.pop(0)
        return np.zeros(1, np.float32), reward, not self._left, False, said


def played(*told):
    """Rewards and faults of one episode, and its block."""
    row = SimulatorRow(EnvWorkerSpec("w", 1, 0, 0, (0,), "t", "toy"), 0, lambda id, kwargs: Told(told))
    spaces = spaces_of(row.env.observation_space, row.env.action_space)
    fd = create_memory(block_bytes(spaces, 1))
    block = Block(fd, spaces, 1)
    os.close(fd)
    row.bind(block)
    row.begin_episode()
    steps = []
    for number in range(len(told)):
        assert row.step() == (number == len(told) - 1)
        steps.append((float(block.rewards[0]), bool(block.faults[0])))
    return steps, block


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_reward_that_is_no_finite_float32_is_a_fault_and_not_in_the_return(reward):
    steps, block = played((1.0, {}), (reward, {}), (2.0, {}))
    assert steps == [(1.0, False), (0.0, True), (2.0, False)]
    assert block.returns.tolist() == [3.0] and block.lengths.tolist() == [3]
    assert block.terminated[0] and block.has_final[0]


def test_what_a_step_that_went_wrong_was_rewarded_is_kept_but_not_in_the_return():
    steps, block = played((1.0, {}), (500.0, {"error": "lost", "raw_reward": 1000.0}), (2.0, {"raw_reward": 20.0}))
    assert steps == [(1.0, False), (500.0, True), (2.0, False)] and block.returns.tolist() == [21.0]


@pytest.mark.parametrize("raw", [float("nan"), float("inf"), 1e308])
def test_a_raw_reward_without_bounds_is_left_out_and_no_fault(raw):
    steps, block = played((1.0, {"raw_reward": raw}), (1.0, {"raw_reward": raw}), (1.0, {"raw_reward": 5.0}))
    assert steps == [(1.0, False)] * 3 and block.returns.tolist() == [5.0]


def test_a_fault_that_ends_the_episode_reports_no_return():
    steps, block = played((1.0, {}), (float("nan"), {}))
    assert steps[-1] == (0.0, True) and block.truncated[0] and not block.terminated[0]
    assert not block.has_final[0] and block.returns.tolist() == [0.0]

"""One simulator's row of a block, stepped in this process: what is a fault, and what counts in an episode's return."""

import os

import gymnasium
import numpy as np
import pytest

from penstock.fleet.env_worker import SimulatorRow
from penstock.fleet.messages import EnvWorkerSpec
from penstock.fleet.shared_block import SharedBlock, block_bytes, create_memory
from penstock.fleet.spaces import SimulatorValueError, spaces_of


class Told(gymnasium.Env):
    """Says (reward, info) as it was told, and shows ``info["shown"]``; the episode ends with the last of them."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, told):
        self._told = told

    def reset(self, *, seed=None, options=None):
        self._left = list(self._told)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward, said = self._left.pop(0)
        return np.full(1, said.get("shown", 0), np.float32), reward, not self._left, False, said


def begun(*told, **limits):
    """A simulator at its first observation, and its block."""
    row = SimulatorRow(EnvWorkerSpec("w", 1, 0, 0, (0,), "t", "toy", **limits), 0, lambda id, kwargs: Told(told))
    spaces = spaces_of(row.env.observation_space, row.env.action_space)
    fd = create_memory(block_bytes(spaces, 1))
    block = SharedBlock(fd, spaces, 1)
    os.close(fd)
    row.bind(block)
    row.begin_episode()
    return row, block


def played(*told):
    """Rewards and faults of one episode, and its block."""
    row, block = begun(*told)
    steps = []
    for number in range(len(told)):
        assert row.step() == (number == len(told) - 1)
        steps.append((float(block.rewards[0]), bool(block.faults[0])))
    return steps, block


@pytest.mark.attack
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_reward_that_is_no_finite_float32_is_a_fault_and_not_in_the_return(reward):
    steps, block = played((1.0, {}), (reward, {}), (2.0, {}))
    assert steps == [(1.0, False), (0.0, True), (2.0, False)]
    assert block.returns.tolist() == [3.0] and block.lengths.tolist() == [3]
    assert block.terminated[0] and block.has_final[0]


def test_what_a_step_that_went_wrong_was_rewarded_is_kept_but_not_in_the_return():
    steps, block = played((1.0, {}), (500.0, {"error": "lost", "raw_reward": 1000.0}), (2.0, {"raw_reward": 20.0}))
    assert steps == [(1.0, False), (500.0, True), (2.0, False)] and block.returns.tolist() == [21.0]


def test_a_distance_that_is_called_error_is_no_fault():
    said = (0.37, np.float32(2.0), np.zeros(3) + 0.1, True, np.array([False, True]), 3)
    steps, _ = played(*((1.0, {"error": error}) for error in said))
    assert [fault for _, fault in steps] == [False, False, False, True, True, True]


def test_an_array_of_one_number_is_a_reward():
    steps, block = played((np.array([0.5]), {}), (np.array(2.0), {"raw_reward": np.ones((1, 1))}))
    assert steps == [(0.5, False), (2.0, False)] and block.returns.tolist() == [1.5]


@pytest.mark.parametrize("raw", [float("nan"), float("inf"), 1e308])
def test_a_raw_reward_without_bounds_is_left_out_and_no_fault(raw):
    steps, block = played((1.0, {"raw_reward": raw}), (1.0, {"raw_reward": raw}), (1.0, {"raw_reward": 5.0}))
    assert steps == [(1.0, False)] * 3 and block.returns.tolist() == [5.0]


@pytest.mark.parametrize(
    ("reward", "info", "message"),
    [
        (None, {}, r"^the reward is None, a NoneType: it must be one number$"),
        (np.array([0.5, 1]), {}, r"^the reward is array\(\[0\.5, 1\. \]\), a ndarray: it must be one number$"),
        (1.0, {"raw_reward": "high"}, r"^info\['raw_reward'\] is 'high', a str: it must be one number$"),
    ],
)
def test_a_reward_that_is_no_number_is_named(reward, info, message):
    row, _ = begun((reward, info), (1.0, {}))
    with pytest.raises(SimulatorValueError, match=message):
        row.step()


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("step", (0, 1.0, False, {}), r"^step returned a tuple of 4: Gymnasium's returns \(observation, reward, "),
        ("step", None, r"^step returned one NoneType: "),
        ("reset", np.zeros(2, np.float32), r"^reset returned one ndarray: Gymnasium's returns \(observation, info\)$"),
    ],
)
def test_what_is_no_return_of_gymnasiums_is_named(monkeypatch, method, returned, message):
    row, _ = begun((1.0, {}), (1.0, {}))
    monkeypatch.setattr(row.env, method, lambda *_, **__: returned)
    with pytest.raises(SimulatorValueError, match=message):
        row.step() if method == "step" else row.begin_episode()


def test_a_fault_that_ends_the_episode_reports_no_return():
    steps, block = played((1.0, {}), (float("nan"), {}))
    assert steps[-1] == (0.0, True) and block.truncated[0] and not block.terminated[0]
    assert not block.has_final[0] and block.returns.tolist() == [0.0]


@pytest.mark.attack
@pytest.mark.parametrize(("shown", "why"), [(float("nan"), "is nan at"), (9.1, "outside its space's bounds 0 and 9")])
def test_an_observation_that_cannot_be_used_is_a_fault_of_its_step_and_ends_the_episode(shown, why):
    row, block = begun((1.0, {}), (500.0, {"shown": shown}), (2.0, {}))
    assert not row.step() and not row.fault
    assert row.step() and why in row.fault
    assert block.faults[0] and block.truncated[0] and not block.terminated[0] and not block.has_final[0]
    assert block.returns.tolist() == [0.0], "the episode is no whole one"
    row.begin_episode()
    assert block.observations[""].tolist() == [[0.0]] and block.first[0]
    assert not row.step() and not row.fault and not block.faults[0]


@pytest.mark.attack
def test_a_last_observation_that_cannot_be_used_is_no_termination():
    row, block = begun((1.0, {"shown": float("inf")}))
    assert row.step() and block.faults[0] and block.truncated[0] and not block.terminated[0] and not block.has_final[0]


@pytest.mark.attack
def test_observations_that_cannot_be_used_step_after_step_are_a_failure_of_the_simulator():
    row, _ = begun((1.0, {"shown": float("nan")}), (1.0, {}), max_failures_in_row=3)
    for _ in range(2):
        assert row.step()
        row.begin_episode()
    with pytest.raises(SimulatorValueError, match=r"is nan.*in 3 steps in a row, fleet.limits.max_failures_in_row"):
        row.step()


def test_a_good_step_ends_a_row_of_observations_that_cannot_be_used():
    nan = {"shown": float("nan")}
    row, _ = begun((1.0, {}), (1.0, nan), (1.0, {}), max_failures_in_row=2)
    for _ in range(5):
        assert not row.step() and row.step()
        row.begin_episode()


@pytest.mark.attack
def test_a_first_observation_that_cannot_be_used_is_a_reset_that_failed(monkeypatch):
    row, _ = begun((1.0, {}))
    monkeypatch.setattr(Told, "reset", lambda self, *, seed=None, options=None: (np.full(1, np.nan, np.float32), {}))
    with pytest.raises(SimulatorValueError, match="is nan"):
        row.begin_episode()


def test_random_steps_before_an_episode_go_round_observations_that_cannot_be_used():
    row, block = begun(*[(1.0, {}), (1.0, {"shown": float("nan")})] * 20)
    row.decorrelate(40)
    assert "is nan" in row.fault and np.isfinite(block.observations[""]).all()

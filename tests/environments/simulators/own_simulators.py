"""A user's own simulators."""

import gymnasium
import numpy as np

SIZE = 1


class StillSimulator(gymnasium.Env):
    """Nothing ever happens."""

    metadata = {"render_modes": []}

    def __init__(self, size=SIZE):
        self.observation_space = gymnasium.spaces.Box(0, 1, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        return np.zeros(self.observation_space.shape, np.float32), 0.0, False, False, {}


def make_still(size=SIZE):
    return StillSimulator(size)


def make_sized(size):
    return StillSimulator(size)


def make_nothing():
    return None


def make_lost():
    return {}["gone"]


gymnasium.register("Still-v0", StillSimulator)

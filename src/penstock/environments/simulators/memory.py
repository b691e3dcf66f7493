"""A task that only a policy with memory solves: a cue at the first step must be named after a delay.

The observation at the question is the same whatever the cue was, and actions before it change nothing that is seen: a
policy without memory cannot do better than chance.
"""

from typing import Any

import gymnasium
import numpy as np

from penstock.types import ConfigError


class MemorySimulator(gymnasium.Env[np.ndarray, Any]):
    """Cue, delay, question.

    Observations are float32 [num_cues + 1]: at first the cue, one-hot; then zeros, `delay` times; then the question,
    a one in the last place. Only the action on the question counts: the episode terminates, with reward 1 where it is
    the cue's number, else 0. So an episode has `delay` + 2 steps; its optimal return is 1, its return by chance, which
    is also the best that a policy without memory can reach, 1 / `num_cues` (0.25).

    Args:
        num_cues: Cues, and actions.
        delay: Blank steps between cue and question.

    Raises:
        ConfigError: fewer than two cues, or a negative delay.
    """

    metadata = {"render_modes": []}

    def __init__(self, num_cues: int = 4, delay: int = 8) -> None:
        if num_cues < 2:
            raise ConfigError(f"memory: num_cues is {num_cues}: there is nothing to remember with fewer than 2")
        if delay < 0:
            raise ConfigError(f"memory: delay is {delay}: it must not be negative")
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(num_cues)
        self._num_cues, self._delay = num_cues, delay
        self._cue, self._steps = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Draws a cue and shows it."""
        super().reset(seed=seed)
        self._cue, self._steps = int(self.np_random.integers(self._num_cues)), 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Goes on; answers the question where it stands."""
        asked = self._steps == self._delay + 1
        self._steps += 1
        reward = float(asked and int(action) == self._cue)
        return self._shown(), reward, asked, False, {}

    def _shown(self) -> np.ndarray:
        observation = np.zeros(self._num_cues + 1, np.float32)
        if self._steps == 0:
            observation[self._cue] = 1
        elif self._steps == self._delay + 1:
            observation[-1] = 1
        return observation

"""A simulator whose observations say exactly where they stand, for tests of what belongs to what along a run's data."""

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ENDS = ("terminated", "truncated", "fault inside", "fault at the end", "both")
"""How an episode ends, by its number modulo 5."""

LENGTHS = (4, 3, 5, 2, 3)
"""Its steps, likewise."""


def reward_of(episode: int, step: int, move: int) -> float:
    """Exact in float32."""
    return episode + step / 16 + move / 64


class Clockwork(gymnasium.Env):
    """Observes its episode, its step and what was done last; the fleet's autoreset must mix none of them up.

    A life begins with one of the first five episodes, drawn, so that the simulators of one process do not end together,
    and with −1 for the last move.

    Args:
        exit_at: Every life ends abruptly in step 1 of this episode; −1: never.
    """

    observation_space = spaces.Dict(
        {
            "clock": spaces.Dict({"episode": spaces.Discrete(64), "step": spaces.Box(0, 9, (), np.float32)}),
            "last": spaces.Box(-1.0, 3.0, (2,), np.float32),
        }
    )
    action_space = spaces.Dict({"move": spaces.Discrete(3), "arm": spaces.Dict({"push": spaces.Box(-1.0, 1.0, (1,))})})

    def __init__(self, exit_at: int = -1) -> None:
        self._exit_at = exit_at
        self._begun, self._episode = False, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._last = 0, np.zeros(2, np.float32)
        self._episode += 1
        if not self._begun:
            self._begun, self._episode, self._last[0] = True, int(self.np_random.integers(5)), -1.0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._episode == self._exit_at and self._step == 1:
            os._exit(9)
        move, kind = int(action["move"]), self._episode % 5
        reward = reward_of(self._episode, self._step, move)
        self._last = np.array([move, action["arm"]["push"][0]], np.float32)
        self._step += 1
        ended = self._step == LENGTHS[kind]
        fault = (kind == 2 and self._step == 2) or (kind == 3 and ended)
        told = {"error": "so it was told"} if fault else {}
        return self._observation(), reward, ended and kind != 1, ended and kind in (1, 4), told

    def _observation(self) -> Any:
        clock = {"episode": self._episode, "step": np.array(self._step, np.float32)}
        return {"clock": clock, "last": self._last}

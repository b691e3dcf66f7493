"""Simulators whose pictures say which episode and which step they show."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 4
COLOURS = np.array([(220, 20, 20), (20, 220, 20), (20, 20, 220), (220, 220, 20), (200, 200, 200)], np.uint8)
"""Of steps 0 … LENGTH."""


class Painted(gymnasium.Env):
    """Draws itself in the colour of its step; episodes have `LENGTH` steps, of reward 0.5 each."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = spaces.Box(0, 255, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, breaks_at: int = -1) -> None:
        self.render_mode, self._breaks_at, self._steps = render_mode, breaks_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observation(), 0.5, self._steps == LENGTH, False, {"raw_reward": 2.0}

    def render(self) -> np.ndarray:
        if self._steps == self._breaks_at:
            raise RuntimeError("the brush is lost")
        return self._picture()

    def _observation(self) -> Any:
        return np.array([self._steps, 0], np.float32)

    def _picture(self) -> np.ndarray:
        return np.broadcast_to(COLOURS[self._steps], (33, 65, 3))


class Seen(Painted):
    """Cannot draw itself: the same picture is what it shows."""

    observation_space = spaces.Box(0, 255, (33, 65, 3), np.uint8)

    def __init__(self) -> None:
        super().__init__()

    def _observation(self) -> Any:
        return np.array(self._picture())

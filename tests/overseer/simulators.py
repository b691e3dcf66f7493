"""Simulators for tests of whole fleet runs: small, quick, and in trouble when told so."""

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Guess(gymnasium.Env):
    """The right action is the one that is shown; ten steps an episode, so that the best return is 10."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, die_at: int = 0, hang_at: int = 0, nan_every: int = 0) -> None:
        self._die_at, self._hang_at, self._nan_every, self._total = die_at, hang_at, nan_every, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._total += 1
        if self._total == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._total == self._hang_at:
            time.sleep(600)
        reward = float(int(action) == self._right)
        broken = self._nan_every and self._total % self._nan_every == 0
        shown = np.full(2, np.nan, np.float32) if broken else self._show()
        return shown, reward, self._steps == 10, False, {}

    def _show(self) -> np.ndarray:
        self._right = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self._right]


class Stumbling(Guess):
    """Says of every step that it went wrong."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"error": "no connection"}


class Unmakeable(gymnasium.Env):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("the engine is not here")


class Flaky(Guess):
    """Cannot be made the first `failures` times; each time leaves a file in `folder`."""

    def __init__(self, folder: str, failures: int = 1) -> None:
        super().__init__()
        tries = len(os.listdir(folder))
        if tries < failures:
            open(os.path.join(folder, str(tries)), "x").close()
            raise RuntimeError("its port is taken")


class Shown(gymnasium.Env):
    """Shows an image that grows brighter for five steps."""

    observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._image(), 1.0, self._steps == 5, False, {}

    def _image(self) -> np.ndarray:
        return np.full((32, 32, 3), 40 * self._steps, np.uint8)


class Troubled(Shown):
    """Shows the same, and dies or hangs at its eighth step; the first `times` times, each of which leaves a file."""

    def __init__(self, folder: str, how: str, times: int = 1) -> None:
        self._folder, self._how, self._times, self._total = folder, how, times, 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._total += 1
        before = len(os.listdir(self._folder))
        if self._total == 8 and before < self._times:
            open(os.path.join(self._folder, str(before)), "x").close()
            if self._how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().step(action)

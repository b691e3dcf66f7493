"""Simulators for tests of the process side: small, exact, and in trouble when a file in a folder says so."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Observation (draw of the episode, steps of the episode, sum of actions); ends as told.

    A file in `trouble` makes the next call of that name misbehave once: it is removed first.
    """

    observation_space = spaces.Box(-2e9, 2e9, (3,), np.float64)
    action_space = spaces.Discrete(5, start=2)

    def __init__(
        self,
        terminate_after: int = 5,
        truncate_after: int = 100,
        trouble: str = "",
        child: str = "",
        init_s: float = 0.0,
    ) -> None:
        self._terminate_after, self._truncate_after = terminate_after, truncate_after
        self._trouble = Path(trouble) if trouble else None
        time.sleep(init_s)
        self._misbehave("make")
        if child:
            session = child.endswith("session")
            sleeper = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session
            )
            Path(child).parent.mkdir(exist_ok=True)
            with open(child, "a") as file:
                print(os.getpid(), sleeper.pid, file=file, flush=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._misbehave("reset")
        self._draw, self._steps, self._sum = float(self.np_random.integers(1 << 30)), 0, 0.0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        said = self._misbehave("step")
        self._steps += 1
        self._sum += float(action)
        ended = self._steps >= self._terminate_after
        told = {"error": "the engine stumbled"} if said == "error" else {}
        reward = float("nan") if said == "nan" else float(action) / 4
        observation = {"blind": np.full(3, np.nan), "beyond": np.full(3, 3e9)}.get(said, self._observation())
        return observation, reward, ended, not ended and self._steps >= self._truncate_after, told

    def _observation(self) -> np.ndarray:
        return np.array([self._draw, self._steps, self._sum])

    def _misbehave(self, call: str) -> str:
        if self._trouble is None:
            return ""
        try:
            path = self._trouble / call
            what = path.read_text()
            path.unlink()
        except FileNotFoundError:
            return ""
        if what == "raise":
            raise RuntimeError(f"trouble in {call}")
        if what == "exit":
            print("leaving now", file=sys.stderr, flush=True)
            os._exit(7)
        if what == "hang":
            time.sleep(600)
        if what.startswith("sleep "):
            time.sleep(float(what.split()[1]))
        return what


class Stumbling(Counter):
    """Says of every step that it went wrong."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"error": True}


class Blind(Counter):
    """Shows nothing after its resets."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.full(3, np.nan), 0.0, False, False, {}


class Broken(Counter):
    """The first `lives` lives raise at a step, which leaves a file in `folder`: the very first after `good` steps."""

    def __init__(self, folder: str, lives: int, good: int) -> None:
        super().__init__()
        self._folder, self._lives, self._good = Path(folder), lives, good

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        lost = len(list(self._folder.iterdir()))
        if lost < self._lives and (lost > 0 or self._steps == self._good):
            (self._folder / str(lost)).touch()
            [].pop()
        return super().step(action)


class Uneven(Counter):
    """Of the simulators of one process the first one's episodes have 3 steps; the others' do not end."""

    made = 0

    def __init__(self) -> None:
        Uneven.made += 1
        super().__init__(terminate_after=3 if Uneven.made == 1 else 1_000_000, truncate_after=1_000_000)


class Nested(gymnasium.Env):
    """Everything that a space can be; what it did last comes back as what it observes."""

    def __init__(self) -> None:
        self.action_space = spaces.Dict(
            {
                "buttons": spaces.MultiDiscrete([3, 2], start=[1, 0]),
                "camera": spaces.Box(-1.0, 1.0, (2,), np.float32),
                "both": spaces.Tuple((spaces.MultiBinary(3), spaces.Text(6, min_length=0, charset="abc"))),
            }
        )
        self.observation_space = self.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._blank(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return action, 0.0, False, False, {}

    def _blank(self) -> dict[str, Any]:
        return {
            "buttons": np.array([1, 0]),
            "camera": np.zeros(2, np.float32),
            "both": (np.zeros(3, np.int8), ""),
        }


class Drawing(gymnasium.Env):
    """Observes draws of the global generators, whether JAX is loaded, and how many threads may do linear algebra."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        jax = any(name.partition(".")[0] in ("jax", "equinox", "ray") for name in sys.modules)
        threads = float(os.environ["OMP_NUM_THREADS"])
        return np.array([random.random(), np.random.random(), float(jax), threads]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(4), 0.0, False, False, {}


class Odd(gymnasium.Env):
    """A simulator whose observations have no fixed size."""

    observation_space = spaces.Sequence(spaces.Discrete(2))
    action_space = spaces.Discrete(2)

"""A simulator made to measure: chosen frames, step time, jitter and faults. For benchmarks and fault tests.

What it does follows from the seed and the actions alone: frames and rewards depend on every action since the reset, so
that an action that was lost, doubled or given to another simulator shows. Time and faults are drawn from a stream of
their own: with or without them the trajectory is the same. Not for learning: nothing about it can be solved.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np

from penstock.types import ConfigError

_CHILD = """
import os, time
while word := os.read(0, 1):
    os.write(1, word)
time.sleep(600)
"""
"""Answers every byte; outlives its parent, as engines do, though not for ever."""


class SyntheticError(RuntimeError):
    """What the simulator raises where it was told to."""


class SyntheticSimulator(gymnasium.Env[np.ndarray, Any]):
    """Steps that take as long, and fail as often, as they are told to.

    The state is one number of 16 bits: s' = 25173·s + 512·action + 13849. A frame is the episode's noise shifted by the
    upper byte b of s, the reward b / 255. An episode is truncated after `episode_steps`.

    Args:
        observation_shape: Of a frame.
        dtype: ``uint8`` (0 … 255), another integer (likewise), or a float (in [0, 1)).
        num_actions: Choices of the one discrete action.
        step_s: Mean duration of a step.
        work: ``sleep`` gives the processor away; ``cpu`` burns that much processor time of this process
            (`time.process_time`, so that it does not shrink where processors are shared).
        jitter: σ of a lognormal factor of mean 1 on each step's duration; 0: none.
        episode_steps: Steps of an episode.
        init_s: Duration of making it.
        reset_s: Duration of a reset.
        slow_reset_s: Duration of a slow one.
        slow_reset_rate: Probability of those.
        reset_error_rate: Probability that a reset raises `SyntheticError`.
        crash_rate: Probability, per step, that the process is killed (SIGKILL).
        hang_rate: Probability, per step, that the step takes an hour.
        error_rate: Probability, per step, that it raises `SyntheticError`.
        faulty_rate: Probability, per step, of ``info["error"]``.
        child_process: It has a child process that each step asks; the step raises `SyntheticError` as soon as that is
            dead. ``info["child_pid"]`` of a reset names it. It outlives a parent that is killed.

    Raises:
        ConfigError: an argument is out of its range.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        observation_shape: Sequence[int] = (128, 128, 3),
        dtype: str = "uint8",
        num_actions: int = 4,
        step_s: float = 0.0,
        work: Literal["sleep", "cpu"] = "sleep",
        jitter: float = 0.0,
        episode_steps: int = 1000,
        init_s: float = 0.0,
        reset_s: float = 0.0,
        slow_reset_s: float = 0.0,
        slow_reset_rate: float = 0.0,
        reset_error_rate: float = 0.0,
        crash_rate: float = 0.0,
        hang_rate: float = 0.0,
        error_rate: float = 0.0,
        faulty_rate: float = 0.0,
        child_process: bool = False,
        render_mode: str | None = None,
    ) -> None:
        _not_negative(step_s=step_s, jitter=jitter, init_s=init_s, reset_s=reset_s, slow_reset_s=slow_reset_s)
        rates = {"crash_rate": crash_rate, "hang_rate": hang_rate, "error_rate": error_rate, "faulty_rate": faulty_rate}
        _probabilities(rates, slow_reset_rate=slow_reset_rate, reset_error_rate=reset_error_rate)
        if work not in ("sleep", "cpu"):
            raise ConfigError(f"synthetic: work is {work!r}: it is sleep or cpu")
        if episode_steps < 1 or num_actions < 1:
            raise ConfigError("synthetic: episode_steps and num_actions are at least 1")
        self.render_mode = render_mode
        self.observation_space = _frame_space(tuple(observation_shape), dtype)
        self.action_space = gymnasium.spaces.Discrete(num_actions)
        self._step_s, self._work, self._jitter = step_s, work, jitter
        self._episode_steps = episode_steps
        self._reset_s, self._slow_reset_s, self._slow_reset_rate = reset_s, slow_reset_s, slow_reset_rate
        self._reset_error_rate = reset_error_rate
        self._limits = np.cumsum(list(rates.values())).tolist()
        self._faults = np.random.default_rng()
        self._steps, self._state = 0, 0
        self._noise = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        time.sleep(init_s)
        self._child = _start_child() if child_process else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._faults = np.random.default_rng([seed, 1])
        slow, fails = self._faults.random(2)
        self._spend(self._slow_reset_s if slow < self._slow_reset_rate else self._reset_s)
        if fails < self._reset_error_rate:
            raise SyntheticError("reset failed, as it was told to (reset_error_rate)")
        self._steps, self._state = 0, int(self.np_random.integers(1 << 16))
        self._noise = self._draw_noise()
        return self._frame(), {} if self._child is None else {"child_pid": self._child.pid}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Spends its time, perhaps fails, and goes on."""
        said = self._fail_perhaps()
        self._spend(self._duration())
        if self._child is not None:
            _ask(self._child)
        self._steps += 1
        self._state = (25173 * self._state + 512 * int(action) + 13849) & 0xFFFF
        reward = (self._state >> 8) / 255
        return self._frame(), reward, False, self._steps >= self._episode_steps, said

    def render(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The frame as uint8 [height, width, 3], where it has that shape; else one of its values as a grey square."""
        frame = self._frame()
        if np.issubdtype(frame.dtype, np.floating):
            frame = frame * 255
        frame = frame.astype(np.uint8)
        return frame if frame.ndim == 3 and frame.shape[2] == 3 else np.full((16, 16, 3), frame.flat[0], np.uint8)

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate(timeout=10)
            self._child = None

    def _draw_noise(self) -> np.ndarray:
        space = self.observation_space
        if np.issubdtype(space.dtype, np.floating):
            return self.np_random.random(space.shape).astype(space.dtype)
        return self.np_random.integers(0, 256, space.shape, np.uint8).astype(space.dtype, copy=False)

    def _frame(self) -> np.ndarray:
        if self._noise.dtype == np.uint8:
            return self._noise + np.uint8(self._state >> 8)  # wraps
        if np.issubdtype(self._noise.dtype, np.floating):
            return np.mod(self._noise + self._noise.dtype.type((self._state >> 8) / 256), 1)
        return np.mod(self._noise + self._noise.dtype.type(self._state >> 8), 256)

    def _duration(self) -> float:
        if not self._jitter:
            return self._step_s
        return self._step_s * math.exp(self._jitter * self._faults.standard_normal() - self._jitter**2 / 2)

    def _fail_perhaps(self) -> dict[str, Any]:
        crash, hang, error, faulty = self._limits
        if not faulty:
            return {}
        drawn = self._faults.random()
        if drawn < crash:
            os.kill(os.getpid(), signal.SIGKILL)
        elif drawn < hang:
            time.sleep(3600)
        elif drawn < error:
            raise SyntheticError("step failed, as it was told to (error_rate)")
        return {"error": "synthetic fault (faulty_rate)"} if drawn < faulty else {}

    def _spend(self, duration_s: float) -> None:
        if duration_s <= 0:
            return
        if self._work == "sleep":
            time.sleep(duration_s)
            return
        end_s = time.process_time() + duration_s
        while time.process_time() < end_s:
            pass


def _frame_space(shape: tuple[int, ...], dtype: str) -> gymnasium.spaces.Box:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise ConfigError(f"synthetic: dtype is {dtype!r}: write uint8, float32 or the like") from None
    if np.issubdtype(kind, np.floating):
        return gymnasium.spaces.Box(0.0, 1.0, shape, kind.type)
    if np.issubdtype(kind, np.integer) and np.iinfo(kind).max >= 255:
        return gymnasium.spaces.Box(0, 255, shape, kind.type)
    raise ConfigError(f"synthetic: dtype is {dtype!r}: it must be a float, or an integer that holds 0 to 255")


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ConfigError(f"synthetic: {name} is {value}: it must not be negative")


def _probabilities(per_step: dict[str, float], **others: float) -> None:
    for name, value in {**per_step, **others}.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"synthetic: {name} is {value}: it is a probability")
    if sum(per_step.values()) > 1 + 1e-9:
        raise ConfigError(f"synthetic: {' + '.join(per_step)} is {sum(per_step.values())}, more than 1")


def _start_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )


def _ask(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b".")
        answered = child.stdout.read(1)
    except BrokenPipeError:
        answered = b""
    if not answered:
        raise SyntheticError(f"the child process {child.pid} is dead")

"""Minecraft through MineStudio's `MinecraftSim` (https://github.com/CraftJarvis/MineStudio), version 1.1.

What is put right here:

- Its constructor asks at the terminal where its engine is missing. Here that is looked at before, and is an error.
- `reset` takes no seed. Here the first reset's seed chooses the world, unless the config names one.
- `step` empties the action that it is given. Here it gets a copy.
- It says both ``terminated`` and ``truncated`` where an episode is over. Here that is a termination; a step limit
  (`max_episode_steps` of `make_simulator`) truncates. Its `JudgeResetCallback` would call a time limit a termination,
  after which nothing is bootstrapped: it is refused.
- After a lost connection it shows a *random* observation, and ``info["error"]``, which then stays in every later info.
  Here that step is truncated and a fault, and only that one.
- The engine is a shell, a Java process and more, in a session of their own. Here `close` kills all of them.
- Its space of observations has height and width the wrong way round.

Not covered: a process that is itself killed leaves the engine behind, whose session differs from its own;
`penstock.environments.simulators.processes.descendants` finds it as long as its parent lives.
"""

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import minestudio.simulator.entry as minestudio_entry  # pyright: ignore[reportMissingImports]
import numpy as np
import psutil
from minestudio.utils import get_mine_studio_dir  # pyright: ignore[reportMissingImports]

from penstock.environments.simulators.processes import descendants, kill_trees
from penstock.types import ConfigError, EnvironmentFailure
from penstock.types.importing import load_attribute

_ENGINE = Path("engine") / "build" / "libs" / "mcprec-6.13.jar"
_TIME_LIMIT = "JudgeResetCallback"  # ends an episode at its `time_limit` with `terminated`, and without `truncated`


class MinecraftSimulator(gymnasium.Env[Any, Any]):
    """One world; observations are a dict of ``image`` uint8 [height, width, 3].

    Actions are a dict: with `action_type` ``agent`` ``buttons`` MultiDiscrete([8641]) and ``camera``
    MultiDiscrete([121]); with ``env`` twenty keys and a camera Box(−180, 180, (2,)).

    Args:
        action_type: ``agent`` or ``env``.
        obs_size: Width and height of the image.
        render_size: Width and height at which the game draws.
        seed: Of the world; None: from the first reset's seed.
        inventory: What the player begins with.
        preferred_spawn_biome: Where it begins.
        num_empty_frames: Frames that are skipped after a reset.
        callbacks: Dotted paths of MineStudio callbacks (rewards, tasks), or mappings of ``path`` and ``kwargs``.
        camera_config: Arguments of its `CameraConfig`.
        close_timeout_s: The engine may take so long to end by itself.

    Raises:
        ConfigError: the engine is missing, or a callback cannot be made or used.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        action_type: str = "agent",
        obs_size: Sequence[int] = (128, 128),
        render_size: Sequence[int] = (640, 360),
        seed: int | None = None,
        inventory: Mapping[str, Any] | None = None,
        preferred_spawn_biome: str | None = None,
        num_empty_frames: int = 20,
        callbacks: Sequence[str | Mapping[str, Any]] = (),
        camera_config: Mapping[str, Any] | None = None,
        close_timeout_s: float = 10.0,
        render_mode: str | None = None,
    ) -> None:
        _require_engine()
        self.render_mode = render_mode
        self._others = set(descendants(os.getpid()))
        self._seed, self._close_timeout_s = seed, close_timeout_s
        self._sim: Any = minestudio_entry.MinecraftSim(
            action_type=action_type,
            obs_size=tuple(obs_size),
            render_size=tuple(render_size),
            seed=seed or 0,
            inventory=dict(inventory or {}),
            preferred_spawn_biome=preferred_spawn_biome,
            num_empty_frames=num_empty_frames,
            callbacks=[_callback(one) for one in callbacks],
            camera_config=None if camera_config is None else minestudio_entry.CameraConfig(**camera_config),
        )
        width, height = obs_size
        image = gymnasium.spaces.Box(0, 255, (height, width, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"image": image})
        self.action_space = self._sim.action_space
        self._image = np.zeros(image.shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begins again in the same world; the first time, starts the engine.

        Raises:
            EnvironmentFailure: the engine was lost meanwhile.
        """
        super().reset(seed=seed)
        if self._seed is None and seed is not None:
            self._seed = int(seed) % (1 << 31)
            self._sim.env.seed(self._seed)
        self._forget_error()
        observation, said = self._sim.reset()
        if said.get("error"):
            raise EnvironmentFailure(f"Minecraft failed to reset: {said['error']}")
        return self._seen(observation), {"world_seed": self._seed or 0}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """One tick of the game, a twentieth of a second."""
        self._forget_error()
        observation, reward, terminated, truncated, said = self._sim.step(copy.deepcopy(dict(action)))
        if said.get("error"):
            return self._seen(observation), 0.0, False, True, {"error": str(said["error"])}
        terminated = bool(terminated)
        return self._seen(observation), float(reward), terminated, bool(truncated) and not terminated, {}

    def render(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The last image."""
        return self._image.copy()

    def close(self) -> None:
        """Lets the engine end, then kills what is left of it: shell, Java, and what they started."""
        below = self._started()
        ending = threading.Thread(target=self._sim.close, name="minecraft-close", daemon=True)
        ending.start()
        ending.join(self._close_timeout_s)
        kill_trees({*below, *self._started()})

    def _started(self) -> list[psutil.Process]:
        return [mark for mark in descendants(os.getpid()) if mark not in self._others]

    def _seen(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        self._image = np.array(observation["image"], np.uint8)
        return {"image": self._image.copy()}

    def _forget_error(self) -> None:
        """The simulator's info gathers whatever any step said, for ever."""
        gathered = getattr(self._sim, "info", None)
        if gathered:
            gathered.pop("error", None)


def _require_engine() -> None:
    engine = Path(get_mine_studio_dir()) / _ENGINE
    if not engine.is_file():
        raise ConfigError(
            f"minecraft: its engine {engine} is missing: set MINESTUDIO_DIR to the folder that has it, or fetch it "
            "with python -m minestudio.simulator.entry -y (it needs Java 8)"
        )


def _callback(one: str | Mapping[str, Any]) -> Any:
    path, arguments = (one, {}) if isinstance(one, str) else (one["path"], dict(one.get("kwargs", {})))
    make = load_attribute(path, "minecraft: callbacks")
    try:
        made = make(**arguments)
    except TypeError as error:
        raise ConfigError(f"minecraft: callback {path!r} refused {arguments}: {error}") from error
    if any(kind.__name__ == _TIME_LIMIT for kind in type(made).__mro__):
        raise ConfigError(
            f"minecraft: callback {path!r} ends an episode at its time limit as if the task were over, so that nothing "
            f"would be learned of what follows: leave it out, and set max_episode_steps: {made.time_limit}"
        )
    return made

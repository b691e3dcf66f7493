"""MiniGrid and BabyAI (https://minigrid.farama.org): small grid worlds, with a mission as text where it differs.

The package's own space of missions is none that Gymnasium's other tools know: here it is a `gymnasium.spaces.Text`.
"""

import os
import string
from typing import Any

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # the package imports pygame, which greets on stdout

import gymnasium
import minigrid  # registers its environments
from minigrid.core.mission import MissionSpace

from penstock.types import ConfigError, EnvironmentFailure
from penstock.types.importing import nearest

_CHARACTERS = string.ascii_letters + string.digits + " ,.'-"
_PREFIXES = ("MiniGrid-", "BabyAI-")


def names() -> list[str]:
    """Ids of its worlds."""
    return sorted(name for name in gymnasium.registry if name.startswith(_PREFIXES))


class MinigridSimulator(gymnasium.Env[Any, Any]):
    """One world; observations are a dict of ``image`` uint8 [7, 7, 3], ``direction`` Discrete(4), perhaps ``mission``.

    The image holds a kind, a colour and a state for each cell in sight: numbers, no brightness. Actions are
    Discrete(7). The reward comes at the end: 1 − 0.9 · steps / limit for success.

    Args:
        world: ``MiniGrid-DoorKey-5x5-v0``, or without the beginning: ``DoorKey-5x5-v0``.
        mission: Whether observations have the text; None: only where it differs between episodes.
        mission_length: Characters that it may have.
        kwargs: Of the world.

    Raises:
        ConfigError: no such world.
        EnvironmentFailure: at a reset, a mission longer than `mission_length`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, world: str, mission: bool | None = None, mission_length: int = 256, **kwargs: Any) -> None:
        self._world = gymnasium.make(_id(world), disable_env_checker=True, **kwargs)
        self.render_mode = self._world.render_mode
        self.action_space = self._world.action_space
        parts = self._world.observation_space
        assert isinstance(parts, gymnasium.spaces.Dict)
        told = parts["mission"]
        constant = type(told) is MissionSpace and told.ordered_placeholders is None
        self._told = not constant if mission is None else mission
        self._mission_length = mission_length
        leaves: dict[str, gymnasium.Space[Any]] = {"image": parts["image"], "direction": parts["direction"]}
        if self._told:
            leaves["mission"] = gymnasium.spaces.Text(mission_length, min_length=0, charset=_CHARACTERS)
        self.observation_space = gymnasium.spaces.Dict(leaves)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """A new grid."""
        super().reset(seed=seed)
        observation, said = self._world.reset(seed=seed, options=options)
        if self._told and len(observation["mission"]) > self._mission_length:
            raise EnvironmentFailure(
                f"the mission {observation['mission']!r} has {len(observation['mission'])} characters, more than "
                f"mission_length = {self._mission_length}: raise it"
            )
        return self._part(observation), said

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One action."""
        observation, reward, terminated, truncated, said = self._world.step(int(action))
        return self._part(observation), float(reward), bool(terminated), bool(truncated), said

    def render(self) -> Any:
        """The whole grid as uint8 [height, width, 3]."""
        return self._world.render()

    def close(self) -> None:
        """Frees what was drawn on."""
        self._world.close()

    def _part(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {name: observation[name] for name in self.observation_space}  # pyright: ignore[reportGeneralTypeIssues]


def _id(world: str) -> str:
    assert minigrid is not None
    for candidate in (world, *(f"{prefix}{world}" for prefix in _PREFIXES)):
        if candidate in gymnasium.registry:
            return candidate
    short = [name.partition("-")[2] for name in names()]
    raise ConfigError(f"minigrid: no world {world!r}{nearest(world, [*names(), *short])}")

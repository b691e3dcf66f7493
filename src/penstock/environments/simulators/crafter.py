"""Crafter (Hafner 2021, https://arxiv.org/abs/2109.06780) as a Gymnasium environment.

The package speaks the API of old Gym. What is put right here: it seeds itself in its constructor, from the global
generator; it reports one `done` for death and for its length limit; and it keeps the creatures of a chunk of its world
in sets, whose order is that of memory addresses, so that which of them vanishes differs from process to process. A
trajectory here follows from the seed and the actions.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import crafter
import gymnasium
import numpy as np

from penstock.types import ConfigError


class CrafterSimulator(gymnasium.Env[np.ndarray, Any]):
    """One player in a world of 64 × 64 fields; observations are uint8 [height, width, 3], actions Discrete(17).

    Reward 1 for the first time of each of 22 achievements in an episode, and 0.1 for each point of health won or
    lost. Death terminates an episode, `length` truncates it. The last step's info has ``achievements`` (how often, by
    name) and ``unlocked`` (how many different ones).

    Args:
        size: Height and width of the picture.
        length: Steps, at most.
        area: Fields of the world, across and down.
        view: Fields that are seen, across and down; the lowest of them show what the player has.
        reward: False: every reward is 0.
        render_mode: ``rgb_array`` or None.

    Raises:
        ConfigError: a length below 1.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        size: int | Sequence[int] = 64,
        length: int = 10_000,
        area: Sequence[int] = (64, 64),
        view: Sequence[int] = (9, 9),
        reward: bool = True,
        render_mode: str | None = None,
    ) -> None:
        if length < 1:
            raise ConfigError(f"crafter: length is {length}: an episode has at least 1 step")
        self.render_mode = render_mode
        height, width = (size, size) if isinstance(size, int) else size
        self._world = crafter.Env(tuple(area), tuple(view), (width, height), reward, length=0, seed=0)
        self._length, self._steps = length, 0
        self.observation_space = gymnasium.spaces.Box(0, 255, (height, width, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(self._world.action_names))

    @property
    def action_names(self) -> list[str]:
        """What the actions are."""
        return list(self._world.action_names)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A new world."""
        super().reset(seed=seed)
        self._steps = 0
        self._world._seed, self._world._episode = int(self.np_random.integers(1 << 31)), 0
        observation = self._world.reset()
        _order_chunks(self._world._world)
        return observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step of the player and of the creatures near it."""
        observation, reward, _, said = self._world.step(int(action))
        self._steps += 1
        dead = bool(said["discount"] == 0)
        truncated = not dead and self._steps >= self._length
        if not dead and not truncated:
            return observation, float(reward), False, False, {}
        achieved = said["achievements"]
        unlocked = sum(count > 0 for count in achieved.values())
        return observation, float(reward), dead, truncated, {"achievements": achieved, "unlocked": unlocked}

    def render(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The picture, larger."""
        return self._world.render((256, 256))


class _OrderedSet:
    """A set in order of insertion; what the world does with a chunk."""

    def __init__(self) -> None:
        self._members: dict[Any, None] = {}

    def add(self, member: Any) -> None:
        self._members[member] = None

    def remove(self, member: Any) -> None:
        del self._members[member]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def _order_chunks(world: Any) -> None:
    """Replaces the new world's sets of creatures by ordered ones."""
    chunks: defaultdict[Any, _OrderedSet] = defaultdict(_OrderedSet)
    for creature in world.objects:
        chunks[world.chunk_key(creature.pos)].add(creature)
    world._chunks = chunks

"""Atari 2600 games of the Arcade Learning Environment, prepared as in Mnih et al. 2015 (DQN).

No-op starts, FIRE where a game waits for it, four frames per step of which the brighter of the last two counts at each
pixel, 84 × 84 grey by area, four such pictures in a stack, rewards clipped to their sign. Gymnasium's own wrapper is
not used because it needs OpenCV and has no FIRE. Pillow averages whole pixels, each in the one area that its centre
lies in, where OpenCV divides those on a border.

The console is a function of its actions alone unless `repeat_action_probability` is above 0; only then does a seeded
reset load the game anew, which is what it takes to seed it (0.1 s instead of 5 ms).
"""

from typing import Any

import ale_py
import ale_py.roms
import gymnasium
import numpy as np
from PIL import Image

from penstock.types import ConfigError
from penstock.types.importing import nearest

_NOOP, _FIRE = 0, 1

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else each process prints a banner


def names() -> list[str]:
    """Games that come with the package."""
    return sorted(ale_py.roms.get_all_rom_ids())


class AtariSimulator(gymnasium.Env[np.ndarray, Any]):
    """One game; observations are uint8 [size, size, frame_stack], the newest frame last; actions Discrete.

    `info["raw_reward"]` is the step's points, unclipped. 30 minutes of play truncate an episode.

    Args:
        game: ``pong``, ``space_invaders`` or ``SpaceInvaders``.
        noop_max: An episode begins after 1 to so many frames without action; 0: at once.
        frame_skip: Frames per step.
        size: Edge of the picture.
        frame_stack: Pictures in an observation.
        life_loss: A lost life terminates the episode; the next reset goes on with the same game, whatever its seed,
            unless that is over or ``options={"new_game": True}`` is given. Returns are then those of a life.
        clip_rewards: −1, 0 or 1 instead of points.
        fire_reset: Press FIRE at the start of games that wait for it.
        repeat_action_probability: That a frame repeats the last action instead (Machado et al. 2018 propose 0.25).
        full_action_space: All 18 actions, also where a game has fewer.
        max_frames: Of an episode.
        render_mode: ``rgb_array`` or None.

    Raises:
        ConfigError: no such game, or a number below 1.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        game: str,
        noop_max: int = 30,
        frame_skip: int = 4,
        size: int = 84,
        frame_stack: int = 4,
        life_loss: bool = False,
        clip_rewards: bool = True,
        fire_reset: bool = True,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        max_frames: int = 108_000,
        render_mode: str | None = None,
    ) -> None:
        for name, value in (("frame_skip", frame_skip), ("size", size), ("frame_stack", frame_stack)):
            if value < 1:
                raise ConfigError(f"atari: {name} is {value}: it is at least 1")
        self._console = ale_py.AtariEnv(
            _rom(game),
            obs_type="ram",
            frameskip=1,
            repeat_action_probability=repeat_action_probability,
            full_action_space=full_action_space,
            max_num_frames_per_episode=max_frames,
            render_mode=render_mode,
        )
        meanings = self._console.get_action_meanings()
        self._fires = fire_reset and meanings[_FIRE : _FIRE + 1] == ["FIRE"]
        self._noop_max, self._frame_skip, self._size = noop_max, frame_skip, size
        self._has_chance = repeat_action_probability > 0
        self._life_loss, self._clips = life_loss, clip_rewards
        height, width = self._console.ale.getScreenDims()
        self._screens = [np.zeros((height, width), np.uint8) for _ in range(2)]
        self._pictures = np.zeros((frame_stack, size, size), np.uint8)
        self._lives, self._goes_on = 0, False
        self.render_mode = render_mode
        self.action_space = self._console.action_space
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, frame_stack), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A new game; after a lost life, the same one (see `life_loss`)."""
        super().reset(seed=seed)
        goes_on = self._goes_on and not (options or {}).get("new_game", False)
        if goes_on:
            frame = self._console.step(_NOOP)
            over = frame[2] or frame[3]
        if not goes_on or over:
            self._begin(seed)
        if self._fires:
            self._press(_FIRE)
        self._goes_on, self._lives = False, self._console.ale.lives()
        self._look(0)
        self._pictures[:] = self._picture(self._screens[0])
        return self._observation(), {"lives": self._lives}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """`frame_skip` frames with one action."""
        points, over, truncated, seen = 0.0, False, False, 0
        for frame in range(self._frame_skip):
            _, reward, over, truncated, _ = self._console.step(action)
            points += float(reward)
            if frame >= self._frame_skip - 2 or over or truncated:
                self._look(seen % 2)
                seen += 1
            if over or truncated:
                break
        self._add(np.maximum(*self._screens) if seen > 1 else self._screens[0])
        before, self._lives = self._lives, self._console.ale.lives()
        self._goes_on = self._life_loss and not over and not truncated and self._lives < before
        reward = float(np.sign(points)) if self._clips else points
        said = {"raw_reward": points, "lives": self._lives}
        return self._observation(), reward, over or self._goes_on, truncated, said

    def render(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The screen as uint8 [210, 160, 3] (some games: [250, 160, 3])."""
        return self._console.ale.getScreenRGB()

    def _begin(self, seed: int | None) -> None:
        self._console.reset(seed=seed if self._has_chance else None)
        frames = int(self.np_random.integers(1, self._noop_max + 1)) if self._noop_max > 0 else 0
        for _ in range(frames):
            self._press(_NOOP)

    def _press(self, action: int) -> None:
        """One frame; a game that it ends begins anew."""
        _, _, over, truncated, _ = self._console.step(action)
        if over or truncated:
            self._console.reset()

    def _look(self, which: int) -> None:
        self._console.ale.getScreenGrayscale(self._screens[which])

    def _picture(self, screen: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(screen).resize((self._size, self._size), Image.Resampling.BOX))

    def _add(self, screen: np.ndarray) -> None:
        self._pictures[:-1] = self._pictures[1:]
        self._pictures[-1] = self._picture(screen)

    def _observation(self) -> np.ndarray:
        return np.ascontiguousarray(self._pictures.transpose(1, 2, 0))


def _rom(game: str) -> str:
    """Name of the file: ``SpaceInvaders`` is ``space_invaders``."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in game).lstrip("_")
    if snake not in names():
        raise ConfigError(f"atari: no game {game!r}{nearest(snake, names())}")
    return snake

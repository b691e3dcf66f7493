"""ViZDoom (https://vizdoom.farama.org): a real engine in a process of its own, through its Gymnasium wrapper.

What is put right here:

- The wrapper calls a time limit a termination, too. Here it truncates, unless the player died.
- It shows a black screen at an episode's end, because the engine has none then. Here the last one that there was is
  shown again, so that a truncated episode can be bootstrapped.
- The engine writes ``_vizdoom`` and ``_vizdoom.ini`` where it is started. Here it is started in a folder that vanishes.
- Killed with its parent, it leaves 10 MB of shared memory behind. Here the names in ``/dev/shm`` are removed as soon
  as both sides have it mapped.

The engine stays in its parent's process group: kill that. Killed alone, the next step raises at once; stopped, the
step waits (a fleet's step deadline ends it).
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # the wrapper imports pygame, which greets on stdout

import gymnasium
import numpy as np
import vizdoom
from vizdoom.gymnasium_wrapper.base_gymnasium_env import VizdoomEnv

from penstock.environments.simulators.processes import command_line, descendants
from penstock.types import ConfigError
from penstock.types.importing import nearest

_RESOLUTIONS = ("160X120", "200X150", "256X192", "320X240", "400X300", "512X384", "640X480", "800X600")
_SHARED_MEMORY = Path("/dev/shm")
_NAME = "+viz_instance_id"  # the word before it on the engine's command line


def names() -> list[str]:
    """Scenarios that come with the package."""
    return sorted(path.stem for path in Path(vizdoom.scenarios_path).glob("*.cfg"))


class VizdoomSimulator(gymnasium.Env[Any, Any]):
    """One player in a scenario; observations are a dict of ``screen`` uint8 [height, width, 3] and ``gamevariables``.

    Actions are Discrete (nothing, or one button of the scenario) with `max_buttons_pressed` 1, MultiBinary with 0.

    Args:
        scenario: Its name (``basic``), or the path of a ``.cfg`` file.
        frame_skip: Tics (1/35 s of the game) per step.
        max_buttons_pressed: So many at once; 0: any.
        resolution: Width and height of the screen, one of the engine's.
        grey: One channel instead of three.
        shrink: Pictures are means over squares of so many pixels a side, which costs a policy as many times less.
        settings: More of the engine's, by their names in ``.cfg`` files (``doom_skill: 3``).
        render_mode: ``rgb_array`` or None.

    Raises:
        ConfigError: no such scenario or resolution, or `shrink` does not divide it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}

    def __init__(
        self,
        scenario: str = "basic",
        frame_skip: int = 4,
        max_buttons_pressed: int = 1,
        resolution: str = "160x120",
        grey: bool = False,
        shrink: int = 1,
        settings: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if resolution.upper() not in _RESOLUTIONS:
            raise ConfigError(f"vizdoom: resolution is {resolution!r}: it is one of {', '.join(_RESOLUTIONS).lower()}")
        wide, high = map(int, resolution.lower().split("x"))
        if shrink < 1 or wide % shrink or high % shrink:
            raise ConfigError(f"vizdoom: shrink is {shrink}: it must divide {wide} and {high}")
        chosen = {"screen_resolution": f"RES_{resolution.upper()}", "screen_format": "GRAY8" if grey else "RGB24"}
        self._engine = VizdoomEnv(
            str(_scenario_file(scenario)),
            frame_skip,
            max_buttons_pressed,
            render_mode,
            **{**chosen, **(settings or {})},
        )
        self._engine.game.set_doom_config_path(os.devnull)
        self.render_mode = render_mode
        self._shrink = shrink
        self.observation_space = _shrunk_space(self._engine.observation_space, shrink)
        self.action_space = self._engine.action_space
        self._shown: Any = None
        self._name = ""

    @property
    def engine_pid(self) -> int | None:
        """The engine's process; None before the first reset."""
        return next((pid for pid, name in _engines().items() if name == self._name), None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """A new episode; starts the engine where it does not run."""
        super().reset(seed=seed)
        if self._engine.game.is_running():
            return self._first(*self._engine.reset(seed=seed, options=options))
        others = set(_engines().values())
        with _vanishing_folder():
            first, said = self._engine.reset(seed=seed, options=options)
        for name in set(_engines().values()) - others:
            self._name = name
            _forget_shared_memory(name)
        return self._first(first, said)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """`frame_skip` tics."""
        observation, reward, ended, timed_out, said = self._engine.step(action)
        if not ended:
            self._shown = _shrunk(observation, self._shrink)
            return self._shown, float(reward), False, False, said
        truncated = bool(timed_out) and not self._engine.game.is_player_dead()
        last = {name: array.copy() if hasattr(array, "copy") else array for name, array in self._shown.items()}
        return last, float(reward), not truncated, truncated, said

    def _first(self, observation: Any, said: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._shown = _shrunk(observation, self._shrink)
        return self._shown, said

    def render(self) -> Any:
        """All screens that the engine draws, side by side."""
        return self._engine.render()

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()


def _shrunk_space(space: Any, shrink: int) -> Any:
    """Of what `_shrunk` gives."""
    if shrink == 1:
        return space
    pictures = {name: part for name, part in space.items() if _is_picture(part)}
    smaller = {
        name: gymnasium.spaces.Box(0, 255, (part.shape[0] // shrink, part.shape[1] // shrink, part.shape[2]), np.uint8)
        for name, part in pictures.items()
    }
    return gymnasium.spaces.Dict({**space.spaces, **smaller})


def _shrunk(observation: Any, shrink: int) -> Any:
    """Pictures uint8 [height, width, channels] are averaged over squares; all else stays."""
    if shrink == 1:
        return observation
    return {name: _averaged(part, shrink) if _is_picture(part) else part for name, part in observation.items()}


def _is_picture(part: Any) -> bool:
    return part.dtype == np.uint8 and len(part.shape) == 3


def _averaged(picture: np.ndarray, shrink: int) -> np.ndarray:
    high, wide, channels = picture.shape
    squares = picture.reshape(high // shrink, shrink, wide // shrink, shrink, channels)
    return squares.mean((1, 3), dtype=np.float32).astype(np.uint8)


def _scenario_file(scenario: str) -> Path:
    own = Path(scenario).expanduser()
    if own.suffix == ".cfg" and own.is_file():
        return own.absolute()
    if scenario not in names():
        raise ConfigError(
            f"vizdoom: no scenario {scenario!r}{nearest(scenario, names())}: there are {', '.join(names())}, or the "
            "path of a .cfg file"
        )
    return Path(vizdoom.scenarios_path) / f"{scenario}.cfg"


def _engines() -> dict[int, str]:
    """Engines of this process: their numbers, and the names that they share memory under."""
    commands = {mark.pid: command_line(mark.pid) for mark in descendants(os.getpid())}
    return {pid: words[words.index(_NAME) + 1] for pid, words in commands.items() if _NAME in words}


def _forget_shared_memory(name: str) -> None:
    for path in _SHARED_MEMORY.glob(f"ViZDoom*{name}"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _vanishing_folder() -> Iterator[None]:
    """The working directory of a process that is started meanwhile; gone afterwards, which it survives."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="penstock-vizdoom-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)

"""Films one episode of each task, with the policy's value and the reward written over it.

The simulator is stepped in this process and draws itself after every step (``render_mode: rgb_array``); one that draws
nothing but shows an image is filmed by its observation. Frames are encoded in a thread, so that an episode is not kept
in memory. Needs the extra ``gym`` (PyAV, imageio, Pillow). Not covered: films of training episodes.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from penstock.environments.simulators import make_simulator
from penstock.fleet import JaxPolicyRunner, evaluate_policy
from penstock.fleet.arrivals import StepBatch
from penstock.fleet.config import FleetConfig
from penstock.fleet.serial import SerialPool
from penstock.fleet.video import require_film_packages
from penstock.model.control import ControlPolicy
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_simulators import EVALUATOR_ID
from penstock.types import ConfigError, RunFailed, fold

LEAST_SIDE = 256
"""Smaller frames are enlarged, so that what is written over them can be read."""
CLOSE_S = 120.0
_QUEUED = 64


def film_episodes(policy: ControlPolicy, config: FleetRunConfig, folder: Path) -> tuple[Path, ...]:
    """Films one episode per task into ``<folder>/<task>.mp4``.

    Raises:
        ConfigError: a package is missing, a simulator draws nothing, or a film exists already.
    """
    require_film_packages("--video", ("av", "imageio", "PIL"))
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(name, "dummy")  # what draws with pygame must find no screen
    folder.mkdir(parents=True, exist_ok=True)
    paths = {task: folder / f"{task}.mp4" for task in config.fleet.tasks}
    for path in paths.values():
        if path.exists():
            raise ConfigError(f"--video: {path} exists already and is not overwritten: choose another folder")
    for task, path in paths.items():
        _film(policy, config, task, path)
    return tuple(paths.values())


def _film(policy: ControlPolicy, config: FleetRunConfig, task: str, path: Path) -> None:
    changes = {
        "tasks": {task: config.fleet.tasks[task]}, "workers": 1, "envs_per_worker": 1, "envs_per_process": 1,
        "batch_size": 1, "decorrelate_steps": 0,
    }  # fmt: skip
    fleet = config.fleet.model_copy(update=changes)
    camera = _Camera(task, path, fleet)
    pool = SerialPool(fleet, "film", fold(config.seed, "simulators", EVALUATOR_ID), make=camera.make)
    runner = JaxPolicyRunner(
        policy, 1, 1, fold(config.seed, "actions", "film"), deterministic=config.evaluation.deterministic
    )
    try:
        pool.start(fleet.limits.spawn_timeout_s)
        evaluate_policy(pool, runner, 1, fleet, on_batch=[camera.note])
    finally:
        camera.close()
        pool.close()


class _Camera:
    """Takes a frame at the first reset and after each step of the first episode.

    Frame k shows observation k; the policy's value of it comes with the k-th decision, so a frame waits for that. What
    the episode ended with has no value, and its report comes with the next episode's first decision.
    """

    def __init__(self, task: str, path: Path, fleet: FleetConfig) -> None:
        self._task = task
        self._film = _Film(path, fleet.video.fps)
        self._left = fleet.video.most_frames
        self._waiting: deque[np.ndarray] = deque()
        self._return = 0.0
        self._over = False

    def make(self, id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
        """The simulator, filmed."""
        try:
            simulator = make_simulator(id, {**kwargs, "render_mode": "rgb_array"})
        except ConfigError:
            simulator = make_simulator(id, kwargs)  # it takes no render_mode: its observation may be an image
        return _Filmed(simulator, self._frame)

    def _frame(self, simulator: gymnasium.Env[Any, Any], observation: Any, ended: bool) -> None:
        if self._over:  # the simulator is reset in the same step; what follows is no part of the film
            return
        drawn = simulator.render() if simulator.render_mode == "rgb_array" else _image_of(observation)
        if drawn is None:
            raise ConfigError(f"--video: the simulator of task {self._task!r} draws nothing, and shows no image")
        self._over = ended
        self._waiting.append(np.asarray(drawn))

    def note(self, batch: StepBatch) -> None:
        """A decision about the oldest frame that waits; the simulator may have made its next step meanwhile."""
        if not self._waiting:
            return
        frame, reward = self._waiting.popleft(), float(batch.rewards[0])
        self._return += reward
        is_last = self._over and not self._waiting
        value = "the end" if is_last else f"value {float(batch.decision.values[0]):.2f}"
        if self._left > 0:
            self._left -= 1
            self._film.add(frame, f"{value}  reward {reward:g}  return {self._return:g}")

    def close(self) -> None:
        """Waits for the encoder."""
        self._film.close()


class _Filmed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Tells of every observation."""

    def __init__(self, simulator: gymnasium.Env[Any, Any], told: Any) -> None:
        super().__init__(simulator)
        self._told = told

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, said = self.env.reset(seed=seed, options=options)
        self._told(self.env, observation, False)
        return observation, said

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, said = self.env.step(action)
        self._told(self.env, observation, terminated or truncated)
        return observation, reward, terminated, truncated, said


class _Film:
    """Encodes frames in a thread of its own."""

    def __init__(self, path: Path, fps: int) -> None:
        self._path, self._fps = path, fps
        self._frames: queue.Queue[tuple[np.ndarray, str] | None] = queue.Queue(_QUEUED)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._encode, name="film", daemon=True)
        self._thread.start()

    def add(self, frame: np.ndarray, words: str) -> None:
        self._frames.put((frame, words), timeout=CLOSE_S)

    def close(self) -> None:
        """Raises what the encoder raised."""
        if self._thread.is_alive():
            self._frames.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._failure is not None:
            raise RunFailed(f"{self._path} could not be encoded: {self._failure}") from self._failure

    def _encode(self) -> None:
        import imageio.v3 as imageio

        try:
            with imageio.imopen(self._path, "w", plugin="pyav") as film:
                film.init_video_stream("libx264", fps=self._fps)  # pyright: ignore[reportAttributeAccessIssue]
                while (item := self._frames.get()) is not None:
                    film.write_frame(caption(*item))  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:  # whatever a codec raises is told where the film is closed
            self._failure = error
            while self._frames.get() is not None:
                pass


def caption(frame: np.ndarray, words: str) -> np.ndarray:
    """A frame with words over a dark strip at its lower end, at least `LEAST_SIDE` wide, sides even.

    Args:
        frame: uint8 [height, width], or with 1, 3 or more channels, of which three are taken.
        words: One line.

    Returns:
        uint8 [height, width, 3].
    """
    from PIL import Image, ImageDraw

    grey = frame.ndim == 2 or frame.shape[2] in (1, 2, 4)
    pixels = np.repeat(np.atleast_3d(frame)[..., -1:], 3, axis=2) if grey else frame[..., :3]
    factor = max(1, -(-LEAST_SIDE // pixels.shape[1]))
    pixels = pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    pixels = pixels[: pixels.shape[0] // 2 * 2, : pixels.shape[1] // 2 * 2]
    picture = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, picture.height - 14, picture.width, picture.height), fill=(0, 0, 0))
    draw.text((4, picture.height - 13), words, fill=(255, 255, 255))
    return np.asarray(picture)


def _image_of(observation: Any) -> np.ndarray | None:
    """The observation, or the first part of it, that is an image; None where there is none."""
    parts = list(observation.values()) if isinstance(observation, Mapping) else [observation]
    return next((part for part in map(np.asarray, parts) if _is_image(part)), None)


def _is_image(part: np.ndarray) -> bool:
    return part.dtype == np.uint8 and part.ndim in (2, 3) and min(part.shape[:2]) >= 16

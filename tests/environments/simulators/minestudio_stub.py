"""What MineStudio 1.1.6 shows of itself, without an engine: its signatures, its spaces, and what is odd about it.

The engine is a shell with a child, in a session of its own; it is started by the first reset, as MineStudio does.
"""

import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

JAR = "engine/build/libs/mcprec-6.13.jar"
KEYS = ["attack", "back", "forward", "jump", "left", "right", "sneak", "sprint", "use"]


@dataclass
class CameraConfig:
    camera_binsize: int = 2
    camera_maxval: int = 10
    camera_mu: float = 10.0
    camera_quantization_scheme: str = "mu_law"


class _Engine:
    """What `MinecraftSim.env` is."""

    def __init__(self):
        self.seeds = []
        self.started = None

    def seed(self, seed):
        self.seeds.append(seed)

    def start(self):
        if self.started is None:
            self.started = subprocess.Popen(["sh", "-c", "sleep 62 & sleep 62"], start_new_session=True)


class MinecraftSim(gymnasium.Env):
    """Steps: done at the tenth; a lost connection where the camera is 7; a hang at closing where that was asked for."""

    made = []
    asked = []

    def __init__(
        self,
        action_type="agent",
        obs_size=(224, 224),
        render_size=(640, 360),
        seed=0,
        inventory={},  # noqa: B006
        preferred_spawn_biome=None,
        num_empty_frames=20,
        callbacks=[],  # noqa: B006
        camera_config=None,
        **kwargs,
    ):
        if not (Path(get_mine_studio_dir()) / JAR).exists():
            self.asked.append("Detecting missing simulator engine, do you want to download it?")
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.action_type, self.obs_size, self.seed, self.callbacks = action_type, obs_size, seed, callbacks
        self.env = _Engine()
        self.env.seed(seed)
        self.fails_to_reset = False
        self.info = {}
        self.closed = False
        self.steps = 0
        self.made.append(self)

    def reset(self):
        self.env.start()
        self.steps = 0
        if self.fails_to_reset:
            self.info["error"] = "Connection timed out!"
        return self._image(), dict(self.info)

    def step(self, action):
        camera = int(np.asarray(action["camera"]).flat[0])
        if self.action_type == "agent":
            action.pop("buttons")
            action.pop("camera")
            action["translated"] = True
        self.steps += 1
        self.info["health"] = 20
        if camera == 7:
            self.info["error"] = "Connection timed out!"
            return self._image(random=True), 0, True, True, dict(self.info)
        done = self.steps == 10
        return self._image(), 0.5, done, done, dict(self.info)

    def noop_action(self):
        return {"buttons": np.array([0]), "camera": np.array([60])}

    def close(self):
        self.closed = True

    def render(self):
        raise AttributeError("no image before a callback kept one")

    @property
    def action_space(self):
        discrete = gymnasium.spaces.Discrete(2)
        if self.action_type == "agent":
            return gymnasium.spaces.Dict(
                {
                    "buttons": gymnasium.spaces.MultiDiscrete([8641]),
                    "camera": gymnasium.spaces.MultiDiscrete([121]),
                }
            )
        return gymnasium.spaces.Dict(
            {
                **{name: discrete for name in KEYS},
                **{f"hotbar.{number}": discrete for number in range(1, 10)},
                "inventory": discrete,
                "camera": gymnasium.spaces.Box(low=-180, high=180, shape=(2,), dtype=np.float32),
            }
        )

    @property
    def observation_space(self):
        height, width = self.obs_size
        return gymnasium.spaces.Dict(
            {"image": gymnasium.spaces.Box(low=0, high=255, shape=(height, width, 3), dtype=np.uint8)}
        )

    def _image(self, random=False):
        width, height = self.obs_size  # as OpenCV wants them
        value = 99 if random else self.steps
        return {"image": np.full((height, width, 3), value, np.uint8)}


class RewardCallback:
    """Stands for one of MineStudio's."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale


class JudgeResetCallback:
    """As MineStudio's: it calls a time limit a termination."""

    def __init__(self, time_limit: int = 600):
        self.time_limit = time_limit


_folder: Path | None = None


def get_mine_studio_dir():
    return str(_folder)


def modules(folder: Path) -> dict[str, Any]:
    """Modules to put into `sys.modules`; MineStudio's own folder is `folder`."""
    global _folder
    _folder = folder
    MinecraftSim.made.clear()
    MinecraftSim.asked.clear()
    made = {name: types.ModuleType(name) for name in ("minestudio", "minestudio.simulator", "minestudio.utils")}
    entry = types.ModuleType("minestudio.simulator.entry")
    vars(entry).update(MinecraftSim=MinecraftSim, CameraConfig=CameraConfig)
    vars(made["minestudio.simulator"]).update(MinecraftSim=MinecraftSim, entry=entry)
    vars(made["minestudio.utils"]).update(get_mine_studio_dir=get_mine_studio_dir)
    vars(made["minestudio"]).update(simulator=made["minestudio.simulator"], utils=made["minestudio.utils"])
    return {**made, entry.__name__: entry, "minestudio.callbacks_stub": sys.modules[__name__]}


def make(folder: str, **kwargs: Any) -> gymnasium.Env:
    """Minecraft by a dotted path, for simulator processes: the adapter over this stub, whose folder is `folder`."""
    from penstock.environments.simulators import make_simulator

    sys.modules.update(modules(Path(folder)))
    return make_simulator("minecraft", {"obs_size": [32, 16], **kwargs})

"""Films: one frame per observation of one episode, with words on it; what shows nothing is refused."""

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from penstock.overseer.fleet_policies import make_policy
from penstock.overseer.fleet_simulators import probe_spaces
from penstock.overseer.fleet_video import caption, film_episodes
from penstock.types import ConfigError
from tests.overseer.test_fleet_config import build

SHOWN = "tests.overseer.simulators:Shown"


def filmed(tmp_path: Path, id: str) -> tuple[Path, ...]:
    config = build({"fleet": {"tasks": {"pole": {"id": id}}}, "model": {"hidden_sizes": [4]}})
    return film_episodes(make_policy(config, probe_spaces(config)), config, tmp_path / "films")


def test_an_episode_becomes_a_film_with_a_frame_for_each_observation(tmp_path):
    (path,) = filmed(tmp_path, SHOWN)
    frames = imageio.imread(path, plugin="pyav")
    assert path.name == "pole.mp4" and frames.shape == (6, 256, 256, 3)  # five steps, and what they began with
    brightness = frames[:, :200].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(brightness, [0, 40, 80, 120, 160, 200], atol=12)
    with pytest.raises(ConfigError, match="pole.mp4 exists already and is not overwritten"):
        filmed(tmp_path, SHOWN)


def test_a_simulator_that_draws_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the simulator of task 'pole' draws nothing, and shows no image"):
        filmed(tmp_path, "tests.overseer.simulators:Guess")


@pytest.mark.parametrize("shape", [(32, 32), (32, 32, 1), (33, 32, 3), (300, 401, 3), (32, 32, 4)])
def test_frames_of_any_kind_are_captioned_in_colour_with_even_sides(shape):
    captioned = caption(np.full(shape, 200, np.uint8), "value 1.00")
    height, width, channels = captioned.shape
    assert channels == 3 and width >= 256 and height % 2 == width % 2 == 0
    assert (captioned[:-14] == 200).all() and captioned[-14:].min() == 0 and captioned[-14:].max() > 200

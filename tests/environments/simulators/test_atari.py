"""Atari: what the preparation does, against a console without it."""

import numpy as np
import pytest

from penstock.environments.simulators import make_simulator
from penstock.types import ConfigError

ale_py = pytest.importorskip("ale_py")

PLAIN = {"noop_max": 0, "fire_reset": False}


def area_means(screen, size=84):
    """The screen in `size` × `size` areas, each the mean of the pixels whose centres lie in it."""

    def parts(length):
        edges, centres = np.arange(size + 1) * length / size, np.arange(length) + 0.5
        inside = (centres > edges[:-1, None]) & (centres <= edges[1:, None])
        return inside / inside.sum(1, keepdims=True)

    return parts(screen.shape[0]) @ screen @ parts(screen.shape[1]).T


def test_a_picture_is_the_brighter_of_the_last_two_of_four_frames():
    simulator = make_simulator("atari:pong", PLAIN)
    console = ale_py.AtariEnv("pong", obs_type="grayscale", frameskip=1, repeat_action_probability=0.0)
    first, _ = simulator.reset(seed=11)
    screen, _ = console.reset(seed=11)
    assert np.abs(first - area_means(screen)[..., None]).max() <= 1.01
    for action in (2, 2, 3, 0, 3):
        screens = [console.step(action)[0] for _ in range(4)]
        observation, *_ = simulator.step(action)
        assert observation.shape == (84, 84, 4)
        assert np.abs(observation[..., 3] - area_means(np.maximum(screens[2], screens[3]))).max() <= 1.01


def test_the_newest_picture_is_the_last_of_the_stack():
    simulator = make_simulator("atari:pong", PLAIN)
    observations = [simulator.reset(seed=0)[0], *(simulator.step(3)[0] for _ in range(30))]
    assert all(np.array_equal(observations[0][..., 0], observations[0][..., k]) for k in range(4))
    for before, after in zip(observations, observations[1:], strict=False):
        assert np.array_equal(before[..., 1:], after[..., :-1])
    assert not np.array_equal(observations[-1][..., 3], observations[-1][..., 2])


def test_rewards_are_clipped_and_points_are_told():
    found = []
    for clip_rewards in (True, False):
        simulator = make_simulator("atari:ms_pacman", {**PLAIN, "clip_rewards": clip_rewards})
        simulator.reset(seed=0)
        steps = [simulator.step(3) for _ in range(70)]
        found.append([(reward, said["raw_reward"]) for _, reward, _, _, said in steps if said["raw_reward"]][0])
    assert found == [(1.0, 10.0), (10.0, 10.0)]


def test_a_start_waits_for_some_frames_and_presses_fire():
    simulator = make_simulator("atari:breakout", {"noop_max": 30})
    starts = set()
    for seed in range(12):
        simulator.reset(seed=seed)
        starts.add(simulator._console.ale.getEpisodeFrameNumber())
    assert len(starts) > 5 and min(starts) >= 2 and max(starts) <= 31
    first, _ = simulator.reset(seed=0)
    moved = [simulator.step(0)[0] for _ in range(10)][-1]
    assert not np.array_equal(first[..., 3], moved[..., 3]), "the ball flies without FIRE"


def play_until_a_life_is_lost(simulator):
    for _ in range(200):
        _, _, terminated, truncated, said = simulator.step(0)
        assert not truncated
        if terminated or said["lives"] < 5:
            return terminated, said["lives"]
    raise AssertionError("no life was lost in 200 steps")


def test_a_lost_life_ends_an_episode_where_that_is_asked_for():
    simulator = make_simulator("atari:breakout", {"noop_max": 0, "life_loss": True})
    assert simulator.reset(seed=0)[1] == {"lives": 5}
    assert play_until_a_life_is_lost(simulator) == (True, 4)
    assert simulator.reset(seed=1)[1] == {"lives": 4}, "the game goes on"
    simulator.step(0)
    assert simulator.reset(seed=1)[1] == {"lives": 5}, "no life was lost: a new game"
    play_until_a_life_is_lost(simulator)
    assert simulator.reset(seed=1, options={"new_game": True})[1] == {"lives": 5}
    whole = make_simulator("atari:breakout", {"noop_max": 0})
    whole.reset(seed=0)
    assert play_until_a_life_is_lost(whole) == (False, 4)


def test_chance_in_the_console_is_seeded():
    simulator = make_simulator("atari:pong", {**PLAIN, "repeat_action_probability": 0.5})
    played = []
    for seed in (1, 1, 2):
        simulator.reset(seed=seed)
        played.append(np.array([simulator.step(2 + step % 2)[0][..., 3] for step in range(40)]))
    assert np.array_equal(played[0], played[1])
    assert not np.array_equal(played[0], played[2])


def test_too_long_a_game_is_truncated():
    simulator = make_simulator("atari:pong", {**PLAIN, "max_frames": 40})
    simulator.reset(seed=0)
    steps = [simulator.step(0)[2:4] for _ in range(10)]
    assert steps == [(False, False)] * 9 + [(False, True)]


def test_screens_can_be_filmed_and_sizes_be_chosen():
    simulator = make_simulator("atari:pong", {"size": 42, "frame_stack": 2, "render_mode": "rgb_array"})
    assert simulator.reset(seed=0)[0].shape == (42, 42, 2)
    assert simulator.render().shape == (210, 160, 3)
    with pytest.raises(ConfigError, match="frame_skip is 0"):
        make_simulator("atari:pong", {"frame_skip": 0})

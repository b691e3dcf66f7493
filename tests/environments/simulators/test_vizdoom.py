"""ViZDoom: how episodes end, what is left behind, and what becomes of a killed engine."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.environments.simulators import make_simulator
from penstock.types import ConfigError

pytest.importorskip("vizdoom")

NOTHING, ATTACK = 0, 1


@pytest.fixture
def basic(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulator = make_simulator("vizdoom:basic")
    yield simulator
    simulator.close()


def play(simulator, seed, action):
    first, _ = simulator.reset(seed=seed)
    assert first in simulator.observation_space
    for steps in range(1, 200):
        observation, reward, terminated, truncated, _ = simulator.step(action)
        if terminated or truncated:
            return steps, observation, reward, terminated, truncated
    raise AssertionError("the episode did not end in 200 steps")


def test_a_time_limit_truncates_and_the_last_screen_is_shown(basic):
    steps, observation, _, terminated, truncated = play(basic, 3, NOTHING)
    assert (steps, terminated, truncated) == (75, False, True)  # 300 tics, four at a time
    assert observation["screen"].mean() > 20, "not the black screen of the wrapper"
    assert observation["screen"].shape == (120, 160, 3)


def test_pictures_are_averaged_over_squares_where_that_is_asked(basic):
    small = make_simulator("vizdoom:basic", {"shrink": 4, "grey": True})
    assert small.observation_space["screen"].shape == (30, 40, 1)
    _, last, _, _, truncated = play(small, 3, NOTHING)
    large = make_simulator("vizdoom:basic", {"grey": True})
    shown = play(large, 3, NOTHING)[1]["screen"].astype(np.float64)
    assert truncated and last["screen"][2, 3, 0] == int(shown[8:12, 12:16, 0].mean())
    assert last["screen"].std() > 5 and last["gamevariables"] == basic.reset(seed=3)[0]["gamevariables"]
    for simulator in (small, large):
        simulator.close()
    with pytest.raises(ConfigError, match="shrink is 7: it must divide 160 and 120"):
        make_simulator("vizdoom:basic", {"shrink": 7})


def test_a_shot_monster_terminates(basic):
    ends = [play(basic, seed, ATTACK)[1:] for seed in (0, 1)]
    _, reward, terminated, truncated = ends[1]
    assert (terminated, truncated) == (True, False) and reward > 90


def test_nothing_is_left_in_the_folder_in_shared_memory_or_on_the_terminal(basic, tmp_path, capfd):
    basic.reset(seed=0)
    shared = set(re.findall(r"/dev/shm/ViZDoom\w+", Path(f"/proc/{basic.engine_pid}/maps").read_text()))
    assert len(shared) == 3 and not [path for path in shared if os.path.exists(path)]
    basic.step(0)
    basic.close()
    time.sleep(0.1)  # the engine writes what it has to say at its end
    assert os.getcwd() == str(tmp_path) and list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_killed_engine_raises_at_once_and_a_reset_starts_another(basic):
    assert basic.engine_pid is None
    first, _ = basic.reset(seed=8)
    engine_pid = basic.engine_pid
    assert os.getpgid(engine_pid) == os.getpgid(0), "killing the group kills it"
    os.kill(engine_pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(Exception, match="instance crash"):
        for _ in range(3):
            basic.step(0)
    assert time.monotonic() - began_s < 10
    again, _ = basic.reset(seed=8)
    assert np.array_equal(first["screen"], again["screen"])
    assert basic.engine_pid not in (None, engine_pid)


def test_screens_may_be_grey_and_buttons_be_free():
    simulator = make_simulator(
        "vizdoom:defend_the_center",
        {"resolution": "200x150", "grey": True, "max_buttons_pressed": 0, "settings": {"doom_skill": 1}},
    )
    assert simulator.observation_space["screen"].shape == (150, 200, 1)
    assert simulator.action_space.shape == (3,)


def test_a_scenario_may_be_a_file_and_must_exist(tmp_path):
    import vizdoom

    scenarios = Path(vizdoom.scenarios_path)
    own = tmp_path / "own.cfg"
    own.write_text((scenarios / "basic.cfg").read_text().replace("basic.wad", str(scenarios / "basic.wad")))
    assert make_simulator(f"vizdoom:{own}").action_space.n == 4
    with pytest.raises(ConfigError, match="no scenario 'basics' .did you mean 'basic'"):
        make_simulator("vizdoom:basics")
    with pytest.raises(ConfigError, match="resolution is '100x100'"):
        make_simulator("vizdoom:basic", {"resolution": "100x100"})

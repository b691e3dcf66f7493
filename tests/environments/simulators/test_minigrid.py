"""MiniGrid: missions are text where they say something, and left out where they do not."""

import gymnasium
import pytest

from penstock.environments.simulators import make_simulator
from penstock.types import EnvironmentFailure

pytest.importorskip("minigrid")

LEFT, FORWARD = 0, 2


def test_a_mission_that_is_always_the_same_is_left_out_unless_it_is_asked_for():
    assert set(make_simulator("minigrid:DoorKey-5x5-v0").observation_space.spaces) == {"image", "direction"}
    told = make_simulator("minigrid:MiniGrid-DoorKey-5x5-v0", {"mission": True})
    assert told.reset(seed=0)[0]["mission"] == "use the key to open the door and then get to the goal"


@pytest.mark.parametrize("world", ["Fetch-5x5-N2-v0", "BabyAI-GoToLocal-v0", "BabyAI-BossLevel-v0"])
def test_a_mission_that_differs_is_text(world):
    simulator = make_simulator(f"minigrid:{world}")
    assert isinstance(simulator.observation_space["mission"], gymnasium.spaces.Text)
    missions = set()
    for seed in range(8):
        observation, _ = simulator.reset(seed=seed)
        assert observation in simulator.observation_space
        missions.add(observation["mission"])
    assert len(missions) > 2
    silent = make_simulator(f"minigrid:{world}", {"mission": False})
    assert set(silent.reset(seed=0)[0]) == {"image", "direction"}


def test_a_mission_that_is_too_long_is_an_error():
    simulator = make_simulator("minigrid:BabyAI-GoToLocal-v0", {"mission_length": 5})
    with pytest.raises(EnvironmentFailure, match="more than mission_length = 5: raise it"):
        simulator.reset(seed=0)


def test_success_terminates_and_the_limit_truncates():
    simulator = make_simulator("minigrid:Empty-5x5-v0", {"max_steps": 10})
    simulator.reset(seed=0)
    steps = [simulator.step(action) for action in (FORWARD, FORWARD, 1, FORWARD, FORWARD)]
    assert [step[2:4] for step in steps] == [(False, False)] * 4 + [(True, False)]
    assert steps[-1][1] == pytest.approx(1 - 0.9 * 5 / 10)
    simulator.reset(seed=0)
    assert [simulator.step(LEFT)[2:4] for _ in range(10)][-1] == (False, True)


def test_the_grid_can_be_filmed():
    simulator = make_simulator("minigrid:Empty-5x5-v0", {"render_mode": "rgb_array"})
    simulator.reset(seed=0)
    frame = simulator.render()
    assert frame.ndim == 3 and frame.shape[2] == 3
    simulator.close()

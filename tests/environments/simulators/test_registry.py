"""Every built-in passes Gymnasium's checker and is reproducible; ids and arguments that are wrong say what is right."""

import hashlib
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.passive_env_checker import env_render_passive_checker

from penstock.environments.simulators import make_simulator, simulator_ids
from penstock.types import ConfigError

SMALL = {
    "Acrobot-v1": {}, "CartPole-v1": {}, "MountainCar-v0": {}, "MountainCarContinuous-v0": {}, "Pendulum-v1": {},
    "atari:pong": {}, "atari:Breakout": {"life_loss": True}, "crafter": {"area": [20, 20]}, "memory": {},
    "minigrid:DoorKey-5x5-v0": {}, "minigrid:BabyAI-GoToLocal-v0": {}, "synthetic": {}, "vizdoom:basic": {},
}  # fmt: skip
PACKAGES = {"atari": "ale_py", "crafter": "crafter", "minigrid": "minigrid", "vizdoom": "vizdoom"}


@pytest.fixture(params=SMALL)
def small(request):
    package = PACKAGES.get(request.param.partition(":")[0])
    if package is not None:
        pytest.importorskip(package)
    simulator = make_simulator(request.param, SMALL[request.param])
    yield simulator
    simulator.close()


def content(observation):
    parts = observation.values() if isinstance(observation, dict) else [observation]
    return b"".join(part.encode() if isinstance(part, str) else np.asarray(part).tobytes() for part in parts)


def trajectory(simulator, seed, steps):
    digest = hashlib.sha256()
    simulator.action_space.seed(7)
    digest.update(content(simulator.reset(seed=seed)[0]))
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = simulator.step(simulator.action_space.sample())
        digest.update(content(observation) + np.float64(reward).tobytes() + bytes([terminated, truncated]))
        if terminated or truncated:
            digest.update(content(simulator.reset()[0]))
    return digest.hexdigest()


@pytest.mark.filterwarnings("ignore:.*(is -?infinity|symmetric and normalized)")  # Gymnasium's own classics
@pytest.mark.filterwarnings("ignore:.*alternative render modes")  # ours have no other
@pytest.mark.parametrize("id", SMALL)
def test_gymnasiums_checker_passes_on(id):
    pytest.importorskip(PACKAGES.get(id.partition(":")[0], "gymnasium"))
    drawn = id != "memory"
    simulator = make_simulator(id, SMALL[id] | ({"render_mode": "rgb_array"} if drawn else {})).unwrapped
    check_env(simulator, skip_render_check=simulator.spec is not None)  # Gymnasium's own: other modes open windows
    if drawn:
        simulator.reset(seed=0)
        env_render_passive_checker(simulator)
    simulator.close()


def test_the_seed_decides_the_trajectory_of(small):
    first = trajectory(small, 3, 60)
    assert trajectory(small, 3, 60) == first
    assert trajectory(small, 4, 60) != first


def test_every_id_has_a_line_and_every_family_a_checked_member():
    ids = simulator_ids()
    assert all(10 <= len(line) <= 60 for line in ids.values())
    assert {name.partition(":")[0] for name in ids} - {"minecraft"} == {name.partition(":")[0] for name in SMALL}
    assert ids["atari:<game>"].startswith("Atari")


def test_random_actions_keep_the_pole_up_for_about_22_steps():
    simulator, lengths = make_simulator("CartPole-v1"), []
    simulator.action_space.seed(0)
    for seed in range(200):
        simulator.reset(seed=seed)
        for length in range(1, 501):
            _, _, terminated, _, _ = simulator.step(simulator.action_space.sample())
            if terminated:
                lengths.append(length)
                break
    assert len(lengths) == 200
    assert 20 < np.mean(lengths) < 25 and min(lengths) >= 8 and max(lengths) < 130


@pytest.mark.parametrize("id", ["memory", "CartPole-v1", "tests.environments.simulators.own_simulators:make_still"])
def test_a_step_limit_truncates_any_simulator(id):
    simulator = make_simulator(id, {"max_episode_steps": 3})
    simulator.reset(seed=0)
    assert [simulator.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_an_own_simulator_comes_by_its_path(tmp_path):
    simulator = make_simulator("tests.environments.simulators.own_simulators:make_still", {"size": 5})
    assert simulator.reset()[0].shape == (5,)
    file = tmp_path / "worlds.py"
    file.write_text("import gymnasium\n\ndef make(steps):\n    return gymnasium.make('CartPole-v1')\n")
    assert make_simulator(f"{file}:make", {"steps": 1}).spec.id == "CartPole-v1"


def test_a_module_may_register_an_id_with_gymnasium():
    simulator = make_simulator("tests.environments.simulators.own_simulators:Still-v0", {"size": 2})
    assert simulator.reset()[0].shape == (2,)
    assert isinstance(simulator, gymnasium.Env)


@pytest.mark.parametrize(
    ("id", "kwargs", "message"),
    [
        ("CartPole-v2", {}, r"unknown \(did you mean 'CartPole-v[01]'\?\)"),
        ("sinthetic", {}, r"did you mean 'synthetic'\?.*atari:<game>"),
        ("memory:4", {}, "write memory"),
        ("atari", {}, "write atari:<game>"),
        ("memory", {"dellay": 3}, r"kwargs\.dellay.*did you mean 'delay'.*num_cues, delay, max_episode_steps"),
        ("memory", {"max_episode_steps": 0}, "max_episode_steps of simulator 'memory' is 0"),
        ("memory", {"num_cues": 1}, "nothing to remember"),
        ("synthetic", {"step_s": -1}, "step_s is -1"),
        ("synthetic", {"crash_rate": 0.6, "hang_rate": 0.6}, "more than 1"),
        ("synthetic", {"dtype": "float"}, None),
        ("synthetic", {"dtype": "string"}, "dtype is 'string'"),
        ("synthetic", {"dtype": "int8"}, "holds 0 to 255"),
        ("CartPole-v1", {"gravity": 3}, r"kwargs\.gravity.*has no such argument.*sutton_barto_reward"),
        ("tests.environments.simulators.own_simulators:make_stil", {}, "did you mean 'make_still'"),
        ("tests.environments.simulators.own_simulators:make_nothing", {}, "gave a NoneType"),
        (
            "tests.environments.simulators.own_simulators:make_lost",
            {},
            r"could not be made: KeyError: 'gone' \(own_simulators\.py:\d+\)$",
        ),
        ("tests.environments.simulators.own_simulators:SIZE", {}, "is a int"),
        ("tests.environments.simulators.own_simulators:make_sized", {}, r"kwargs\.size is missing"),
        ("no_such_package.worlds:make", {}, "no module named 'no_such_package'"),
        ("no_such_package.worlds:Name-v0", {}, "no module named 'no_such_package'"),
    ],
)
def test_what_is_wrong_is_said(id, kwargs, message):
    if message is None:
        assert make_simulator(id, kwargs).observation_space.dtype == np.float64
        return
    with pytest.raises(ConfigError, match=message):
        make_simulator(id, kwargs)


def test_names_after_a_colon_are_corrected_too():
    for id, package, meant in (
        ("atari:pongg", "ale_py", "pong"),
        ("vizdoom:basik", "vizdoom", "basic"),
        ("minigrid:DoorKey-5x5", "minigrid", "DoorKey-5x5-v0"),
    ):
        pytest.importorskip(package)
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            make_simulator(id)


def test_an_argument_that_the_id_says_is_refused():
    pytest.importorskip("ale_py")
    with pytest.raises(ConfigError, match="its id says that already"):
        make_simulator("atari:pong", {"game": "breakout"})


@pytest.mark.parametrize(
    ("id", "module", "remedy"),
    [
        ("atari:pong", "ale_py", r"needs ale-py: pip install 'penstock\[gym\]'"),
        ("crafter", "crafter", r"needs crafter: pip install 'penstock\[gym\]'"),
        ("minecraft", "minestudio", "needs minestudio: pip install minestudio"),
    ],
)
def test_a_missing_package_names_its_remedy(monkeypatch, id, module, remedy):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=remedy):
        make_simulator(id)


def test_simulators_load_no_jax():
    program = (
        "import sys; from penstock.environments.simulators import make_simulator; make_simulator('memory');"
        "print([name for name in ('jax', 'pydantic', 'torch', 'ale_py', 'pygame') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")

"""The adapter of MineStudio's `MinecraftSim`, against a stub; and the stub, against the package where there is one."""

import ast
import importlib.util
import inspect
import os
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from tests.environments.simulators import minestudio_stub as stub

from penstock.environments.simulators import make_simulator
from penstock.environments.simulators.processes import descendants
from penstock.types import ConfigError, EnvironmentFailure

ADAPTER = "penstock.environments.simulators.minecraft"
ACTION = {"buttons": np.array([3]), "camera": np.array([60])}
LOST = {"buttons": np.array([3]), "camera": np.array([7])}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """MineStudio's folder, with its engine."""
    for name, module in stub.modules(tmp_path).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    (tmp_path / stub.JAR).parent.mkdir(parents=True)
    (tmp_path / stub.JAR).touch()
    yield tmp_path
    sys.modules.pop(ADAPTER, None)
    for sim in stub.MinecraftSim.made:
        if sim.env.started is not None:
            sim.env.started.kill()
            sim.env.started.wait(10)


@pytest.fixture
def simulator(engine):
    made = make_simulator("minecraft", {"obs_size": [32, 16]})
    yield made
    made.close()


def sim_of(simulator):
    assert simulator is not None
    return stub.MinecraftSim.made[-1]


def test_gymnasiums_checker_passes(engine):
    simulator = make_simulator("minecraft", {"obs_size": [32, 16], "seed": 3})
    check_env(simulator, skip_render_check=True, skip_close_check=True)
    simulator.close()


def test_a_missing_engine_is_an_error_before_anything_is_asked(engine):
    (engine / stub.JAR).unlink()
    with pytest.raises(ConfigError, match=r"mcprec-6\.13\.jar is missing: set MINESTUDIO_DIR"):
        make_simulator("minecraft")
    assert stub.MinecraftSim.made == [] and stub.MinecraftSim.asked == []


def test_images_have_the_height_and_the_width_that_the_game_gives(simulator):
    observation, _ = simulator.reset(seed=1)
    assert observation["image"].shape == (16, 32, 3)
    assert observation in simulator.observation_space
    assert simulator.render().shape == (16, 32, 3)


def test_the_first_seed_chooses_the_world_and_later_ones_do_not(simulator):
    assert simulator.reset(seed=(1 << 31) + 5)[1] == {"world_seed": 5}
    assert simulator.reset(seed=8)[1] == {"world_seed": 5}
    assert sim_of(simulator).env.seeds == [0, 5]


def test_a_configured_world_stays(engine):
    simulator = make_simulator("minecraft", {"seed": 77})
    assert simulator.reset(seed=5)[1] == {"world_seed": 77}
    assert sim_of(simulator).env.seeds == [77]
    simulator.close()


def test_the_callers_action_is_left_alone(simulator):
    simulator.reset(seed=0)
    action = dict(ACTION)
    simulator.step(action)
    assert set(action) == {"buttons", "camera"}


def test_an_end_is_a_termination_and_only_that(simulator):
    simulator.reset(seed=0)
    steps = [simulator.step(ACTION) for _ in range(10)]
    assert [step[2:4] for step in steps] == [(False, False)] * 9 + [(True, False)]
    assert {step[1] for step in steps} == {0.5} and steps[-1][4] == {}


def test_a_step_limit_truncates(engine):
    simulator = make_simulator("minecraft", {"max_episode_steps": 3})
    simulator.reset(seed=0)
    assert [simulator.step(ACTION)[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]
    simulator.close()


@pytest.mark.parametrize("kwargs", [{}, {"time_limit": 50}])
def test_the_callback_that_calls_a_time_limit_a_termination_is_refused(engine, kwargs):
    path = "minestudio.callbacks_stub.JudgeResetCallback"
    remedy = f"leave it out, and set max_episode_steps: {kwargs.get('time_limit', 600)}"
    with pytest.raises(ConfigError, match=f"callback '{path}' ends an episode at its time limit .*{remedy}"):
        make_simulator("minecraft", {"callbacks": [{"path": path, "kwargs": kwargs}]})
    assert stub.MinecraftSim.made == []


def test_a_lost_connection_is_a_fault_of_that_step_only(simulator):
    simulator.reset(seed=0)
    simulator.step(ACTION)
    _, reward, terminated, truncated, said = simulator.step(LOST)
    assert (reward, terminated, truncated, said) == (0.0, False, True, {"error": "Connection timed out!"})
    assert simulator.reset(seed=1)[1] == {"world_seed": 0}
    assert simulator.step(ACTION)[2:] == (False, False, {})


def test_a_reset_that_lost_the_engine_raises(simulator):
    sim_of(simulator).fails_to_reset = True
    with pytest.raises(EnvironmentFailure, match="failed to reset: Connection timed out"):
        simulator.reset(seed=0)


def test_keys_are_actions_too(engine):
    simulator = make_simulator("minecraft", {"action_type": "env"})
    simulator.reset(seed=0)
    assert len(simulator.action_space.spaces) == 20
    simulator.step(simulator.action_space.sample())
    simulator.close()


def wait_until_gone(pids, limit_s=5.0):
    end_s = time.monotonic() + limit_s
    while alive := {mark.pid for mark in descendants(os.getpid())} & pids:
        running = {pid for pid in alive if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()}
        if not running:
            return
        assert time.monotonic() < end_s, f"{running} still run"
        time.sleep(0.01)


@pytest.mark.parametrize("hangs", [False, True])
def test_close_kills_the_whole_engine_even_if_its_own_end_hangs(engine, monkeypatch, hangs):
    simulator = make_simulator("minecraft", {"close_timeout_s": 0.2})
    simulator.reset(seed=0)
    sim = sim_of(simulator)
    shell_pid = sim.env.started.pid
    end_s = time.monotonic() + 5
    while len(below := descendants(shell_pid)) < 2:
        assert time.monotonic() < end_s, "the engine has not started"
    if hangs:
        monkeypatch.setattr(sim, "close", lambda: time.sleep(60))
    began_s = time.monotonic()
    simulator.close()
    assert time.monotonic() - began_s < 5
    assert sim.env.started.wait(5) == -9
    wait_until_gone({mark.pid for mark in below})
    for mark in below:
        assert not Path(f"/proc/{mark.pid}").exists() or descendants(mark.pid) == []


def test_arguments_reach_the_simulator(engine):
    simulator = make_simulator(
        "minecraft",
        {
            "inventory": {"1": {"type": "log"}},
            "camera_config": {"camera_mu": 5.0},
            "callbacks": [
                "minestudio.callbacks_stub.RewardCallback",
                {"path": "minestudio.callbacks_stub.RewardCallback", "kwargs": {"scale": 2.0}},
            ],
        },
    )
    arguments = sim_of(simulator).arguments
    assert arguments["inventory"] == {"1": {"type": "log"}}
    assert arguments["camera_config"].camera_mu == 5.0
    assert [callback.scale for callback in arguments["callbacks"]] == [1.0, 2.0]
    simulator.close()
    with pytest.raises(ConfigError, match=r"RewardCallback' refused \{'scal': 1\}"):
        make_simulator(
            "minecraft", {"callbacks": [{"path": "minestudio.callbacks_stub.RewardCallback", "kwargs": {"scal": 1}}]}
        )


# --- the stub and the package ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package_folder():
    """Where the installed package lies."""
    found = importlib.util.find_spec("minestudio")
    if found is None or not found.submodule_search_locations:
        pytest.skip("minestudio is not installed")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def package(package_folder):
    """Syntax tree of the installed package's module; it is not imported, which would load torch and Java bindings."""
    source = package_folder / "simulator" / "entry.py"
    return {node.name: node for node in ast.parse(source.read_text("utf-8")).body if hasattr(node, "name")}


def methods(class_node):
    return {node.name: node for node in class_node.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["__init__", "reset", "step", "close", "render", "noop_action"])
def test_the_stub_has_the_packages_signatures(package, name):
    theirs = methods(package["MinecraftSim"])[name].args
    ours = inspect.signature(getattr(stub.MinecraftSim, name)).parameters
    names = [one.arg for one in theirs.args] + ([theirs.kwarg.arg] if theirs.kwarg else [])
    assert names == list(ours)
    defaults = [ast.literal_eval(node) for node in theirs.defaults]
    assert defaults == [one.default for one in ours.values() if one.default is not inspect.Parameter.empty]


def test_the_stub_has_the_packages_camera_config(package):
    fields = {
        node.target.id: ast.literal_eval(node.value)
        for node in package["CameraConfig"].body
        if isinstance(node, ast.AnnAssign)
    }
    assert fields == vars(stub.CameraConfig())


@pytest.mark.parametrize("action_type", ["agent", "env"])
def test_the_stub_has_the_packages_spaces(package, action_type):
    source = methods(package["MinecraftSim"])
    names = {"gymnasium": gymnasium, "np": np, "height": 16, "width": 32}
    returned = [
        eval(compile(ast.Expression(node.value), "entry.py", "eval"), names)
        for name in ("action_space", "observation_space")
        for node in ast.walk(source[name])
        if isinstance(node, ast.Return)
    ]
    agent, env, observation = returned
    sim = stub.MinecraftSim.__new__(stub.MinecraftSim)
    sim.action_type, sim.obs_size = action_type, (16, 32)
    assert sim.action_space == (agent if action_type == "agent" else env)
    assert sim.observation_space == observation


def test_the_package_still_has_the_callback_that_is_refused(package_folder):
    source = package_folder / "simulator" / "callbacks" / "judgereset.py"
    (made,) = [node for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    assert made.name == stub.JudgeResetCallback.__name__
    assert [one.arg for one in methods(made)["__init__"].args.args] == ["self", "time_limit"]
    assert "truncated = True" not in ast.unparse(made) and "terminated = True" in ast.unparse(made)


def test_the_engine_is_looked_for_where_the_package_looks(package):
    assert Path(stub.JAR).name in ast.unparse(package["check_engine"])
    assert "input(" in ast.unparse(package["check_engine"]), "it asks"

"""docs/simulators.md tells the truth: its example runs, and its ids and arguments are those that there are."""

import inspect
import re
from pathlib import Path

from gymnasium.utils.env_checker import check_env

from penstock.environments.simulators import SyntheticSimulator, make_simulator, simulator_ids

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "simulators.md").read_text()


def test_the_example_is_a_simulator(tmp_path):
    source = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Corridor" in block)
    (tmp_path / "my_worlds.py").write_text(source)
    simulator = make_simulator(f"{tmp_path}/my_worlds.py:Corridor", {"length": 2, "max_episode_steps": 100})
    check_env(simulator.unwrapped, skip_render_check=True)
    simulator.reset(seed=0)
    assert [simulator.step(1)[1:4] for _ in range(2)] == [(0.0, False, False), (1.0, True, False)]


def test_every_id_is_in_the_table():
    assert [id for id in simulator_ids() if f"`{id}`" not in PAGE] == []


def test_every_argument_of_the_synthetic_one_is_in_its_table():
    arguments = set(inspect.signature(SyntheticSimulator).parameters) - {"render_mode"}
    table = PAGE.partition("**synthetic.**")[2].partition("**Minecraft.**")[0]
    assert {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])} == arguments

"""What a fleet run would consist of: sizes from one simulator, or why there is none."""

import pytest

from penstock.overseer.config_loading import build_config
from penstock.overseer.control.plan import SIMULATOR_BYTES, estimate_fleet_memory
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.plan import describe_plan
from penstock.rundir.yaml_documents import parse_yaml
from penstock.types import ConfigError, LeafSpace, Spaces
from tests.overseer.test_control_config import build


def test_the_plan_is_a_recipe_with_sizes_and_components():
    config = build({"model": {"hidden_sizes": [8], "memory": "gru", "memory_size": 4}})
    text = describe_plan(config)
    assert build_config(FleetRunConfig, parse_yaml(text, "plan")) == config
    for words in (
        "# Model: mlp, gru, ", "# Observations: box float32[4]", "# Actions: discrete int64[] of 2",
        "#   fragments  ", "#   simulators        4 processes of 1: pole (CartPole-v1)",
        "4 fragments per update (32 steps)",
    ):  # fmt: skip
        assert words in text


def test_without_the_simulator_the_plan_says_why_where_other_machines_may_make_it():
    changes = {"fleet": {"tasks": {"pole": {"id": "nowhere:make"}}}}
    with pytest.raises(ConfigError, match="task 'pole': simulator 'nowhere.make': no module named 'nowhere'"):
        describe_plan(build(changes))
    text = describe_plan(build(changes | {"runtime": "ray"}))
    assert "# Model and memory: unknown, because no simulator can be made here: " in text and "nowhere" in text
    assert "#   checkpoints " in text


def test_the_estimate_adds_up_fragments_wherever_they_are():
    config = build({"fleet": {"queue_fragments": 2}, "replay": {"max_waiting": 5}})
    spaces = Spaces((LeafSpace("", "box", (100,), "float32"),), (LeafSpace("", "discrete", (), "int64", (2,)),))
    memory = estimate_fleet_memory(config, spaces, parameters=1000, state_bytes=16)
    assert memory["parameters of learner and workers"] == 3 * 4000
    # 2 · 4 in an update, 5 waiting, 2 queued, 4 being filled; of 8 + 1 steps of 400 + 8 + 64 bytes and a state
    assert memory["fragments"] == (8 + 5 + 2 + 4) * (9 * (400 + 8 + 64) + 16)
    assert memory["shared memory of the simulators"] == 2 * 4 * 400
    assert memory["processes of light simulators"] == 4 * SIMULATOR_BYTES

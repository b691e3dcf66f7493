from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.model.control.config import ControlModelConfig
from penstock.overseer import FleetRunConfig
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import build_config
from penstock.overseer.control.kind import ControlKind, actions_out_of_reach, large_returns
from penstock.overseer.kind import REWOUND
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.rundir import RunDirectory
from penstock.types import LeafSpace, RolloutBatchStats, Spaces

SPACES = Spaces((LeafSpace("", "box", (4,), "float32"),), (LeafSpace("", "discrete", (), "int64", (2,)),))


def settings_of(**changes: Any) -> Settings[FleetRunConfig]:
    fleet = {"tasks": {"cart": {"id": "CartPole-v1"}}, "workers": 3}
    config = build_config(FleetRunConfig, {"steps": 1, "runtime": "ray", "fleet": fleet, **changes})
    return Settings(config, RunDirectory("runs/x"), "a secret")


def components(**changes: Any) -> list[ComponentSpec]:
    return ControlKind(SPACES).components(settings_of(**changes), None)


def test_a_fleet_run_has_one_of_each_and_as_many_workers_as_asked_for():
    specs = components()
    assert [spec.name for spec in specs] == [
        "replay-0", "learner-0", "rollout-0", "rollout-1", "rollout-2", "evaluator-0",
    ]  # fmt: skip
    assert {spec.name for spec in specs if spec.essential} == {"learner-0", "replay-0"}
    sizes = ControlKind(SPACES).scalable(settings_of())
    assert [(role, make(7).name, least) for role, make, least in sizes] == [("rollout", "rollout-7", 1)]


def test_every_component_is_told_the_run_and_what_the_policy_sees_as_plain_values():
    for spec in components():
        assert Spaces.from_values(spec.settings["spaces"]) == SPACES
        told = Settings.of(spec.settings, FleetRunConfig)
        assert told.config == settings_of().config and told.token == "a secret" and told.lineage == 0
        assert "a secret" not in repr(spec)


def test_only_the_learner_sees_an_accelerator_unless_its_role_says_otherwise():
    specs = {spec.name: spec for spec in components(roles={"evaluator": {"env": {"JAX_PLATFORMS": "cuda"}}})}
    assert specs["learner-0"].resources.env == {}
    assert specs["rollout-0"].resources.env["JAX_PLATFORMS"] == "cpu"
    assert specs["evaluator-0"].resources.env["JAX_PLATFORMS"] == "cuda"


def test_going_back_gives_learner_replay_and_evaluator_the_checkpoint():
    settings = replace(settings_of(), lineage=2, checkpoint=Path("checkpoints/step-4"))
    specs = ControlKind(SPACES).components(settings, {"evaluator": {"evaluated_step": 3}, "run": {}})
    anew = {spec.name: spec.settings for spec in specs if spec.name in REWOUND}
    assert sorted(anew) == ["evaluator-0", "learner-0", "replay-0"]
    assert all(values["lineage"] == 2 and "spaces" in values for values in anew.values())
    assert anew["learner-0"]["checkpoint"].endswith("checkpoints/step-4")
    assert anew["evaluator-0"]["state"] == {"evaluated_step": 3}


@pytest.mark.parametrize(
    ("low", "high", "std", "told"),
    [
        (-1.0, 1.0, 1.0, False),
        (-2.0, 2.0, 1.0, False),
        (0.0, 1.0, 1.0, False),
        (-0.4, 0.4, 1.0, False),
        (-0.4, 0.4, 5.0, True),
        (0.0, 1000.0, 1.0, True),
        (-0.01, 0.01, 1.0, True),
        (3.0, 5.0, 1.0, True),
        (-5.0, -3.0, 1.0, True),
        (None, 1000.0, 1.0, False),
    ],
)
def test_actions_that_a_policy_hardly_reaches_are_told(low, high, std, told):
    wheel = LeafSpace("wheel", "box", (2,), "float32", low=low, high=high)
    spaces = Spaces(SPACES.observations, (*SPACES.actions, wheel))
    found = actions_out_of_reach(spaces, std)
    assert len(found) == told
    if low == 0.0 and told:
        assert found[0].startswith(
            "action wheel lies in [0, 1000], and a policy begins with N(0, 1²), clipped to that: "
        )


def results(reward: float) -> dict[str, RolloutBatchStats]:
    return {"pole": RolloutBatchStats("pole", 1, 1, reward, 0.0, 0.0, 1.0, 0.0)}


def test_returns_beyond_what_values_learn_from_name_the_scale_that_brings_them_to_tens():
    apart = ControlModelConfig(value_network="separate")
    assert large_returns(results(-1200.0), 1.0, apart) == large_returns(results(2e6), 1e-5, apart) == []
    (words,) = large_returns(results(-2.5e6), 1.0, apart)
    assert "return is -2.5e+06" in words and words.endswith("set learner.reward_scale=auto, or 1e-05")
    (words,) = large_returns(results(3e7), 0.01, ControlModelConfig())
    assert words.endswith("set learner.reward_scale=auto, or 1e-06")
    assert large_returns(results(3e7), "auto", ControlModelConfig()) == []


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (ControlModelConfig(), "set learner.reward_scale=auto, or model.value_network=separate"),
        (ControlModelConfig(memory="gru"), "set learner.reward_scale=auto"),
        (ControlModelConfig(module="net.py:Net"), "set learner.reward_scale=auto"),
    ],
)
def test_returns_that_drown_the_actions_in_layers_that_values_share_are_told(model, remedy):
    assert large_returns(results(-21.0), 1.0, model) == large_returns(results(-290.0), 0.1, model) == []
    (words,) = large_returns(results(-40.0), 1.0, model)
    assert "the untrained policy's return is -40; " in words and words.endswith(remedy)
